"""Lays out a resolved prompt: the runs of its schema, its new text, and all positions.

Under ``schema`` positions (the paper's), text of the schema keeps its position, with gaps. Under ``packed`` positions
there are no gaps. The result, ``Placed``, has parts with token ids, positions and origins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, takewhile
from threading import Lock

from inlay.errors import ModelError, Place, PMLError, Problem
from inlay.pml import Filled, Item, MemberStart, NewText, Resolved, SchemaText, SetEnd, SetStart, TurnEnd, TurnStart
from inlay.pml.rules import path_of
from inlay.prompt.chat import ChatTemplate, Trim
from inlay.prompt.free_order import FreeSet, Member
from inlay.prompt.layout import Hole, Owner, RunPart, SchemaLayout, TextRun
from inlay.prompt.tokens import TextEncoder
from inlay.prompt.turns import bos_text, closing, opening, split
from inlay.wording import counted, quote

_SHARED = 2**20  # above every vocabulary size and context length
_integers: list[int] = []
_growing = Lock()


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message's content.

    Args:
        marked: True if the request asks for a module.
        ttl_s: the module's lifetime in seconds. None for no limit.
        leads: True in the system turn in front of all others, and for a tool.
        automatic: True if it is a module without a mark: a tool, or a block of the system prompt.
        message, index: the number of its message, and of the part in it.
        tool: the number of its tool. None for a part of a message.
        found: True for a piece of text that was found by its content. It is ``marked`` from its third text on.
    """

    marked: bool
    ttl_s: float | None = None
    leads: bool = False
    automatic: bool = field(default=False, compare=False)
    message: int = field(default=0, compare=False)
    index: int = field(default=0, compare=False)
    tool: int | None = field(default=None, compare=False)
    found: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Placed:
    """Consecutive tokens of a prompt.

    Args:
        start: the position of the first one in this prompt.
        origin: the schema's run, the hole of a default, the part of a message, or None for other text.
        kept: True if its KV may be stored and looked up.
    """

    ids: tuple[int, ...]
    start: int
    origin: TextRun | Hole | ContentPart | None
    kept: bool = True

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def marked(self) -> bool:
        """True for a module, an argument or a marked part."""
        if isinstance(self.origin, ContentPart):
            return self.origin.marked
        return isinstance(self.origin, TextRun | Hole)


@dataclass(frozen=True)
class PromptLayout:
    """A prompt as parts in the order of their positions.

    Args:
        place: the prompt's source place, if it has a schema.
        public: True if that schema is shared by all salts.
        sets: in the order of the prompt.
        anchor: for a conversation in parts, the text from position 0 that all conversations with its system turn
            share. The prompt itself may begin with other text.
        anchor_own: the token ids of the caller's text in the anchor: contents, tools and template variables.
        in_pieces: True if its tools or the blocks of its system prompt are modules without marks.
        texts: its unmarked texts outside the chat template, as first and last-plus-one token. For a prompt without a
            schema.
    """

    schema: SchemaLayout | None
    parts: tuple[Placed, ...]
    text: str
    imported: frozenset[str] = frozenset()
    place: Place | None = None
    public: bool = False
    sets: tuple[FreeSet, ...] = ()
    anchor: tuple[Placed, ...] = ()
    anchor_own: tuple[int, ...] = ()
    in_pieces: bool = False
    texts: tuple[tuple[int, int], ...] = ()

    @cached_property
    def ids(self) -> tuple[int, ...]:
        if len(self.parts) == 1:
            return self.parts[0].ids  # the usual case, without a copy
        return tuple(token for part in self.parts for token in part.ids)

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return max((part.end for part in self.parts if part.ids), default=0)

    @property
    def marked_end(self) -> int:
        """The position behind the last schema text or marked part; 0 without one."""
        automatic = (isinstance(part.origin, ContentPart) and part.origin.automatic for part in self.parts)
        return max(
            (part.end for part, each in zip(self.parts, automatic, strict=True) if part.marked and not each), default=0
        )

    @cached_property
    def positions(self) -> tuple[int, ...]:
        return _shared([p for part in self.parts for p in range(part.start, part.end)])


