"""What holds of a schema in whatever form it is written: unique names, scaffolds that fit, files that can be read.

And what follows for its prompts: which modules exclude each other, and where at one level of the schema, between which
always-present pieces, the modules go that are imported there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inlay.errors import Place
from inlay.pml.nodes import Module, Param, Scaffold, Text, Turn, Union
from inlay.pml.problems import Problems, whereabouts
from inlay.pml.sources import Folder, UnreadableError
from inlay.wording import quote

_Choices = dict[int, str]  # order of a union → the member of it that a prompt must import


class Exclusions:
    """Knows, of every module, which member of which union a prompt has to choose to import it."""

    def __init__(self, children: tuple[Text | Module | Union | Turn, ...]) -> None:
        self._choices: dict[str, _Choices] = {}
        self._visit(children, {})

    def between(self, names: Iterable[str]) -> tuple[str, str] | None:
        """The first two of these modules that no prompt can import together."""
        chosen: dict[int, tuple[str, str]] = {}
        for name in names:
            for union, member in self._choices.get(name, {}).items():
                other_member, other = chosen.setdefault(union, (member, name))
                if other_member != member:
                    return other, name
        return None

    def _visit(self, children: Iterable[Text | Param | Module | Union | Turn], choices: _Choices) -> None:
        for child in children:
            if isinstance(child, Union):
                for member in child.members:
                    self._visit([member], {**choices, child.order: member.name})
            elif isinstance(child, Module):
                self._choices[child.name] = choices
                self._visit(child.children, choices)
            elif isinstance(child, Turn):
                self._visit(child.children, choices)


@dataclass(frozen=True, slots=True)
class SchemaParts:
    """What a schema file holds."""

    name: str
    children: tuple[Text | Module | Union | Turn, ...]
    scaffolds: tuple[Scaffold, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """How problems call things, which depends on the form: a scaffold, and the method that reads a string."""

    scaffold: str
    method: str


class SchemaRules:
    """Checks one schema while it is read; what is wrong goes to ``problems``."""

    def __init__(self, folder: Folder | None, problems: Problems, words: Words) -> None:
        self._folder = folder
        self._problems = problems
        self._words = words
        self._modules: dict[str, Place] = {}

    def define(self, module: str, place: Place, name_place: Place) -> None:
        """A module of this name begins at ``place``."""
        first = self._modules.setdefault(module, place)
        if first is not place:
            twice = f"module {quote(module)} is defined twice, first {whereabouts(first)}"
            self._problems.add(name_place, f"{twice}; give this one another name")

    def check_params(self, module: str, params: Iterable[Param]) -> None:
        """No two parameters of a module have the same name."""
        seen = set()
        for param in params:
            if param.name and param.name in seen:
                twice = f"parameter {quote(param.name)} is defined twice in module {quote(module)}"
                self._problems.add(param.place, f"{twice}; give this one another name")
            seen.add(param.name)

    def file(self, src: str, place: Place) -> tuple[Text, ...]:
        """The content of a module that names a file."""
        if self._folder is None:
            remedy = f"give one with Schema.{self._words.method}(text, folder=…)"
            self._problems.add(place, f"src needs a folder, and a schema in a string has none; {remedy}")
            return ()
        try:
            text = self._folder.read(src)
        except UnreadableError as error:
            self._problems.add(place, str(error))
            return ()
        return (Text(text, Place(self._folder.name(src), 1, 1)),) if text else ()

    def check_scaffolds(
        self, scaffolds: Iterable[Scaffold], children: tuple[Text | Module | Union | Turn, ...]
    ) -> None:
        """Scaffolds name modules that a prompt can import together; all modules are defined by now."""
        exclusions = Exclusions(children)
        for scaffold in scaffolds:
            for name in scaffold.modules:
                if name not in self._modules:
                    self._problems.add(scaffold.place, self._unknown(name))
            names = f"{self._words.scaffold} names"
            if len(set(scaffold.modules)) == 1:
                alone = f"{names} {quote(scaffold.modules[0])} alone"
                self._problems.add(scaffold.place, f"{alone}; name at least two modules, or delete it")
            if pair := exclusions.between(scaffold.modules):
                both = f"{names} {quote(pair[0])} and {quote(pair[1])}, of which a union allows one"
                self._problems.add(scaffold.place, f"{both}; leave one of them out")

    def _unknown(self, name: str) -> str:
        near = self._problems.near(name, self._modules)
        remedy = f'did you mean "{near}"?' if near else "name modules of this schema"
        return f"{self._words.scaffold} names {quote(name)}, which is no module of this schema; {remedy}"


@dataclass(frozen=True, slots=True)
class Border:
    """The start or the end of a turn of the schema."""

    turn: Turn
    start: bool


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Where a module goes: after how many fixed pieces of its level, and there at which place in schema order.

    Members of one union share their slot.
    """

    zone: int
    index: int


@dataclass(frozen=True, slots=True)
class Level:
    """The top level of a schema, turns opened up, or the inside of a module.

    ``fixed`` is what is always there once the level is; ``slots`` says where each importable module goes.
    """

    fixed: tuple[Text | Param | Border, ...]
    slots: dict[str, Slot]
    params: dict[str, Param]


def levels_of(children: Iterable[Text | Module | Union | Turn], modules: Iterable[Module]) -> dict[str | None, Level]:
    """The top level of a schema under None, and the inside of each module under its name."""
    levels: dict[str | None, Level] = {module.name: _level(module.children) for module in modules}
    levels[None] = _level(children)
    return levels


def _level(children: Iterable[Text | Param | Module | Union | Turn]) -> Level:
    fixed: list[Text | Param | Border] = []
    slots: dict[str, Slot] = {}
    for index, node in enumerate(_opened(children)):
        if isinstance(node, Module | Union):
            members = node.members if isinstance(node, Union) else (node,)
            slots.update((member.name, Slot(len(fixed), index)) for member in members)
        else:
            fixed.append(node)
    params = {node.name: node for node in fixed if isinstance(node, Param)}
    return Level(tuple(fixed), slots, params)


def _opened(
    children: Iterable[Text | Param | Module | Union | Turn],
) -> Iterable[Text | Param | Module | Union | Border]:
    for child in children:
        if isinstance(child, Turn):
            yield Border(child, start=True)
            yield from child.children
            yield Border(child, start=False)
        else:
            yield child
