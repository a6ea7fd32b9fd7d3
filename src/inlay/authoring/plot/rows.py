"""The rows, bars and boxes of a schema's layout, before they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inlay.pml import Module, Param, Text, Turn, Union
from inlay.pml.scopes import names_of
from inlay.prompt.layout import Hole, SchemaLayout, TextRun

#: The content of a stretch of positions. ``unused``: positions that a member of a union leaves free.
KINDS = ("template", "always", "module", "parameter", "unused")


@dataclass(frozen=True, slots=True)
class Bar:
    """Positions ``start`` … ``start + length - 1`` and their content, one of KINDS."""

    start: int
    length: int
    kind: str


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """One line of a drawing. ``depth`` is the indentation level of its label, ``note`` its counts as text."""

    label: str
    note: str
    depth: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Rows ``first`` … ``last`` within positions ``start`` … ``end - 1``: a module with its children, or a union."""

    first: int
    last: int
    start: int
    end: int
    depth: int
    union: bool


@dataclass
class Rows:
    """All rows from top to bottom, and the boxes around them, outer ones first."""

    rows: list[DrawnRow] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)


def rows_of(layout: SchemaLayout) -> Rows:
    """Return the rows of a schema: one for the always-present text of each turn or of the schema, and one for each
    module.
    """
    walk = _RowWalk(layout)
    turns = [child for child in layout.schema.children if isinstance(child, Turn)]
    *in_turns, beside = _always_present(layout, turns)
    if beside:
        walk.always("always present", beside)
    rows = iter(in_turns)
    for child in layout.schema.children:
        if isinstance(child, Turn):
            walk.always(f"<{child.role}>", next(rows))
            walk.children(child.children, 1)
        else:
            walk.children((child,), 0)
    return walk.found


def _always_present(layout: SchemaLayout, turns: Sequence[Turn]) -> list[list[Bar]]:
    """Return the bars of text outside of modules: one list for each turn, and last one for text outside of turns."""
    turn_of = {order: number for number, turn in enumerate(turns) for order in _texts(turn)}
    number_of = {layout.turn_of[turn.order]: number for number, turn in enumerate(turns)}
    present: list[list[Bar]] = [[] for _ in (*turns, None)]
    for run in layout.runs:
        at = run.start
        for part in run.parts if not run.owner else ():
            piece = part.closes if part.turn is None else part.turn
            number = turn_of.get(-1 if part.node is None else part.node, -1) if piece is None else number_of[piece]
            if part.ids:
                present[number].append(Bar(at, len(part.ids), "template" if part.node is None else "always"))
            at += len(part.ids)
    return present


def _texts(turn: Turn) -> list[int]:
    return [child.order for child in turn.children if isinstance(child, Text)]


@dataclass
class _RowWalk:
    layout: SchemaLayout
    found: Rows = field(default_factory=Rows)

    def always(self, label: str, bars: list[Bar]) -> None:
        self.row(label, 0, bars)

    def children(self, children: Sequence[Text | Param | Module | Union | Turn], depth: int) -> None:
        for child in children:
            if isinstance(child, Module):
                self.module(child, depth, None)
            elif isinstance(child, Union):
                self.union(child, depth)
            elif isinstance(child, Turn):  # a turn of a module
                self.children(child.children, depth)

    def union(self, union: Union, depth: int) -> None:
        extents = [self.layout.extents[self.layout.schema.paths[member.order]] for member in union.members]
        start, end = min(extent.start for extent in extents), max(extent.end for extent in extents)
        box = len(self.found.boxes)
        first = len(self.found.rows)
        for member in union.members:
            self.module(member, depth, end)
        self.found.boxes.insert(box, Box(first, len(self.found.rows) - 1, start, end, depth, union=True))

    def module(self, module: Module, depth: int, union_end: int | None) -> None:
        """Add a module. ``union_end`` is the end of its union, or None."""
        path = self.layout.schema.paths[module.order]
        extent = self.layout.extents[path]
        bars = [
            Bar(entry.start, len(entry.ids), "module") if isinstance(entry, TextRun) else _hole(entry)
            for entry in self.layout.by_owner.get(names_of(path), ())
        ]
        if union_end is not None and union_end > extent.end:
            bars.append(Bar(extent.end, union_end - extent.end, "unused"))
        box = len(self.found.boxes)
        first = len(self.found.rows)
        self.row(path, depth, bars)
        self.children(module.children, depth + 1)
        last = len(self.found.rows) - 1
        if last > first:
            self.found.boxes.insert(box, Box(first, last, extent.start, extent.end, depth, union=False))

    def row(self, label: str, depth: int, bars: list[Bar]) -> None:
        self.found.rows.append(DrawnRow(label, _note(bars), depth, tuple(bars)))


def _hole(hole: Hole) -> Bar:
    return Bar(hole.start, hole.length, "parameter")


def _note(bars: Sequence[Bar]) -> str:
    """Format the counts of text tokens, parameter positions and unused positions."""
    count = {kind: sum(bar.length for bar in bars if bar.kind == kind) for kind in KINDS}
    tokens = count["template"] + count["always"] + count["module"]
    parts = [f"{tokens:,} token{'' if tokens == 1 else 's'}"]
    if count["parameter"]:
        parts.append(f"len {count['parameter']:,}")
    if count["unused"]:
        parts.append(f"{count['unused']:,} unused")
    return ", ".join(parts)
