"""Nodes to numbers: the token ids and position ids of a schema and of a prompt.

A schema is laid out once. Text takes as many positions as it has tokens, a parameter takes ``len``, members of a union
start at the same position, and the union is as long as its longest member (Prompt Cache, arXiv 2311.04934, section
3.3). Consecutive text of one owner becomes one TextRun: what is cached later on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from inlay.errors import Place, PMLError, Problem
from inlay.pml import Module, Param, Schema, Text, Turn, Union
from inlay.prompt.chat import ChatTemplate, Trim
from inlay.prompt.tokens import TextEncoder, beyond_vocabulary
from inlay.wording import counted, html_table

Owner = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TextRun:
    """Consecutive text of one owner.

    index: its number among the schema's runs and holes, in document order.
    start: the position of its first token under ``schema`` positions.
    owner: the module that it belongs to, under its ancestors; () for text that is always present.
    parts: what it was made of.
    """

    index: int
    ids: tuple[int, ...]
    start: int
    owner: Owner
    parts: tuple[RunPart, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class RunPart:
    """A text node (by its order), a piece of the chat template (by its turn), or the BOS token."""

    ids: tuple[int, ...]
    text: str
    node: int | None = None
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Hole:
    """The positions of a parameter. default: the ids of its default, or None."""

    index: int
    start: int
    length: int
    owner: Owner
    param: Param
    default: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Extent:
    """The positions of a module: ``start`` … ``end - 1``. tokens: of its own text, without nested modules."""

    start: int
    end: int
    tokens: int


@dataclass(frozen=True, repr=False)
class SchemaLayout:
    """A schema as token ids and positions.

    entries: runs and holes in document order.
    extents: module name → positions.
    run_of: order of a text node → index of its run; a text without tokens is in none.
    run_of_turn: number of a turn → index of the run with the template's piece in front of it; an empty piece that
        would begin a run is in none.
    hole_of: order of a parameter → index of its hole.
    turn_pieces: the chat template's pieces in front of the schema's turns.
    """

    schema: Schema
    entries: tuple[TextRun | Hole, ...]
    length: int
    extents: dict[str, Extent]
    run_of: dict[int, int]
    run_of_turn: dict[int, int]
    hole_of: dict[int, int]
    turn_pieces: tuple[str, ...]
    by_owner: dict[Owner, tuple[TextRun | Hole, ...]]

    def __repr__(self) -> str:
        tokens = sum(len(run.ids) for run in self.runs)
        return f"<SchemaLayout of {self.schema!r}, {counted(tokens, 'token')}>"

    def _repr_html_(self) -> str:
        rows = ((name, extent.tokens, f"{extent.start}…{extent.end}") for name, extent in self.extents.items())
        return html_table(f"schema {self.schema.name}", ("module", "tokens", "positions"), rows)

    @property
    def runs(self) -> Iterator[TextRun]:
        return (entry for entry in self.entries if isinstance(entry, TextRun))

    @property
    def roles(self) -> list[str]:
        """Of the schema's turns."""
        return _roles(self.schema)

    def text_of(self, order: int) -> str:
        """A text node as it is laid out: a chat template may strip the ends of a turn."""
        return self._texts.get(order, "")

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {part.node: part.text for run in self.runs for part in run.parts if part.node is not None}

    def chain(self, index: int, owners: frozenset[Owner]) -> list[TextRun | Hole]:
        """The entries of these owners before entry ``index``, in document order."""
        before = [entry for owner in owners for entry in self.by_owner.get(owner, ()) if entry.index < index]
        return sorted(before, key=lambda entry: entry.index)


def _roles(schema: Schema) -> list[str]:
    return [child.role for child in schema.children if isinstance(child, Turn)]


def lay_out_schema(
    schema: Schema, encoder: TextEncoder, template: ChatTemplate, *, vocabulary: int | None = None
) -> SchemaLayout:
    """Token ids and positions of a schema.

    vocabulary: how many tokens the model knows; None where there is no model that the ids could reach.
    Raises PMLError (a default that is too long, a token that the model does not know), ContextError and ModelError.
    """
    roles = _roles(schema)
    walk = _SchemaWalk(encoder, vocabulary)
    if roles:
        walk.turn_pieces, walk.trims = template.opening_pieces(roles), template.opening_trims(roles)
    else:
        walk.add_text(RunPart(encoder.bos, ""), (), Place(schema.source))
    turn = 0
    for child in schema.children:
        if isinstance(child, Turn):
            turn += 1
            walk.turn(child, turn - 1, open_ended=turn == len(roles) and child.role == "user")
        else:
            walk.node(child, ())
    if walk.problems:
        raise PMLError(walk.problems)
    return walk.finish(schema)


