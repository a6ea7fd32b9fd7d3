"""``inlay bench throughput``: many requests at once; a table for every row of columns, every sweep, and memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import (
    AsJson,
    DType,
    KVCacheDType,
    Models,
    Plot,
    Quantization,
    Quick,
    Threads,
    Weights,
    check_plot,
    counts,
    words,
)
from inlay.cli.output import told_loading
from inlay.errors import ParameterError
from inlay_lab.cli.bench_tables import make_table, number, show
from inlay_lab.options import floats

if TYPE_CHECKING:
    from rich.table import Table

    from inlay_lab.bench.throughput.measure import News

_WAYS = "off,stock,transformers,llama.cpp"
#: The parts that an option is for. It is refused if none of them is measured.
_USES = {
    "against": ("prefix", "modules", "workloads"),
    "arrivals": ("prefix", "modules"),
    "rates": ("prefix", "modules"),
    "requests": ("prefix", "modules", "workloads"),
    "prefixes": ("prefix",),
    "question": ("prefix", "modules"),
    "completion": ("prefix",),
    "workloads": ("workloads",),
    "hit-rates": ("workloads",),
    "clients": ("workloads",),
    "documents": ("memory",),
    "plot": ("workloads",),
}

#: Times in milliseconds: of a request per token, to the first token, between two tokens. KV in MiB. The share of the
#: floor that all steps reach, and full decode steps.
_HEADINGS = ("who", "n", "tok/s", "ms/tok", "first p50", "p99", "next p50", "p99", "KV", "floor", "decode", "×")
_HITS = ("aimed", "hits", "who", "n", "first p50", "p90", "p99", "req/s", "tok/s", "floor", "first ×", "×")
#: Full decode steps: their time, and max(weights, products) + KV, in milliseconds, with the rates behind it.
_FLOOR = ("who", "rows", "step", "fastest", "weights", "at GB/s", "products", "at GFLOP/s", "KV", "floor", "of floor")
_MEMORY = ("documents", "RSS", "KV", "KV each", "RSS each", "first p50", "found, µs", "not, µs")


def throughput(
    model: Models,
    part: Annotated[str, typer.Option(help="Of prefix, modules, workloads, memory: one, or several with commas.")] = (
        "prefix,modules"
    ),
    against: Annotated[
        str | None, typer.Option(help=f"Of {_WAYS}, none for inlay alone; workloads know off only; all.")
    ] = None,
    arrivals: Annotated[str | None, typer.Option(help="Of batch (all at once), poisson; batch.")] = None,
    rates: Annotated[str | None, typer.Option(help="Requests a second of Poisson arrivals; 0.25,0.5,1,2.")] = None,
    requests: Annotated[int | None, typer.Option(help="How many in a run; 16, of workloads 20.")] = None,
    batch: Annotated[int | None, typer.Option(help="The most that run at once; 16.")] = None,
    prefixes: Annotated[str | None, typer.Option(help="Tokens that all prompts share; 0,512,1024,2048.")] = None,
    question: Annotated[int | None, typer.Option(help="Tokens of each prompt's own; 32.")] = None,
    completion: Annotated[int | None, typer.Option(help="Tokens of an answer behind a prefix; 64.")] = None,
    workloads: Annotated[str | None, typer.Option(help="Of documents, passages, summaries; all.")] = None,
    hit_rates: Annotated[
        str | None, typer.Option(help="Percent of hits that workloads aim at; 0,25,50,75,90,95.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Of workloads, each with one request at a time; 4.")] = None,
    documents: Annotated[str | None, typer.Option(help="Resident documents, for memory; 0,10,50,100.")] = None,
    budget_s: Annotated[
        float | None, typer.Option(help="Seconds for a cell: fewer requests where all would take longer; 120.")
    ] = None,
    threads: Threads = None,
    dtype: DType = "auto",
    weights: Weights = "packed",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDType = "auto",
    runs: Annotated[int, typer.Option(help="Runs of each; the one of median time is reported.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Add every cell to this file of JSON lines; go on from those in it.")
    ] = None,
    quick: Quick = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Many requests at once: behind a shared prefix, over modules in any order, and as users ask."""
    given: dict[str, Any] = {
        "against": against, "arrivals": arrivals, "rates": rates, "requests": requests, "prefixes": prefixes,
        "question": question, "completion": completion, "workloads": workloads, "hit-rates": hit_rates,
        "clients": clients, "documents": documents, "plot": plot,
    }  # fmt: skip
    _check_uses(given, words(part))
    check_plot(plot)
    sizes: dict[str, Any] = {"requests": requests, "batch": batch, "question": question, "completion": completion}
    sizes |= {"clients": clients, "budget_s": budget_s}
    for name, text in (("prefixes", prefixes), ("documents", documents)):
        sizes[name] = None if text is None else counts(f"--{name}", text)
    sizes["rates"] = None if rates is None else floats("--rates", rates, "0.5,1,2")
    sizes["hit_rates"] = None if hit_rates is None else _shares(hit_rates)
    with told_loading("the libraries"):
        from inlay_lab.bench.throughput.measure import measure_throughput
        from inlay_lab.bench.throughput.setting import ThroughputSetting
        from inlay_lab.bench.throughput.workload import KINDS

    base = ThroughputSetting(
        models=tuple(dict.fromkeys(model)),
        parts=words(part),
        columns=() if against == "none" else words(against or _WAYS),
        arrivals=words(arrivals or "batch"),
        workloads=KINDS if workloads is None else words(workloads),
        dtype=dtype,
        weights=weights or "packed",
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        runs=runs,
        out=out,
    )
    setting = base.small() if quick else base
    setting = replace(setting, **{name: value for name, value in sizes.items() if value is not None})
    result = measure_throughput(setting, _tell)
    if plot is not None:
        from inlay_lab.bench.throughput.plot import draw_hit_rates

        draw_hit_rates(result, plot)
    show(result, _tables(result), as_json)


