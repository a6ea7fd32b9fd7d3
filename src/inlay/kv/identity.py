"""Identity: a segment is identified by the text that it could attend to.

A Context is the flattened record of the tokens in front of a segment. It holds each token's id, its distance from the
previous token, and how its KV was made. Cutting or joining segments never changes this stream of tokens. The context
digest hashes the record and its distance to the segment's first token.

This module needs no torch and knows no KV, so a prompt can be prepared and named without a model.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from inlay.errors import ParameterError

EMPTY = b""
LOSSLESS = "none"  # the codec of KV as it was computed

_VERSION = 1  # of the hash and of the byte format; other versions never give the same digests
_GROUP, _BREAK, _SALT, _RECOMPUTE, _CODEC, _DIGEST, _BYTES, _ADAPTER, _MODEL, _LABEL = (
    b"inlay context %d %-6b" % (_VERSION, kind)
    for kind in (b"group", b"break", b"salt", b"repair", b"codec", b"digest", b"bytes", b"adapt", b"model", b"label")
)
_RECORD_BYTES = 8  # per token: its id and its distance from the previous token, 4 bytes each
_GROUP_TOKENS = 64
_GROUP_BYTES = _GROUP_TOKENS * _RECORD_BYTES
#: Version, flags, tokens, end, chain. The adapter (if any), pending records and a checksum follow.
_WRITTEN = struct.Struct("<BBQQ32s")
_PRIVATE, _ADAPTED = 1, 2
_ADAPTER_BYTES = 32
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Context:
    """An immutable record of tokens in attention order, of constant size. ``Context()`` is the empty one.

    A record is public until ``keep_private`` adds a cache salt. From there on, records with other salts differ even
    where their tokens are the same.

    The stream is hashed in groups, each together with the hash up to it. A group has 64 tokens. It ends early before a
    token that was made under another context, and where the record becomes private. So the groups depend on the stream
    alone, not on its pieces. Every hash input begins with its kind.

    A record that begins ``under`` an adapter hashes the adapter first. So KV made with one adapter never matches KV
    made with another adapter or with the model alone.

    Some tokens made under one context may be recomputed. The stream then lists these in front of all of them
    (``recomputed``), and they do not break the stream.

    Attributes:
        chain: The hash of all whole groups.
        pending: The records of the tokens behind them, at most 63.
        tokens: The number of tokens in the record.
        end: The position behind the last one.
        private: True if a salt is in the chain.
        adapter: The digest of the adapter under which it begins, which is in the chain; b"" for the model alone.
    """

    chain: bytes = bytes(32)
    pending: bytes = b""
    tokens: int = 0
    end: int = 0
    private: bool = False
    adapter: bytes = b""

    @classmethod
    def under(cls, adapter: bytes) -> Context:
        """The empty record under an adapter; b"" for the model alone."""
        return cls(_hash(_ADAPTER, bytes(32), adapter), adapter=adapter) if adapter else cls()

    def digest(self, start: int) -> bytes:
        """The context digest of a token at position ``start`` that attends to the whole record; EMPTY for no
        context.
        """
        if not self.tokens and self.chain == bytes(32):
            return EMPTY
        gap = start - self.end if self.tokens else 0
        tail = self.tokens.to_bytes(8, "little") + gap.to_bytes(8, "little", signed=True)
        return _hash(_DIGEST, self.chain, tail + self.pending)

    def keep_private(self, salt: bytes) -> Context:
        """Return this record restricted to one cache salt, with all text that follows. b"" for public text."""
        if not salt or self.private:
            return self
        chain = _hash(_SALT, self.chain, len(salt).to_bytes(8, "little") + salt + self.pending)
        return replace(self, chain=chain, pending=b"", private=True)

    def recomputed(self, offsets: Sequence[int]) -> Context:
        """Return this record for following tokens, some of which are recomputed behind all that precedes them.

        The record lists the recomputed tokens first.

        Args:
            offsets: of the recomputed tokens, increasing, counted from the next token on.
        """
        said = hashlib.sha256(np.asarray(offsets, "<u4").tobytes()).digest()
        return replace(self, chain=_hash(_RECOMPUTE, self.chain, said + self.pending), pending=b"")

    def through(self, codec: str) -> Context:
        """Return this record for following tokens whose KV has passed through a codec and may have changed."""
        if codec == LOSSLESS:
            return self
        name = codec.encode()
        return replace(self, chain=_hash(_CODEC, self.chain, bytes([len(name)]) + name + self.pending), pending=b"")

    def extend(self, ids: tuple[int, ...], start: int, made: bytes, continues: bool) -> Context:
        """This record with more tokens behind it.

        Args:
            ids: tokens at consecutive positions from ``start``.
            made: the context digest under which the first of them was made.
            continues: True if that context is the previous token's context followed by that token. No break is then
                hashed.
        """
        if not ids:
            return self
        chain, pending = self.chain, self.pending
        if not continues:
            chain, pending = _hash(_BREAK, chain, len(made).to_bytes(1, "little") + made + pending), b""
        # The first token has no distance: its position does not matter to later text.
        pending += _records(ids, (start - self.end + 1) % (1 << 32) if self.tokens else 0)
        whole = len(pending) - len(pending) % _GROUP_BYTES
        for at in range(0, whole, _GROUP_BYTES):
            chain = _hash(_GROUP, chain, pending[at : at + _GROUP_BYTES])
        tokens, end = self.tokens + len(ids), start + len(ids)
        return Context(chain, pending[whole:], tokens, end, self.private, self.adapter)

    def to_bytes(self) -> bytes:
        """The record as bytes, at most 594 of them. The salt cannot be recovered from it."""
        flags = (_PRIVATE if self.private else 0) | (_ADAPTED if self.adapter else 0)
        body = _WRITTEN.pack(_VERSION, flags, self.tokens, self.end, self.chain) + self.adapter + self.pending
        return body + _checksum(body)

    @classmethod
    def from_bytes(cls, written: bytes) -> Context:
        """Read a record that ``to_bytes`` wrote.

        Raises:
            ParameterError: it has another version or is damaged.
        """
        if written and written[0] != _VERSION:
            raise ParameterError(
                f"a context record has version {written[0]} and this inlay reads version {_VERSION}; "
                "run the same version of inlay on both sides",
                code="cache.other_version",
            )
        body = written[:-_CHECKSUM_BYTES]
        adapted = _ADAPTER_BYTES if len(body) > 1 and body[1] & _ADAPTED else 0
        adapter, pending = body[_WRITTEN.size :][:adapted], body[_WRITTEN.size + adapted :]
        if len(body) < _WRITTEN.size + adapted or len(pending) >= _GROUP_BYTES or len(pending) % _RECORD_BYTES:
            raise ParameterError(
                f"a context record cannot have {len(written)} bytes; give all that Context.to_bytes wrote, and no more",
                code="cache.damaged_record",
            )
        _, flags, tokens, end, chain = _WRITTEN.unpack_from(body)
        sound = tokens * _RECORD_BYTES >= len(pending) and (tokens or end == 0)
        if written[-_CHECKSUM_BYTES:] != _checksum(body) or not sound:
            raise ParameterError(
                "a context record is damaged; give the bytes that Context.to_bytes wrote, unchanged",
                code="cache.damaged_record",
            )
        return cls(chain, pending, tokens, end, bool(flags & _PRIVATE), adapter)


def _records(ids: tuple[int, ...], gap: int) -> bytes:
    """Records of tokens at consecutive positions. ``gap`` is the first token's distance from the previous one."""
    numbers = array("I", (1,)) * (2 * len(ids))
    numbers[::2] = array("I", ids)
    numbers[1] = gap
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _hash(kind: bytes, chain: bytes, said: bytes) -> bytes:
    """The hash of one item behind a chain. Every field but the last has a fixed length or includes its length."""
    return hashlib.sha256(kind + chain + said).digest()