@dataclass(slots=True)
class _Run:
    """A TextRun that may become longer."""

    index: int
    ids: list[int]
    start: int
    owner: Owner
    parts: list[RunPart]

    def finished(self) -> TextRun:
        return TextRun(self.index, tuple(self.ids), self.start, self.owner, tuple(self.parts))


@dataclass
class _SchemaWalk:
    encoder: TextEncoder
    vocabulary: int | None
    turn_pieces: tuple[str, ...] = ()
    trims: tuple[Trim, ...] = ()
    at: int = 0
    entries: list[_Run | Hole] = field(default_factory=list)
    extents: dict[str, Extent] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    closed: bool = True  # whether the next text begins a new run

    def turn(self, turn: Turn, number: int, *, open_ended: bool) -> None:
        piece = self.turn_pieces[number]
        self.add_text(RunPart(self.encoder.template(piece), piece, turn=number), (), turn.place)
        for child in _trimmed(turn, self.trims[number], open_ended):
            self.node(child, ())

    def node(self, node: Text | Param | Module | Union, owner: Owner) -> None:
        if isinstance(node, Text):
            self.encoder.bound.check([node.text], f"{node.place}: ")
            self.add_text(RunPart(self.encoder.text(node.text), node.text, node=node.order), owner, node.place)
            return
        self.closed = True
        if isinstance(node, Param):
            self.hole(node, owner)
        elif isinstance(node, Module):
            self.module(node, owner)
        else:
            self.union(node, owner)
        self.closed = True

    def module(self, module: Module, owner: Owner) -> None:
        start, first, owner = self.at, len(self.entries), (*owner, module.name)
        for child in module.children:
            self.node(child, owner)
        runs = (self.entries[number] for number in range(first, len(self.entries)))
        tokens = sum(len(run.ids) for run in runs if isinstance(run, _Run) and run.owner == owner)
        self.extents[module.name] = Extent(start, self.at, tokens)

    def union(self, union: Union, owner: Owner) -> None:
        start = end = self.at
        for member in union.members:
            self.at = start
            self.closed = True
            self.module(member, owner)
            end = max(end, self.at)
        self.at = end

    def hole(self, param: Param, owner: Owner) -> None:
        default = None if param.default is None else self.encoder.text(param.default)
        self.check(default or (), param.place)
        if default is not None and len(default) > param.length:
            self.problems.append(
                Problem(
                    param.place,
                    f"the default of '{param.name}' is {len(default)} tokens long and its len is {param.length}; "
                    f'write len="{len(default)}" or a shorter default',
                )
            )
        self.entries.append(Hole(len(self.entries), self.at, param.length, owner, param, default))
        self.at += param.length

    def check(self, ids: tuple[int, ...], place: Place) -> None:
        """Note a token that the model does not know."""
        unknown = None if self.vocabulary is None else beyond_vocabulary(ids, self.vocabulary, self.encoder.name)
        if unknown is not None:
            self.problems.append(Problem(place, f"this becomes {unknown}"))

    def add_text(self, part: RunPart, owner: Owner, place: Place) -> None:
        self.check(part.ids, place)
        last = self.entries[-1] if self.entries else None
        if not self.closed and isinstance(last, _Run) and last.owner == owner:
            last.ids += part.ids
            last.parts.append(part)
        elif part.ids:  # no run is empty
            self.entries.append(_Run(len(self.entries), list(part.ids), self.at, owner, [part]))
        else:
            return
        self.at += len(part.ids)
        self.closed = False

    def finish(self, schema: Schema) -> SchemaLayout:
        entries = tuple(entry.finished() if isinstance(entry, _Run) else entry for entry in self.entries)
        runs = [entry for entry in entries if isinstance(entry, TextRun)]
        by_owner: dict[Owner, list[TextRun | Hole]] = {}
        for entry in entries:
            by_owner.setdefault(entry.owner, []).append(entry)
        return SchemaLayout(
            schema=schema,
            entries=entries,
            length=self.at,
            extents=self.extents,
            run_of={part.node: run.index for run in runs for part in run.parts if part.node is not None},
            run_of_turn={part.turn: run.index for run in runs for part in run.parts if part.turn is not None},
            hole_of={entry.param.order: entry.index for entry in entries if isinstance(entry, Hole)},
            turn_pieces=self.turn_pieces,
            by_owner={owner: tuple(entries) for owner, entries in by_owner.items()},
        )


def _trimmed(turn: Turn, trim: Trim, open_ended: bool) -> list[Text | Module | Union]:
    """A turn's children as a chat template that strips bodies leaves them. New text may follow an open-ended turn."""
    children = list(turn.children)
    if children and isinstance(children[0], Text):
        children[0] = replace(children[0], text=trim.start(children[0].text))
    if children and isinstance(children[-1], Text) and not open_ended:
        children[-1] = replace(children[-1], text=trim.end(children[-1].text))
    return [child for child in children if not (isinstance(child, Text) and not child.text)]