def _check_uses(given: Mapping[str, Any], parts: tuple[str, ...]) -> None:
    """Raise ParameterError for an option that none of the parts uses."""
    for option, value in given.items():
        if value is not None and not set(parts) & set(_USES[option]):
            raise ParameterError(
                f"--{option} is for --part {' or '.join(_USES[option])}; name it there, or drop --{option}"
            )
    if given["rates"] is not None and "poisson" not in words(given["arrivals"] or ""):
        raise ParameterError("--rates are those of Poisson arrivals; add --arrivals poisson, or drop --rates")
    if "llama.cpp" in words(given["against"] or "") and "prefix" not in parts:
        raise ParameterError("--against llama.cpp is for --part prefix; name it there, or drop it")
    others = {"stock", "transformers"} & set(words(given["against"] or ""))
    if others and not {"prefix", "modules"} & set(parts):
        raise ParameterError(f"--against {', '.join(sorted(others))}: workloads are compared with off alone; drop it")


def _shares(text: str) -> tuple[float, ...]:
    return tuple(percent / 100 for percent in floats("--hit-rates", text, "0,50,90"))


def _tell(news: News) -> None:
    """Print a line on stderr for every cell, with or without a terminal: a run takes long and often runs unattended."""
    kept = ", kept" if news.kept else ""
    line = f"[{news.done}/{news.total}{kept}] {_cell_title(news.about)}: {_gist(news.about, news.cell)}"
    print(line, file=sys.stderr, flush=True)


def _cell_title(about: Mapping[str, Any]) -> str:
    title = [about["model"], about["part"]]
    title += [f"{about[name]:,} {name}" for name in ("prefix", "documents") if about.get(name) is not None]
    if "workload" in about:
        title.append(f"{about['workload']} at {about['aimed_hit_rate']:.0%}")
    if about.get("rate") is not None:
        title.append(f"{about['rate']:g} a second")
    return ", ".join([*title, about.get("column", "inlay")])


def _gist(about: Mapping[str, Any], cell: Mapping[str, Any]) -> str:
    if "skipped" in cell:
        return f"left out: {cell['skipped']}"
    if "wall_s" not in cell:
        return f"first token after {cell['ttft_ms']['p50']:,.0f} ms"
    return f"{cell['requests']} of {about['requests']} requests in {cell['wall_s']:.1f} s"


