"""The token ids and positions of a schema.

A schema is laid out once. Text takes as many positions as it has tokens, and a parameter takes ``len``. The members of
a union start at the same position, and the union is as long as its longest member (Prompt Cache, arXiv 2311.04934,
section 3.3). Consecutive text of one owner becomes one TextRun, the unit that is cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256

from inlay.errors import ModelError, Place, PMLError, Problem
from inlay.pml import Module, Param, Schema, Text, Turn, Union
from inlay.pml.rules import ByPath, path_of
from inlay.pml.variables import params_of
from inlay.prompt.chat import ChatTemplate, Trim
from inlay.prompt.tokens import TextEncoder, beyond_vocabulary
from inlay.prompt.turns import PresentTurns, bos_text, closing, has_turns, opening, openings, speaks, split
from inlay.wording import counted, html_table

FILLINGS = ("default", "scaffold")
"""What may fill the hole of a parameter before a request does."""

Owner = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TextRun:
    """Consecutive text of one owner.

    Args:
        index: its number among the schema's runs and holes, in document order.
        start: the position of its first token under ``schema`` positions.
        owner: the path of its module, ancestors first; () for text that is always present.
        parts: the text nodes and template pieces that it consists of.
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
    """A text node (by order), a piece of the template (by the turn that it opens or closes), or BOS."""

    ids: tuple[int, ...]
    text: str
    node: int | None = None
    turn: int | None = None
    closes: int | None = None

    @property
    def is_bos(self) -> bool:
        return self.node is None and self.turn is None and self.closes is None


@dataclass(frozen=True, slots=True)
class Hole:
    """The positions of a parameter, with the token ids of its default and scaffold texts (None for no such text)."""

    index: int
    start: int
    length: int
    owner: Owner
    param: Param
    default: tuple[int, ...] | None
    scaffold: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """The positions ``start`` … ``end - 1`` of a module. ``tokens`` counts its own text, without nested modules."""

    start: int
    end: int
    tokens: int


@dataclass(frozen=True, repr=False)
class SchemaLayout:
    """A schema as token ids and positions.

    Args:
        entries: runs and holes in document order.
        extents: path of a module → positions.
        run_of: order of a text node → index of its run. A text without tokens has none.
        run_of_turn: number of a turn → index of the run with the template's piece in front of it. An empty piece that
            would begin a run has none. Turns are numbered in document order, including turns in modules.
        run_of_end: number of a turn → index of the run that closes it, where text without a role may follow.
        hole_of: order of a parameter → index of its hole.
        turn_of: order of a turn → its number.
        turn_pieces: the chat template's pieces in front of the schema's turns.
        openings: see ``turns.openings``.
    """

    schema: Schema
    entries: tuple[TextRun | Hole, ...]
    length: int
    extents: ByPath[Extent]
    run_of: dict[int, int]
    run_of_turn: dict[int, int]
    run_of_end: dict[int, int]
    hole_of: dict[int, int]
    turn_of: dict[int, int]
    turn_pieces: tuple[str, ...]
    openings: tuple[str, ...]
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

    def text_of(self, order: int) -> str:
        """Return a text node as laid out. A chat template may strip the ends of a turn."""
        return self._texts.get(order, "")

    @cached_property
    def digest(self) -> str:
        """A hash of the schema's own text, without the text of the chat template."""
        hashed = sha256()
        for entry in self.entries:
            own: list[object] = [entry.owner]
            if isinstance(entry, Hole):
                own += [entry.param.name, entry.length, entry.default, entry.scaffold]
            else:
                own += [part.text for part in entry.parts if part.node is not None]
            hashed.update(repr(own).encode("utf-8", "surrogatepass"))
        return hashed.hexdigest()

    @cached_property
    def uncached(self) -> frozenset[Owner]:
        """The modules that are never stored: those with cache="false", and the modules inside them."""
        modules, parents = self.schema.modules, self.schema.parents
        owners = {path: (*parents[path], module.name) for path, module in modules.items()}
        never = {owner for path, owner in owners.items() if not modules[path].cache}
        around = (owner for owner in owners.values() if any(owner[:depth] in never for depth in range(len(owner))))
        return frozenset((*never, *around))

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {part.node: part.text for run in self.runs for part in run.parts if part.node is not None}

    def chain(self, index: int, owners: frozenset[Owner]) -> list[TextRun | Hole]:
        """Return the entries of these owners before entry ``index``, in document order."""
        before = [entry for owner in owners for entry in self.by_owner.get(owner, ()) if entry.index < index]
        return sorted(before, key=lambda entry: entry.index)