def _checksum(body: bytes) -> bytes:
    return _hash(_BYTES, b"", body)[:_CHECKSUM_BYTES]


def fingerprint_under(fingerprint: bytes, adapter: bytes) -> bytes:
    """The fingerprint of a model with an adapter; the model's own for b""."""
    return _hash(_MODEL, fingerprint, adapter) if adapter else fingerprint


@dataclass(frozen=True, slots=True)
class KeyMaker:
    """Computes segment keys.

    Args:
        positioned: True if the start position matters (learned positions, or shifts refused).
        numerics: versions of the code that computes KV, so that an upgrade never replays KV from an old fault. "" if
            the KV does not outlive the process.
    """

    fingerprint: bytes
    kv_dtype: str
    codec: str
    salt: bytes
    positioned: bool
    numerics: str = ""

    def place(self, context_digest: bytes, start: int) -> bytes:
        """The index node: sha256 of the key's parts without token ids. The segments that may come next lie there."""
        return self._digest([context_digest, self._start(start)])

    def key(self, context_digest: bytes, ids: tuple[int, ...], start: int) -> bytes:
        """sha256 of model fingerprint, KV dtype and codec, cache salt, numerics, context digest, ids, and start."""
        return self._digest([context_digest, np.asarray(ids, "<u4").tobytes(), self._start(start)])

    def _start(self, start: int) -> bytes:
        return start.to_bytes(8, "little", signed=True) if self.positioned else b"anywhere"

    def _digest(self, parts: list[bytes]) -> bytes:
        digest = _begun(self.fingerprint, self.kv_dtype, self.codec, self.salt, self.numerics).copy()
        for part in parts:
            digest.update(_sized(part))
        return digest.digest()


