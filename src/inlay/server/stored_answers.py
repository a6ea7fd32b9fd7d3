"""Stored answers of tenants, in memory, within bounds of size, number and time."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from inlay.api.call import StoredAnswer


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of stored answers.

    Args:
        answers: the most of one tenant.
        tenant_bytes: the most bytes of one tenant, as JSON.
        total_bytes: the most bytes of all tenants.
        lifetime_s: seconds that an answer is stored.
    """

    answers: int
    tenant_bytes: int
    total_bytes: int
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class _Entry:
    """An answer as JSON: the document, then each part of its input. Python objects take six times as many bytes."""

    parts: tuple[bytes, ...]
    size: int
    until: float


@dataclass(slots=True)
class _Tenant:
    """The ids of a tenant's answers, oldest first, and their bytes."""

    names: dict[str, None] = field(default_factory=dict)
    size: int = 0


class StoredAnswers:
    """Answers by tenant and id. The oldest ones are dropped first. Any thread may use it.

    Args:
        bounds: see Bounds.
        clock: monotonic seconds.
    """

    def __init__(self, bounds: Bounds, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()  # by tenant and id, oldest first
        self._tenants: dict[str, _Tenant] = {}
        self._size = 0

    def keep(self, tenant: str, name: str, answer: StoredAnswer) -> bool:
        """Store an answer. Returns False if it is larger than a tenant may store."""
        parts = tuple(json.dumps(part).encode() for part in (answer.document, *answer.input))
        size = sum(map(len, parts))
        if size > min(self._bounds.tenant_bytes, self._bounds.total_bytes):
            return False
        with self._lock:
            self._drop((tenant, name))
            self._expire()
            while (mine := self._tenants.get(tenant)) is not None and self._is_full(mine, size):
                self._drop((tenant, next(iter(mine.names))))
            while self._size + size > self._bounds.total_bytes:
                self._drop(next(iter(self._entries)))
            self._entries[tenant, name] = _Entry(parts, size, self._clock() + self._bounds.lifetime_s)
            mine = self._tenants.setdefault(tenant, _Tenant())
            mine.names[name] = None
            mine.size += size
            self._size += size
        return True

    def get(self, tenant: str, name: str) -> StoredAnswer | None:
        """Return a tenant's answer.

        None for an unknown answer and for other tenants' answers. Slow for a large answer.
        """
        with self._lock:
            self._expire()
            found = self._entries.get((tenant, name))
        if found is None:
            return None
        document, *given = map(json.loads, found.parts)
        return StoredAnswer(document, tuple(given))

    def size(self, tenant: str, name: Any) -> int:
        """Return the bytes of a tenant's answer as JSON; 0 if it has none of this id, which may be any value."""
        with self._lock:
            found = self._entries.get((tenant, name)) if isinstance(name, str) else None
        return 0 if found is None else found.size

    def delete(self, tenant: str, name: str) -> bool:
        """Delete a tenant's answer. Returns False if it has none of this id."""
        with self._lock:
            self._expire()
            return self._drop((tenant, name))

    def of(self, tenant: str) -> Mapping[str, StoredAnswer]:
        """Return the answers of a tenant, by id."""
        return _TenantAnswers(self, tenant)

    def names(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's answers, oldest first."""
        with self._lock:
            self._expire()
            mine = self._tenants.get(tenant)
            return [] if mine is None else list(mine.names)

    def _is_full(self, mine: _Tenant, size: int) -> bool:
        return len(mine.names) >= self._bounds.answers or mine.size + size > self._bounds.tenant_bytes

    def _expire(self) -> None:
        now = self._clock()
        while self._entries and next(iter(self._entries.values())).until <= now:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[str, str]) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        tenant, name = key
        mine = self._tenants[tenant]
        del mine.names[name]
        mine.size -= entry.size
        self._size -= entry.size
        if not mine.names:
            del self._tenants[tenant]
        return True


class _TenantAnswers(Mapping[str, StoredAnswer]):
    def __init__(self, answers: StoredAnswers, tenant: str) -> None:
        self._answers = answers
        self._tenant = tenant

    def __getitem__(self, name: str) -> StoredAnswer:
        found = self._answers.get(self._tenant, name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._answers.names(self._tenant))

    def __len__(self) -> int:
        return len(self._answers.names(self._tenant))
