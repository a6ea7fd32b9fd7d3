"""The report: every experiment with the published figure beside ours, and the reason for a difference."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from inlay import __version__
from inlay.errors import ParameterError
from inlay.wording import markdown_table
from inlay_lab.reports import write_texts
from inlay_lab.reproduce.experiment import Data, Published, Row, Scale
from inlay_lab.reproduce.run import Entry, Status, summary

logger = logging.getLogger(__name__)
IMAGES = "images"
_SCALES = {
    Scale.QUICK: "quick: sizes of minutes, to see that everything runs; figures at such sizes say less",
    Scale.DEFAULT: "default: sizes for a laptop",
    Scale.FULL: "full: the published sizes, as far as this machine has room for them",
}


def write_report(entries: Sequence[Entry], scale: Scale, machine: Data, folder: Path) -> None:
    """Write ``report.md``, ``report.json`` and drawings into an existing folder. Raises ParameterError."""
    drawn = _draw(entries, folder)
    texts = {
        "report.md": markdown(entries, scale, machine, drawn),
        "report.json": json.dumps(summary(entries, scale, machine), indent=1, ensure_ascii=False),
    }
    write_texts(folder, texts, "--out")


def _draw(entries: Sequence[Entry], folder: Path) -> dict[str, str]:
    """Draw every result that has a drawing; returns file names by experiment."""
    drawn = {}
    for entry in entries:
        draw, outcome = entry.experiment.draw, entry.outcome
        if draw is None or outcome is None:
            continue
        name = f"{IMAGES}/{entry.experiment.name}.png"
        try:
            (folder / IMAGES).mkdir(exist_ok=True)
            draw(outcome.data, folder / name)
            drawn[entry.experiment.name] = name
        except OSError as error:
            raise ParameterError(f"--out {folder / name} cannot be written: {error.strerror}") from None
        except Exception:  # the tables still have the figures
            logger.warning("%s could not be drawn", entry.experiment.name, exc_info=True)
    return drawn


def markdown(entries: Sequence[Entry], scale: Scale, machine: Data, drawn: dict[str, str]) -> str:
    """The report as Markdown. ``drawn`` has the file of each experiment's drawing."""
    sections = [
        "# Published experiments, run again",
        f"inlay {__version__}, scale {_SCALES[scale]}. {describe(machine)}",
        _LEGEND,
        markdown_table(*overview(entries)),
    ]
    for entry in entries:
        sections += _section(entry, drawn.get(entry.experiment.name))
    return "\n\n".join(sections)


_LEGEND = (
    "Prompt Cache is arXiv 2311.04934, ChunkAttention arXiv 2402.15220. The commentary is an article in Japanese on "
    "Prompt Cache (論文解説: Prompt Cache), whose tables are not in the paper; another one, in Chinese, repeats the "
    "paper's figures and has none of its own. Figures within 5 %, or inside a published range, are called the same. "
    "The overview has the first figure of each experiment."
)


def describe(machine: Data) -> str:
    """The machine in a sentence."""
    return (
        f"{machine['threads']} of {machine['cores']} cores of {machine['cpu']} ({machine['cpu_capability']}), "
        f"{machine['memory_gib']:g} GiB, torch {machine['torch']}, transformers {machine['transformers']}."
    )


def overview(entries: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of all experiments."""
    lines = []
    for entry in entries:
        each = entry.experiment
        head = [each.name, each.source]
        row = next((row for row in entry.outcome.rows if row.published is not None), None) if entry.outcome else None
        row = row or (entry.outcome.rows[0] if entry.outcome and entry.outcome.rows else None)
        if entry.kept is None or row is None:
            lines.append([*head, "", "", "", str(entry.status)])
            continue
        took = "" if each.light else f", {entry.kept.took_s:,.0f} s"
        printed = "" if row.published is None else figure(row.published.value, row.unit)
        lines.append([*head, row.what, printed, figure(row.ours, row.unit), f"{entry.status}{took}"])
    return ["experiment", "source", "figure", "published", "here", ""], lines


def _section(entry: Entry, drawing: str | None) -> list[str]:
    each = entry.experiment
    section = [f"## {each.title}", f"{each.source}; `inlay reproduce --only {each.name}`."]
    if entry.kept is None:
        return [*section, f"**{str(entry.status).capitalize()}**: {entry.reason}."]
    kept, outcome = entry.kept, entry.kept.outcome
    if not each.light:
        load = kept.conditions["load_1m"]
        section[-1] += f" Measured on {kept.on} in {kept.took_s:,.0f} s; the load was {load:g} when it began."
    if drawing is not None:
        section.append(f"![{each.title}]({drawing})")
    if outcome.rows:
        section.append(markdown_table(["figure", "published", "here", "why they differ"], map(_line, outcome.rows)))
    for table in outcome.tables:
        section += [f"{table.title}:", markdown_table(table.header, table.lines)]
    return [*section, *outcome.notes]


def _line(row: Row) -> list[str]:
    printed = "" if row.published is None else _printed(row.published, row.unit)
    reason = row.why if row.differs else "" if row.ours is None or row.published is None else "the same"
    return [row.what, printed, figure(row.ours, row.unit), reason]


def _printed(published: Published, unit: str) -> str:
    on = f"; {published.on}" if published.on else ""
    return f"{figure(published.value, unit)} ({published.where}{on})"


def figure(value: float | tuple[float, float] | str | None, unit: str) -> str:
    """A figure in three digits or more, with its unit; a dash for none."""
    if value is None:
        return "—"
    if isinstance(value, tuple):
        return f"{_digits(value[0])} to {figure(value[1], unit)}"
    text = value if isinstance(value, str) else _digits(value)
    return f"{text}{unit if unit in ('×', '') else f' {unit}'}"


def _digits(value: float) -> str:
    """Whole numbers from 100 on, three digits below."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.3f}".rstrip("0") if "e" in text and abs(value) >= 0.001 else text


def failed(entries: Sequence[Entry]) -> list[str]:
    """The names of failed experiments."""
    return [entry.experiment.name for entry in entries if entry.status is Status.FAILED]