@lru_cache(maxsize=64)
def _begun(fingerprint: bytes, kv_dtype: str, codec: str, salt: bytes, numerics: str) -> hashlib._Hash:
    """The hash of the parts that all digests of a KeyMaker begin with. Copy it before you add to it."""
    digest = hashlib.sha256()
    for part in (fingerprint, kv_dtype.encode(), codec.encode(), salt, numerics.encode()):
        digest.update(_sized(part))
    return digest


def _sized(part: bytes) -> bytes:
    """A part behind its length, so that no two lists of parts give the same bytes."""
    return len(part).to_bytes(8, "little") + part


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """Tokens at consecutive positions, and the record of the tokens in front of them.

    Attributes:
        start: the position of the first token.
        before: the flattened context in front of it.
        continues: True if the previous token belongs to this context and was made under it; see Context.extend.
    """

    ids: tuple[int, ...]
    start: int
    before: Context
    continues: bool = True
    _digest: bytes = field(default=b"", init=False, repr=False)

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.ids)

    @property
    def digest(self) -> bytes:
        """The context digest of its first token."""
        if not self._digest:
            object.__setattr__(self, "_digest", self.before.digest(self.start))
        return self._digest

    def after(self, tokens: int) -> Context:
        """The record behind the first ``tokens`` tokens."""
        return self.before.extend(self.ids[:tokens], self.start, self.digest, self.continues)

    def borders(self) -> Iterator[tuple[int, Context]]:
        """Yield the end of each hash group: the number of the run's tokens up to there, and the record behind them.

        A stream of tokens has the same borders in whatever pieces it comes.
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

    def prefix(self, tokens: int) -> TokenRun:
        """The first ``tokens`` tokens."""
        return TokenRun(self.ids[:tokens], self.start, self.before, self.continues)

    def rest(self, tokens: int) -> TokenRun:
        """The run without its first ``tokens`` tokens."""
        return TokenRun(self.ids[tokens:], self.start + tokens, self.after(tokens)) if tokens else self


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SegmentSpec(TokenRun):
    """A segment to look up or to encode: tokens at the positions at which they are encoded.

    Attributes:
        parent: the last segment that it attends to; its own parent is the one before. None for no context, or for an
            unknown one; see ``detached``.
        record: the flattened context behind its last token.
        codec: the codec that its KV has passed through.
        source: for a lossy form, the segment as it was computed; see ``through``.
        text: True for the text of a prompt, which is read up to any token. False for a module, which is read whole.
        labels: names by which it can be evicted; see ``labels_of``. They are no part of its key.
    """

    parent: SegmentSpec | None
    key: bytes
    record: Context
    codec: str = LOSSLESS
    source: SegmentSpec | None = None
    text: bool = False
    labels: tuple[bytes, ...] = ()
    _forms: dict[str, SegmentSpec] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[bytes, ...]:
        """Its key and its labels."""
        return (self.key, *self.labels)

    @property
    def lossless(self) -> SegmentSpec:
        """The segment as it was computed."""
        return self if self.source is None else self.source

    def through(self, codec: str, keys: KeyMaker) -> SegmentSpec:
        """The form of this segment that comes back from a tier with this codec.

        A lossy form is a segment of its own: its context digest, and the digest of all text behind it, differs from
        those of computed KV. Its key is the segment's key with the codec. No module is encoded behind a lossy form.
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
                labels=self.labels,
            )
            self._forms[codec] = made
        return made

    @property
    def detached(self) -> bool:
        """True if its context is not known as segments, so that it can be read but not encoded."""
        return self.parent is None and self.before.tokens > 0

    @property
    def context(self) -> tuple[SegmentSpec, ...]:
        """The segments that it attends to, in order, at the positions at which they are encoded.

        Built on every call: stored lists would need a number of references that grows with the square of the modules.
        """
        found = []
        spec = self.parent
        while spec is not None:
            found.append(spec)
            spec = spec.parent
        return tuple(reversed(found))


