"""Schemas by name: an owner's own schema hides the public one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

PUBLIC = ""  # the owner of public schemas


class SchemaRegistry(Generic[T]):
    """Schemas, or data about them, by name and owner (a cache_salt). Thread-safe.

    A name is unique among the public schemas, and among those of each owner.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], T] = {}
        self._lock = threading.Lock()  # for changes

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._known.values()))

    def find(self, name: str, owner: str = PUBLIC) -> T | None:
        """Return the owner's own entry of a name, else the public one."""
        own = self._known.get((owner, name))
        return self._known.get((PUBLIC, name)) if own is None else own

    def get(self, name: str, owner: str = PUBLIC) -> T | None:
        """Return exactly this owner's entry of a name."""
        return self._known.get((owner, name))

    def of(self, owner: str) -> list[T]:
        """Return all entries of an owner."""
        return [known for (whose, _), known in list(self._known.items()) if whose == owner]

    def visible(self, owner: str) -> dict[str, T]:
        """Return name → entry for all names that an owner can use."""
        known = list(self._known.items())
        return {name: one for whose in (PUBLIC, owner) for (of, name), one in known if of == whose}

    def put(self, name: str, owner: str, known: T) -> None:
        """Register an entry, in place of one with the same name and owner."""
        with self._lock:
            self._known[owner, name] = known

    def remove(self, name: str, owner: str = PUBLIC) -> T | None:
        """Remove and return an entry; None without one."""
        with self._lock:
            return self._known.pop((owner, name), None)
