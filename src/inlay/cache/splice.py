"""A splice: what one request attends to, as an ordered list of stored segments and fresh token runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inlay.attention.plan import Piece, pieces_at
from inlay.cache.pool import cut
from inlay.cache.segment import Context, KeyMaker, Segment, SegmentSpec, specify
from inlay.layout import Hole, TextRun
from inlay.placement import Placed


@dataclass(frozen=True, slots=True)
class Cached:
    """A stored, or to be stored, segment in a splice.

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
    """Tokens that the request computes for itself."""

    ids: tuple[int, ...]
    start: int


Splice = tuple[Cached | Fresh, ...]


def splice_fresh(parts: Sequence[Placed]) -> Splice:
    """Everything computed: reuse off."""
    return tuple(Fresh(part.ids, part.start) for part in parts)


def splice_exact(parts: Sequence[Placed], keys: KeyMaker) -> Splice:
    """Segments for the schema's text up to the first text of the request, each made under all that stands before it."""
    splice: list[Cached | Fresh] = []
    specs: list[SegmentSpec] = []
    for part in parts:
        if part.origin is None or len(specs) < len(splice):
            splice.append(Fresh(part.ids, part.start))
        else:
            specs.append(specify(part.ids, part.start, tuple(specs), keys))
            splice.append(Cached(specs[-1], part.start, len(part.ids), exact=True, displaced=False))
    return tuple(splice)


def splice_modules(parts: Sequence[Placed], spec_of: Callable[[TextRun | Hole], SegmentSpec]) -> Splice:
    """Segments for all text of the schema, each as its encoding context has it."""
    splice: list[Cached | Fresh] = []
    record = Context()  # what stands before the next part in this splice
    before = Context()  # what the part before it was made under, and that part
    placed: dict[bytes, int] = {}  # key of a segment → its shift here
    for part in parts:
        here, gap = record.digest(part.start), part.start - record.end
        spec = None if part.origin is None else spec_of(part.origin)
        made = here if spec is None else spec.digest
        continues = made == before.digest(before.end + gap)
        record = record.extend(part.ids, part.start, made, continues)
        if spec is None:
            splice.append(Fresh(part.ids, part.start))
            before = record
        else:
            shift = part.start - spec.start
            displaced = any(placed.get(other.key, shift) != shift for other in spec.context)
            splice.append(Cached(spec, part.start, len(spec.ids), exact=made == here, displaced=displaced))
            placed[spec.key] = shift
            before = spec.record
    return tuple(splice)


def open_end(splice: Splice) -> Splice:
    """The same with at least one fresh token at the end: somebody has to compute the logits behind the last one."""
    last = splice[-1] if splice else None
    if not isinstance(last, Cached):
        return splice
    shorter = replace(last, length=last.length - 1)
    tail = Fresh(last.spec.ids[-1:], last.start + last.length - 1)
    return (*splice[:-1], *([shorter] if shorter.length else []), tail)


def pieces(segment: Segment, shift: int, length: int) -> tuple[Piece, ...]:
    """The first ``length`` tokens of a stored segment as a plan sees them."""
    return pieces_at(cut(segment.runs, 0, length), segment.start, shift)
