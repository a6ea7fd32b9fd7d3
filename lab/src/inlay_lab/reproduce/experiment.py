"""Experiments and their outcomes: rows of our figure beside the published one, tables, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

#: Plain JSON values, so that they can be stored, compared and sent to another process.
Settings = Mapping[str, Any]
Data = dict[str, Any]

_CLOSE = 0.05  # figures that differ by less count as equal


class Scale(StrEnum):
    """The size of experiments: minutes for all of them, some hours on a laptop, or a night."""

    QUICK = "quick"
    DEFAULT = "default"
    FULL = "full"


class NotHereError(Exception):
    """An experiment cannot run on this machine or without an input. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Published:
    """A published figure.

    Attributes:
        value: A number, the two ends of a range, or words.
        where: Its table, figure or section.
        on: The hardware of the measurement, or "" if it depends on none.
    """

    value: float | tuple[float, float] | str
    where: str
    on: str = ""

    def agrees(self, ours: float | str) -> bool:
        """True if our figure is within 5 % or inside the range, or if the words are equal."""
        if isinstance(self.value, str) or isinstance(ours, str):
            return self.value == ours
        low, high = self.value if isinstance(self.value, tuple) else (self.value, self.value)
        return low - _CLOSE * abs(low) <= ours <= high + _CLOSE * abs(high)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        ours: None if it was not measured.
        published: None if the source has no such figure.
        why: The reason for a difference, or "".
    """

    what: str
    unit: str
    ours: float | str | None
    published: Published | None = None
    why: str = ""

    def report(self) -> Data:
        """The row as plain values, for a record."""
        return asdict(self)

    @property
    def differs(self) -> bool:
        """True if there are two figures and they do not agree."""
        return self.ours is not None and self.published is not None and not self.published.agrees(self.ours)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of all measured cases. Cells are text."""

    title: str
    header: list[str]
    lines: list[list[str]]


@dataclass(frozen=True)
class Outcome:
    """The result of an experiment.

    Attributes:
        notes: Sentences on the measurement.
        data: Input of its drawing.
    """

    rows: list[Row]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: Data = field(default_factory=dict)

    def report(self) -> Data:
        """The outcome as plain JSON values, for a record."""
        return asdict(self)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Outcome:
        """The inverse of ``report``, after JSON. Raises KeyError or TypeError for other input."""
        rows = [_row(dict(each)) for each in found["rows"]]
        tables = [Table(**each) for each in found["tables"]]
        return cls(rows, tables, list(found["notes"]), dict(found["data"]))


def _row(found: Data) -> Row:
    printed = found.pop("published")
    if printed is not None:
        value = printed["value"]
        printed = Published(**printed | {"value": tuple(value) if isinstance(value, list) else value})
    return Row(**found, published=printed)


@dataclass(frozen=True)
class Experiment:
    """One published experiment.

    Attributes:
        name: For ``--only``.
        source: The paper and its table, figure or section.
        settings: By scale. A stored result must have the same settings.
        measure: Runs it. Raises NotHereError if it cannot run, InlayError if it fails.
        draw: Draws an outcome's data into a PNG file; None for no drawing.
        given: Names of settings that users may add.
        light: It takes no time or memory, so it runs in this process and is not stored.
    """

    name: str
    title: str
    source: str
    settings: Mapping[Scale, Settings]
    measure: Callable[[Settings], Outcome]
    draw: Callable[[Data, Path], None] | None = None
    given: tuple[str, ...] = ()
    light: bool = False
