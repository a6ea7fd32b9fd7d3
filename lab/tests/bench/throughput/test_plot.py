"""The plot of workloads has a line for every percentile, for any hit rates."""

from __future__ import annotations

from inlay_lab.bench.throughput.plot import draw_hit_rates


def row(hit_rate: float, first: float) -> dict:
    cell = {"hit_rate": hit_rate, "ttft_ms": {"p50": first, "p90": 2 * first, "p99": 3 * first}}
    return {
        "part": "workloads",
        "model": "random:tiny",
        "workload": "documents",
        "columns": {"inlay": cell, "off": cell},
    }


def test_repeated_hit_rates_can_be_drawn(tmp_path):
    path = tmp_path / "hits.svg"
    draw_hit_rates({"rows": [row(0.5, 80.0), row(0.5, 70.0), row(0.9, 10.0)]}, path)
    assert "<svg" in path.read_text()
