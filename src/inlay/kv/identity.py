"""Segments and their identity: a segment is identified by what it could attend to.

A Context is the flattened record of the tokens that stand before a segment: each one's id, its distance from the token
before it, and how its own KV was made. Because the record is a stream of tokens, cutting or joining segments never
changes it. Its digest, with the distance to the segment's first token, is the segment's context digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from inlay.slots import SlotRange, cut

_RECORD = np.dtype([("id", "<u4"), ("gap", "<u4"), ("link", "u1")])
_CONTINUES, _BREAKS = 0, 1

EMPTY = b""


class Context:
    """An immutable record of tokens in attention order. ``Context()`` is the empty one.

    A record is public until ``keep_private`` makes it somebody's: from there on, others' records differ from it even
    where their tokens are the same.
    """

    __slots__ = ("_hash", "end", "private", "tokens")

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.private = False
        self.tokens = 0
        self.end = 0  # the position behind the last token

    def digest(self, start: int) -> bytes:
        """The context digest of a token at position ``start`` that attends to all of this; EMPTY for nothing."""
        if self.tokens == 0:
            return self._hash.digest() if self.private else EMPTY
        final = self._hash.copy()
        final.update(b"gap" + (start - self.end).to_bytes(8, "little", signed=True))
        return final.digest()

    def keep_private(self, salt: bytes) -> Context:
        """This record, and whatever follows it, for those alone who have this salt; b"" for everybody."""
        if not salt or self.private:
            return self
        mine = Context()
        mine._hash = self._hash.copy()
        mine._hash.update(b"salt" + len(salt).to_bytes(8, "little") + salt)
        mine.private, mine.tokens, mine.end = True, self.tokens, self.end
        return mine

    def extend(self, ids: tuple[int, ...], start: int, made: bytes, continues: bool) -> Context:
        """This record with more tokens behind it.

        ids: tokens at consecutive positions from ``start``.
        made: the context digest that the first of them was made under.
        continues: whether that context is the one of the token before, and that token: then nothing new is said.
        """
        longer = Context()
        longer._hash, longer.private = self._hash.copy(), self.private
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

    def place(self, context_digest: bytes, start: int) -> bytes:
        """sha256 of all of that but the token ids: under it the index keeps what may come next."""
        return self._digest([context_digest, self._start(start)])

    def key(self, context_digest: bytes, ids: tuple[int, ...], start: int) -> bytes:
        """sha256 of model fingerprint, KV dtype and codec, tenant salt, context digest, token ids, and start."""
        return self._digest([context_digest, np.asarray(ids, "<u4").tobytes(), self._start(start)])

    def _start(self, start: int) -> bytes:
        return start.to_bytes(8, "little", signed=True) if self.positioned else b"anywhere"

    def _digest(self, parts: list[bytes]) -> bytes:
        digest = hashlib.sha256()
        for part in (self.fingerprint, self.kv_dtype.encode(), self.codec.encode(), self.salt, *parts):
            digest.update(len(part).to_bytes(8, "little") + part)  # so that no two lists of parts read the same
        return digest.digest()


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """Tokens at consecutive positions, and the record of what they could attend to.

    start: the position of the first one.
    before: the flattened context in front of it.
    continues: whether the token in front was made under just that context and is a part of it; see Context.extend.
    """

    ids: tuple[int, ...]
    start: int
    before: Context
    continues: bool = True

    @property
    def digest(self) -> bytes:
        """Its context digest."""
        return self.before.digest(self.start)

    def after(self, tokens: int) -> Context:
        """The record behind the first ``tokens`` tokens."""
        return self.before.extend(self.ids[:tokens], self.start, self.digest, self.continues)

    def beginning(self, tokens: int) -> TokenRun:
        """The first ``tokens`` tokens."""
        return TokenRun(self.ids[:tokens], self.start, self.before, self.continues)

    def rest(self, tokens: int) -> TokenRun:
        """What is left behind the first ``tokens`` tokens."""
        return TokenRun(self.ids[tokens:], self.start + tokens, self.after(tokens)) if tokens else self


@dataclass(frozen=True, slots=True, eq=False)
class SegmentSpec:
    """A segment as it is asked for, whether or not it exists.

    start: the position that its first token is encoded at.
    parent: the last segment that it attends to; that one's parent is the one before, and so on. None for no context.
    before: the flattened context in front of it.
    digest: its context digest.
    record: the flattened context behind its last token, for what follows it.
    """

    ids: tuple[int, ...]
    start: int
    parent: SegmentSpec | None
    before: Context
    digest: bytes
    key: bytes
    record: Context

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def context(self) -> tuple[SegmentSpec, ...]:
        """The segments that it attends to, in order, at the positions that they are encoded at.

        Made anew at every call: a schema whose contexts grow would keep as many references as modules squared.
        """
        found = []
        spec = self.parent
        while spec is not None:
            found.append(spec)
            spec = spec.parent
        return tuple(reversed(found))

    @property
    def run(self) -> TokenRun:
        """Its tokens with their record."""
        return TokenRun(self.ids, self.start, self.before)


def specify(
    ids: tuple[int, ...], start: int, context: Sequence[SegmentSpec], keys: KeyMaker, salt: bytes = b""
) -> SegmentSpec:
    """The spec of these tokens at ``start``, attending to ``context``.

    context: each segment must have been made under all those before it; so the last one alone says as much as all.
    salt: whose it is; b"" for everybody's.
    """
    parent = context[-1] if context else None
    record = (Context() if parent is None else parent.record).keep_private(salt)
    digest = record.digest(start)
    return SegmentSpec(
        ids=ids,
        start=start,
        parent=parent,
        before=record,
        digest=digest,
        key=keys.key(digest, ids, start),
        record=record.extend(ids, start, digest, continues=True),
    )


@dataclass(eq=False, slots=True)
class Segment:
    """An immutable run of tokens with their KV in the pool.

    run: its tokens, as they were encoded.
    place: where the index keeps it.
    slots: where its KV lies, one slot a token; chunks may be shared with its neighbours.
    keys: what names places.
    holds: who needs it, or its beginning, to stay.
    older, newer: its neighbours in the order of use; see eviction.py.
    """

    run: TokenRun
    place: bytes
    slots: tuple[SlotRange, ...]
    keys: KeyMaker
    holds: set[Hold] = field(default_factory=set)
    older: Segment | None = None
    newer: Segment | None = None
    _behind: tuple[int, bytes] | None = None  # as many tokens as it had then, and the place behind them

    @property
    def tokens(self) -> int:
        return len(self.run.ids)

    @property
    def held(self) -> int:
        """How many of its tokens, from the first on, somebody needs to stay."""
        return max((hold.tokens[self] for hold in self.holds), default=0)

    @property
    def behind(self) -> bytes:
        """Where the index keeps what may follow its last token. Worked out when it is asked for: it hashes them all."""
        if self._behind is None or self._behind[0] != self.tokens:
            # What follows is named in the segment's own positions, which may be others than those of who reads it:
            # where segments may be read at a shift, a place knows distances alone.
            rest = self.run.rest(self.tokens)
            self._behind = self.tokens, self.keys.place(rest.digest, rest.start)
        return self._behind[1]


@dataclass(eq=False, slots=True)
class Hold:
    """Beginnings of segments that must stay until this is released, as far as they are read.

    tokens: of each segment, how many. One that is cut in two is held in both parts, as far as that goes.
    """

    tokens: dict[Segment, int] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        return list(self.tokens)

    def slots(self) -> list[tuple[SlotRange, ...]]:
        """Where what is held lies. May be asked from any thread: what is cut meanwhile is as it was or as it is."""
        return [_beginning(segment.slots, tokens) for segment, tokens in list(self.tokens.items())]

    def add(self, segment: Segment, tokens: int) -> None:
        """Hold the first ``tokens`` tokens of a segment, or more where more of it is held already."""
        segment.holds.add(self)
        self.tokens[segment] = max(tokens, self.tokens.get(segment, 0))

    def shorten(self, segment: Segment, tokens: int) -> int:
        """Hold no more than that many tokens of a segment; returns how many more were held."""
        more = max(0, self.tokens[segment] - tokens)
        self.tokens[segment] -= more
        return more

    def release(self) -> None:
        for segment in self.tokens:
            segment.holds.discard(self)
        self.tokens.clear()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _beginning(slots: tuple[SlotRange, ...], tokens: int) -> tuple[SlotRange, ...]:
    return cut(slots, 0, min(tokens, sum(run.length for run in slots)))
