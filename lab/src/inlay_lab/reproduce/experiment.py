"""What an experiment is, and what comes of one: rows of our figure beside the published one, tables, and a drawing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

#: Plain values that JSON holds, so that they can be kept, compared and handed to another process.
Settings = Mapping[str, Any]
Data = dict[str, Any]

_CLOSE = 0.05  # figures that differ by less are called the same


class Scale(StrEnum):
    """How large experiments are: minutes for all of them, a part of a day on a laptop, or a night."""

    QUICK = "quick"
    DEFAULT = "default"
    FULL = "full"


class NotHereError(Exception):
    """An experiment cannot run on this machine, or with what was given; the message says why, and what would help."""


class NotBuiltError(NotHereError):
    """An experiment is about something that inlay does not have."""


@dataclass(frozen=True, slots=True)
class Published:
    """A figure as it was printed.

    value: a number, the two ends of a range, or words where the source says it in words.
    where: its table, figure or section. on: the hardware it was measured on, or "" where it depends on none.
    """

    value: float | tuple[float, float] | str
    where: str
    on: str = ""

    def agrees(self, ours: float | str) -> bool:
        """Whether ours is as good as the same: within 5 %, inside the range, or the same words."""
        if isinstance(self.value, str) or isinstance(ours, str):
            return self.value == ours
        low, high = self.value if isinstance(self.value, tuple) else (self.value, self.value)
        return low - _CLOSE * abs(low) <= ours <= high + _CLOSE * abs(high)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ours: None where it was not measured. why: the reason where the two differ; "" where nothing is said.

    published: None where the source has no such figure.
    """

    what: str
    unit: str
    ours: float | str | None
    published: Published | None = None
    why: str = ""

    def report(self) -> Data:
        """As it stands in a record."""
        return asdict(self)

    @property
    def differs(self) -> bool:
        """Whether there are two figures, and they are not the same."""
        return self.ours is not None and self.published is not None and not self.published.agrees(self.ours)


@dataclass(frozen=True, slots=True)
class Table:
    """More than what is compared: every case that was measured. Cells are text."""

    title: str
    header: list[str]
    lines: list[list[str]]


@dataclass(frozen=True)
class Outcome:
    """What an experiment came to. notes: sentences on how it was measured. data: what it is drawn from."""

    rows: list[Row]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: Data = field(default_factory=dict)

    def report(self) -> Data:
        """As it stands in a record: plain values that JSON holds."""
        return asdict(self)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Outcome:
        """What ``report`` gave, after JSON. Raises KeyError and TypeError where it is something else."""
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

    name: what ``--only`` calls it. source: the paper and its table, figure or section.
    settings: of each scale; what a kept result must have been measured with.
    measure: runs it; raises NotHereError where it cannot run, InlayError where it fails.
    draw: a drawing of an outcome's data, into a PNG file; None where there is none.
    given: names of what users may add to its settings.
    light: whether it takes no time and no memory, so that it runs in this process and nothing of it is kept.
    """

    name: str
    title: str
    source: str
    settings: Mapping[Scale, Settings]
    measure: Callable[[Settings], Outcome]
    draw: Callable[[Data, Path], None] | None = None
    given: tuple[str, ...] = ()
    light: bool = False
