"""Checks a prompt against its schema, and puts what both say into one order: a flat list of items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from inlay.errors import Place
from inlay.pml import resolve_problems as sentences
from inlay.pml.nodes import Argument, Import, Module, Param, PromptTurn, Text, Turn, Union
from inlay.pml.problems import Problems
from inlay.pml.rules import Border, Level, Slot
from inlay.pml.schema import Prompt, Schema
from inlay.pml.scopes import names_of, opened, path_of


@dataclass(frozen=True, slots=True)
class SchemaText:
    """Text of the schema. ``owner`` names the modules around it, outermost first; none for always-present text."""

    node: Text
    owner: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """A parameter with the argument that the prompt gives, or with its default."""

    param: Param
    text: str
    is_default: bool
    owner: tuple[str, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class NewText:
    """Text that the prompt adds."""

    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class TurnStart:
    """A chat turn begins; ``own`` is True if the prompt adds it, False if it is the schema's.

    place: where it is written, or where the module is imported that it comes with. node, owner: the turn of the schema,
    and the names of the modules around it; None and () for one that the prompt adds.
    """

    role: str
    own: bool
    place: Place
    node: Turn | None = None
    owner: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The chat turn ends."""

    role: str
    own: bool


Item = SchemaText | Filled | NewText | TurnStart | TurnEnd


@dataclass(frozen=True)
class Resolved:
    """A prompt that fits its schema: what it says, in order, and which modules it imports, by their paths."""

    schema: Schema
    items: tuple[Item, ...]
    imported: frozenset[str]
    source: str


_Arguments = Mapping[str, Argument]


def resolve(schema: Schema, prompt: Prompt, *, moves: bool = False) -> Resolved:
    """What the prompt says, as one list of items in order.

    Imports follow the schema's order. With ``moves``, those between which the schema has no always-present text, no
    parameter and no border of a turn may stand in any order. Raises PMLError with every problem found.
    """
    problems = Problems(prompt.source)
    resolver = _Resolver(schema, moves, problems)
    if prompt.schema == schema.name:
        items = resolver.prompt(prompt)
    else:
        # most other problems would follow from this one
        items = []
        problems.add(prompt.place or Place(prompt.source), sentences.other_schema(prompt.schema, schema.name))
    problems.raise_any()
    return Resolved(schema, tuple(items), frozenset(resolver.imported), prompt.source)


@dataclass(slots=True)
class _Placed:
    """An import with its place in the schema, and the new text that goes with it."""

    node: Import
    slot: Slot
    before: list[NewText] = field(default_factory=list)
    after: list[NewText] = field(default_factory=list)


