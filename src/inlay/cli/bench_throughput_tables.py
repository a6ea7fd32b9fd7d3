"""Tables of ``inlay bench throughput``: one for every row of columns, one for every sweep, one for memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from inlay.cli.bench_options import make_table, number

if TYPE_CHECKING:
    from rich.table import Table

#: Times in milliseconds: of a request by its tokens, to the first token, between two of them; KV in MiB; the share of
#: the floor that all steps reach, and full decode steps.
_HEADINGS = ("who", "n", "tok/s", "ms/tok", "first p50", "p99", "next p50", "p99", "KV", "floor", "decode", "×")
_HITS = ("aimed", "hits", "who", "n", "first p50", "p90", "p99", "req/s", "tok/s", "floor", "first ×", "×")
_MEMORY = ("documents", "RSS", "KV", "KV each", "RSS each", "first p50", "found, µs", "not, µs")


def tables(result: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Titled tables of a result, and one of what was left out."""
    skipped = make_table(("what", "because"))
    for (part, _), group in groupby(result["rows"], key=_table_of):
        rows = list(group)
        made = {"workloads": _hits, "memory": _memory}.get(part, _columns)
        yield _title(rows[0]), made(rows)
        for what, reason in _left_out(rows):
            skipped.add_row(what, reason)
    if skipped.row_count:
        yield "left out", skipped


def _table_of(row: dict[str, Any]) -> tuple[str, Any]:
    name = {"workloads": "workload", "memory": "part"}.get(row["part"])
    return row["part"], (row["model"], row["dtype"], row[name] if name else (row["prefix"], row["rate"]))


def _title(row: dict[str, Any]) -> str:
    model = f"{row['model']}, {row['dtype']}"
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


def _hits(rows: list[dict[str, Any]]) -> Table:
    """A line for every hit rate; the column that shares nothing ran once, so it has one line."""
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