def _tables(result: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Titled tables of a result, and one of the cells that were left out."""
    skipped = make_table(("what", "because"))
    for (part, _), group in groupby(result["rows"], key=_table_of):
        rows = list(group)
        made = {"workloads": _hits, "memory": _memory}.get(part, _columns)
        yield _table_title(rows[0]), made(rows)
        if made is _columns and (floors := _floors(rows)).row_count:
            yield "full decode steps and their floor, max(weights, products) + KV; medians", floors
        for what, reason in _left_out(rows):
            skipped.add_row(what, reason)
    if skipped.row_count:
        yield "left out", skipped


def _table_of(row: dict[str, Any]) -> tuple[str, Any]:
    name = {"workloads": "workload", "memory": "part"}.get(row["part"])
    return row["part"], (row["model"], row["dtype"], row[name] if name else (row["prefix"], row["rate"]))


def _keys_and_values(row: dict[str, Any]) -> str | None:
    return None if row["kv_cache_dtype"] == "auto" else f"{row['kv_cache_dtype']} KV"


def _table_title(row: dict[str, Any]) -> str:
    model = ", ".join(word for word in (row["model"], row["dtype"], row["quantization"], _keys_and_values(row)) if word)
    if row["part"] == "memory":
        return f"{model}: resident documents of {row['document_tokens']:,} tokens"
    if row["part"] == "workloads":
        return f"{model}: {row['workload']}; {row['requests']} requests of {row['clients']} clients"
    about = "6 of 12 modules in any order" if row["prefix"] is None else f"{row['prefix']:,} shared tokens"
    when = "all at once" if row["rate"] is None else f"{row['rate']:g} a second"
    saved = "" if row["kv_saved"] is None else f"; KV {-row['kv_saved']:+.0%} against off"
    return f"{model}: {about}; {row['requests']} requests, {when}{saved}"


def _columns(rows: list[dict[str, Any]]) -> Table:
    table = make_table(_HEADINGS)
    for row in rows:
        for name, cell in row["columns"].items():
            if "skipped" in cell:
                table.add_row(name, *["—"] * (len(_HEADINGS) - 1))
            else:
                table.add_row(name, *_cells(cell), _ratio(row["ratio"], name))
    return table


def _cells(cell: dict[str, Any]) -> Iterator[str]:
    yield number(cell["requests"])
    yield number(cell["tokens_s"])
    yield number(cell["latency_ms_per_token"])
    for name in ("ttft_ms", "inter_token_ms"):
        for percentile in ("p50", "p99"):
            yield number(None if cell[name] is None else cell[name][percentile])
    yield number(None if cell["kv_peak_bytes"] is None else cell["kv_peak_bytes"] / 2**20)
    steps = cell["steps"] or {}
    yield _share(steps.get("of_floor"))
    yield _share((steps.get("decode") or {}).get("of_floor"))


def _floors(rows: list[dict[str, Any]]) -> Table:
    table = make_table(_FLOOR)
    for row in rows:
        for name, cell in row["columns"].items():
            steps = cell.get("steps") or {}
            if not (step := steps.get("decode")):
                continue
            named = ("ms", "fastest_ms", "weights_ms", "read_gb_s", "products_ms", "gemm_gflops", "kv_ms", "floor_ms")
            table.add_row(name, number(step["rows"]), *(number(step[key]) for key in named), _share(step["of_floor"]))
    return table


def _hits(rows: list[dict[str, Any]]) -> Table:
    """A line for every hit rate. The column without reuse ran once, so it has one line."""
    table = make_table(_HITS)
    for at, row in enumerate(rows):
        for name, cell in row["columns"].items():
            if "skipped" in cell or (at and name != "inlay"):
                continue
            times = (number(cell["ttft_ms"][percentile]) for percentile in ("p50", "p90", "p99"))
            rates = (number(cell["requests_s"]), number(cell["tokens_s"]))
            aimed = "—" if name == "off" else _share(row["aimed_hit_rate"])
            floor = _share((cell["steps"] or {}).get("of_floor"))
            ratios = (_ratio(row[kind], "off" if name == "inlay" else name) for kind in ("ttft_ratio", "ratio"))
            ours = tuple(ratios) if name == "inlay" else ("—", "—")
            table.add_row(aimed, _share(cell["hit_rate"]), name, number(cell["requests"]), *times, *rates, floor, *ours)
    return table


def _memory(rows: list[dict[str, Any]]) -> Table:
    table = make_table(_MEMORY)
    for row in rows:
        if "skipped" in row:
            continue
        sizes = ("rss_bytes", "kv_bytes", "kv_bytes_per_document", "rss_bytes_per_document")
        mib = (number(None if row[name] is None else row[name] / 2**20) for name in sizes)
        found = (number(row["lookup_us"]), number(row["lookup_miss_us"]))
        table.add_row(number(row["documents"]), *mib, number(row["ttft_ms"]["p50"]), *found)
    return table


def _left_out(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        if "skipped" in row:
            yield f"{row['documents']:,} documents", row["skipped"]
        for name, cell in row.get("columns", {}).items():
            if "skipped" in cell:
                yield name, cell["skipped"]


def _share(value: float | None) -> str:
    return "—" if value is None else f"{value:.0%}"


def _ratio(ratios: dict[str, float] | None, name: str) -> str:
    ratio = (ratios or {}).get(name)
    return "—" if ratio is None else f"{ratio:.2f}"