#: The size of a label.
LABEL_BYTES = 16
#: The label of text of prompts.
TEXT_LABEL = b"text of a prompt"


def labels_of(owner: bytes, schema: str, module: str = "") -> tuple[bytes, bytes]:
    """Return the labels of a schema's segments: that of the schema, and that of the module.

    A schema that is replaced under its name, or laid out again, keeps its labels. So they name its earlier segments.

    Args:
        owner: the salt of the schema. b"" for a public one.
        module: the path of the module. "" for text outside modules.
    """
    named = _hash(_LABEL, hashlib.sha256(owner).digest(), schema.encode("utf-8", "surrogatepass"))
    return named[:LABEL_BYTES], _hash(_LABEL, named, module.encode("utf-8", "surrogatepass"))[:LABEL_BYTES]


def owner_label(owner: bytes) -> bytes:
    """Return the label of all segments of an owner: of its schemas, and of marked parts of its messages."""
    return labels_of(owner, "")[0]  # no schema has this name


def detached_spec(run: TokenRun, keys: KeyMaker) -> SegmentSpec:
    """Return the spec of a stored run whose context is known as a record alone."""
    key = keys.key(run.digest, run.ids, run.start)
    record = run.after(len(run.ids))
    return SegmentSpec(run.ids, run.start, run.before, run.continues, parent=None, key=key, record=record)


def made_under(spec: SegmentSpec, keys: KeyMaker, salt: bytes) -> bool:
    """True if a caller with this salt has the segment. Recomputes its key."""
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
    labels: tuple[bytes, ...] = (),
    group: bytes = b"",
) -> SegmentSpec:
    """The spec of these tokens at ``start``, attending to ``context``.

    Args:
        context: segments, each made under all those before it; so the last one identifies them all.
        salt: the cache salt; b"" for public.
        adapter: the adapter, used only without ``context``, which includes it otherwise.
        labels: see SegmentSpec.
        group: in place of ``labels``, a label that it shares with others. Its own label is made of its key.
    """
    parent = context[-1] if context else None
    before = (Context.under(adapter) if parent is None else parent.record).keep_private(salt)
    digest = before.digest(start)
    record = before.extend(ids, start, digest, continues=True)
    key = keys.key(digest, ids, start)
    if group:
        labels = group, key[:LABEL_BYTES]
    return SegmentSpec(ids, start, before, parent=parent, key=key, record=record, labels=labels)


#: The cache salt and the adapter of a text. A request finds texts with its own alone.
TextOwner = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class MovedText:
    """Tokens that are stored as text of an earlier request, behind other text.

    Args:
        spec: the stored text up to the last of these tokens. See ``SegmentSpec.detached``.
        first: the number of the first of these tokens in ``spec``.
        offset: its number in the wanted tokens.
        length: the number of tokens.
    """

    spec: SegmentSpec
    first: int
    offset: int
    length: int
