"""Identity: a segment is identified by what it could attend to.

A Context is the flattened record of the tokens that stand before a segment: each one's id, its distance from the token
before it, and how its own KV was made. Because the record is a stream of tokens, cutting or joining segments never
changes it. Its digest, with the distance to the segment's first token, is the segment's context digest.

Nothing here knows where keys and values lie, or needs torch: whoever prepares prompts can name segments.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from inlay.errors import ParameterError

EMPTY = b""
LOSSLESS = "none"  # the codec of keys and values as they were computed
ROUNDED = ("int8", "fp8")  # KV dtypes over which a model is another one than over its own

_VERSION = 1  # of what is hashed and of what is written: other records never have the digest of these
_GROUP, _BREAK, _SALT, _REPAIR, _CODEC, _DIGEST, _BYTES, _ADAPTER, _MODEL = (
    b"inlay context %d %-6b" % (_VERSION, kind)
    for kind in (b"group", b"break", b"salt", b"repair", b"codec", b"digest", b"bytes", b"adapt", b"model")
)
_RECORD_BYTES = 8  # of one token: its id and its distance from the token before, 4 bytes each
_GROUP_TOKENS = 64
_GROUP_BYTES = _GROUP_TOKENS * _RECORD_BYTES
#: Version, flags, tokens, end, chain; the adapter where there is one, pending records and a checksum follow.
_WRITTEN = struct.Struct("<BBQQ32s")
_PRIVATE, _ADAPTED = 1, 2
_ADAPTER_BYTES = 32
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Context:
    """An immutable record of tokens in attention order, of constant size. ``Context()`` is the empty one.

    A record is public until ``keep_private`` makes it somebody's: from there on, others' records differ from it even
    where their tokens are the same.

    The stream is hashed in groups, each with the hash up to it: 64 tokens are a group, and so is, before its time, what
    stands in front of a token that was made under another context, or of where the record becomes private. So the
    groups depend on the stream alone, not on the pieces that it came in. What is hashed begins with its kind.

    A record that begins ``under`` an adapter says so before all else, so that nothing that was made with one is taken
    for what was made with another, or with the model alone.

    Of tokens that were made under one context, some may be computed anew where they stand: the stream then says before
    all of them which ones (``repaired``), and they are no breaks in it.

    chain: the hash of all whole groups.
    pending: the records of the tokens behind them, at most 63.
    tokens: how many it is of.
    end: the position behind the last one.
    private: whether a salt is in the chain.
    adapter: the digest of the adapter under which it begins, which is in the chain; b"" for the model alone.
    """

    chain: bytes = bytes(32)
    pending: bytes = b""
    tokens: int = 0
    end: int = 0
    private: bool = False
    adapter: bytes = b""

    @classmethod
    def under(cls, adapter: bytes) -> Context:
        """The empty record of what is made with an adapter; b"" for the model alone."""
        return cls(_hash(_ADAPTER, bytes(32), adapter), adapter=adapter) if adapter else cls()

    def digest(self, start: int) -> bytes:
        """The context digest of a token at position ``start`` that attends to all of this; EMPTY for nothing."""
        if not self.tokens and self.chain == bytes(32):
            return EMPTY
        gap = start - self.end if self.tokens else 0
        tail = self.tokens.to_bytes(8, "little") + gap.to_bytes(8, "little", signed=True)
        return _hash(_DIGEST, self.chain, tail + self.pending)

    def keep_private(self, salt: bytes) -> Context:
        """This record, and whatever follows it, for those alone who have this salt; b"" for everybody."""
        if not salt or self.private:
            return self
        chain = _hash(_SALT, self.chain, len(salt).to_bytes(8, "little") + salt + self.pending)
        return replace(self, chain=chain, pending=b"", private=True)

    def repaired(self, offsets: Sequence[int]) -> Context:
        """This record, where of what follows the tokens at these offsets are computed behind all that stands before.

        offsets: increasing, counted from the next token on.
        """
        said = hashlib.sha256(np.asarray(offsets, "<u4").tobytes()).digest()
        return replace(self, chain=_hash(_REPAIR, self.chain, said + self.pending), pending=b"")

    def through(self, codec: str) -> Context:
        """This record, for tokens behind it whose own KV has passed through a codec, which may have changed it."""
        if codec == LOSSLESS:
            return self
        name = codec.encode()
        return replace(self, chain=_hash(_CODEC, self.chain, bytes([len(name)]) + name + self.pending), pending=b"")

    def extend(self, ids: tuple[int, ...], start: int, made: bytes, continues: bool) -> Context:
        """This record with more tokens behind it.

        ids: tokens at consecutive positions from ``start``.
        made: the context digest that the first of them was made under.
        continues: whether that context is the one of the token before, and that token: then nothing new is said.
        """
        if not ids:
            return self
        chain, pending = self.chain, self.pending
        if not continues:
            chain, pending = _hash(_BREAK, chain, len(made).to_bytes(1, "little") + made + pending), b""
        # The distance is undefined for the first token of all: where it stands does not matter to what follows.
        pending += _records(ids, (start - self.end + 1) % (1 << 32) if self.tokens else 0)
        whole = len(pending) - len(pending) % _GROUP_BYTES
        for at in range(0, whole, _GROUP_BYTES):
            chain = _hash(_GROUP, chain, pending[at : at + _GROUP_BYTES])
        tokens, end = self.tokens + len(ids), start + len(ids)
        return Context(chain, pending[whole:], tokens, end, self.private, self.adapter)

    def to_bytes(self) -> bytes:
        """The record as bytes, at most 594 of them. No salt can be read from it."""
        flags = (_PRIVATE if self.private else 0) | (_ADAPTED if self.adapter else 0)
        body = _WRITTEN.pack(_VERSION, flags, self.tokens, self.end, self.chain) + self.adapter + self.pending
        return body + _checksum(body)

    @classmethod
    def from_bytes(cls, written: bytes) -> Context:
        """The record that ``to_bytes`` wrote. Raises ParameterError for one of another version, or damaged."""
        if written and written[0] != _VERSION:
            raise ParameterError(
                f"a context record has version {written[0]} and this inlay reads version {_VERSION}; "
                "run the same version of inlay on both sides"
            )
        body = written[:-_CHECKSUM_BYTES]
        adapted = _ADAPTER_BYTES if len(body) > 1 and body[1] & _ADAPTED else 0
        adapter, pending = body[_WRITTEN.size :][:adapted], body[_WRITTEN.size + adapted :]
        if len(body) < _WRITTEN.size + adapted or len(pending) >= _GROUP_BYTES or len(pending) % _RECORD_BYTES:
            raise ParameterError(
                f"a context record cannot have {len(written)} bytes; give all that Context.to_bytes wrote, and no more"
            )
        _, flags, tokens, end, chain = _WRITTEN.unpack_from(body)
        sound = tokens * _RECORD_BYTES >= len(pending) and (tokens or end == 0)
        if written[-_CHECKSUM_BYTES:] != _checksum(body) or not sound:
            raise ParameterError("a context record is damaged; give the bytes that Context.to_bytes wrote, unchanged")
        return cls(chain, pending, tokens, end, bool(flags & _PRIVATE), adapter)


def _records(ids: tuple[int, ...], gap: int) -> bytes:
    """Of tokens at consecutive positions, the first of them ``gap`` behind the token before."""
    numbers = array("I", (1,)) * (2 * len(ids))
    numbers[::2] = array("I", ids)
    numbers[1] = gap
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _hash(kind: bytes, chain: bytes, said: bytes) -> bytes:
    """The hash of one thing said behind a chain. Every field has a fixed length or says its own, but for the last."""
    return hashlib.sha256(kind + chain + said).digest()


def _checksum(body: bytes) -> bytes:
    return _hash(_BYTES, b"", body)[:_CHECKSUM_BYTES]


def fingerprint_under(fingerprint: bytes, adapter: bytes) -> bytes:
    """What tells a model with an adapter from others; its own fingerprint with none, b""."""
    return _hash(_MODEL, fingerprint, adapter) if adapter else fingerprint


@dataclass(frozen=True, slots=True)
class KeyMaker:
    """Turns what identifies a segment into its key.

    positioned: whether the start position matters (learned positions, or shifts refused).
    numerics: which versions of what computes them made the keys and values, so that an upgrade never replays what an
        old fault computed; "" where they don't outlive the process.
    """

    fingerprint: bytes
    kv_dtype: str
    codec: str
    salt: bytes
    positioned: bool
    numerics: str = ""

    def place(self, context_digest: bytes, start: int) -> bytes:
        """sha256 of all of that but the token ids: under it the index keeps what may come next."""
        return self._digest([context_digest, self._start(start)])

    def key(self, context_digest: bytes, ids: tuple[int, ...], start: int) -> bytes:
        """sha256 of model fingerprint, KV dtype and codec, tenant salt, numerics, context digest, ids, and start."""
        return self._digest([context_digest, np.asarray(ids, "<u4").tobytes(), self._start(start)])

    def _start(self, start: int) -> bytes:
        return start.to_bytes(8, "little", signed=True) if self.positioned else b"anywhere"

    def _digest(self, parts: list[bytes]) -> bytes:
        digest = hashlib.sha256()
        made = (self.fingerprint, self.kv_dtype.encode(), self.codec.encode(), self.salt, self.numerics.encode())
        for part in (*made, *parts):
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
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + len(self.ids)

    @property
    def digest(self) -> bytes:
        """Its context digest."""
        return self.before.digest(self.start)

    def after(self, tokens: int) -> Context:
        """The record behind the first ``tokens`` tokens."""
        return self.before.extend(self.ids[:tokens], self.start, self.digest, self.continues)

    def borders(self) -> Iterator[tuple[int, Context]]:
        """Where groups of its record end: how many tokens it has up to there, and the record behind them.

        A stream of tokens has the same borders whatever pieces it came in.
        """
        record, at, continues = self.before, 0, self.continues
        made = EMPTY if continues else self.digest
        while True:
            begun = len(record.pending) // _RECORD_BYTES if continues else 0
            stop = at + _GROUP_TOKENS - begun
            if stop > len(self.ids):
                return
            record = record.extend(self.ids[at:stop], self.start + at, made, continues)
            at, continues = stop, True
            yield at, record

    def beginning(self, tokens: int) -> TokenRun:
        """The first ``tokens`` tokens."""
        return TokenRun(self.ids[:tokens], self.start, self.before, self.continues)

    def rest(self, tokens: int) -> TokenRun:
        """What is left behind the first ``tokens`` tokens."""
        return TokenRun(self.ids[tokens:], self.start + tokens, self.after(tokens)) if tokens else self


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SegmentSpec(TokenRun):
    """A segment as it is asked for, whether or not it exists: tokens at the positions that they are encoded at.

    parent: the last segment that it attends to; that one's parent is the one before, and so on. None for no context.
    record: the flattened context behind its last token, for what follows it.
    codec: what its KV has passed through. source: of a lossy form, the segment as it is computed; see ``through``.
    """

    parent: SegmentSpec | None
    key: bytes
    record: Context
    codec: str = LOSSLESS
    source: SegmentSpec | None = None
    _forms: dict[str, SegmentSpec] = field(default_factory=dict, repr=False)

    @property
    def lossless(self) -> SegmentSpec:
        """The segment as it is computed."""
        return self if self.source is None else self.source

    def through(self, codec: str, keys: KeyMaker) -> SegmentSpec:
        """This segment as it comes back from a tier that has it through a codec.

        It is another segment: its context digest, and that of whatever stands behind it, is one that nothing has which
        was computed behind the same text alone. Its key is that of the segment, with the codec. What modules are
        encoded behind is never such a form.
        """
        if codec == self.codec:
            return self
        assert self.source is None, "a form is made of what was computed"
        made = self._forms.get(codec)
        if made is None:
            before = self.before.through(codec)
            digest = before.digest(self.start)
            made = SegmentSpec(
                self.ids,
                self.start,
                before,
                parent=self.parent,
                key=replace(keys, codec=codec).key(self.digest, self.ids, self.start),
                record=before.extend(self.ids, self.start, digest, continues=True),
                codec=codec,
                source=self,
            )
            self._forms[codec] = made
        return made

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


def made_under(spec: SegmentSpec, keys: KeyMaker, salt: bytes) -> bool:
    """Whether a segment is one that somebody with this salt has: its key is worked out anew."""
    made: SegmentSpec | None = None
    for each in (*spec.lossless.context, spec.lossless):
        context = () if made is None else (made,)
        made = specify(each.ids, each.start, context, keys, salt if each.before.private else b"", each.before.adapter)
    return made is not None and made.key == spec.lossless.key


def specify(
    ids: tuple[int, ...],
    start: int,
    context: Sequence[SegmentSpec],
    keys: KeyMaker,
    salt: bytes = b"",
    adapter: bytes = b"",
) -> SegmentSpec:
    """The spec of these tokens at ``start``, attending to ``context``.

    context: each segment must have been made under all those before it; so the last one alone says as much as all.
    salt: whose it is; b"" for everybody's. adapter: what it is made with, where there is no context that says so.
    """
    parent = context[-1] if context else None
    before = (Context.under(adapter) if parent is None else parent.record).keep_private(salt)
    digest = before.digest(start)
    record = before.extend(ids, start, digest, continues=True)
    return SegmentSpec(ids, start, before, parent=parent, key=keys.key(digest, ids, start), record=record)
