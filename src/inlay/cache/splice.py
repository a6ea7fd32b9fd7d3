"""A splice: what one request attends to, as an ordered list of stored segments and fresh token runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inlay.attention.plan import Piece, pieces_at
from inlay.cache.index import Found
from inlay.cache.pool import cut
from inlay.cache.segment import Context, SegmentSpec, TokenRun
from inlay.layout import Hole, TextRun
from inlay.placement import Placed


@dataclass(frozen=True, slots=True)
class Cached:
    """A module's segment in a splice, stored or to be stored.

    start: the position that the request reads it at.
    length: how many of its tokens the request reads; all, or all but the last.
    exact: whether it was made under just what stands before it here, at shift zero relative to all of it.
    displaced: whether it stands elsewhere relative to its context than when it was encoded.
    """

    spec: SegmentSpec
    start: int
    length: int
    exact: bool
    displaced: bool


@dataclass(frozen=True, slots=True)
class Fresh:
    """Tokens that the request computes for itself, or finds computed under just what stands before them here.

    run: with its record; None where nothing may be reused.
    """

    ids: tuple[int, ...]
    start: int
    run: TokenRun | None = None


Splice = tuple[Cached | Fresh, ...]


def splice_fresh(parts: Sequence[Placed]) -> Splice:
    """Everything computed: reuse off."""
    return tuple(Fresh(part.ids, part.start) for part in parts)


def splice_exact(parts: Sequence[Placed]) -> Splice:
    """Everything by its exact prefix, wherever its text comes from."""
    return splice_modules(parts, None)


def splice_modules(parts: Sequence[Placed], spec_of: Callable[[TextRun | Hole], SegmentSpec] | None) -> Splice:
    """Segments for all text of the schema, each as its encoding context has it."""
    splice: list[Cached | Fresh] = []
    record = Context()  # what stands before the next part in this splice
    before = Context()  # what the part before it was made under, and that part
    placed: dict[bytes, int] = {}  # key of a segment → its shift here
    for part in _joined(parts, spec_of is None):
        here, gap = record.digest(part.start), part.start - record.end
        spec = None if part.origin is None or spec_of is None else spec_of(part.origin)
        made = here if spec is None else spec.digest
        continues = made == before.digest(before.end + gap)
        run = TokenRun(part.ids, part.start, record, continues)
        record = record.extend(part.ids, part.start, made, continues)
        if spec is None:
            splice.append(Fresh(part.ids, part.start, run))
            before = record
        else:
            shift = part.start - spec.start
            displaced = any(placed.get(other.key, shift) != shift for other in spec.context)
            splice.append(Cached(spec, part.start, len(spec.ids), exact=made == here, displaced=displaced))
            placed[spec.key] = shift
            before = spec.record
    return tuple(splice)


def _joined(parts: Sequence[Placed], every: bool) -> list[Placed]:
    """Neighbours that the request brings itself, as one run of tokens. every: whether all parts count as such."""
    joined: list[Placed] = []
    for part in parts:
        own = Placed(part.ids, part.start, None) if every else part
        last = joined[-1] if joined else None
        if last is not None and own.origin is None and last.origin is None and last.end == own.start:
            joined[-1] = Placed(last.ids + own.ids, last.start, None)
        elif own.ids:
            joined.append(own)
    return joined


def open_end(splice: Splice) -> Splice:
    """The same with at least one fresh token at the end: somebody has to compute the logits behind the last one."""
    last = splice[-1] if splice else None
    if not isinstance(last, Cached):
        return splice
    shorter = replace(last, length=last.length - 1)
    tail = Fresh(last.spec.ids[-1:], last.start + last.length - 1)
    return (*splice[:-1], *([shorter] if shorter.length else []), tail)


def pieces(found: Found, start: int, tokens: int) -> tuple[Piece, ...]:
    """The first ``tokens`` tokens of what was found, read from position ``start`` on, as a plan sees them."""
    read: tuple[Piece, ...] = ()
    for segment, length in found.parts:
        taken = min(length, tokens)
        if taken <= 0:
            break
        read += pieces_at(cut(segment.slots, 0, taken), segment.run.start, start - segment.run.start)
        start, tokens = start + taken, tokens - taken
    return read
