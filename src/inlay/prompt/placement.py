"""A resolved prompt to numbers: which runs of its schema it takes, which text is new, and where all of it stands.

``schema`` positions are the paper's: what the schema holds stays where the schema has it, gaps and all. ``packed``
positions leave no gap: everything follows what stands before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from threading import Lock

from inlay.errors import Place, PMLError, Problem
from inlay.pml import Filled, Item, NewText, Resolved, SchemaText, TurnEnd, TurnStart
from inlay.prompt.chat import ChatTemplate, Trim
from inlay.prompt.layout import Hole, RunPart, SchemaLayout, TextRun
from inlay.prompt.tokens import TextEncoder

_SHARED = 2**20  # more tokens than vocabularies have, and more positions than prompts
_integers: list[int] = []
_growing = Lock()


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message's content. marked: whether the request asks that it be a module."""

    marked: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """Consecutive tokens of a prompt.

    start: the position of the first one in this prompt.
    origin: the run of a schema that it is, the hole whose default it is, the part of a message, or None for other text
        of the request.
    """

    ids: tuple[int, ...]
    start: int
    origin: TextRun | Hole | ContentPart | None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class PromptLayout:
    """A prompt as parts in the order of their positions.

    place: where it was written, if it has a schema. public: whether that schema is everybody's.
    """

    schema: SchemaLayout | None
    parts: tuple[Placed, ...]
    text: str
    imported: frozenset[str] = frozenset()
    place: Place | None = None
    public: bool = False

    @cached_property
    def ids(self) -> tuple[int, ...]:
        if len(self.parts) == 1:
            return self.parts[0].ids  # most are such, and some are long
        return tuple(token for part in self.parts for token in part.ids)

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return max((part.end for part in self.parts if part.ids), default=0)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        return _shared([p for part in self.parts for p in range(part.start, part.end)])


def _shared(numbers: Sequence[int]) -> tuple[int, ...]:
    """The same numbers, as objects that all prompts have in common: an int takes four times what points to it does.

    These objects stay, so numbers are to be ids that the model knows, or positions that it has.
    """
    most = max(numbers, default=0)
    if most >= _SHARED:
        return tuple(numbers)
    if most >= len(_integers):
        with _growing:
            _integers.extend(range(len(_integers), most + 1))
    return tuple(map(_integers.__getitem__, numbers))


def lay_out_ids(ids: Sequence[int], text: str) -> PromptLayout:
    """A prompt without a schema: nothing but new tokens from position 0."""
    return PromptLayout(None, (Placed(_shared(ids), 0, None),), text)


def lay_out_prompt(
    resolved: Resolved, layout: SchemaLayout, encoder: TextEncoder, template: ChatTemplate, *, packed: bool
) -> PromptLayout:
    """Place a resolved prompt. packed: whether it leaves no gap. Raises PMLError, ContextError and ModelError."""
    turns = _Turns.of(resolved, template)
    items = list(resolved.items)
    settled: dict[int, str] = {}
    for number, text in _settle_ends(items, layout, turns.trims).items():
        item = items[number]
        if isinstance(item, SchemaText):
            settled[item.node.order] = text
        elif isinstance(item, NewText | Filled):
            items[number] = replace(item, text=text)
    where = f"{resolved.source}: "
    new = [
        item.text for item in items if isinstance(item, NewText) or (isinstance(item, Filled) and not item.is_default)
    ]
    encoder.bound.check_count(sum(map(bool, new)), "new texts")
    encoder.bound.check(new, where)
    walk = _PromptWalk(Place(resolved.source), layout, encoder, template, turns, settled, packed)
    walk.begin()
    for item in items:
        walk.item(item)
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
    trims: tuple[Trim, ...]

    @classmethod
    def of(cls, resolved: Resolved, template: ChatTemplate) -> _Turns:
        starts = [item for item in resolved.items if isinstance(item, TurnStart)]
        roles = tuple(start.role for start in starts)
        if not roles:
            return cls((), (), False, ())
        # A prompt that ends in an assistant turn of its own wants that turn carried on.
        generation = not (starts[-1].own and roles[-1] == "assistant")
        pieces = template.pieces(roles, generation=generation)
        return cls(roles, pieces, generation, template.trims(roles, generation=generation))


def _settle_ends(items: Sequence[Item], layout: SchemaLayout, trims: Sequence[Trim]) -> dict[int, str]:
    """What a template that strips bodies leaves of the texts at their ends: the number of an item → its text.

    Texts of modules and defaults stay as written: they are shared, and stand elsewhere in other prompts.
    """
    settled: dict[int, str] = {}

    def strip(numbers: Iterable[int], trim: Callable[[str], str]) -> None:
        for number in numbers:
            text = settled.get(number, _loose_text(items[number], layout))
            if text is None:
                return
            settled[number] = trim(text)
            if settled[number]:
                return

    turn = body = -1
    for number, item in enumerate(items):
        if isinstance(item, TurnStart):
            turn, body = turn + 1, number + 1
        elif isinstance(item, TurnEnd):
            strip(range(body, number), trims[turn].start)
            strip(reversed(range(body, number)), trims[turn].end)
    return settled


