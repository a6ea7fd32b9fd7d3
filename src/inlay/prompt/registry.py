"""What goes by a schema's name: its owner's own, else what is everybody's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

PUBLIC = ""  # the owner of what is everybody's


class SchemaRegistry(Generic[T]):
    """Schemas, or what is known of them, by name and owner. Any thread may ask.

    An owner is a cache salt; names are taken once among the public ones and once for every owner.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], T] = {}
        self._lock = threading.Lock()  # of changes

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._known.values()))

    def find(self, name: str, owner: str = PUBLIC) -> T | None:
        """What an owner means by a name: their own, else the public one."""
        own = self._known.get((owner, name))
        return self._known.get((PUBLIC, name)) if own is None else own

    def get(self, name: str, owner: str = PUBLIC) -> T | None:
        """The owner's own of that name, or the public one where the owner is PUBLIC."""
        return self._known.get((owner, name))

    def of(self, owner: str) -> list[T]:
        """All that an owner has."""
        return [known for (whose, _), known in list(self._known.items()) if whose == owner]

    def visible(self, owner: str) -> dict[str, T]:
        """Name → what an owner means by it."""
        known = list(self._known.items())
        return {name: one for whose in (PUBLIC, owner) for (of, name), one in known if of == whose}

    def put(self, name: str, owner: str, known: T) -> None:
        """Keep something under a name, in place of what had that name."""
        with self._lock:
            self._known[owner, name] = known

    def remove(self, name: str, owner: str = PUBLIC) -> T | None:
        """Forget what an owner has under a name; returns what that was."""
        with self._lock:
            return self._known.pop((owner, name), None)
