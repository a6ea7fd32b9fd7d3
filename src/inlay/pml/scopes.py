"""Names of modules. They are unique in their scope: the schema's root, or one module. Elsewhere a module is its path.

Unions and turns open no scope. A path is the names of the modules from the root down, as in ``age/default``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from inlay.pml.nodes import Import

_T = TypeVar("_T")
_Child = TypeVar("_Child")

_SEPARATOR = "/"


def path_of(names: tuple[str, ...]) -> str:
    """The path of the module with these names, from the root down; "" for none of them."""
    return _SEPARATOR.join(names)


def names_of(path: str) -> tuple[str, ...]:
    """The names that a path is made of."""
    return tuple(path.split(_SEPARATOR))


def opened(nodes: Iterable[_Child]) -> tuple[_Child | Import, ...]:
    """The nodes of one level, with what a path imports inside an import of the path's first name.

    That is the one before it, if it has this name, or else a new one.
    """
    level: list[_Child | Import] = []
    inside: dict[int, list[Import]] = {}  # by number in the level, what goes into this import
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
    """What is known of modules, by their paths. It is found by a last name, too, where one module alone has that.

    A name that is a path is that path: so a module of the schema's root wins over others of its name.
    """

    def __init__(self, known: Mapping[str, _T]) -> None:
        self._known = dict(known)
        self._by_last: dict[str, list[str]] = {}
        for path in self._known:
            self._by_last.setdefault(path.rpartition(_SEPARATOR)[2], []).append(path)

    def paths(self, name: str) -> tuple[str, ...]:
        """The paths that a name may mean; none where no module has it."""
        return (name,) if name in self._known else tuple(self._by_last.get(name, ()))

    def last_names(self) -> Iterator[str]:
        """The last names of all modules, each once."""
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
