"""Segments and their identity: a segment is identified by what it could attend to.

A Context is the flattened record of the tokens that stand before a segment: each one's id, its distance from the token
before it, and how its own KV was made. Because the record is a stream of tokens, cutting or joining segments never
changes it. Its digest, with the distance to the segment's first token, is the segment's context digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from inlay.cache.pool import Run

_RECORD = np.dtype([("id", "<u4"), ("gap", "<u4"), ("link", "u1")])
_CONTINUES, _BREAKS = 0, 1

EMPTY = b""


class Context:
    """An immutable record of tokens in attention order. ``Context()`` is the empty one."""

    __slots__ = ("_hash", "end", "tokens")

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.tokens = 0
        self.end = 0  # the position behind the last token

    def digest(self, start: int) -> bytes:
        """The context digest of a token at position ``start`` that attends to all of this; EMPTY for nothing."""
        if self.tokens == 0:
            return EMPTY
        final = self._hash.copy()
        final.update(b"gap" + (start - self.end).to_bytes(8, "little", signed=True))
        return final.digest()

    def extend(self, ids: tuple[int, ...], start: int, made: bytes, continues: bool) -> Context:
        """This record with more tokens behind it.

        ids: tokens at consecutive positions from ``start``.
        made: the context digest that the first of them was made under.
        continues: whether that context is the one of the token before, and that token: then nothing new is said.
        """
        longer = Context()
        longer._hash = self._hash.copy()
        if not ids:
            longer.tokens, longer.end = self.tokens, self.end
            return longer
        records = np.empty(len(ids), _RECORD)
        records["id"], records["gap"], records["link"] = ids, 1, _CONTINUES
        # The distance is undefined for the first token of all: where it stands does not matter to what follows.
        records["gap"][0] = (start - self.end + 1) % (1 << 32) if self.tokens else 0
        records["link"][0] = _CONTINUES if continues else _BREAKS
        longer._hash.update(records[:1].tobytes())
        if not continues:
            longer._hash.update(len(made).to_bytes(1, "little") + made)
        longer._hash.update(records[1:].tobytes())
        longer.tokens, longer.end = self.tokens + len(ids), start + len(ids)
        return longer


@dataclass(frozen=True, slots=True)
class KeyMaker:
    """Turns what identifies a segment into its key.

    positioned: whether the start position matters (learned positions, or shifts refused).
    """

    fingerprint: bytes
    kv_dtype: str
    codec: str
    salt: bytes
    positioned: bool

    def key(self, context_digest: bytes, ids: tuple[int, ...], start: int) -> bytes:
        """sha256 of model fingerprint, KV dtype and codec, tenant salt, context digest, token ids, and start."""
        parts = [self.fingerprint, self.kv_dtype.encode(), self.codec.encode(), self.salt, context_digest]
        parts.append(np.asarray(ids, "<u4").tobytes())
        parts.append(start.to_bytes(8, "little", signed=True) if self.positioned else b"anywhere")
        digest = hashlib.sha256()
        for part in parts:  # lengths in front, so that no two lists of parts read the same
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()


@dataclass(frozen=True, slots=True, eq=False)
class SegmentSpec:
    """A segment as it is asked for, whether or not it exists.

    start: the position that its first token is encoded at.
    context: the segments that it attends to, in order, at the positions that they are encoded at.
    digest: its context digest.
    record: the flattened context behind its last token, for what follows it.
    """

    ids: tuple[int, ...]
    start: int
    context: tuple[SegmentSpec, ...]
    digest: bytes
    key: bytes
    record: Context

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


def specify(ids: tuple[int, ...], start: int, context: tuple[SegmentSpec, ...], keys: KeyMaker) -> SegmentSpec:
    """The spec of these tokens at ``start``, attending to ``context``.

    Each segment of the context must have been made under all those before it in the context.
    """
    record = context[-1].record if context else Context()
    digest = record.digest(start)
    return SegmentSpec(
        ids=ids,
        start=start,
        context=context,
        digest=digest,
        key=keys.key(digest, ids, start),
        record=record.extend(ids, start, digest, continues=True),
    )


@dataclass(eq=False, slots=True)
class Segment:
    """An immutable run of tokens with their KV in the pool.

    runs: the chunks that it owns; the last one may be longer than its tokens need.
    pins: how many requests or callers need it to stay.
    """

    key: bytes
    ids: tuple[int, ...]
    start: int
    runs: tuple[Run, ...]
    pins: int = 0
    used: int = field(default=0)  # when it was last asked for, in the store's own count

    @property
    def tokens(self) -> int:
        return len(self.ids)
