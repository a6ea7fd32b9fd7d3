"""What holds of a schema in whatever form it is written: unique names, scaffolds that fit, files that can be read.

And what follows for its prompts: which modules exclude each other, and where at one level of the schema, between which
always-present pieces, the modules go that are imported there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from inlay.errors import Place
from inlay.pml.nodes import Meta, Module, Param, Scaffold, Text, Turn, Union
from inlay.pml.problems import Problems, whereabouts
from inlay.pml.scopes import ByPath, path_of
from inlay.pml.sources import Folder, UnreadableError
from inlay.wording import listed, quote

_Choices = dict[int, str]  # order of a union → the member of it that a prompt must import


class Exclusions:
    """Knows, of every module, by path, which member of which union a prompt has to choose to import it."""

    def __init__(self, children: tuple[Text | Module | Union | Turn, ...]) -> None:
        self._choices: dict[str, _Choices] = {}
        self._visit(children, (), {})

    def between(self, paths: Iterable[str]) -> tuple[str, str] | None:
        """The first two of these modules that no prompt can import together."""
        chosen: dict[int, tuple[str, str]] = {}
        for path in paths:
            for union, member in self._choices.get(path, {}).items():
                other_member, other = chosen.setdefault(union, (member, path))
                if other_member != member:
                    return other, path
        return None

    def _visit(
        self, children: Iterable[Text | Param | Module | Union | Turn], scope: tuple[str, ...], choices: _Choices
    ) -> None:
        for child in children:
            if isinstance(child, Union):
                for member in child.members:
                    self._visit([member], scope, {**choices, child.order: member.name})
            elif isinstance(child, Module):
                inside = (*scope, child.name)
                self._choices[path_of(inside)] = choices
                self._visit(child.children, inside, choices)
            elif isinstance(child, Turn):
                self._visit(child.children, scope, choices)


@dataclass(frozen=True, slots=True)
class SchemaParts:
    """What a schema file holds."""

    name: str
    children: tuple[Text | Module | Union | Turn, ...]
    scaffolds: tuple[Scaffold, ...]
    meta: tuple[Meta, ...]


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
        self._modules: dict[str, Place] = {}  # by path

    def define(self, names: tuple[str, ...], place: Place, name_place: Place) -> None:
        """A module begins at ``place``. names: its own, behind those of the modules around it."""
        module = path_of(names)
        first = self._modules.setdefault(module, place)
        if first is not place:
            twice = f"module {quote(module)} is defined twice, first {whereabouts(first)}"
            self._problems.add(name_place, f"{twice}; give this one another name")

    def check_meta(self, meta: Iterable[Meta]) -> None:
        """Nothing is told twice about one part of a schema."""
        seen = set()
        for one in meta:
            if one.name and one.name in seen:
                self._problems.add(one.place, f"metadata {quote(one.name)} stands here twice; keep one of them")
            seen.add(one.name)

    def check_member(self, name: str, members: Iterable[Module], place: Place, union: str) -> None:
        """The scaffold of a union is a member of it. union: what problems call it."""
        names = [member.name for member in members]
        if name not in names:
            near = self._problems.near(name, names)
            remedy = f"did you mean {quote(near)}?" if near else f"its members are {listed(names)}"
            self._problems.add(place, f"{union} has scaffold={quote(name)}, which is no member of it; {remedy}")

    def check_params(self, module: str, children: Iterable[Text | Param | Module | Union | Turn]) -> None:
        """No two parameters of a module have the same name, those in its turns included."""
        seen = set()
        for param in _params(children):
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

    def checked_scaffolds(
        self, scaffolds: Iterable[Scaffold], children: tuple[Text | Module | Union | Turn, ...]
    ) -> tuple[Scaffold, ...]:
        """Scaffolds with the paths of their modules, which a prompt can import together; all are defined by now."""
        modules, exclusions, uncached = ByPath(self._modules), Exclusions(children), set(_uncached(children, (), False))
        checked = []
        for scaffold in scaffolds:
            paths = tuple(self._path(name, modules, scaffold.place) for name in scaffold.modules)
            checked.append(replace(scaffold, modules=paths))
            names = f"{self._words.scaffold} names"
            if len(set(paths)) == 1:
                alone = f"{names} {quote(paths[0])} alone"
                self._problems.add(scaffold.place, f"{alone}; name at least two modules, or delete it")
            if pair := exclusions.between(paths):
                both = f"{names} {quote(pair[0])} and {quote(pair[1])}, of which a union allows one"
                self._problems.add(scaffold.place, f"{both}; leave one of them out")
            for path in dict.fromkeys(path for path in paths if path in uncached):
                never = f"{names} {quote(path)}, which is never cached"
                self._problems.add(scaffold.place, f"{never}; leave it out, or let it be cached")
        return tuple(checked)

    def _path(self, name: str, modules: ByPath[Place], place: Place) -> str:
        """The path of a module that a scaffold names; after a problem, the name."""
        paths = modules.paths(name)
        if len(paths) == 1:
            return paths[0]
        wrong = f"{self._words.scaffold} names {quote(name)}"
        if paths:
            self._problems.add(place, f"{wrong}, which may be {choice(paths)}; write the one that you mean")
        else:
            near = self._problems.near(name, [*modules, *modules.last_names()])
            remedy = f'did you mean "{near}"?' if near else "name modules of this schema"
            self._problems.add(place, f"{wrong}, which is no module of this schema; {remedy}")
        return name


def _params(children: Iterable[Text | Param | Module | Union | Turn]) -> Iterator[Param]:
    """The parameters of a module with these children."""
    return (node for node in _opened(children) if isinstance(node, Param))


def _uncached(
    children: Iterable[Text | Param | Module | Union | Turn], scope: tuple[str, ...], inside: bool
) -> Iterator[str]:
    """The paths of modules that are never cached. inside: whether they stand in one that is not."""
    for child in children:
        if isinstance(child, Module):
            names, never = (*scope, child.name), inside or not child.cache
            if never:
                yield path_of(names)
            yield from _uncached(child.children, names, never)
        elif isinstance(child, Union):
            yield from _uncached(child.members, scope, inside)
        elif isinstance(child, Turn):
            yield from _uncached(child.children, scope, inside)


def choice(paths: Iterable[str]) -> str:
    """Some paths of modules as a sentence offers them."""
    return listed([quote(path) for path in paths])


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
    """The top level of a schema, or the inside of a module, turns opened up.

    ``fixed`` is what is always there once the level is; ``slots`` says where each importable module goes, by name.
    """

    fixed: tuple[Text | Param | Border, ...]
    slots: dict[str, Slot]
    params: dict[str, Param]


def levels_of(
    children: Iterable[Text | Module | Union | Turn], modules: Mapping[str, Module]
) -> dict[str | None, Level]:
    """The top level of a schema under None, and the inside of each module under its path."""
    levels: dict[str | None, Level] = {path: _level(module.children) for path, module in modules.items()}
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
