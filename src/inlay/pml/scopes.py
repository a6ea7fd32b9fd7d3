"""Names and paths of modules.

A module's name is unique in its scope: the root of the schema, or one module. Unions and turns open no scope. A path
lists the names from the root down, as in ``age/default``, and identifies a module in the whole schema.
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
