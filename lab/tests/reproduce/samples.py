"""Experiments for tests: small outcomes without a measurement."""

from __future__ import annotations

from collections.abc import Callable

from inlay_lab.reproduce.experiment import Experiment, Outcome, Published, Row, Scale, Settings, Table

MACHINE = {
    "cpu": "Some CPU",
    "cpu_capability": "AVX2",
    "cores": 2,
    "threads": 2,
    "memory_gib": 16.0,
    "load_1m": 0.5,
    "torch": "2",
    "transformers": "5",
}
PUBLISHED = Published(2.0, "table 1", "A100")


def outcome(ours: float = 3.0) -> Outcome:
    """Three rows: one that differs, one in a published range, one of words."""
    return Outcome(
        [
            Row("times as fast", "×", ours, PUBLISHED, "another machine"),
            Row("tokens", "", 7, Published((5.0, 8.0), "§2")),
            Row("grows", "", "linear", Published("linear", "figure 5")),
            Row("alone", "ms", 0.25),
        ],
        [Table("All of it", ["a", "b"], [["1", "2"]])],
        ["A note."],
        {"points": [1, 2]},
    )


def experiment(name: str = "one", measure: Callable[[Settings], Outcome] | None = None, **more: object) -> Experiment:
    """An experiment with the same settings at every scale. By default it returns ``outcome()``."""
    settings = {scale: {"sizes": [1, 2], "model": "m"} for scale in Scale}
    return Experiment(name, f"Title of {name}", "A paper, table 1", settings, measure or (lambda _: outcome()), **more)  # type: ignore[arg-type]
