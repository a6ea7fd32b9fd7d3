"""A resolved prompt to numbers: which runs of its schema it takes, which text is new, and where all of it stands.

``schema`` positions are the paper's: what the schema holds stays where the schema has it, gaps and all. ``packed``
positions leave no gap: everything follows what stands before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inlay.chat import ChatTemplate
from inlay.errors import Place, PMLError, Problem
from inlay.layout import Hole, SchemaLayout, TextRun
from inlay.pml import Filled, Item, NewText, Resolved, SchemaText, TurnEnd, TurnStart
from inlay.tokens import TextEncoder

POSITIONS = ("schema", "packed")


@dataclass(frozen=True, slots=True)
class Placed:
    """Consecutive tokens of a prompt.

    start: the position of the first one in this prompt.
    origin: the run it is, the hole whose default it is, or None for text of the request.
    """

    ids: tuple[int, ...]
    start: int
    origin: TextRun | Hole | None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class PromptLayout:
    """A prompt as parts in the order of their positions."""

    schema: SchemaLayout | None
    parts: tuple[Placed, ...]
    text: str
    imported: frozenset[str] = frozenset()

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for part in self.parts for token in part.ids)

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(p for part in self.parts for p in range(part.start, part.end))


def lay_out_ids(ids: Sequence[int], text: str) -> PromptLayout:
    """A prompt without a schema: nothing but new tokens from position 0."""
    return PromptLayout(None, (Placed(tuple(ids), 0, None),), text)


def lay_out_prompt(
    resolved: Resolved, layout: SchemaLayout, encoder: TextEncoder, template: ChatTemplate, *, positions: str
) -> PromptLayout:
    """Place a resolved prompt. positions: "schema" or "packed". Raises PMLError and ModelError."""
    turns = _Turns.of(resolved, template)
    walk = _PromptWalk(Place(resolved.source), layout, encoder, template, turns, packed=positions == "packed")
    walk.begin()
    items = resolved.items
    for number, item in enumerate(items):
        first = number > 0 and isinstance(items[number - 1], TurnStart)
        last = number + 1 < len(items) and isinstance(items[number + 1], TurnEnd)
        walk.item(item, first=first, last=last)
    walk.finish()
    if walk.problems:
        raise PMLError(walk.problems)
    return PromptLayout(layout, tuple(walk.parts), "".join(walk.pieces), resolved.imported)


@dataclass(frozen=True)
class _Turns:
    """The turns of a prompt, and what the chat template puts around them."""

    roles: tuple[str, ...]
    pieces: tuple[str, ...]
    generation: bool
    trims: tuple[bool, ...]

    @classmethod
    def of(cls, resolved: Resolved, template: ChatTemplate) -> _Turns:
        starts = [item for item in resolved.items if isinstance(item, TurnStart)]
        roles = tuple(start.role for start in starts)
        if not roles:
            return cls((), (), False, ())
        # A prompt that ends in an assistant turn of its own wants that turn carried on.
        generation = not (starts[-1].own and roles[-1] == "assistant")
        pieces = template.pieces(roles, generation=generation)
        return cls(roles, pieces, generation, tuple(template.trims(role) for role in roles))


@dataclass
class _PromptWalk:
    source: Place
    layout: SchemaLayout
    encoder: TextEncoder
    template: ChatTemplate
    turns: _Turns
    packed: bool
    at: int = 0
    turn: int = -1
    parts: list[Placed] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # the whole text, for people
    bodies: list[str] = field(default_factory=list)  # the text of each turn, for the template's check
    placed: set[int] = field(default_factory=set)  # indices of runs that stand already
    new_text: Place | None = None  # the latest text of the request, while nothing of the schema followed it
    problems: list[Problem] = field(default_factory=list)

    def begin(self) -> None:
        first = self.layout.entries[0] if self.layout.entries else None
        if not self.turns.roles and isinstance(first, TextRun) and not first.owner:
            self.run(first.index)  # BOS stands alone in front, or before the first text

    def item(self, item: Item, *, first: bool, last: bool) -> None:
        """Place one item; first and last tell whether it opens or closes the body of a turn."""
        if isinstance(item, TurnStart):
            self.start_turn(item)
        elif isinstance(item, SchemaText):
            if item.node.order in self.layout.run_of:
                self.run(self.layout.run_of[item.node.order])
        elif isinstance(item, Filled):
            self.filled(item)
        elif isinstance(item, NewText):
            text = item.text
            if self.turns.roles and self.turns.trims[self.turn]:
                text = text.lstrip() if first else text
                text = text.rstrip() if last else text
            self.new_text = item.place
            self.say(text)
            self.place(self.encoder.text(text), None)

    def start_turn(self, start: TurnStart) -> None:
        self.turn += 1
        if start.own:
            piece = self.turns.pieces[self.turn]
            self.open_body(piece)
            self.place(self.encoder.template(piece), None)
        else:
            self.run(self.layout.run_of_turn[self.turn])

    def run(self, index: int) -> None:
        """Place a run of the schema, once, as it is or as this prompt's turns change it."""
        if index in self.placed:
            return
        self.placed.add(index)
        run = self.layout.entries[index]
        assert isinstance(run, TextRun)
        self.arrive(run.start)
        ids: list[int] = []
        for part in run.parts:
            ids.extend(part.ids if part.turn is None else self.turn_piece(part.turn, part.ids))
            if part.turn is None:
                self.say(part.text)
        self.place(tuple(ids), run if tuple(ids) == run.ids else None)

    def turn_piece(self, turn: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """What stands before a turn of the schema, which later turns can change."""
        piece = self.turns.pieces[turn]
        self.open_body(piece)
        if piece == self.layout.turn_pieces[turn]:
            return ids
        self.template.warn_once(
            "the chat template writes the schema's turns differently when turns follow: "
            f"what it puts before turn {turn + 1} is computed anew for each prompt"
        )
        return self.encoder.template(piece)

    def filled(self, item: Filled) -> None:
        hole = self.layout.entries[self.layout.hole_of[item.param.order]]
        assert isinstance(hole, Hole)
        self.arrive(hole.start)
        self.say(item.text)
        if item.is_default:
            self.place(hole.default or (), hole)
            return
        ids = self.encoder.text(item.text)
        if len(ids) <= hole.length:
            self.place(ids, None)
            return
        self.problems.append(
            Problem(
                item.place,
                f"the argument '{hole.param.name}' is {len(ids)} tokens long and its len is {hole.length}; "
                f'shorten it, or write len="{len(ids)}" in the schema',
            )
        )

    def finish(self) -> None:
        if not self.turns.roles:
            return
        if self.turns.generation:
            self.pieces.append(self.turns.pieces[-1])
            self.place(self.encoder.template(self.turns.pieces[-1]), None)
            self.template.verify(self.turns.roles, self.bodies, self.turns.pieces)

    def open_body(self, piece: str) -> None:
        self.pieces.append(piece)
        self.bodies.append("")

    def say(self, text: str) -> None:
        self.pieces.append(text)
        if self.bodies:
            self.bodies[-1] += text

    def place(self, ids: tuple[int, ...], origin: TextRun | Hole | None) -> None:
        if not ids:
            return
        last = self.parts[-1] if self.parts else None
        if origin is None and last is not None and last.origin is None and last.end == self.at:
            self.parts[-1] = Placed(last.ids + ids, last.start, None)
        else:
            self.parts.append(Placed(ids, self.at, origin))
        self.at += len(ids)

    def arrive(self, start: int) -> None:
        """Come to something whose position the schema fixes; under packed positions it stands wherever we are."""
        if not self.packed:
            if start < self.at:
                self.problems.append(Problem(self.new_text or self.source, self.overflow(self.at - start)))
            self.at = start
        self.new_text = None

    def overflow(self, tokens: int) -> str:
        many = f"{tokens} token{'s' if tokens > 1 else ''}"
        if self.new_text is None:
            return f"the chat template adds {many} more than the schema has room for; use positions 'packed'"
        return (
            f"the new text is {many} too long for its gap in the schema; shorten it, move it to the end, "
            "or use positions 'packed'"
        )
