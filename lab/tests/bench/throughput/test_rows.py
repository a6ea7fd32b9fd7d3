"""Our figures against the others', also with different numbers of requests; and their plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inlay_lab.bench.throughput.measure import row_of
from inlay_lab.bench.throughput.plot import draw_hit_rates, draw_times

ABOUT = {"part": "prefix", "rate": None}


def cell(requests: int, wall_s: float, **more: Any) -> dict[str, Any]:
    return {
        "wall_s": wall_s, "prepare_s": 0.0, "tokens_s": 10 * requests / wall_s, "ttft_ms": {"p50": 100.0, "p90": 200.0},
        "kv_peak_bytes": 1000, "peak_batch": 2, "requests": requests, "hit_rate": 0.5, **more,
    }  # fmt: skip


def test_ratios_compare_token_rates():
    row = row_of(
        ABOUT, {"inlay": cell(16, 4.0), "off": cell(4, 8.0, ttft_ms={"p50": 450.0}), "stock": {"skipped": "no"}}
    )
    assert row["ratio"] == {"off": 8.0}  # 40 tokens a second, and 5
    assert row["ttft_ratio"] == {"off": 4.5}
    assert list(row["columns"]) == ["inlay", "off", "stock"]


def test_preparation_time_is_in_the_second_ratio():
    row = row_of(ABOUT, {"inlay": cell(16, 4.0, prepare_s=4.0), "off": cell(16, 16.0)})
    assert (row["ratio"], row["ratio_prepared"]) == ({"off": 4.0}, {"off": 2.0})


def test_kv_memory_is_compared_for_equal_request_numbers():
    ours, off = cell(16, 1.0, kv_peak_bytes=4000, peak_batch=16), cell(4, 1.0, kv_peak_bytes=4000, peak_batch=4)
    assert row_of(ABOUT, {"inlay": ours, "off": off})["kv_saved"] == 0.75


def test_ratio_is_none_for_given_arrivals_and_skipped_columns():
    assert row_of(ABOUT | {"rate": 2.0}, {"inlay": cell(4, 1.0), "off": cell(4, 1.0)})["ratio"] is None
    row = row_of(ABOUT, {"inlay": {"skipped": "too late"}, "off": cell(4, 1.0)})
    assert (row["ratio"], row["ttft_ratio"], row["kv_saved"]) == (None, None, None)


def rows(kind: str, *hit_rates: float) -> list[dict[str, Any]]:
    off = cell(4, 1.0, ttft_ms={"p50": 900.0})
    cells = [
        {"inlay": cell(4, 1.0, hit_rate=rate, ttft_ms={"p50": 1000 - rate, "p90": 2000}), "off": off}
        for rate in hit_rates
    ]
    return [{"part": "workloads", "workload": kind, "model": "m", "columns": each} for each in cells]


def test_plot_has_times_over_measured_hit_rates():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw_times(axes, [*rows("documents", 0.5, 0.0), {"columns": {"inlay": {"skipped": "too late"}}}])
    p50, p90, off = axes.get_lines()
    assert list(p50.get_xdata()) == [0.0, 50.0]
    assert list(p50.get_ydata()) == [1.0, 0.9995]
    assert list(p90.get_ydata()) == [2.0, 2.0]
    assert list(off.get_ydata()) == [0.9, 0.9]


def test_a_panel_for_every_workload(tmp_path: Path):
    result = {"rows": [*rows("documents", 0.0, 0.5), *rows("passages", 0.1), {"part": "prefix"}]}
    draw_hit_rates(result, tmp_path / "t.svg")
    assert (tmp_path / "t.svg").stat().st_size > 1000
