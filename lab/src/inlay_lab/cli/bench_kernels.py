"""``inlay bench attention`` and ``decode``: the kernel alone, and one answer token by token, against stock ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import (
    AsJson,
    DType,
    KVCacheDType,
    Model,
    Plot,
    Quantization,
    Quick,
    Runs,
    Threads,
    Weights,
    check_plot,
    counts,
    words,
)
from inlay.cli.output import token_progress, told_loading
from inlay.errors import ParameterError
from inlay_lab.cli.bench_tables import make_table, number, show

if TYPE_CHECKING:
    from rich.table import Table


def attention(
    part: Annotated[str, typer.Option(help="Of table3, figure3, figure4, segments, prefill, plan.")] = (
        "table3,figure3,figure4,segments,prefill,plan"
    ),
    threads: Threads = None,
    dtype: Annotated[str, typer.Option(help="Of float32, bfloat16.")] = "float32,bfloat16",
    heads: Annotated[str | None, typer.Option(help="Query heads/KV heads, several with commas; 32/32,32/8.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Context tokens of table 3; 1024,2048,4096.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences, in table 3 and figure 3; 32.")] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes of figure 4; 1,2,4,8,16,32,64,96.")] = None,
    completions: Annotated[
        str | None, typer.Option(help="Private tokens of each in figure 3; 0,256,512,1024,1536,2048.")
    ] = None,
    columns: Annotated[str, typer.Option(help="Of ours, paged, unshared, sdpa, flash, naive.")] = (
        "ours,paged,unshared,sdpa,flash,naive"
    ),
    backend: Annotated[str, typer.Option(help="Our attention: auto, cpu, torch or reference.")] = "auto",
    runs: Runs = 5,
    quick: Quick = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """One layer: shared prefixes, diverging sequences, batch sizes, scattered segments and prompts; plans."""
    sizes: dict[str, Any] = {"batch": batch}
    for name, option, text in (
        ("prompts", "--prompt", prompt),
        ("batches", "--batches", batches),
        ("completions", "--completions", completions),
    ):
        sizes[name] = None if text is None else counts(option, text)
    sizes["heads"] = None if heads is None else _heads(heads)
    check_plot(plot)
    if plot is not None and not {"table3", "figure3", "figure4"}.intersection(words(part)):
        raise ParameterError("--plot draws table3, figure3 and figure4; add one of them to --part, or drop --plot")
    with told_loading("the libraries"):
        from inlay_lab.bench.attention.measure import AttentionSetting, measure_attention

    base = AttentionSetting(parts=words(part), dtypes=words(dtype), columns=words(columns), backend=backend, runs=runs)
    setting = base.small() if quick else base
    setting = replace(setting, **{name: value for name, value in sizes.items() if value is not None})
    with token_progress("measuring") as progress:
        result = measure_attention(setting, progress)
    if plot is not None:
        from inlay_lab.bench.attention.plot import draw_attention

        draw_attention(result, plot)
    show(result, _attention_tables(result), as_json)


def _heads(text: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for pair in words(text):
        heads, _, kv_heads = pair.partition("/")
        if not (heads.isdecimal() and kv_heads.isdecimal()):
            raise ParameterError(
                f"--heads is '{text}'; write query heads/KV heads, such as 32/8, or several with commas"
            )
        pairs.append((int(heads), int(kv_heads)))
    return tuple(pairs)


def _attention_tables(result: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    for part in ("table3", "figure3", "figure4", "segments", "prefill"):
        kinds = groupby(result.get(part, ()), key=lambda row: (row["dtype"], row["heads"], row["kv_heads"]))
        for (dtype, heads, kv_heads), group in kinds:
            about = f"{dtype}, {heads} query and {kv_heads} KV heads"
            if part == "prefill":
                yield from (_prefill(row, about) for row in group)
            else:
                yield _segments(list(group), about) if part == "segments" else _steps(list(group), part, about)
    if result.get("plan"):
        yield _plans(result["plan"])


def _prefill(row: dict[str, Any], about: str) -> tuple[str, Table]:
    table = make_table(("runs", "ms", "ratio"))
    for count, ms in row["ms"].items():
        table.add_row(count, number(ms), f"{row['ratio'][count]:.2f}×")
    return f"a prompt of {row['tokens']:,} tokens whose slots lie in so many runs: {about}", table


def _plans(rows: list[dict[str, Any]]) -> tuple[str, Table]:
    table = make_table(("requests", "each reads", "items", "entries", "part, ms", "plan, ms"))
    for row in rows:
        sizes = (number(row[name]) for name in ("items", "entries"))
        ms = (number(row["ms"][name]) for name in ("part", "plan"))
        table.add_row(number(row["requests"]), row["read"], *sizes, *ms)
    return "making a plan: modules read by decoding requests, and a partly recomputed segment", table


def _steps(rows: list[dict[str, Any]], part: str, about: str) -> tuple[str, Table]:
    """Milliseconds of each column, our share of the ceiling, and our speedup over the two main alternatives."""
    columns, batch, shared = (rows[0][name] for name in ("columns", "batch", "shared"))
    titles = {
        "table3": f"table 3, ms: batch of {batch}; {about}",
        "figure3": f"figure 3, ms: {shared:,} shared tokens, then own ones; batch of {batch}; {about}",
        "figure4": f"figure 4, ms: {shared:,} tokens, all shared; {about}",
    }
    sizes = ("batch",) if part == "figure4" else ("context", "shared")
    table = make_table((*sizes, *columns, "ceil.", "/paged", "/stock"))
    for row in rows:
        table.add_row(*(number(row[size]) for size in sizes), *_times(row))
    return titles[part], table


def _times(row: dict[str, Any]) -> Iterator[str]:
    """A row's milliseconds, our share of the ceiling, and PagedAttn*'s and the best stock kernel's time over ours."""
    ms = {name: cell.get("ms") for name, cell in row["columns"].items()}
    yield from (number(each) for each in ms.values())
    share = row["columns"].get("ours", {}).get("of_ceiling")
    yield "—" if share is None else f"{share:.0%}"
    best = min((ms[name] for name in ("sdpa", "flash", "naive") if ms.get(name) is not None), default=None)
    for other in (ms.get("paged"), best):
        yield "—" if other is None or ms.get("ours") is None else f"{other / ms['ours']:.2f}"