def _shared(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers as int objects that all prompts share, because an int takes four times the memory of a
    reference.

    The objects are never freed, so the numbers must be known token ids or valid positions.
    """
    most = max(numbers, default=0)
    if most >= _SHARED:
        return tuple(numbers)
    if most >= len(_integers):
        with _growing:
            _integers.extend(range(len(_integers), most + 1))
    return tuple(map(_integers.__getitem__, numbers))


def lay_out_ids(ids: Sequence[int], text: str) -> PromptLayout:
    """Return a prompt of new tokens from position 0, without a schema."""
    return PromptLayout(None, (Placed(_shared(ids), 0, None),), text)


@dataclass(frozen=True)
class PromptTurns:
    """The turns of a prompt with the chat template's text around them.

    ``numbers`` holds the number of each turn in the schema's layout; None for a turn that the prompt adds.
    """

    roles: tuple[str, ...]
    pieces: tuple[str, ...]
    generation: bool
    trims: tuple[Trim, ...]
    numbers: tuple[int | None, ...]

    @classmethod
    def of(cls, resolved: Resolved, layout: SchemaLayout, template: ChatTemplate) -> PromptTurns:
        """Raise PMLError if the template refuses the order of turns from modules, else ModelError."""
        starts = [item for item in resolved.items if isinstance(item, TurnStart)]
        roles = tuple(start.role for start in starts)
        if not roles:
            return cls((), (), False, (), ())
        # A prompt that ends in its own assistant turn continues that turn.
        generation = not (starts[-1].own and roles[-1] == "assistant")
        try:
            pieces = template.pieces(roles, generation=generation)
        except ModelError as error:
            _blame_modules(starts, template, error)
            raise
        trims = template.trims(roles, generation=generation)
        numbers = tuple(None if start.node is None else layout.turn_of[start.node.order] for start in starts)
        return cls(roles, pieces, generation, trims, numbers)


def _blame_modules(starts: Sequence[TurnStart], template: ChatTemplate, error: ModelError) -> None:
    """Raise PMLError at an import if the template refuses turns, some of which come with modules."""
    modules = dict.fromkeys(path_of(start.owner) for start in starts if start.owner)
    if not modules:
        return
    roles = tuple(start.role for start in starts)
    refused = next((n for n in range(1, len(roles)) if opening(template, roles[:n]) is None), len(roles))
    from_modules = [start for start in starts[:refused] if start.owner] or [start for start in starts if start.owner]
    place = from_modules[-1].place
    named = ", ".join(map(quote, modules))
    remedy = "import others, or write the schema's turns in an order that it takes"
    raise PMLError(
        [Problem(place, f"{error}; turns come with {named} here: {remedy}", code="pml.unusable_turns")]
    ) from None


def settle_ends(items: Sequence[Item], layout: SchemaLayout, trims: Sequence[Trim]) -> dict[int, str]:
    """Return the texts at the ends of turns as the template strips them: number of an item → its text.

    Texts of modules and defaults are not stripped, because other prompts share them elsewhere.
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
    """Return the text of an item that is new or always present, else None."""
    if isinstance(item, NewText) or (isinstance(item, Filled) and not item.is_default):
        return item.text
    return layout.text_of(item.node.order) if isinstance(item, SchemaText) and not item.owner else None


def lay_out_prompt(
    resolved: Resolved, layout: SchemaLayout, encoder: TextEncoder, template: ChatTemplate, *, packed: bool
) -> PromptLayout:
    """Place a resolved prompt; ``packed`` leaves no gap. Raises PMLError, ContextError and ModelError."""
    turns = PromptTurns.of(resolved, layout, template)
    items = list(resolved.items)
    settled: dict[int, str] = {}
    for number, text in settle_ends(items, layout, turns.trims).items():
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
    for number, item in enumerate(items):
        if isinstance(item, SetStart) and _says_something(items[number + 1 :]):
            walk.close_alone()  # the closing piece stays in front of the set
        walk.item(item)
    walk.finish()
    if walk.problems:
        raise PMLError(walk.problems)
    sets = tuple(
        FreeSet(tuple(map(Member, each.names)), why_fixed=each.why_fixed)
        if each.why_fixed
        else walk.borders[number].free_set(each.names)
        for number, each in enumerate(resolved.sets)
    )
    return PromptLayout(layout, tuple(walk.parts), "".join(walk.pieces), resolved.imported, sets=sets)


def _says_something(items: Sequence[Item]) -> bool:
    """Return True if the set that begins these items has text."""
    inside = takewhile(lambda item: not isinstance(item, SetEnd), items)
    return any(isinstance(item, SchemaText) or (isinstance(item, Filled | NewText) and item.text) for item in inside)


@dataclass(slots=True)
class _Borders:
    """The start positions and character indices of a set's members, followed by the end of the last one."""

    positions: list[int] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)

    def free_set(self, names: Sequence[str]) -> FreeSet:
        tokens = [end - start for start, end in pairwise(self.positions)]
        characters = [end - start for start, end in pairwise(self.characters)]
        members = tuple(Member(*each) for each in zip(names, tokens, characters, strict=True))
        return FreeSet(members, self.positions[0], self.characters[0])


