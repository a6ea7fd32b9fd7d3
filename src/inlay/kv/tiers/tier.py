"""What every tier below the pool does, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from inlay.errors import PortableError
from inlay.kv.codecs.codec import Slab
from inlay.kv.tiers.record import SegmentRecord
from inlay.types import TierStats


class Miss(Enum):
    """Why a tier had nothing to give."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    LATE = "late"
    FAILED = "failed"  # the system refused


class Kept(Enum):
    """Which segments the tiers below the pool may hold. Host memory may hold all: it ends with the process."""

    SCHEMAS = "schemas"  # those of public schemas
    UNSALTED = "unsalted"  # parts of messages, too, of requests without a cache_salt
    ALL = "all"  # private schemas, and parts of messages of requests with a cache_salt, too


class TierMissError(PortableError):
    """A tier could not give a segment; that is for the tier's own neighbours, who compute it instead."""

    def __init__(self, reason: Miss, message: str = "") -> None:
        super().__init__(message or reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A segment that a tier holds.

    size: bytes that it takes there. created, used: seconds since 1970. uses: how often it was read. pinned: whether it
    may not be evicted. text … private: how it was made, as its record says; see MissReasons.
    """

    key: bytes
    tokens: int
    size: int
    model: str
    created: float
    used: float
    uses: int = 0
    pinned: bool = False
    text: bytes = b""
    fingerprint: bytes = b""
    numerics: str = ""
    codec: str = ""
    salt: bytes = b""
    context: bytes = b""
    private: bool = False

    @classmethod
    def of(cls, record: SegmentRecord, size: int, at: float) -> TierEntry:
        """That of a segment which a tier has since then."""
        return cls(
            key=record.key,
            tokens=record.tokens,
            size=size,
            model=record.model,
            created=at,
            used=at,
            text=record.text,
            fingerprint=record.fingerprint,
            numerics=record.numerics,
            codec=f"{record.kv_dtype} {record.codec}",
            salt=record.salt,
            context=record.context,
            private=record.before.private,
        )


class Tier(Protocol):
    """Segments that lie outside of the pool.

    ``get``, ``put``, ``delete``, ``left_s``, ``find`` and ``refresh`` may take long, and are called on threads of their
    own; the rest never waits. Any may be called from several threads at once.

    codec: what the pool's segments are written through. What comes from another tier stays as it is.
    """

    @property
    def name(self) -> str: ...

    @property
    def codec(self) -> str: ...

    def holds(self, key: bytes) -> bool:
        """Whether a segment is thought to be there. Asks nobody, so it may be wrong."""
        ...

    def unsure(self, key: bytes) -> bool:
        """Whether only ``find`` tells if a segment is there."""
        ...

    def find(self, keys: Sequence[bytes]) -> None:
        """Learn which of these are there, for ``holds``. Raises TierMissError where that cannot be learned now."""
        ...

    def get(self, asked: SegmentRecord, take: Callable[[int, Slab], None], late: Callable[[], bool]) -> None:
        """Give a segment's slabs, layer by layer, each one checked before it is given.

        asked: what is wanted; only what was written of just this is given.
        take: called with a layer and its slab, which is the tier's again when it returns.
        late: whether the time is over. Raises TierMissError; what was taken by then is not to be used.
        """
        ...

    def put(self, record: SegmentRecord, slabs: Iterable[Slab]) -> bool:
        """Keep a segment; returns whether it is kept. slabs: of each layer. They may not change before it returns."""
        ...

    def delete(self, key: bytes) -> bool:
        """Forget a segment; returns whether there was one."""
        ...

    def expire(self, key: bytes, ttl_s: float) -> None:
        """Give a segment, which may come later, so many seconds from now on; the claim that ends last counts."""
        ...

    def left_s(self, key: bytes) -> float | None:
        """For how many seconds more a segment is to be found; None where that has no end. May take long."""
        ...

    def iterate(self) -> Iterator[TierEntry]:
        """What is there, most recently used last."""
        ...

    def stats(self) -> TierStats: ...

    @property
    def has_room(self) -> bool:
        """Whether at most half of its quota is taken, so that a segment that is never read again costs no other one."""
        ...

    def refresh(self) -> None:
        """Take note of what others have put there and removed. May take long."""
        ...

    def close(self) -> None:
        """Let go of files and connections; what was put stays."""
        ...