def _loose_text(item: Item, layout: SchemaLayout) -> str | None:
    """The text of an item that is new or always present, and None for others."""
    if isinstance(item, NewText) or (isinstance(item, Filled) and not item.is_default):
        return item.text
    return layout.text_of(item.node.order) if isinstance(item, SchemaText) and not item.owner else None


@dataclass
class _PromptWalk:
    source: Place
    layout: SchemaLayout
    encoder: TextEncoder
    template: ChatTemplate
    turns: _Turns
    settled: Mapping[int, str]  # order of a text node at an end of a turn → its text in this prompt
    packed: bool
    at: int = 0
    turn: int = -1
    parts: list[Placed] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # the whole text, for people
    bodies: list[list[str]] = field(default_factory=list)  # the texts of each turn, for the template's check
    fresh: list[tuple[int, ...]] = field(default_factory=list)  # new tokens up to here, which become one part
    placed: set[int] = field(default_factory=set)  # indices of runs that stand already
    new_text: Place | None = None  # the latest text of the request, while nothing of the schema followed it
    problems: list[Problem] = field(default_factory=list)

    def begin(self) -> None:
        first = self.layout.entries[0] if self.layout.entries else None
        if not self.turns.roles and isinstance(first, TextRun) and not first.owner:
            self.run(first.index)  # BOS stands alone in front, or before the first text

    def item(self, item: Item) -> None:
        if isinstance(item, TurnStart):
            self.start_turn(item)
        elif isinstance(item, SchemaText):
            if item.node.order in self.layout.run_of:
                self.run(self.layout.run_of[item.node.order])
        elif isinstance(item, Filled):
            self.filled(item)
        elif isinstance(item, NewText):
            self.new_text = item.place
            self.say(item.text)
            self.place(self.encoder.text(item.text), None)

    def start_turn(self, start: TurnStart) -> None:
        self.turn += 1
        if start.own:
            piece = self.turns.pieces[self.turn]
            self.open_body(piece)
            self.place(self.encoder.template(piece), None)
        elif self.turn in self.layout.run_of_turn:
            self.run(self.layout.run_of_turn[self.turn])
        else:
            self.place(self.turn_piece(self.turn, ()), None)

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
            ids.extend(self.text_part(part) if part.turn is None else self.turn_piece(part.turn, part.ids))
        self.place(tuple(ids), run if tuple(ids) == run.ids else None)

    def text_part(self, part: RunPart) -> tuple[int, ...]:
        """Text of the schema, which the template may strip where it stands at an end of a turn in this prompt."""
        text = part.text if part.node is None else self.settled.get(part.node, part.text)
        self.say(text)
        if text == part.text:
            return part.ids
        self.template.warn_once(
            "the chat template strips the ends of turns: text of the schema that stands at one in some prompts only is "
            f"computed anew for those, first {part.text[-20:]!r}"
        )
        return self.encoder.text(text)

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
        turns = self.turns
        if turns.generation:
            self.pieces.append(turns.pieces[-1])
            self.place(self.encoder.template(turns.pieces[-1]), None)
        self.flush()
        if turns.roles:
            bodies = ["".join(texts) for texts in self.bodies]
            self.template.verify(turns.roles, bodies, turns.pieces, generation=turns.generation)

    def open_body(self, piece: str) -> None:
        self.pieces.append(piece)
        self.bodies.append([])

    def say(self, text: str) -> None:
        self.pieces.append(text)
        if self.bodies:
            self.bodies[-1].append(text)

    def place(self, ids: tuple[int, ...], origin: TextRun | Hole | None) -> None:
        if not ids:
            return
        if origin is None:
            self.fresh.append(ids)
        else:
            self.flush()
            self.parts.append(Placed(ids, self.at, origin))
        self.at += len(ids)

    def flush(self) -> None:
        """Make a part of the new tokens up to here."""
        if self.fresh:
            ids = self.fresh[0] if len(self.fresh) == 1 else tuple(chain.from_iterable(self.fresh))
            self.parts.append(Placed(ids, self.at - len(ids), None))
            self.fresh.clear()

    def arrive(self, start: int) -> None:
        """Come to something whose position the schema fixes; under packed positions it stands wherever we are."""
        if not self.packed:
            if start < self.at:
                self.problems.append(Problem(self.new_text or self.source, self.overflow(self.at - start)))
            if start != self.at:
                self.flush()
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
