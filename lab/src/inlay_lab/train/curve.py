"""Draw a training run: ``python -m inlay_lab.train.curve DIRECTORY/log.jsonl --out curve.svg`` (needs matplotlib)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from inlay_lab.eval.questions import TASKS

_APART = 0.024  # of the whole run, between the names of two stages


def draw(lines: Iterable[str], out: Path) -> None:
    """Plot loss and exact match on held-out questions by task, over steps.

    Args:
        lines: Lines of a ``log.jsonl``.
        out: The image file.
    """
    from matplotlib import pyplot

    notes = _last_of_each_step(json.loads(line) for line in lines)
    figure, (above, *below) = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    losses = [note for note in notes if "loss" in note]
    above.plot([note["step"] for note in losses], [note["loss"] for note in losses], color="black")
    above.set_ylabel("loss")
    name_stages(above, losses)
    for axes, documents in zip(below, (2, 6), strict=True):
        for task in TASKS:
            seen = [note for note in notes if f"{documents} {task}" in note]
            axes.plot([n["step"] for n in seen], [n[f"{documents} {task}"] for n in seen], marker=".", label=task)
        axes.set_ylabel(f"exact match, {documents} documents")
        axes.set_ylim(0, 1.02)
        axes.grid(color="0.9")
    below[0].legend(loc="lower right")
    below[-1].set_xlabel("step")
    figure.savefig(out)


def name_stages(axes: Any, losses: list[dict[str, Any]]) -> None:
    """Draw a line and a name where each stage begins. Names of short stages move to the right."""
    apart = losses[-1]["step"] * _APART
    previous, free = None, 0.0
    for note in losses:
        if note["stage"] != previous:
            previous, at = note["stage"], max(note["step"], free)
            axes.axvline(note["step"], color="lightgray", zorder=0)
            axes.text(at, axes.get_ylim()[1], f" {previous}", rotation=90, va="top", fontsize=8)
            free = at + apart


def _last_of_each_step(notes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last note of each step, in the order of steps. A resumed run repeats those after its last checkpoint."""
    last = {(note["step"], "loss" in note): note for note in notes}
    return [last[key] for key in sorted(last)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw a training run.")
    parser.add_argument("log", type=Path, help="the log.jsonl of a run")
    parser.add_argument("--out", type=Path, required=True, help="an .svg or .png file")
    arguments = parser.parse_args()
    with arguments.log.open(encoding="utf-8") as lines:
        draw(lines, arguments.out)


if __name__ == "__main__":
    main()
