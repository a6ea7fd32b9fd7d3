"""Checks a prompt against its schema and merges both into a flat list of items in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from inlay.errors import Place
from inlay.pml import resolve_problems as sentences
from inlay.pml.nodes import MAX_SET, Argument, Import, ImportSet, Module, Param, PromptTurn, Text, Turn, Union
from inlay.pml.problems import Problems
from inlay.pml.rules import Border, NestingLevel, Slot, names_of, opened, path_of
from inlay.pml.schema import Prompt, Schema


@dataclass(frozen=True, slots=True)
class SchemaText:
    """Text of the schema. ``owner`` names the modules around it, outermost first, and is () for always-present text."""

    node: Text
    owner: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """A parameter with the prompt's argument or its default."""

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
    """The start of a chat turn.

    Attributes:
        own: True if the prompt adds the turn, False if the schema has it.
        place: The place of the turn, or of the import of the module that holds it.
        node: The schema's turn, or None for a turn of the prompt.
        owner: The names of the modules around the schema's turn, outermost first.
    """

    role: str
    own: bool
    place: Place
    node: Turn | None = None
    owner: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of a chat turn."""

    role: str
    own: bool


@dataclass(frozen=True, slots=True)
class SetStart:
    """The start of imports in free order. ``number`` is the index of the set in ``Resolved.sets``."""

    number: int


@dataclass(frozen=True, slots=True)
class MemberStart:
    """The start of the next import in a set."""


@dataclass(frozen=True, slots=True)
class SetEnd:
    """The end of a set."""


Item = SchemaText | Filled | NewText | TurnStart | TurnEnd | SetStart | MemberStart | SetEnd


@dataclass(frozen=True, slots=True)
class ResolvedSet:
    """A set of imports after resolution.

    Attributes:
        names: Paths of the imports, in the order of the items.
        why_fixed: The reason why the order is fixed, or "" if it is free. A fixed set has no SetStart, MemberStart or
            SetEnd among the items.
    """

    names: tuple[str, ...]
    why_fixed: str = ""


@dataclass(frozen=True)
class Resolved:
    """A prompt that fits its schema, as items in order.

    Attributes:
        imported: Paths of the imported modules.
        sets: The prompt's sets, in the order of the prompt.
    """

    schema: Schema
    items: tuple[Item, ...]
    imported: frozenset[str]
    source: str
    sets: tuple[ResolvedSet, ...] = ()


_Arguments = Mapping[str, Argument]


def resolve(schema: Schema, prompt: Prompt, *, moves: bool = False) -> Resolved:
    """Check the prompt against its schema and return its content as items in order.

    Imports must follow the schema's order. Imports of a set that is not free to move are sorted into it.

    Args:
        moves: Let imports change order unless the schema has always-present text, a parameter or a turn's border
            between them.

    Raises:
        PMLError: The prompt does not fit the schema. The error lists every problem found.
    """
    problems = Problems(prompt.source)
    resolver = _Resolver(schema, moves, problems)
    if prompt.schema == schema.name:
        items = resolver.prompt(prompt)
    else:
        # most other problems would follow from this one
        items = []
        problems.add(
            prompt.place or Place(prompt.source),
            sentences.other_schema(prompt.schema, schema.name),
            code="pml.other_schema",
        )
    problems.raise_any()
    return Resolved(schema, tuple(items), frozenset(resolver.imported), prompt.source, resolver.in_order())


@dataclass(slots=True)
class _Placed:
    """An import with its slot in the schema, and the new text around it.

    Attributes:
        of: The number of its set if the set's order is free, otherwise None.
        member: It belongs to a set.
        inside: It belongs to a set, or an enclosing import does.
    """

    node: Import
    slot: Slot
    before: list[NewText] = field(default_factory=list)
    after: list[NewText] = field(default_factory=list)
    of: int | None = None
    member: bool = False
    inside: bool = False


class _Resolver:
    def __init__(self, schema: Schema, moves: bool, problems: Problems) -> None:
        self.imported: dict[str, Import] = {}  # by path
        self.sets: dict[int, ResolvedSet] = {}  # by number
        self._numbers: dict[int, int] = {}  # id of each ImportSet → its number, in the order of the prompt
        self._schema = schema
        self._moves = moves
        self._problems = problems

    def in_order(self) -> tuple[ResolvedSet, ...]:
        """Return the prompt's sets in the order of the prompt."""
        return tuple(self.sets[number] for number in range(len(self._numbers)))

    def prompt(self, prompt: Prompt) -> list[Item]:
        """Return all items of the prompt."""
        self._number(prompt.children)
        loose = self._loose(prompt)
        turns = [child for child in prompt.children if isinstance(child, PromptTurn)]
        modules_alone = all(isinstance(child, Module | Union) for child in self._schema.children)
        if modules_alone and any(isinstance(child, Import | ImportSet) for turn in turns for child in turn.children):
            if loose:
                self._problems.add(
                    loose[0].place,
                    sentences.loose_beside_turns(loose[0], self._schema.name),
                    code="pml.text_outside_turns",
                )
            return self._turns_around_imports(turns)
        return self._top_level(loose) + [item for turn in turns for item in self._turn_of_text(turn)]

    def _number(self, nodes: Iterable[Text | Import | ImportSet | PromptTurn]) -> None:
        for node in nodes:
            if isinstance(node, ImportSet):
                self._numbers[id(node)] = len(self._numbers)
                self._number(node.imports)
            elif not isinstance(node, Text):
                self._number(node.children)

    def _loose(self, prompt: Prompt) -> list[Text | Import | ImportSet]:
        """Return the nodes outside the prompt's turns, and report any that follow a turn."""
        loose: list[Text | Import | ImportSet] = []
        turn: PromptTurn | None = None
        for child in prompt.children:
            if isinstance(child, PromptTurn):
                turn = turn or child
            else:
                if turn:
                    self._problems.add(
                        child.place, sentences.loose_after_turn(child, turn.role), code="pml.text_outside_turns"
                    )
                loose.append(child)
        return loose

    def _top_level(self, loose: list[Text | Import | ImportSet]) -> list[Item]:
        placed, rest = self._place(loose, ())
        self._check_order(placed)
        items = self._merge(self._schema.levels[None], placed, (), {})
        if not rest or _ends_in_user_turn(items) or not any(isinstance(item, TurnStart) for item in items):
            return _with_rest(items, rest)
        return [*items, TurnStart("user", True, rest[0].place), *rest, TurnEnd("user", True)]

    def _turn_of_text(self, turn: PromptTurn) -> list[Item]:
        items: list[Item] = [TurnStart(turn.role, True, turn.place)]
        for child in turn.children:
            if isinstance(child, Text):
                items.append(NewText(child.text, child.place))
                continue
            if isinstance(child, ImportSet) and not child.imports:
                self._problems.add(child.place, sentences.empty_set(), code="pml.empty_set")
            for node in child.imports if isinstance(child, ImportSet) else (child,):
                has = "chat turns" if self._schema.has_turns else "text"
                self._problems.add(
                    node.place,
                    sentences.import_in_turn(node.name, self._schema.name, has, turn.role),
                    code="pml.import_in_turn",
                )
        return [*items, TurnEnd(turn.role, True)]

    def _turns_around_imports(self, turns: list[PromptTurn]) -> list[Item]:
        """Return the items of the prompt's turns, for a schema of only modules.

        The imports of all turns together must follow the schema's order.
        """
        items: list[Item] = []
        order: list[_Placed] = []
        for turn in turns:
            items.append(TurnStart(turn.role, True, turn.place))
            placed, rest = self._place(turn.children, ())
            imported = [self._import(one, ()) for one in placed]
            for one, inside in zip(placed, imported, strict=True):
                if any(isinstance(item, TurnStart) for item in inside):
                    self._problems.add(
                        one.node.place, sentences.turns_in_turn(one.node.name, turn.role), code="pml.turns_in_turn"
                    )
            items += [*_with_borders(placed, imported), *rest, TurnEnd(turn.role, True)]
            order += placed
        self._check_order(order)
        return items

    def _place(
        self, parts: Iterable[Text | Import | ImportSet], owner: tuple[str, ...], *, inside: bool = False
    ) -> tuple[list[_Placed], list[NewText]]:
        """Return the imports of one level with the new text around them, and the new text after the last import."""
        placed: list[_Placed] = []
        waiting: list[NewText] = []
        for part in opened(parts):
            if isinstance(part, Text):
                waiting.append(NewText(part.text, part.place))
                continue
            several = self._set(part, owner, inside) if isinstance(part, ImportSet) else self._one(part, owner, inside)
            if several:
                (placed[-1].after if placed else several[0].before).extend(waiting)
                placed += several
                waiting = []
        return placed, waiting

    def _one(self, node: Import, owner: tuple[str, ...], inside: bool, *, member: bool = False) -> list[_Placed]:
        slot = self._slot(node, owner)
        return [] if slot is None else [_Placed(node, slot, member=member, inside=inside or member)]

    def _set(self, node: ImportSet, owner: tuple[str, ...], inside: bool) -> list[_Placed]:
        """Return the imports of a ``<set>``: as written if their order is free, otherwise in schema order.

        Reports a set that is empty, too large, or inside another set.

        Args:
            node: the set.
            owner: the names of the modules around it, outermost first.
            inside: True if the set is inside another set.
        """
        number = self._numbers[id(node)]
        if inside:
            self._problems.add(node.place, sentences.nested_set(), code="pml.nested_set")
        if not node.imports:
            self._problems.add(node.place, sentences.empty_set(), code="pml.empty_set")
        if len(node.imports) > MAX_SET:
            self._problems.add(node.place, sentences.large_set(len(node.imports)), code="pml.too_large")
            return []
        placed = [one for each in opened(node.imports) for one in self._one(each, owner, inside, member=True)]
        why_fixed = self._why_fixed(placed)
        if why_fixed:
            placed.sort(key=lambda one: one.slot)
        else:
            for one in placed:
                one.of = number
        self.sets[number] = ResolvedSet(tuple(path_of((*owner, one.node.name)) for one in placed), why_fixed)
        return placed

    def _why_fixed(self, placed: Sequence[_Placed]) -> str:
        if len(placed) < 2:
            return "it is alone"
        if not self._moves:
            return "under positions 'schema' modules stand where their schema has them"
        if len({one.slot.zone for one in placed}) > 1:
            return "the schema has text, a parameter or a turn's border between them"
        return ""

    def _slot(self, node: Import, owner: tuple[str, ...]) -> Slot | None:
        """Return the slot of an import at this level, or None after a problem."""
        name, path = node.name, path_of((*owner, node.name))
        slot = self._schema.levels[path_of(owner) if owner else None].slots.get(name)
        if slot is None:
            self._add_why_not_here(node, owner)
            return None
        if first := self.imported.get(path):
            self._problems.add(node.place, sentences.repeated(name, first.place), code="pml.duplicate_import")
            return None
        self.imported[path] = node
        return slot

    def _add_why_not_here(self, node: Import, owner: tuple[str, ...]) -> None:
        """Report an import of a module that this level does not have."""
        name, modules = node.name, self._schema.modules
        paths = modules.paths(name)
        inside = owner[-1] if owner else None
        if len(paths) == 1:
            message = sentences.misnested(name, names_of(paths[0])[:-1], inside)
            self._problems.add(node.place, message, code="pml.misnested_module")
        elif paths:
            self._problems.add(node.place, sentences.ambiguous(name, paths, inside), code="pml.ambiguous_module")
        else:
            near = self._problems.near(name, modules.last_names())
            message = sentences.unknown_module(name, near, self._schema.name, modules)
            self._problems.add(node.place, message, code="pml.unknown_module")

    def _check_order(self, placed: list[_Placed]) -> None:
        """Report imports of one level that break the schema's order, and two imports from one union."""
        taken: dict[Slot, Import] = {}
        last: tuple[Slot, Import] | None = None
        for one in placed:
            slot, node = one.slot, one.node
            if other := taken.get(slot):
                self._problems.add(node.place, sentences.one_union(node.name, other.name), code="pml.union_conflict")
                continue
            taken[slot] = node
            if last is None or last[0] < slot:
                last = slot, node
            elif slot.zone < last[0].zone or not self._moves:
                movable = slot.zone == last[0].zone
                self._problems.add(
                    node.place, sentences.out_of_order(node.name, last[1].name, movable), code="pml.out_of_order"
                )

    def _merge(
        self, level: NestingLevel, placed: list[_Placed], owner: tuple[str, ...], arguments: _Arguments
    ) -> list[Item]:
        """Return the level's fixed pieces, with the imports of each zone before the piece that ends the zone."""
        zones: dict[int, list[Item]] = {}
        for zone in {one.slot.zone: None for one in placed}:
            inside = [one for one in placed if one.slot.zone == zone]
            zones[zone] = _with_borders(inside, [self._import(one, owner) for one in inside])
        merged: list[Item] = []
        for zone, piece in enumerate(level.fixed):
            merged += [*zones.get(zone, ()), *self._fixed(piece, owner, arguments)]
        return merged + zones.get(len(level.fixed), [])

    def _import(self, one: _Placed, owner: tuple[str, ...]) -> list[Item]:
        node, inside = one.node, (*owner, one.node.name)
        level = self._schema.levels[path_of(inside)]
        arguments = self._arguments(node, level)
        placed, rest = self._place(node.children, inside, inside=one.inside)
        self._check_order(placed)
        items = _with_rest(self._merge(level, placed, inside, arguments), rest)
        if one.member and any(isinstance(item, TurnStart) for item in items):
            self._problems.add(node.place, sentences.turns_in_set(node.name), code="pml.turns_in_set")
        return items

    def _arguments(self, node: Import, level: NestingLevel) -> _Arguments:
        arguments: dict[str, Argument] = {}
        for argument in node.arguments:
            if argument.name not in level.params:
                near = self._problems.near(argument.name, level.params)
                message = sentences.unknown_parameter(node.name, argument.name, near, level.params)
                self._problems.add(argument.place, message, code="pml.unknown_parameter")
            elif argument.name in arguments:
                self._problems.add(
                    argument.place, sentences.argument_twice(node.name, argument.name), code="pml.duplicate_argument"
                )
            arguments[argument.name] = argument
        missing = [name for name, param in level.params.items() if name not in arguments and param.default is None]
        if missing:
            self._problems.add(node.place, sentences.no_arguments(node.name, missing), code="pml.missing_argument")
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


def _with_borders(placed: Sequence[_Placed], imported: Sequence[list[Item]]) -> list[Item]:
    """Return the items of neighbouring imports, with the new text around them and the borders of free sets.

    Text beside a free set stays outside the set.
    """
    items: list[Item] = []
    for number, (one, inside) in enumerate(zip(placed, imported, strict=True)):
        of = one.of
        first = of is not None and (number == 0 or placed[number - 1].of != of)
        last = of is not None and (number + 1 == len(placed) or placed[number + 1].of != of)
        items += one.before
        items += [SetStart(of)] if first and of is not None else []
        items += [MemberStart(), *inside] if of is not None else inside
        items += [SetEnd()] if last else []
        items += one.after
    return items


def _ends_in_user_turn(items: list[Item]) -> bool:
    return bool(items) and items[-1] == TurnEnd("user", False)


def _with_rest(items: list[Item], rest: list[NewText]) -> list[Item]:
    """Append new text to the items. A final user turn of the schema takes the text in, as the question after its
    documents.
    """
    return [*items[:-1], *rest, items[-1]] if rest and _ends_in_user_turn(items) else [*items, *rest]