def lay_out_schema(
    schema: Schema, encoder: TextEncoder, template: ChatTemplate, *, vocabulary: int | None = None
) -> SchemaLayout:
    """Return the token ids and positions of a schema.

    Args:
        vocabulary: the number of tokens that the model knows. None without a model.

    Raises:
        PMLError: for a default that is too long, or a token that the model does not know.
        ContextError, ModelError: if the text exceeds the context, or the template refuses the turns.
    """
    walk = _SchemaWalk(encoder, template, vocabulary, Place(schema.source))
    walk.schema(schema)
    if walk.problems:
        raise PMLError(walk.problems)
    return walk.finish(schema)


@dataclass(slots=True)
class _OpenTextRun:
    """A TextRun under construction."""

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
    template: ChatTemplate
    vocabulary: int | None
    source: Place
    always: tuple[tuple[str, Trim], ...] = ()  # the template's pieces and trims of the turns outside modules
    turn_pieces: list[str] = field(default_factory=list)
    turn_of: dict[int, int] = field(default_factory=dict)
    has_turns: bool = False
    varies: bool = False  # True if the text before the next turn may differ between prompts
    at: int = 0
    entries: list[_OpenTextRun | Hole] = field(default_factory=list)
    extents: dict[str, Extent] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    closed: bool = True  # True if the next text begins a new run

    def schema(self, schema: Schema) -> None:
        turns = [child for child in schema.children if isinstance(child, Turn)]
        in_modules = has_turns(child for child in schema.children if not isinstance(child, Turn))
        self.has_turns = in_modules or bool(turns)
        seen = PresentTurns()
        if turns:
            self.always = self.always_open(tuple(turn.role for turn in turns), in_modules)
        elif not in_modules:
            self.close((), seen, self.source)
        for child in schema.children:
            if isinstance(child, Turn):
                self.turn(child, (), seen, open_ended=child is turns[-1] and child.role == "user")
            else:
                self.beside_turns(child, (), seen)

    def always_open(self, roles: tuple[str, ...], in_modules: bool) -> tuple[tuple[str, Trim], ...]:
        """Return the template's pieces before the turns outside modules, and their trims."""
        try:
            return tuple(zip(self.template.opening_pieces(roles), self.template.opening_trims(roles), strict=True))
        except ModelError:
            if not in_modules:
                raise
            return ()  # turns in modules must stand between them

    def beside_turns(self, node: Text | Param | Module | Union, owner: Owner, seen: PresentTurns) -> None:
        """Lay out a node outside turns. The turn before it is closed if the node can have text."""
        if self.has_turns and not seen.closed and speaks(node):
            self.close(owner, seen, node.place)
        self.node(node, owner, seen)

    def close(self, owner: Owner, seen: PresentTurns, place: Place) -> None:
        """Add the piece that closes the last turn before text without a role, or BOS if there was no turn."""
        seen.closed = True
        if seen.last is None:
            self.add_text(RunPart(self.encoder.bos, ""), owner, place)
        elif text := closing(self.template, seen.roles):
            self.add_piece(RunPart(self.encoder.template(text), text, closes=seen.last), owner, place)

    def turn(self, turn: Turn, owner: Owner, seen: PresentTurns, *, open_ended: bool = False) -> None:
        number = self.turn_of[turn.order] = len(self.turn_pieces)
        roles = (*seen.roles, turn.role)
        known = self.always and not owner
        opened = self.always[len(seen.roles)] if known else opening(self.template, roles)
        piece, trim = opened or ("", Trim())
        if seen.closed:
            before = closing(self.template, seen.roles) if seen.roles else bos_text(self.encoder)
            piece = split(piece, before)[1]
        seen.roles = roles
        self.turn_pieces.append(piece)
        self.varies |= bool(owner)
        if opened is None:
            self.closed = True
        else:
            self.add_piece(RunPart(self.encoder.template(piece), piece, turn=number), owner, turn.place)
        for child in _trimmed(turn, trim, open_ended):
            self.node(child, owner, None)
        seen.last, seen.closed = number, False

    def add_piece(self, part: RunPart, owner: Owner, place: Place) -> None:
        """Add a piece of the template, in a run of its own if it may differ between prompts."""
        self.closed |= self.varies
        self.add_text(part, owner, place)
        self.closed |= self.varies

    def node(self, node: Text | Param | Module | Union, owner: Owner, seen: PresentTurns | None) -> None:
        """Lay out a node. ``seen`` holds the turns before it; None inside a turn."""
        if isinstance(node, Text):
            self.encoder.bound.check([node.text], f"{node.place}: ")
            self.add_text(RunPart(self.encoder.text(node.text), node.text, node=node.order), owner, node.place)
            return
        self.closed = True
        if isinstance(node, Param):
            self.hole(node, owner)
        elif isinstance(node, Module):
            self.module(node, owner, seen)
        else:
            self.union(node, owner, seen)
        self.closed = True

    def module(self, module: Module, owner: Owner, seen: PresentTurns | None) -> None:
        start, first, owner = self.at, len(self.entries), (*owner, module.name)
        inside = None if seen is None else replace(seen)  # some prompts lack this module's turns
        for child in module.children:
            if inside is None:
                assert not isinstance(child, Turn), "no turn stands in another"
                self.node(child, owner, None)
            elif isinstance(child, Turn):
                self.turn(child, owner, inside)
            else:
                self.beside_turns(child, owner, inside)
        runs = (self.entries[number] for number in range(first, len(self.entries)))
        tokens = sum(len(run.ids) for run in runs if isinstance(run, _OpenTextRun) and run.owner == owner)
        self.extents[path_of(owner)] = Extent(start, self.at, tokens)

    def union(self, union: Union, owner: Owner, seen: PresentTurns | None) -> None:
        start = end = self.at
        for member in union.members:
            self.at = start
            self.closed = True
            self.module(member, owner, seen)
            end = max(end, self.at)
        self.at = end

    def hole(self, param: Param, owner: Owner) -> None:
        default, scaffold = (self.filling(param, name) for name in FILLINGS)
        self.entries.append(Hole(len(self.entries), self.at, param.length, owner, param, default, scaffold))
        self.at += param.length

    def filling(self, param: Param, name: str) -> tuple[int, ...] | None:
        """Return the token ids of a default or scaffold text, or None without one."""
        text: str | None = getattr(param, name)
        if text is None:
            return None
        ids = self.encoder.text(text)
        self.check(ids, param.place)
        if (problem := too_long(param, name, len(ids))) is not None:
            self.problems.append(problem)
        return ids

    def check(self, ids: tuple[int, ...], place: Place) -> None:
        """Record a problem for a token that the model does not know."""
        unknown = None if self.vocabulary is None else beyond_vocabulary(ids, self.vocabulary, self.encoder.name)
        if unknown is not None:
            self.problems.append(Problem(place, f"this becomes {unknown}", code="model.unknown_token"))

    def add_text(self, part: RunPart, owner: Owner, place: Place) -> None:
        self.check(part.ids, place)
        last = self.entries[-1] if self.entries else None
        if not self.closed and isinstance(last, _OpenTextRun) and last.owner == owner:
            last.ids += part.ids
            last.parts.append(part)
        elif part.ids:
            self.entries.append(_OpenTextRun(len(self.entries), list(part.ids), self.at, owner, [part]))
        else:
            return
        self.at += len(part.ids)
        self.closed = False

    def finish(self, schema: Schema) -> SchemaLayout:
        entries = tuple(entry.finished() if isinstance(entry, _OpenTextRun) else entry for entry in self.entries)
        runs = [entry for entry in entries if isinstance(entry, TextRun)]
        by_owner: dict[Owner, list[TextRun | Hole]] = {}
        for entry in entries:
            by_owner.setdefault(entry.owner, []).append(entry)
        return SchemaLayout(
            schema=schema,
            entries=entries,
            length=self.at,
            extents=ByPath(self.extents),
            run_of={part.node: run.index for run in runs for part in run.parts if part.node is not None},
            run_of_turn={part.turn: run.index for run in runs for part in run.parts if part.turn is not None},
            run_of_end={part.closes: run.index for run in runs for part in run.parts if part.closes is not None},
            hole_of={entry.param.order: entry.index for entry in entries if isinstance(entry, Hole)},
            turn_of=self.turn_of,
            turn_pieces=tuple(self.turn_pieces),
            openings=openings(self.template, schema),
            by_owner={owner: tuple(entries) for owner, entries in by_owner.items()},
        )


