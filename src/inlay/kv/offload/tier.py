"""The protocol of every tier below the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from inlay.errors import PortableError
from inlay.kv.offload.codecs import Slab
from inlay.kv.offload.record import SegmentRecord
from inlay.types import TierStats


class Miss(Enum):
    """Why a tier did not deliver a segment."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    LATE = "late"
    FAILED = "failed"  # an error of the operating system or server


class TierMissError(PortableError):
    """A tier could not deliver a segment. The caller tries another tier or recomputes the segment."""

    def __init__(self, reason: Miss, message: str = "") -> None:
        super().__init__(message or reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A segment in a tier.

    Attributes:
        size: bytes in the tier.
        created, used: seconds since 1970.
        uses: how often it was read.
        pinned: True if it may not be evicted.
        text … private: how it was made, from its record; see MissReasons.
        labels: see SegmentSpec.
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
    labels: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, record: SegmentRecord, size: int, at: float) -> TierEntry:
        """The entry of a segment that a tier received at time ``at``."""
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
            labels=record.labels,
        )


class Tier(Protocol):
    """Segments outside the pool.

    ``get``, ``put``, ``delete``, ``left_s``, ``find`` and ``refresh`` may block and run on background threads. All else
    never blocks. All methods are thread-safe.

    Attributes:
        codec: the codec for segments from the pool. Segments from another tier keep their form.
    """

    @property
    def name(self) -> str: ...

    @property
    def codec(self) -> str: ...

    def holds(self, key: bytes) -> bool:
        """True if the segment is believed to be there. Makes no request, so it may be wrong."""
        ...

    def unsure(self, key: bytes) -> bool:
        """True if only ``find`` can tell whether the segment is there."""
        ...

    def find(self, keys: Sequence[bytes]) -> None:
        """Find out which of these are there, for ``holds``. Raises TierMissError if that is impossible now."""
        ...

    def get(self, asked: SegmentRecord, take: Callable[[int, Slab], None], late: Callable[[], bool]) -> None:
        """Deliver a segment's slabs, layer by layer. Each is checked before delivery.

        Args:
            asked: the wanted record. Only a segment with an equal record is delivered.
            take: called with a layer and its slab. The slab is valid only during the call.
            late: True once the time is over.

        Raises:
            TierMissError: discard the slabs taken so far.
        """
        ...

    def put(self, record: SegmentRecord, slabs: Iterable[Slab]) -> bool:
        """Store a segment; returns True if it is stored. ``slabs``, one per layer, must not change before the
        return.
        """
        ...

    def delete(self, key: bytes) -> bool:
        """Remove a segment; returns True if it was there."""
        ...

    def expire(self, key: bytes, ttl_s: float) -> None:
        """Let a segment, which may arrive later, expire after this many seconds. The latest end of several calls
        counts.
        """
        ...

    def left_s(self, key: bytes) -> float | None:
        """Seconds until a segment expires; None for never. May block."""
        ...

    def iterate(self) -> Iterator[TierEntry]:
        """All entries, most recently used last."""
        ...

    def labelled(self, labels: Iterable[bytes]) -> list[TierEntry]:
        """The entries with any of these labels, as far as this process knows. The cost grows with their number."""
        ...

    def stats(self) -> TierStats: ...

    @property
    def has_room(self) -> bool:
        """True if at most half of its quota is taken, so that a segment that is never read again displaces no other
        one.
        """
        ...

    def refresh(self) -> None:
        """Learn of changes by other processes. May block."""
        ...

    def close(self) -> None:
        """Close files and connections. Stored segments stay."""
        ...
