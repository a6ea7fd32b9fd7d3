"""A row of the result: what was asked, every column's cell, and our figures against the others'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inlay.bench.throughput.ledger import Cell


def row_of(about: Mapping[str, Any], cells: Mapping[str, Cell]) -> dict[str, Any]:
    """A row. about: what was asked. cells: by column, ours first; one that could not run holds ``skipped``.

    ratio: our tokens a second over theirs, where a rate of arrivals does not set them; with what was prepared before
        counted in as ``ratio_prepared``.
    ttft_ratio: their time to the first token over ours, medians.
    kv_saved: the share of the unshared column's KV, for as many requests at once, that we do without.
    """
    ran = {name: cell for name, cell in cells.items() if "skipped" not in cell}
    ours = ran.pop("inlay", None)
    row: dict[str, Any] = {**about, "columns": dict(cells)}
    row |= {"ratio": None, "ratio_prepared": None, "ttft_ratio": None, "kv_saved": None}
    if ours is None:
        return row
    row["ttft_ratio"] = {name: _over(cell["ttft_ms"]["p50"], ours["ttft_ms"]["p50"]) for name, cell in ran.items()}
    if about["rate"] is None:
        row["ratio"] = {name: _over(ours["tokens_s"], cell["tokens_s"]) for name, cell in ran.items()}
        row["ratio_prepared"] = {name: _over(_prepared(ours), _prepared(cell)) for name, cell in ran.items()}
    if "off" in ran:
        row["kv_saved"] = round(1 - _held(ours) / _held(ran["off"]), 4)
    return row


def _over(one: float, other: float) -> float:
    return round(one / other, 3)


def _prepared(cell: Cell) -> float:
    """Tokens a second, if what was computed before is counted in."""
    return float(cell["tokens_s"] * cell["wall_s"] / (cell["wall_s"] + cell["prepare_s"]))


def _held(cell: Cell) -> float:
    """Bytes of KV for each of the requests that run at once: columns may have had fewer of them."""
    return float(cell["kv_peak_bytes"] / cell["peak_batch"])