def _segments(rows: list[dict[str, Any]], about: str) -> tuple[str, Table]:
    first = rows[0]
    size, count = first["segment_tokens"], first["segments"]
    table = make_table(("rows", "one segment, ms", "neighbours", "scattered", "scattered, a shift each"))
    for row in rows:
        ratios = [f"{row['ratio'][name]:.2f}×" for name in ("neighbours", "scattered", "shifted")]
        table.add_row(f"{row['query']}, {row['rows']}", number(row["ms"]["one"]), *ratios)
    return f"{count} segments of {size} tokens against one of {count * size}: {about}", table


def decode(
    model: Model,
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of the answer that are timed, behind its first.")] = 32,
    threads: Threads = None,
    dtype: DType = "auto",
    weights: Weights = "packed",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDType = "auto",
    baselines: Annotated[str, typer.Option(help="Of transformers, llama.cpp; none for inlay alone.")] = (
        "transformers,llama.cpp"
    ),
    runs: Runs = 5,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """One answer, token by token: inlay, stock transformers and llama.cpp; and what a step of ours is made of."""
    with told_loading("the libraries"):
        from inlay_lab.bench.decode import DecodeSetting, measure_decode

    setting = DecodeSetting(
        model=model,
        context=context,
        tokens=min(tokens, 8) if quick else tokens,
        dtype=dtype,
        weights=weights,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        baselines=() if baselines == "none" else words(baselines),
        runs=1 if quick else runs,
        quick=quick,
    )
    with token_progress("decoding") as progress:
        result = measure_decode(setting, progress)
    show(result, _decode_tables(result), as_json)


def _decode_tables(result: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    kept = "" if result["kv_cache_dtype"] == "auto" else f", {result['kv_cache_dtype']} KV"
    title = (
        f"{result['model']}, {result['dtype']}{kept}: {result['tokens']} tokens behind a prompt of {result['context']}"
    )
    table = make_table(("who", "ms/token", "tokens/s", "weights read, GB/s", "of copying", "of floor"))
    for name, cell in result["columns"].items():
        if "skipped" in cell:
            table.add_row(name, "—", "—", "—", "—", cell["skipped"])
            continue
        rates = (number(cell["ms_per_token"]), number(cell["tokens_s"]), number(cell["gb_s"]))
        shares = ("—" if cell[share] is None else f"{cell[share]:.0%}" for share in ("of_copy", "of_floor"))
        table.add_row(name, *rates, *shares)
    yield title, table
    if floor := result["floor"]:
        parts = make_table(("weights, ms", "at GB/s", "products, ms", "at GFLOP/s", "KV, ms", "floor, ms"))
        named = ("weights_ms", "read_gb_s", "products_ms", "gemm_gflops", "kv_ms", "ms")
        parts.add_row(*(number(floor[name]) for name in named))
        yield "the floor: max(weights, products) + KV", parts
    step = result["step"]
    parts = make_table(("part", "ms", "share"))
    for name, ms in step["ms"].items():
        parts.add_row(name, number(ms), f"{step['share'][name]:.0%}")
    yield f"a step of ours ({step['how']}: {step['ms_per_token']:.2f} ms)", parts