@dataclass
class _PromptWalk:
    source: Place
    layout: SchemaLayout
    encoder: TextEncoder
    template: ChatTemplate
    turns: PromptTurns
    settled: Mapping[int, str]  # order of a text node at an end of a turn → its text in this prompt
    packed: bool
    at: int = 0
    turn: int = -1  # the latest turn that is placed; a run may hold several turns
    in_turn: bool = False
    closed: bool = False  # True if the last turn is closed, or, before the first turn, if BOS is placed
    item_turn: int = -1  # the latest turn among the items so far
    parts: list[Placed] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # the whole text, for display
    bodies: list[list[str]] = field(default_factory=list)  # the texts of each turn, for the check of the template
    fresh: list[tuple[int, ...]] = field(default_factory=list)  # new tokens that become the next part
    fresh_kept: bool = True  # True if their KV may be stored
    placed: set[int] = field(default_factory=set)  # indices of the runs that are placed
    new_text: Place | None = None  # the latest new text, until text of the schema follows
    problems: list[Problem] = field(default_factory=list)
    borders: dict[int, _Borders] = field(default_factory=dict)  # by number of the set
    latest: _Borders = field(default_factory=_Borders)  # those of the current set

    def begin(self) -> None:
        if self.turns.roles:
            return
        first = self.layout.entries[0] if self.layout.entries else None
        if isinstance(first, TextRun) and not first.owner:
            self.run(first.index)  # BOS, alone or with the first text
        else:
            self.place(self.encoder.bos, None)

    def item(self, item: Item) -> None:
        if isinstance(item, SetStart):
            self.borders[item.number] = self.latest = _Borders()
        elif isinstance(item, MemberStart | SetEnd):
            self.border()
        elif isinstance(item, TurnStart):
            self.start_turn()
        elif isinstance(item, TurnEnd):
            if self.turn == self.item_turn and self.in_turn:
                self.in_turn = self.closed = False
        elif isinstance(item, SchemaText):
            if item.node.order in self.layout.run_of:
                self.run(self.layout.run_of[item.node.order])
        elif isinstance(item, Filled):
            self.filled(item)
        elif isinstance(item, NewText):
            self.new_text = item.place
            if item.text:
                self.close_alone()
            self.say(item.text)
            self.place(self.encoder.text(item.text), None)

    def border(self) -> None:
        """Record a start of a member of the current set, or its end. No part crosses this border."""
        self.flush()
        self.latest.positions.append(self.at)
        self.latest.characters.append(sum(map(len, self.pieces)))

    def start_turn(self) -> None:
        self.item_turn += 1
        if self.turn >= self.item_turn:
            return  # already placed as part of a run
        number = self.turns.numbers[self.item_turn]
        if number is not None and number in self.layout.run_of_turn:
            self.run(self.layout.run_of_turn[number])
        else:
            self.place(self.encoder.template(self.open_turn()), None)

    def open_turn(self) -> str:
        """Begin the next turn and return the template's piece before it."""
        piece = self.cut()[1] if self.closed else self.turns.pieces[self.turn + 1]
        self.turn += 1
        self.in_turn = True
        self.pieces.append(piece)
        self.bodies.append([])
        return piece

    def cut(self) -> tuple[str, str]:
        """Split the template's piece behind the last turn into the parts before and behind text without a role."""
        roles = self.turns.roles[: self.turn + 1]
        return split(self.turns.pieces[self.turn + 1], closing(self.template, roles) if roles else self.bos())

    def bos(self) -> str:
        return bos_text(self.encoder)

    def close(self) -> str:
        """End the last turn before text without a role. Returns the piece that closes it."""
        piece = self.cut()[0] if self.turn >= 0 else ""
        self.in_turn, self.closed = False, True
        self.pieces.append(piece)
        return piece

    def close_alone(self) -> None:
        """Close the last turn before text without a role, with the schema's run if that holds just the closing
        piece.
        """
        if self.in_turn or self.closed or not self.turns.roles:
            return
        number = self.turns.numbers[self.turn] if self.turn >= 0 else None
        index = 0 if self.turn < 0 else self.layout.run_of_end.get(-1 if number is None else number)
        run = self.layout.entries[index] if index is not None and self.layout.entries else None
        if isinstance(run, TextRun) and len(run.parts) == 1 and (run.parts[0].is_bos or run.parts[0].closes == number):
            self.run(run.index)
        elif self.turn < 0:
            self.close()
            self.place(self.encoder.bos, None)
        else:
            self.place(self.encoder.template(self.close()), None)

    def run(self, index: int) -> None:
        """Place a run of the schema, unless it is placed already. The prompt's turns may change its text."""
        if index in self.placed:
            return
        self.placed.add(index)
        run = self.layout.entries[index]
        assert isinstance(run, TextRun)
        if self.needs_closing(run.parts[0]):
            self.close_alone()
        self.arrive(run.start)
        ids: list[int] = []
        for part in run.parts:
            ids.extend(self.part(part))
        self.place(tuple(ids), run if tuple(ids) == run.ids else None, run.owner)

    def needs_closing(self, part: RunPart) -> bool:
        """True if the last turn must be closed before this part."""
        if part.turn is not None:  # in the layout it may be only the half that opens a turn
            piece = self.turns.pieces[self.turn + 1]
            return not self.closed and part.text != piece and part.text == self.cut()[1]
        return part.node is not None

    def part(self, part: RunPart) -> tuple[int, ...]:
        """Return the ids of a part of a run as it is in this prompt."""
        if part.node is not None:
            return self.text_part(part)
        if part.is_bos:
            first = self.turn < 0 and not self.closed
            self.closed |= first
            return part.ids if first else ()
        if part.turn is not None:
            if self.in_turn:  # the run continues in the next turn
                self.in_turn = self.closed = False
            return self.as_laid_out(part, self.open_turn(), f"what it puts before turn {self.turn + 1}")
        return () if self.closed else self.as_laid_out(part, self.close(), f"what closes turn {self.turn + 1}")

    def as_laid_out(self, part: RunPart, piece: str, what: str) -> tuple[int, ...]:
        """Return the ids of a piece of the template. Warns once if this prompt's turns change the piece.

        Args:
            part: the piece as laid out with the schema.
            piece: the piece in this prompt.
            what: the part of the prompt that is recomputed then, for the warning.
        """
        if piece == part.text:
            return part.ids
        self.template.warn_once(
            "the chat template writes the schema's turns differently when turns follow: "
            f"{what} is recomputed for each prompt"
        )
        return self.encoder.template(piece)

    def text_part(self, part: RunPart) -> tuple[int, ...]:
        """Return the ids of schema text. The template may strip it at an end of a turn."""
        text = part.text if part.node is None else self.settled.get(part.node, part.text)
        self.say(text)
        if text == part.text:
            return part.ids
        self.template.warn_once(
            "the chat template strips the ends of turns: text of the schema that stands at one in some prompts only is "
            f"recomputed for those, first {part.text[-20:]!r}"
        )
        return self.encoder.text(text)

    def filled(self, item: Filled) -> None:
        hole = self.layout.entries[self.layout.hole_of[item.param.order]]
        assert isinstance(hole, Hole)
        if item.text:
            self.close_alone()
        self.arrive(hole.start)
        if item.is_default:
            self.say(item.text)
            self.place(hole.default or (), hole, hole.owner)
            return
        ids = self.encoder.text(item.text)
        if len(ids) <= hole.length:
            self.say(item.text)
            self.place(ids, None)
            return
        self.problems.append(
            Problem(
                item.place,
                f"the argument '{hole.param.name}' is {len(ids)} tokens long and its len is {hole.length}; "
                f'shorten it, or write len="{len(ids)}" in the schema',
                code="pml.argument_too_long",
            )
        )

    def finish(self) -> None:
        turns = self.turns
        if turns.generation:
            piece = self.cut()[1] if self.closed and not self.in_turn else turns.pieces[-1]
            self.pieces.append(piece)
            self.place(self.encoder.template(piece), None)
        self.flush()
        if turns.roles:
            bodies = ["".join(texts) for texts in self.bodies]
            self.template.verify(turns.roles, bodies, turns.pieces, generation=turns.generation)

    def say(self, text: str) -> None:
        self.pieces.append(text)
        if self.in_turn:
            self.bodies[-1].append(text)

    def place(self, ids: tuple[int, ...], origin: TextRun | Hole | None, owner: Owner = ()) -> None:
        """Place tokens. ``owner`` is the module of schema text."""
        if not ids:
            return
        kept = owner not in self.layout.uncached
        if origin is None or not kept:
            if kept != self.fresh_kept:
                self.flush()
            self.fresh_kept = kept
            self.fresh.append(ids)
        else:
            self.flush()
            self.parts.append(Placed(ids, self.at, origin))
        self.at += len(ids)

    def flush(self) -> None:
        """Make one part of the pending new tokens."""
        if self.fresh:
            ids = self.fresh[0] if len(self.fresh) == 1 else tuple(chain.from_iterable(self.fresh))
            self.parts.append(Placed(ids, self.at - len(ids), None, self.fresh_kept))
            self.fresh.clear()

    def arrive(self, start: int) -> None:
        """Move to a fixed position of the schema. Packed positions stay where they are."""
        if not self.packed:
            if start < self.at:
                self.problems.append(
                    Problem(self.new_text or self.source, self.overflow(self.at - start), code="pml.too_long")
                )
            if start != self.at:
                self.flush()
            self.at = start
        self.new_text = None

    def overflow(self, tokens: int) -> str:
        many = counted(tokens, "token")
        if self.new_text is None:
            return f"the chat template adds {many} more than the schema has room for; use positions 'packed'"
        return (
            f"the new text is {many} too long for its gap in the schema; shorten it, move it to the end, "
            "or use positions 'packed'"
        )
