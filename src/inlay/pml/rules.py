"""The rules that a schema must follow in every written form, and the levels that the resolver fills.

The rules: names are unique, scaffolds fit together, and files can be read. The module also finds modules that exclude
each other, and the slot of each module between the always-present pieces of its level.

A module's name is unique in its scope: the root of the schema, or one module. Unions and turns open no scope. A path
lists the names from the root down, as in ``age/default``, and identifies a module in the whole schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from inlay.errors import Place
from inlay.pml.nodes import Import, Meta, Module, Param, Scaffold, Text, Turn, Union
from inlay.pml.problems import Problems, whereabouts
from inlay.pml.sources import Folder, UnreadableError
from inlay.wording import listed, quote

_T = TypeVar("_T")
_Child = TypeVar("_Child")

_SEPARATOR = "/"


def path_of(names: tuple[str, ...]) -> str:
    """Join the names of a module, from the root down, into its path. No names give ""."""
    return _SEPARATOR.join(names)


def names_of(path: str) -> tuple[str, ...]:
    """Split a path into its names."""
    return tuple(path.split(_SEPARATOR))


def opened(nodes: Iterable[_Child]) -> tuple[_Child | Import, ...]:
    """Expand imports by path into nested imports, for the nodes of one level.

    A path goes into the import before it if that import has the path's first name. Otherwise a new import is added.
    """
    level: list[_Child | Import] = []
    inside: dict[int, list[Import]] = {}  # imports to nest, by the index of the outer import in the level
    for node in nodes:
        head, separator, rest = node.name.partition(_SEPARATOR) if isinstance(node, Import) else ("", "", "")
        if not isinstance(node, Import) or not separator:
            level.append(node)
            continue
        last = level[-1] if level else None
        if not isinstance(last, Import) or last.name != head:
            level.append(Import(head, (), (), node.place))
        inside.setdefault(len(level) - 1, []).append(replace(node, name=rest))
    for number, more in inside.items():
        outer = level[number]
        assert isinstance(outer, Import)
        level[number] = replace(outer, children=(*outer.children, *more))
    return tuple(level)


class ByPath(Mapping[str, _T]):
    """A mapping from module paths to values, with lookup by a module's last name if that name is unique.

    An exact path wins. So a module at the root of the schema wins over nested modules of the same name.
    """

    def __init__(self, known: Mapping[str, _T]) -> None:
        self._known = dict(known)
        self._by_last: dict[str, list[str]] = {}
        for path in self._known:
            self._by_last.setdefault(path.rpartition(_SEPARATOR)[2], []).append(path)

    def paths(self, name: str) -> tuple[str, ...]:
        """Return the paths that a name may mean. Empty if no module has the name."""
        return (name,) if name in self._known else tuple(self._by_last.get(name, ()))

    def last_names(self) -> Iterator[str]:
        """Iterate over the distinct last names of all modules."""
        return iter(self._by_last)

    def __getitem__(self, name: str) -> _T:
        paths = self.paths(name)
        return self._known[paths[0] if len(paths) == 1 else name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._known!r})"


_Choices = dict[int, str]  # order of a union → the member that a prompt must import


class Exclusions:
    """The union members that a prompt must choose before it can import a module, by module path."""

    def __init__(self, children: tuple[Text | Module | Union | Turn, ...]) -> None:
        self._choices: dict[str, _Choices] = {}
        self._visit(children, (), {})

    def between(self, paths: Iterable[str]) -> tuple[str, str] | None:
        """Return the first two of these modules that no prompt can import together, or None."""
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
    """The contents of a schema file."""

    name: str
    children: tuple[Text | Module | Union | Turn, ...]
    scaffolds: tuple[Scaffold, ...]
    meta: tuple[Meta, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """Terms for error messages that differ between PML and JSON. ``method`` is the method that reads a string."""

    scaffold: str
    union: str
    method: str


class SchemaRules:
    """Checks one schema while it is read, and reports errors to ``problems``."""

    def __init__(self, folder: Folder | None, problems: Problems, words: Words) -> None:
        self._folder = folder
        self._problems = problems
        self._words = words
        self._modules: dict[str, Place] = {}  # by path

    def define(self, names: tuple[str, ...], place: Place, name_place: Place) -> None:
        """Record a module and report a second definition of its path.

        Args:
            names: The names of the enclosing modules, outermost first, and then the module's name.
            place: The start of the module.
            name_place: The place of the name, for the error.
        """
        module = path_of(names)
        first = self._modules.setdefault(module, place)
        if first is not place:
            twice = f"module {quote(module)} is defined twice, first {whereabouts(first)}"
            self._problems.add(name_place, f"{twice}; give this one another name", code="pml.duplicate_name")

    def check_meta(self, meta: Iterable[Meta]) -> None:
        """Report metadata that one part of a schema holds twice."""
        seen = set()
        for one in meta:
            if one.name and one.name in seen:
                self._problems.add(
                    one.place,
                    f"metadata {quote(one.name)} stands here twice; keep one of them",
                    code="pml.duplicate_metadata",
                )
            seen.add(one.name)

    def check_member(self, name: str, members: Iterable[Module], place: Place) -> None:
        """Report a union's scaffold that is not one of its members."""
        names = [member.name for member in members]
        if name not in names:
            near = self._problems.near(name, names)
            remedy = f"did you mean {quote(near)}?" if near else f"its members are {listed(names)}"
            self._problems.add(
                place,
                f"{self._words.union} has scaffold={quote(name)}, which is no member of it; {remedy}",
                code="pml.unknown_member",
            )

    def check_params(self, module: str, children: Iterable[Text | Param | Module | Union | Turn]) -> None:
        """Report parameters of a module that share a name, including parameters in its turns."""
        seen = set()
        for param in _params(children):
            if param.name and param.name in seen:
                twice = f"parameter {quote(param.name)} is defined twice in module {quote(module)}"
                self._problems.add(param.place, f"{twice}; give this one another name", code="pml.duplicate_name")
            seen.add(param.name)

    def file(self, src: str, place: Place) -> tuple[Text, ...]:
        """Return the text of a module that names a file, and report errors."""
        if self._folder is None:
            remedy = f"give one with Schema.{self._words.method}(text, folder=…)"
            self._problems.add(
                place, f"src needs a folder, and a schema in a string has none; {remedy}", code="pml.src_without_folder"
            )
            return ()
        try:
            text = self._folder.read(src)
        except UnreadableError as error:
            self._problems.add(place, str(error), code="pml.unreadable_file")
            return ()
        return (Text(text, Place(self._folder.name(src), 1, 1)),) if text else ()

    def checked_scaffolds(
        self, scaffolds: Iterable[Scaffold], children: tuple[Text | Module | Union | Turn, ...]
    ) -> tuple[Scaffold, ...]:
        """Return the scaffolds with their modules' paths, and report scaffolds that no prompt can import.

        All modules must be defined before this call.
        """
        modules, exclusions, uncached = ByPath(self._modules), Exclusions(children), set(_uncached(children, (), False))
        checked = []
        for scaffold in scaffolds:
            paths = tuple(self._path(name, modules, scaffold.place) for name in scaffold.modules)
            checked.append(replace(scaffold, modules=paths))
            names = f"{self._words.scaffold} names"
            if len(set(paths)) == 1:
                alone = f"{names} {quote(paths[0])} alone"
                self._problems.add(
                    scaffold.place, f"{alone}; name at least two modules, or delete it", code="pml.invalid_scaffold"
                )
            if pair := exclusions.between(paths):
                both = f"{names} {quote(pair[0])} and {quote(pair[1])}, of which a union allows one"
                self._problems.add(scaffold.place, f"{both}; leave one of them out", code="pml.invalid_scaffold")
            for path in dict.fromkeys(path for path in paths if path in uncached):
                never = f"{names} {quote(path)}, which is never cached"
                self._problems.add(
                    scaffold.place, f"{never}; leave it out, or let it be cached", code="pml.invalid_scaffold"
                )
        return tuple(checked)

    def _path(self, name: str, modules: ByPath[Place], place: Place) -> str:
        """Return the path of a module that a scaffold names, or the name itself after a problem."""
        paths = modules.paths(name)
        if len(paths) == 1:
            return paths[0]
        wrong = f"{self._words.scaffold} names {quote(name)}"
        if paths:
            self._problems.add(
                place,
                f"{wrong}, which may be {choice(paths)}; write the one that you mean",
                code="pml.ambiguous_module",
            )
        else:
            near = self._problems.near(name, [*modules, *modules.last_names()])
            remedy = f'did you mean "{near}"?' if near else "name modules of this schema"
            self._problems.add(
                place, f"{wrong}, which is no module of this schema; {remedy}", code="pml.unknown_module"
            )
        return name


