"""``inlay bench ttft`` and ``encode``: time to first token with cached modules, and the speed of encoding modules."""

from __future__ import annotations

from collections.abc import Iterator
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


_NAMES = ("cached", "new", "ttft_ms", "full_prefill_ms", "bound_ms", "speedup", "over_bound", "floor_ms", "of_floor")
_RECOMPUTED = ("repaired", "behind_ms", "over_behind")
_LLAMA = ("llama_ms", "llama_held_ms")


def ttft(
    model: Model,
    cached: Annotated[str | None, typer.Option(help="Cached tokens: a number, or several with commas; 2048.")] = None,
    new: Annotated[int, typer.Option(help="New tokens behind them.")] = 32,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="From 256 to 16,384 cached tokens, with curves fitted to the times.")
    ] = False,
    threads: Threads = None,
    dtype: DType = "auto",
    weights: Weights = "packed",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDType = "auto",
    reuse: Annotated[
        str, typer.Option(help="isolated, anchored or modular, or one with recomputation: modular+profiled:0.1.")
    ] = "modular",
    positions: Annotated[str | None, typer.Option(help="schema or packed.")] = None,
    runs: Runs = 7,
    baselines: Annotated[
        str, typer.Option(help="Of transformers (the stock model's full prefill) and llama.cpp; none for neither.")
    ] = "transformers",
    longest_baseline: Annotated[
        int | None, typer.Option(help="The most cached tokens for which baselines are timed; it takes minutes.")
    ] = None,
    quick: Quick = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time to first token with cached modules, against a full prefill and against the new tokens alone."""
    if longest_baseline is not None and baselines == "none":
        raise ParameterError("--longest-baseline asks for a baseline, and --baselines none leaves all out; drop one")
    lengths = None if cached is None else counts("--cached", cached)
    check_plot(plot)
    with told_loading("the libraries"):
        from inlay_lab.bench.ttft import QUICK_SWEEP, SWEEP, Setting, TTFTSetting, measure_ttft

    if lengths is None and sweep:
        lengths = QUICK_SWEEP if quick else SWEEP
    setting = TTFTSetting(
        model=model,
        rows=tuple(Setting(count, new) for count in lengths or ((128,) if quick else (2048,))),
        dtype=dtype,
        weights=weights,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        reuse=reuse,
        positions=positions,
        runs=1 if quick else runs,
        baselines=() if baselines == "none" else words(baselines),
        longest_baseline=longest_baseline,
        sweep=sweep,
        quick=quick,
    )
    with token_progress("turns") as progress:
        result = measure_ttft(setting, progress)
    if plot is not None:
        from inlay_lab.bench.ttft import draw_ttft

        draw_ttft(result, plot)
    show(result, _ttft_tables(result), as_json)


def _ttft_tables(result: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    more = (*_RECOMPUTED, *_LLAMA)
    names = (*_NAMES, *(name for name in more if any(name in row for row in result["rows"])))
    table = make_table(names)
    for row in result["rows"]:
        table.add_row(*(number(row.get(name)) for name in names))
    yield f"{result['model']}, {result['dtype']}: time to first token", table
    if result["left_out"]:
        missing = make_table(("left out", "because"))
        for who, why in result["left_out"].items():
            missing.add_row(who, why)
        yield "baselines", missing
    if result["skipped"]:
        left_out = make_table(("cached", "new", "because"))
        for row in result["skipped"]:
            left_out.add_row(number(row["cached"]), number(row["new"]), row["reason"])
        yield "left out", left_out
    fitted = {name: curve for name, curve in (result["fits"] or {}).items() if isinstance(curve, dict)}
    if fitted:
        fits = make_table(("curve", "ms", "R²"))
        for name, curve in fitted.items():
            terms = (f"{c:+.4g}{('', ' n', ' n²')[power]}" for power, c in enumerate(curve["coefficients"]))
            fits.add_row(name, " ".join(terms), f"{curve['r2']:.4f}")
        yield "fits over n, the prompt's tokens", fits


def encode(
    model: Model,
    modules: Annotated[int, typer.Option(help="Modules of the schema.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 256,
    batches: Annotated[str, typer.Option(help="The stock model's batch sizes; the best one counts.")] = "1,2,4,8,16",
    threads: Threads = None,
    dtype: DType = "auto",
    weights: Weights = "packed",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDType = "auto",
    runs: Runs = 3,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Modules encoded packed, beside the stock model on the same texts as a batch of prompts."""
    sizes = counts("--batches", batches)
    with told_loading("the libraries"):
        from inlay_lab.bench.encode import EncodeSetting, measure_encode

    setting = EncodeSetting(
        model=model,
        modules=min(modules, 4) if quick else modules,
        tokens=min(tokens, 32) if quick else tokens,
        batches=sizes,
        dtype=dtype,
        weights=weights,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        runs=1 if quick else runs,
        quick=quick,
    )
    with token_progress("encoding") as progress:
        result = measure_encode(setting, progress)
    show(result, _encode_tables(result), as_json)


def _encode_tables(result: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    title = f"{result['model']}, {result['dtype']}: {result['modules']} modules, {result['tokens']:,} tokens together"
    table = make_table(("who", "tokens/s"))
    table.add_row("inlay", number(result["tokens_s"]))
    table.add_row(f"stock, batches of {result['stock_batch']}", number(result["stock_tokens_s"]))
    table.add_row("ratio", number(result["ratio"]))
    yield title, table
    tried = make_table(("batch", "tokens/s"))
    for batch, rate in result["stock_tokens_s_by_batch"].items():
        tried.add_row(batch, number(rate))
    yield "the stock model on some of them, by batch size", tried
