"""Finds unmarked text that comes again behind other text, and makes modules of it: ``find="content"``.

The unmarked texts of a prompt are cut by their content (``Borders``). ``SeenPieces`` has a hash of each piece of
earlier prompts and a tag of the text before it, no text. Token ids are compared where their KV is found. A piece behind
one of its first two texts does not count again, until a third text comes. So a conversation that continues reads the
piece as its earlier turns did, from the stored prefix.

A piece that came before behind other text becomes a part of its own. Behind its second text it is computed in place,
unless it is stored, and the engine stores it in idle time. From its third text on it is a part like a marked part.
Token ids and positions of the prompt stay the same.

``Borders`` cuts token ids where the text around them says so, so that equal text is cut alike anywhere. A place is a
border if no place near it has a higher rank. The rank is the kind of the place, then a hash of the 16 tokens behind it.
Headings and code fences come first, then blank lines, line ends and sentence ends, then all other places. The rule
looks at most 320 tokens to each side. So a text is cut alike behind any other text, except near its ends.

``SeenTexts`` has the texts of marked parts by their hashes. A later call can name a text without sending it.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from hashlib import sha256
from heapq import heapify, heappop, heapreplace
from itertools import islice, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from inlay.prompt.placement import ContentPart, Placed, PromptLayout
from inlay.types import Scope

#: The fewest and the most tokens of a piece. Most paragraphs are longer than the fewest, so the borders of documents
#: are found, even if all paragraphs look alike.
LEAST, MOST = 32, 1024

_WINDOW = 16  # tokens
_FACTOR = 0x9E3779B97F4A7C15
_POWERS = np.array([pow(_FACTOR, power, 2**64) for power in range(1, _WINDOW + 1)], np.uint64)
_HASH_BITS = 48

#: Of each kind of place, the tokens to both sides in which no other place has a higher rank. A narrow range makes more
#: borders. Kinds: any place, the end of a line or sentence, a blank line, a heading or fence.
_RANGES = (320, 192, 32, 32)
_PLAIN, _LINE, _BLANK, _HEADING = range(4)

#: Bits of a token. _ENDS_LINES counts line ends at its end, up to 2, in two bits.
_WHITE, _ENDS_LINES, _SENTENCE, _HEAD, _FENCE, _BREAKS = 1, 2, 8, 16, 32, 64
_HEADS = re.compile(r"#|<[A-Za-z]|---|===|\[\d*\]?$")
_FENCES = ("```", "~~~")
_ENDS = re.compile(r"[.!?。！？][\"')\]]*\s*$")

Ids = npt.NDArray[np.uint32]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Borders:
    """Cuts the token ids of one tokenizer.

    Args:
        tokenizer: names the text of each token. Its special and added tokens are never part of a piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def pieces(self, ids: Ids) -> list[tuple[int, int]]:
        """Return the pieces of a text as first and last-plus-one token, in order.

        Text before a special token, and text behind it, are cut apart. Pieces of fewer than LEAST tokens are left out.
        """
        known = len(self._special)  # a model may have more ids than its tokenizer
        outside = np.flatnonzero((ids >= known) | self._special[np.minimum(ids, known - 1)])
        edges = [-1, *outside.tolist(), len(ids)]
        found = []
        for before, end in pairwise(edges):
            first = before + 1
            if end - first >= LEAST:
                cuts = self._cuts(ids[first:end])
                found += [(first + a, first + b) for a, b in pairwise(cuts) if b - a >= LEAST]
        return found

    def _cuts(self, ids: Ids) -> list[int]:
        """Return the borders of a text without special tokens, with its start and its end."""
        kinds = self._kinds(ids)
        ranks = (kinds.astype(np.int64) << _HASH_BITS) | _hashes(ids)
        chosen = np.zeros(len(ids), bool)
        for kind, reach in enumerate(_RANGES):
            here = kinds == kind
            if here.any():
                chosen |= here & _highest(ranks, reach)
        chosen[0] = False
        cuts = [0, *np.flatnonzero(chosen).tolist(), len(ids)]
        return [0, *(cut for before, end in pairwise(cuts) for cut in _bounded(before, end, first=before == 0))]

    def _kinds(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Return the kind of the place before each token."""
        bits = self._bits[ids]
        lines = bits // _ENDS_LINES & 3
        white_line = (bits & _WHITE > 0) & (lines > 0)
        before, lines_before = _shifted(bits), _shifted(lines)
        ends_line = lines_before > 0
        blank = (lines_before > 1) | (_shifted(white_line) & (_shifted(lines_before) > 0))
        fence = (bits & _FENCE > 0) & ~np.append(bits[1:] & _BREAKS > 0, True)  # one that opens has a language
        kinds = np.where(ends_line | (before & _SENTENCE > 0), _LINE, _PLAIN).astype(np.uint8)
        kinds[blank] = _BLANK
        kinds[ends_line & ((bits & _HEAD > 0) | fence)] = _HEADING
        kinds[white_line] = _PLAIN  # blank lines belong to the piece before them
        return kinds

    @cached_property
    def _bits(self) -> npt.NDArray[np.uint8]:
        """The bits of each token."""
        every = [[i] for i in range(len(self._tokenizer))]
        texts = self._tokenizer.batch_decode(every, clean_up_tokenization_spaces=False)
        return np.array([_bits_of(str(text)) for text in texts], np.uint8)

    @cached_property
    def _special(self) -> npt.NDArray[np.bool_]:
        """True for each token that is no text."""
        special = np.zeros(len(self._tokenizer), bool)
        added = (i for i, token in self._tokenizer.added_tokens_decoder.items() if token.content.strip())
        known = [i for i in {*added, *self._tokenizer.all_special_ids} if i < len(special)]
        special[known] = True
        return special


def _bits_of(text: str) -> int:
    """Return the bits of a token with this text."""
    lines = text[len(text.rstrip()) :].count("\n")
    return (
        (_WHITE if text and not text.strip() else 0)
        | min(lines, 2) * _ENDS_LINES
        | (_SENTENCE if _ENDS.search(text) else 0)
        | (_HEAD if _HEADS.match(text) else 0)
        | (_FENCE if text.startswith(_FENCES) else 0)
        | (_BREAKS if text.startswith("\n") else 0)
    )


def _shifted(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """Return for each token the value of the token before it, and zero for the first."""
    return np.concatenate((np.zeros(1, values.dtype), values[:-1]))


def _hashes(ids: Ids) -> npt.NDArray[np.int64]:
    """Return a hash of the 16 tokens from each token on. The last 15 tokens have the hash 0."""
    found = np.zeros(len(ids), np.int64)
    views = np.lib.stride_tricks.sliding_window_view((ids.astype(np.uint64) + 1) * np.uint64(_FACTOR), _WINDOW)
    mixed = views @ _POWERS
    mixed ^= mixed >> np.uint64(29)
    found[: len(views)] = ((mixed * np.uint64(_FACTOR)) >> np.uint64(64 - _HASH_BITS)).astype(np.int64)
    return found


def _highest(ranks: npt.NDArray[np.int64], reach: int) -> npt.NDArray[np.bool_]:
    """Return True where no rank within ``reach`` before is as high, and none within ``reach`` behind is higher."""
    count, none = len(ranks), np.iinfo(np.int64).min
    padded = np.full(-(-count // reach) * reach + 2 * reach, none, np.int64)
    padded[reach : reach + count] = ranks
    blocks = padded.reshape(-1, reach)
    ahead = np.maximum.accumulate(blocks, axis=1).ravel()  # from the start of the block
    behind = np.maximum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()  # to the end of the block
    most = np.maximum(behind[: len(padded) - reach + 1], ahead[reach - 1 :])  # of ``reach`` tokens from each
    return (ranks > most[:count]) & (ranks >= most[reach + 1 : reach + 1 + count])


def _bounded(before: int, end: int, *, first: bool) -> list[int]:
    """Return the end of a piece, with more borders if the piece is longer than MOST.

    The new borders count from a border that the text before the piece does not move. For a text's first piece, this is
    its end; for other pieces, their start.
    """
    if first:
        return [*reversed(range(end - MOST, before, -MOST)), end]
    return [*range(before + MOST, end, MOST), end]


#: The size of the table.
MAX_BYTES = 64 << 20
_ENTRY_BYTES = 256  # of one text beside its characters
_SPARE = 32  # a full table drops this part of itself: 1 / _SPARE
_HASH = re.compile(r"[0-9a-f]{64}")


def text_hash(text: str) -> str:
    """Return the sha256 of a text's UTF-8 bytes, in 64 hexadecimal digits."""
    return sha256(text.encode(errors="surrogatepass")).hexdigest()


def is_hash(value: object) -> bool:
    """True for 64 hexadecimal digits in lower case."""
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


class SeenTexts:
    """The texts of each salt, in bounded memory. Thread-safe.

    A full table drops the least recent texts of the salts with the largest parts of it. It drops some more than needed,
    because each time it compares all salts.

    Args:
        max_bytes: the size of the table.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: dict[str, OrderedDict[str, str]] = {}  # salt → hash → text, the most recent last
        self._sizes: dict[str, int] = {}  # by salt
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The size of the table's contents."""
        return self._bytes

    def note(self, salt: str, texts: Iterable[str]) -> None:
        """Record texts that a request with this salt has."""
        hashed = [(text_hash(text), text) for text in texts]
        with self._lock:
            for digest, text in hashed:
                mine = self._texts.setdefault(salt, OrderedDict())
                if mine.pop(digest, None) is None:
                    self._grow(salt, _size(text))
                mine[digest] = text
                if self._bytes > self._max_bytes:
                    self._shrink()

    def find(self, salt: str, hashes: Sequence[str]) -> list[str | None]:
        """Return the texts of this salt with these hashes. None for an unknown one."""
        with self._lock:
            mine = self._texts.get(salt)
            return [None if mine is None else mine.get(digest) for digest in hashes]

    def forget(self, salt: str) -> None:
        """Drop the texts of a salt."""
        with self._lock:
            self._texts.pop(salt, None)
            self._bytes -= self._sizes.pop(salt, 0)

    def _grow(self, salt: str, size: int) -> None:
        self._sizes[salt] = self._sizes.get(salt, 0) + size
        self._bytes += size

    def _shrink(self) -> None:
        heap = [(-size, salt) for salt, size in self._sizes.items()]
        heapify(heap)
        most = self._max_bytes - self._max_bytes // _SPARE
        while self._bytes > most:
            salt = heap[0][1]
            mine = self._texts[salt]
            _, text = mine.popitem(last=False)
            self._grow(salt, -_size(text))
            if mine:
                heapreplace(heap, (-self._sizes[salt], salt))
            else:
                heappop(heap)
                del self._texts[salt], self._sizes[salt]


def _size(text: str) -> int:
    return 4 * len(text) + _ENTRY_BYTES  # a character takes up to four bytes


#: The size of the table. A test measures the size of an entry.
ENTRY_BYTES = 128
_SALT_BYTES = 1024  # of the bookkeeping of a salt
_KNOWN_SHARE = 3 / 4  # of a tenant's entries, at most, for known pieces while the table is full
_DROPPED = 64  # entries that are dropped at a time
#: The hash of a piece with its adapter, and a tag of the text before it, from 0 up to TAGS.
Sighting = tuple[int, int]
TAGS = 1 << 15  # both tags of a piece make an int of 28 bytes
_MANY = -1  # in place of the tags of a known piece


class Seen(Enum):
    """How often a piece has come behind different texts, this time included.

    Attributes:
        ONCE: it is new, or it comes again behind one of its first two texts and has had no third one.
        TWICE: it comes behind a second text.
        OFTEN: it came behind two other texts before.
    """

    ONCE = 1
    TWICE = 2
    OFTEN = 3


@dataclass(eq=False, slots=True)
class _Pieces:
    """The pieces of one salt, the most recently seen last.

    Attributes:
        once: hash → tag of the text before the piece.
        known: hash → both tags of a piece that came behind two texts, or _MANY.
    """

    once: dict[int, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return _SALT_BYTES + ENTRY_BYTES * (len(self.once) + len(self.known))


@dataclass(eq=False, slots=True)
class _TenantPieces:
    """The pieces of one tenant by salt, the most recently active salt last, and their size."""

    salts: OrderedDict[str, _Pieces] = field(default_factory=OrderedDict)
    bytes: int = 0
    known_bytes: int = 0


class SeenPieces:
    """The pieces of each salt, in bounded memory. Thread-safe.

    A full table drops entries of the tenant with the largest part of it. New text replaces pieces seen once, so it
    replaces neither known pieces nor those of smaller tenants.

    Args:
        max_bytes: the size of the table.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, _TenantPieces] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """The size of the table's contents."""
        return self._bytes

    def note(self, tenant: str, salt: str, sightings: Sequence[Sighting]) -> list[Seen]:
        """Record the pieces of a prompt. Returns how often each piece has come, this time included.

        Args:
            tenant: the tenant's name, for the bound of memory.
            salt: the cache salt.
            sightings: each piece with the tag of the text before it, in order.
        """
        with self._lock:
            mine = self._tenants.setdefault(tenant, _TenantPieces())
            pieces = mine.salts.get(salt)
            if pieces is None:
                pieces = mine.salts[salt] = _Pieces()
                self._grow(mine, _SALT_BYTES)
            mine.salts.move_to_end(salt)
            found = [self._sees(mine, pieces, *sighting) for sighting in sightings]
            while self._bytes > self._max_bytes:
                self._shrink()
            return found

    def forget(self, salt: str) -> None:
        """Drop the pieces of a salt."""
        with self._lock:
            for name in list(self._tenants):
                self._drop_salt(name, salt)

    def _sees(self, mine: _TenantPieces, pieces: _Pieces, piece: int, tag: int) -> Seen:
        both = pieces.known.pop(piece, None)
        if both is not None:
            again = both != _MANY and tag in divmod(both, TAGS)
            pieces.known[piece] = both if again else _MANY  # the most recent one
            return Seen.ONCE if again else Seen.OFTEN
        before = pieces.once.pop(piece, None)
        if before is not None and before != tag:
            pieces.known[piece] = before * TAGS + tag
            mine.known_bytes += ENTRY_BYTES
            return Seen.TWICE
        pieces.once[piece] = tag
        self._grow(mine, ENTRY_BYTES if before is None else 0)
        return Seen.ONCE

    def _grow(self, mine: _TenantPieces, size: int) -> None:
        mine.bytes += size
        self._bytes += size

    def _shrink(self) -> None:
        """Drop some entries of the largest tenant, from its least recently active salt that has any."""
        name, mine = max(self._tenants.items(), key=lambda item: item[1].bytes)
        crowded = mine.known_bytes > _KNOWN_SHARE * mine.bytes
        kinds = ("known", "once") if crowded else ("once", "known")
        salt, kind = next(
            ((salt, kind) for kind in kinds for salt, pieces in mine.salts.items() if getattr(pieces, kind)),
            (next(iter(mine.salts)), "once"),
        )
        pieces = mine.salts[salt]
        dropped = _drop(pieces.known if kind == "known" else pieces.once)
        mine.known_bytes -= ENTRY_BYTES * dropped if kind == "known" else 0
        self._grow(mine, -ENTRY_BYTES * dropped)
        if not pieces.once and not pieces.known:
            self._drop_salt(name, salt)

    def _drop_salt(self, name: str, salt: str) -> None:
        mine = self._tenants[name]
        pieces = mine.salts.pop(salt, None)
        if pieces is not None:
            mine.known_bytes -= ENTRY_BYTES * len(pieces.known)
            self._grow(mine, -pieces.bytes)
        if not mine.salts:
            del self._tenants[name]


def _drop(entries: dict[int, int]) -> int:
    """Drop the least recent entries. Returns their number."""
    old = list(islice(entries, _DROPPED))
    for each in old:
        del entries[each]
    return len(old)


Range = tuple[int, int]
"""First and last-plus-one."""


class PieceFinder:
    """Finds the pieces of prompts that earlier prompts of the same salt had behind other text. Thread-safe.

    Args:
        tokenizer: of the prompts.
        seen: the table of earlier pieces.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seen: SeenPieces | None = None) -> None:
        self.seen = SeenPieces() if seen is None else seen
        self._borders = Borders(tokenizer)

    def find(self, layout: PromptLayout, scope: Scope, adapter: bytes) -> PromptLayout:
        """Return a prompt with its known pieces as parts. Records all its pieces.

        Args:
            layout: a prompt without a schema.
            scope: its owner.
            adapter: the digest of its adapter.
        """
        ids = np.asarray(layout.ids, np.uint32)
        # Parts of an anchor are segments already, and the prefix tree finds the start of a prompt.
        anchor = sum(len(part.ids) for part in layout.anchor)
        pieces = [
            (first + start, first + end)
            for first, last in layout.texts
            for start, end in self._borders.pieces(ids[first:last])
            if first + start >= max(anchor, 1)
        ]
        if not pieces:
            return layout
        seen = self.seen.note(scope.tenant, scope.cache_salt, list(_sightings(ids, pieces, adapter)))
        found = [each for each in zip(pieces, seen, strict=True) if each[1] is not Seen.ONCE]
        return replace(layout, parts=tuple(_split(layout.parts, found))) if found else layout


def _sightings(ids: Ids, pieces: Sequence[Range], adapter: bytes) -> Iterator[Sighting]:
    """Yield the hash of each piece, and a tag of the text before it."""
    before, at = 0, 0
    for first, end in pieces:
        before = hash((before, ids[at:first].tobytes()))
        yield hash((adapter, ids[first:end].tobytes())), before % TAGS
        at = first


def _split(parts: Sequence[Placed], found: Sequence[tuple[Range, Seen]]) -> Iterator[Placed]:
    """Yield parts, with pieces cut out of them as parts of their own. Each piece lies in one part."""
    left = list(reversed(found))
    for part in parts:
        at = part.start
        while left and left[-1][0][1] <= part.end:
            (first, end), seen = left.pop()
            if first > at:
                yield _between(part, at, first)
            origin = part.origin if isinstance(part.origin, ContentPart) else ContentPart(True)
            origin = replace(origin, marked=seen is Seen.OFTEN, leads=False, automatic=True, found=True)
            yield Placed(part.ids[first - part.start : end - part.start], first, origin, part.kept)
            at = end
        if at == part.start:
            yield part
        elif at < part.end:
            yield _between(part, at, part.end)


def _between(part: Placed, first: int, end: int) -> Placed:
    return Placed(part.ids[first - part.start : end - part.start], first, None, part.kept)


def content_ranges(rendered: str, contents: Sequence[str]) -> list[Range]:
    """Return the ranges of characters at which a rendering has these contents of messages, in order.

    A template may write a content as JSON. Contents that are too short for a piece, and contents that the template
    rewrites, are left out.
    """
    found: list[Range] = []
    at = 0
    for content in contents:
        text = content.strip()
        if len(text) < LEAST:
            continue
        for written in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]):
            first = rendered.find(written, at)
            if first >= 0:
                at = first + len(written)
                found.append((first, at))
                break
    return found


def token_ranges(offsets: Sequence[Range], ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return the tokens that lie within ranges of characters. ``offsets`` has the characters of each token."""
    starts, ends = ([each[side] for each in offsets] for side in (0, 1))
    found = []
    for first, last in ranges:
        begin, end = bisect_left(starts, first), bisect_right(ends, last)
        if begin < end:
            found.append((begin, end))
    return tuple(found)
