"""Cells that have been measured, kept in a file, so that a benchmark that was ended goes on where it was.

A line of JSON each: first the machine, then every cell under all that makes it what it is.

A drawing of the workloads: time to the first token over the share of the prompts' tokens that was stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from inlay import __version__
from inlay.advice.plot.figure import save
from inlay.errors import ParameterError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Cell = dict[str, Any]
#: What has to be the same for two cells to stand in one table.
_ALIKE = ("cpu", "threads", "torch", "transformers", "inlay")


class Ledger:
    """Cells by what was measured. Raises ParameterError for a file that is not its own, or of another machine.

    path: the file; None keeps nothing. machine: as ``describe_machine`` tells it.
    """

    def __init__(self, path: Path | None, machine: Mapping[str, Any]) -> None:
        self._cells: dict[str, Cell] = {}
        self._file: TextIO | None = None
        self._machine = {name: ({"inlay": __version__} | dict(machine))[name] for name in _ALIKE}
        if path is not None:
            try:
                self._open(path)
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no text"
                raise ParameterError(f"--out {path} cannot be used: {reason or error}") from error

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, about: Mapping[str, Any]) -> Cell | None:
        """The cell that was measured under just that, if one was."""
        return self._cells.get(_key(about))

    def put(self, about: Mapping[str, Any], cell: Cell) -> None:
        """Keep a cell."""
        self._cells[_key(about)] = cell
        self._write({"about": about, "cell": cell})

    def _open(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a program that was ended may have left half a line
        for number, line in enumerate((whole or text).splitlines(), start=1):
            self._read(line, f"{path}:{number}")
        self._file = path.open("a", encoding="utf-8")
        self._file.truncate(len(whole.encode()))
        if not whole:
            self._write({"machine": self._machine})

    def _read(self, line: str, place: str) -> None:
        try:
            entry = json.loads(line)
            machine = entry.get("machine", self._machine)
            if "machine" not in entry:
                self._cells[_key(entry["about"])] = dict(entry["cell"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ParameterError(
                f"{place}: this is no line of inlay bench throughput; give --out another file"
            ) from None
        if machine != self._machine:
            raise ParameterError(
                f"{place}: these cells were measured on {_words(machine)}, and this is {_words(self._machine)}; "
                "give --out another file"
            )

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


def _key(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True)


def _words(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())


# Okabe and Ito's colours.
_OURS, _OFF = "#0072B2", "#D55E00"
_FONT = 9.0


def draw_hit_rates(result: dict[str, Any], path: Path) -> None:
    """Draw a panel for every workload, and a line of them for every model. Raises ParameterError.

    result: of ``measure_throughput``, with rows of ``workloads``.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["part"] == "workloads"]
    models, kinds = (list(dict.fromkeys(row[name] for row in rows)) for name in ("model", "workload"))
    figure = Figure(figsize=(0.8 + 3.2 * len(kinds), 0.8 + 2.8 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(kinds), squeeze=False)
    for line, model in zip(panels, models, strict=True):
        for axes, kind in zip(line, kinds, strict=True):
            _draw(axes, [row for row in rows if (row["model"], row["workload"]) == (model, kind)])
            axes.set_title(f"{kind}\n{model}", fontsize=_FONT)
        line[0].set_ylabel("time to the first token, s", fontsize=_FONT)
    named: dict[str, Any] = {}
    for axes in panels.flat:
        named |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=_FONT)
    save(figure, path)


def _draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    cells = [cell for cell in (row["columns"]["inlay"] for row in rows) if "skipped" not in cell]
    points = sorted(((100 * cell["hit_rate"], cell["ttft_ms"]) for cell in cells), key=lambda point: point[0])
    for percentile, style in (("p50", "o-"), ("p90", "^--")):
        seconds = [ttft[percentile] / 1000 for _, ttft in points]
        axes.plot([rate for rate, _ in points], seconds, style, color=_OURS, markersize=4, label=f"inlay, {percentile}")
    off = rows[0]["columns"].get("off", {})
    if "ttft_ms" in off:
        axes.axhline(off["ttft_ms"]["p50"] / 1000, color=_OFF, linewidth=1, label="nothing shared, p50")
    axes.set_xlabel("tokens of prompts that were stored, %", fontsize=_FONT)
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=_FONT - 1)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