def _params(children: Iterable[Text | Param | Module | Union | Turn]) -> Iterator[Param]:
    """Yield the parameters of a module with these children, including those in its turns."""
    return (node for node in _opened(children) if isinstance(node, Param))


def _uncached(
    children: Iterable[Text | Param | Module | Union | Turn], scope: tuple[str, ...], inside: bool
) -> Iterator[str]:
    """Yield the paths of modules that are never cached. ``inside``: an enclosing module is not cached."""
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
    """Format paths of modules as a list of choices for a sentence."""
    return listed([quote(path) for path in paths])


@dataclass(frozen=True, slots=True)
class Border:
    """The start or the end of a turn of the schema."""

    turn: Turn
    start: bool


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The slot of a module at its level. Members of one union share their slot.

    Attributes:
        zone: The number of fixed pieces before it.
        index: Its place in schema order.
    """

    zone: int
    index: int


@dataclass(frozen=True, slots=True)
class NestingLevel:
    """The top level of a schema or the inside of a module, with turns replaced by their borders and content.

    Attributes:
        fixed: The pieces that are present whenever the level is.
        slots: The slot of each importable module, by name.
        params: The parameters, by name.
    """

    fixed: tuple[Text | Param | Border, ...]
    slots: dict[str, Slot]
    params: dict[str, Param]


def levels_of(
    children: Iterable[Text | Module | Union | Turn], modules: Mapping[str, Module]
) -> dict[str | None, NestingLevel]:
    """Return the levels of a schema: the top level under None, and each module's inside under its path."""
    levels: dict[str | None, NestingLevel] = {path: _level(module.children) for path, module in modules.items()}
    levels[None] = _level(children)
    return levels


def _level(children: Iterable[Text | Param | Module | Union | Turn]) -> NestingLevel:
    fixed: list[Text | Param | Border] = []
    slots: dict[str, Slot] = {}
    for index, node in enumerate(_opened(children)):
        if isinstance(node, Module | Union):
            members = node.members if isinstance(node, Union) else (node,)
            slots.update((member.name, Slot(len(fixed), index)) for member in members)
        else:
            fixed.append(node)
    params = {node.name: node for node in fixed if isinstance(node, Param)}
    return NestingLevel(tuple(fixed), slots, params)


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