def _trimmed(turn: Turn, trim: Trim, open_ended: bool) -> list[Text | Param | Module | Union]:
    """Return a turn's children as the template strips them. New text may follow an open-ended turn."""
    children = list(turn.children)
    if children and isinstance(children[0], Text):
        children[0] = replace(children[0], text=trim.start(children[0].text))
    if children and isinstance(children[-1], Text) and not open_ended:
        children[-1] = replace(children[-1], text=trim.end(children[-1].text))
    return [child for child in children if not (isinstance(child, Text) and not child.text)]


def filling_problems(schema: Schema, encoder: TextEncoder) -> list[Problem]:
    """Return the problems of defaults and scaffolds that have more tokens than the ``len`` of their parameter."""
    found = (
        too_long(param, name, len(encoder.text(text)))
        for param in params_of(schema.children)
        for name in FILLINGS
        if (text := getattr(param, name)) is not None
    )
    return [problem for problem in found if problem is not None]


def too_long(param: Param, name: str, tokens: int) -> Problem | None:
    """Return the problem of a default or scaffold text that is longer than its parameter. None if it fits.

    Args:
        param: the parameter.
        name: "default" or "scaffold".
        tokens: the length of the text.
    """
    if tokens <= param.length:
        return None
    what = f"the {name} of '{param.name}' is {tokens} tokens long and its len is {param.length}"
    return Problem(param.place, f'{what}; write len="{tokens}" or a shorter {name}', code="pml.argument_too_long")