class _Resolver:
    def __init__(self, schema: Schema, moves: bool, problems: Problems) -> None:
        self.imported: dict[str, Import] = {}  # by path
        self._schema = schema
        self._moves = moves
        self._problems = problems

    def prompt(self, prompt: Prompt) -> list[Item]:
        """All items of the prompt."""
        loose = self._loose(prompt)
        turns = [child for child in prompt.children if isinstance(child, PromptTurn)]
        modules_alone = all(isinstance(child, Module | Union) for child in self._schema.children)
        if modules_alone and any(isinstance(child, Import) for turn in turns for child in turn.children):
            if loose:
                self._problems.add(loose[0].place, sentences.loose_beside_turns(loose[0], self._schema.name))
            return self._turns_around_imports(turns)
        return self._top_level(loose) + [item for turn in turns for item in self._turn_of_text(turn)]

    def _loose(self, prompt: Prompt) -> list[Text | Import]:
        """What stands in no turn of the prompt; it has to stand before them."""
        loose: list[Text | Import] = []
        turn: PromptTurn | None = None
        for child in prompt.children:
            if isinstance(child, PromptTurn):
                turn = turn or child
            else:
                if turn:
                    self._problems.add(child.place, sentences.loose_after_turn(child, turn.role))
                loose.append(child)
        return loose

    def _top_level(self, loose: list[Text | Import]) -> list[Item]:
        placed, rest = self._place(loose, ())
        self._check_order(placed)
        items = self._merge(self._schema.levels[None], placed, (), {})
        if not rest or _ends_in_user_turn(items) or not any(isinstance(item, TurnStart) for item in items):
            return _with_rest(items, rest)
        return [*items, TurnStart("user", True, rest[0].place), *rest, TurnEnd("user", True)]

    def _turn_of_text(self, turn: PromptTurn) -> list[Item]:
        items: list[Item] = [TurnStart(turn.role, True, turn.place)]
        for child in turn.children:
            if isinstance(child, Import):
                has = "chat turns" if self._schema.has_turns else "text"
                message = sentences.import_in_turn(child.name, self._schema.name, has, turn.role)
                self._problems.add(child.place, message)
            else:
                items.append(NewText(child.text, child.place))
        return [*items, TurnEnd(turn.role, True)]

    def _turns_around_imports(self, turns: list[PromptTurn]) -> list[Item]:
        """The prompt's turns where the schema is modules alone: their imports together follow the schema's order."""
        items: list[Item] = []
        order: list[_Placed] = []
        for turn in turns:
            items.append(TurnStart(turn.role, True, turn.place))
            placed, rest = self._place(turn.children, ())
            for one in placed:
                imported = self._import(one, ())
                if any(isinstance(item, TurnStart) for item in imported):
                    self._problems.add(one.node.place, sentences.turns_in_turn(one.node.name, turn.role))
                items += imported
            items += [*rest, TurnEnd(turn.role, True)]
            order += placed
        self._check_order(order)
        return items

    def _place(self, parts: Iterable[Text | Import], owner: tuple[str, ...]) -> tuple[list[_Placed], list[NewText]]:
        """The imports of one level, with the new text around them, and the new text that ends the level."""
        placed: list[_Placed] = []
        waiting: list[NewText] = []
        for part in opened(parts):
            if isinstance(part, Text):
                waiting.append(NewText(part.text, part.place))
            elif slot := self._slot(part, owner):
                one = _Placed(part, slot)
                (placed[-1].after if placed else one.before).extend(waiting)
                placed.append(one)
                waiting = []
        return placed, waiting

    def _slot(self, node: Import, owner: tuple[str, ...]) -> Slot | None:
        """Where the import goes at this level, or None after a problem."""
        name, path = node.name, path_of((*owner, node.name))
        slot = self._schema.levels[path_of(owner) if owner else None].slots.get(name)
        if slot is None:
            self._problems.add(node.place, self._why_not_here(name, owner))
            return None
        if first := self.imported.get(path):
            self._problems.add(node.place, sentences.repeated(name, first.place))
            return None
        self.imported[path] = node
        return slot

    def _why_not_here(self, name: str, owner: tuple[str, ...]) -> str:
        """What is wrong with the import of a module that does not stand at this level."""
        modules = self._schema.modules
        paths = modules.paths(name)
        if len(paths) == 1:
            return sentences.misnested(name, names_of(paths[0])[:-1], owner[-1] if owner else None)
        if paths:
            return sentences.ambiguous(name, paths, owner[-1] if owner else None)
        near = self._problems.near(name, modules.last_names())
        return sentences.unknown_module(name, near, self._schema.name, modules)

    def _check_order(self, placed: list[_Placed]) -> None:
        """The imports of one level follow the schema, and no two of them are members of one union."""
        taken: dict[Slot, Import] = {}
        last: tuple[Slot, Import] | None = None
        for one in placed:
            slot, node = one.slot, one.node
            if other := taken.get(slot):
                self._problems.add(node.place, sentences.one_union(node.name, other.name))
                continue
            taken[slot] = node
            if last is None or last[0] < slot:
                last = slot, node
            elif slot.zone < last[0].zone or not self._moves:
                movable = slot.zone == last[0].zone
                self._problems.add(node.place, sentences.out_of_order(node.name, last[1].name, movable))

    def _merge(self, level: Level, placed: list[_Placed], owner: tuple[str, ...], arguments: _Arguments) -> list[Item]:
        """The level's fixed pieces, with the imports of each zone before the piece that ends the zone."""
        zones: dict[int, list[Item]] = {}
        for one in placed:
            zones.setdefault(one.slot.zone, []).extend(self._import(one, owner))
        merged: list[Item] = []
        for zone, piece in enumerate(level.fixed):
            merged += [*zones.get(zone, ()), *self._fixed(piece, owner, arguments)]
        return merged + zones.get(len(level.fixed), [])

    def _import(self, one: _Placed, owner: tuple[str, ...]) -> list[Item]:
        node, inside = one.node, (*owner, one.node.name)
        level = self._schema.levels[path_of(inside)]
        arguments = self._arguments(node, level)
        placed, rest = self._place(node.children, inside)
        self._check_order(placed)
        items = _with_rest(self._merge(level, placed, inside, arguments), rest)
        return [*one.before, *items, *one.after]

    def _arguments(self, node: Import, level: Level) -> _Arguments:
        arguments: dict[str, Argument] = {}
        for argument in node.arguments:
            if argument.name not in level.params:
                near = self._problems.near(argument.name, level.params)
                message = sentences.unknown_parameter(node.name, argument.name, near, level.params)
                self._problems.add(argument.place, message)
            elif argument.name in arguments:
                self._problems.add(argument.place, sentences.argument_twice(node.name, argument.name))
            arguments[argument.name] = argument
        missing = [name for name, param in level.params.items() if name not in arguments and param.default is None]
        if missing:
            self._problems.add(node.place, sentences.no_arguments(node.name, missing))
        return arguments

    def _fixed(self, piece: Text | Param | Border, owner: tuple[str, ...], arguments: _Arguments) -> list[Item]:
        if isinstance(piece, Text):
            return [SchemaText(piece, owner)]
        if isinstance(piece, Border):
            return [self._border(piece, owner)]
        if argument := arguments.get(piece.name):
            return [Filled(piece, argument.value, False, owner, argument.place)]
        return [] if piece.default is None else [Filled(piece, piece.default, True, owner, piece.place)]

    def _border(self, border: Border, owner: tuple[str, ...]) -> Item:
        turn = border.turn
        if not border.start:
            return TurnEnd(turn.role, False)
        place = self.imported[path_of(owner)].place if owner else turn.place
        return TurnStart(turn.role, False, place, turn, owner)


def _ends_in_user_turn(items: list[Item]) -> bool:
    return bool(items) and items[-1] == TurnEnd("user", False)


def _with_rest(items: list[Item], rest: list[NewText]) -> list[Item]:
    """Items with new text at their end: the question ends the very user turn that holds the documents."""
    return [*items[:-1], *rest, items[-1]] if rest and _ends_in_user_turn(items) else [*items, *rest]
