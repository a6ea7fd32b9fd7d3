"""A splice: what one request attends to, as an ordered list of stored segments and fresh token runs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from inlay.kv.identity import Context, SegmentSpec, TokenRun
from inlay.prompt.request import EngineRequest, PromptPart


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


def splice_of(request: EngineRequest, stored: Container[bytes] = ()) -> Splice:
    """What a request attends to, with at least one fresh token at its end.

    stored: the keys of those of its candidates that are.
    """
    if request.policy.reads_nothing:
        return tuple(Fresh(part.ids, part.start) for part in request.parts)
    return open_end(splice_parts(request.parts, salt=request.salt.encode(), stored=stored))


def splice_parts(parts: Sequence[PromptPart], *, salt: bytes = b"", stored: Container[bytes] = ()) -> Splice:
    """Segments for the parts that have one, each as its encoding context has it; exact prefixes for the others.

    salt: whose the request is; b"" for one without an owner. stored: see ``PromptPart.segment``.
    """
    splice: list[Cached | Fresh] = []
    record = Context()  # what stands before the next part in this splice
    before = Context()  # what the part before it was made under, and that part
    shifts = _Shifts()
    chosen = (
        _Run(part.ids, part.start, part.segment(stored), salt if part.owned else b"", part.kept) for part in parts
    )
    for part in _joined(chosen):
        record, before = record.keep_private(part.salt), before.keep_private(part.salt)
        here, gap, spec = record.digest(part.start), part.start - record.end, part.spec
        made = here if spec is None else spec.digest
        continues = made == before.digest(before.end + gap)
        run = TokenRun(part.ids, part.start, record, continues)
        record = record.extend(part.ids, part.start, made, continues)
        if spec is None:
            splice.append(Fresh(part.ids, part.start, run if part.kept else None))
            before = record
        else:
            shift = part.start - spec.start
            displaced = shifts.differ(spec, shift)
            splice.append(Cached(spec, part.start, len(spec.ids), exact=made == here, displaced=displaced))
            shifts.place(spec, shift)
            before = spec.record
    return tuple(splice)


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens of a prompt with their segment, if they are one, whose they are, and whether they may be kept."""

    ids: tuple[int, ...]
    start: int
    spec: SegmentSpec | None
    salt: bytes
    kept: bool

    def goes_on_in(self, other: _Run) -> bool:
        """Whether the two are one run of tokens that the request computes for itself."""
        both = self.spec is None and other.spec is None
        same = self.salt == other.salt and self.kept == other.kept
        return both and same and self.start + len(self.ids) == other.start


def _joined(parts: Iterable[_Run]) -> list[_Run]:
    """The parts, those that go on in each other as one."""
    runs: list[list[_Run]] = []
    for part in parts:
        if runs and runs[-1][-1].goes_on_in(part):
            runs[-1].append(part)
        elif part.ids:
            runs.append([part])
    return [run[0] if len(run) == 1 else replace(run[0], ids=tuple(_ids(run))) for run in runs]


def _ids(parts: Iterable[_Run]) -> Iterator[int]:
    return (token for part in parts for token in part.ids)


class _Shifts:
    """How far the segments of a splice are moved, each with all that it attends to."""

    def __init__(self) -> None:
        self._placed: dict[SegmentSpec, int] = {}
        self._known: dict[SegmentSpec, frozenset[int]] = {}  # the shifts of a segment and of its context, two at most

    def differ(self, spec: SegmentSpec, shift: int) -> bool:
        """Whether any segment that this one attends to is moved by something else."""
        return spec.parent is not None and not self._shifts(spec.parent) <= {shift}

    def place(self, spec: SegmentSpec, shift: int) -> None:
        if spec in self._known:
            self._known.clear()  # it stands behind something that attends to it
        self._placed[spec] = shift

    def _shifts(self, spec: SegmentSpec) -> frozenset[int]:
        missing: list[SegmentSpec] = []
        at: SegmentSpec | None = spec
        while at is not None and at not in self._known:
            missing.append(at)
            at = at.parent
        found = frozenset() if at is None else self._known[at]
        for each in reversed(missing):
            if each in self._placed and len(found) < 2:
                found |= {self._placed[each]}
            self._known[each] = found
        return found


def open_end(splice: Splice) -> Splice:
    """The same with at least one fresh token at the end: somebody has to compute the logits behind the last one."""
    last = splice[-1] if splice else None
    if not isinstance(last, Cached):
        return splice
    shorter = replace(last, length=last.length - 1)
    tail = Fresh(last.spec.ids[-1:], last.start + last.length - 1)
    return (*splice[:-1], *([shorter] if shorter.length else []), tail)
