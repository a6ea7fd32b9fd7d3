"""Explains why a segment is missing, from earlier observations of it or of the same text.

This reveals nothing about other tenants. Of private segments only the keys are remembered, and no other tenant can ask
for these keys.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.kv.offload.record import salt_digest, text_digest
from inlay.kv.offload.tier import TierEntry

NEVER_SEEN, EVICTED, LATE, EXPIRED = "never seen", "evicted", "late", "expired"
_MOST = 4096  # remembered segments, 0.4 KiB each


@dataclass(frozen=True, slots=True)
class Made:
    """How the KV of a text was made. The first field that differs is reported."""

    model: bytes
    version: str
    codec: str
    salt: bytes
    context: bytes

    def difference(self, other: Made) -> tuple[int, str]:
        """The number of fields that differ, and the first one as a reason."""
        differing = [name for name in self.__slots__ if getattr(self, name) != getattr(other, name)]
        return len(differing), f"other {differing[0]}" if differing else EVICTED


class MissReasons:
    """Observations of segments in an engine's pool and in the tiers below it.

    Args:
        keys: the engine's keys.
        most: the number of segments to remember.
    """

    def __init__(self, keys: KeyMaker, most: int = _MOST) -> None:
        self._most = most
        # shared by all segments of this engine
        codec, salt = f"{keys.kv_dtype} {keys.codec}", salt_digest(keys.salt)
        self._mine = Made(keys.fingerprint, keys.numerics, codec, salt, b"")
        self._lock = threading.Lock()  # tiers report failures from their own threads
        self._reasons: OrderedDict[bytes, str] = OrderedDict()  # by key, for missing segments
        self._made: OrderedDict[bytes, tuple[Made, ...]] = OrderedDict()  # by text

    def stored(self, spec: SegmentSpec) -> None:
        """Record that a segment, or a form of it, is in the pool. If it is missing later, it was evicted."""
        self.failed(spec, EVICTED)
        if not spec.before.private:
            self._add(text_digest(spec.ids), self._of(spec))

    def listed(self, entry: TierEntry) -> None:
        """Record that a tier has a segment."""
        if not entry.private:
            self._add(entry.text, Made(entry.fingerprint, entry.numerics, entry.codec, entry.salt, entry.context))

    def failed(self, spec: SegmentSpec, reason: str) -> None:
        """Record that a tier did not deliver a segment or a form of it."""
        key = spec.lossless.key
        with self._lock:
            self._reasons[key] = reason
            self._reasons.move_to_end(key)
            if len(self._reasons) > self._most:
                self._reasons.popitem(last=False)

    def explain(self, spec: SegmentSpec) -> str:
        """The reason why a segment is missing: one of MISS_REASONS."""
        known = self._reasons.get(spec.lossless.key)
        if known is not None:
            return known
        mine = self._of(spec)
        others = self._made.get(text_digest(spec.ids), ())
        return min((mine.difference(other) for other in others), default=(0, NEVER_SEEN))[1]

    def _of(self, spec: SegmentSpec) -> Made:
        return replace(self._mine, context=spec.lossless.digest)

    def _add(self, text: bytes, made: Made) -> None:
        known = self._made.get(text, ())
        if made not in known:
            self._made[text] = (*known, made)[-8:]  # the ways that were seen last
        self._made.move_to_end(text)
        if len(self._made) > self._most:
            self._made.popitem(last=False)
