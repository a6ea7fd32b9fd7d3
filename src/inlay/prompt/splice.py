"""A splice: what one request attends to, as an ordered list of stored segments and fresh token runs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from inlay.kv.identity import Context, SegmentSpec, TokenRun
from inlay.prompt.request import EngineRequest, PromptPart

#: Tokens of modules that are computed anew, as offsets into the prompt's parts, by where these start.
Repairs = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Cached:
    """A module's segment in a splice, stored or to be stored, or a range of it.

    start: the position that the request reads the first of these tokens at.
    length: how many tokens the range has; all, or all but the last, where none are computed anew.
    exact: whether it was made under just what stands before it here, at shift zero relative to all of it.
    displaced: whether it stands elsewhere relative to its context than when it was encoded.
    form: what it was encoded as, a word of FORMS.
    first: the token of the segment that the range begins with.
    left_out: tokens of the range that are not read, as ``Repaired`` has them; offsets into the segment, increasing.
    """

    spec: SegmentSpec
    start: int
    length: int
    exact: bool
    displaced: bool
    form: str
    first: int = 0
    left_out: tuple[int, ...] = ()

    def read(self, stored: int) -> int:
        """How many tokens the request reads where the first ``stored`` ones of the segment are stored."""
        among = min(max(stored - self.first, 0), self.length)
        return among - sum(offset < self.first + among for offset in self.left_out)


@dataclass(frozen=True, slots=True)
class Repaired:
    """Tokens within the range of a segment before it, computed anew as it stands here, or found computed so.

    Each attends to what stands before it in the splice: what is read of the segment, and those of these tokens.

    positions: of each token, increasing.
    run: the tokens without what stands between them, behind a record that says which they are of what.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    run: TokenRun


@dataclass(frozen=True, slots=True)
class Fresh:
    """Tokens that the request computes for itself, or finds computed under just what stands before them here.

    run: with its record; None where nothing may be reused.
    instead: how many of its first tokens are read, as they stand here, in place of modules.
    """

    ids: tuple[int, ...]
    start: int
    run: TokenRun | None = None
    instead: int = 0


Splice = tuple[Cached | Repaired | Fresh, ...]


@dataclass(frozen=True, slots=True)
class InPlace:
    """Parts of a prompt that are read as full prefill has them, whatever segments they could be read from.

    starts: where they start. salt: whose their keys and values are; b"" for everybody's.
    """

    starts: frozenset[int] = frozenset()
    salt: bytes = b""


def splice_of(
    request: EngineRequest,
    stored: Container[bytes] = (),
    repairs: Repairs | None = None,
    in_place: InPlace | None = None,
) -> Splice:
    """What a request attends to, with at least one fresh token at its end.

    stored: the keys of those of its candidates that are. repairs: what is computed anew all the same.
    """
    if request.policy.reads_nothing:
        return tuple(_all_fresh(request.parts))
    salt, adapter = request.salt.encode(), request.adapter
    chosen = splice_parts(request.parts, salt=salt, stored=stored, repairs=repairs, in_place=in_place, adapter=adapter)
    return open_end(chosen)


def splice_parts(
    parts: Sequence[PromptPart],
    *,
    salt: bytes = b"",
    stored: Container[bytes] = (),
    repairs: Repairs | None = None,
    in_place: InPlace | None = None,
    adapter: bytes = b"",
) -> Splice:
    """Segments for the parts that have one, each as its encoding context has it; exact prefixes for the others.

    What is computed anew belongs to the request: it is found by those alone who have its salt.

    salt: whose the request is; b"" for one without an owner. stored: see ``PromptPart.segment``. adapter: see
    EngineRequest; what was made with another one, or with none, is never exact, nor is anything behind it.
    """
    repairs, in_place = repairs or {}, in_place or InPlace()
    splice: list[Cached | Repaired | Fresh] = []
    record = Context.under(adapter)  # what stands before the next part in this splice
    before = record  # what the part before it was made under, and that part
    shifts = _Shifts()
    runs = (run for each in parts for run in _runs(each, stored, repairs.get(each.start, ()), salt, in_place))
    for part in _joined(runs):
        record, before = record.keep_private(part.salt), before.keep_private(part.salt)
        here, gap, spec = record.digest(part.start), part.start - record.end, part.spec
        made = here if spec is None else _made(spec, part.first)
        continues = made == before.digest(before.end + gap)
        if spec is None:
            run = TokenRun(part.ids, part.start, record, continues)
            splice.append(Fresh(part.ids, part.start, run if part.kept else None, part.instead))
            record = record.extend(part.ids, part.start, made, continues)
            before = record
            continue
        shift = part.start - part.first - spec.start
        displaced = shifts.differ(spec, shift)
        left_out = tuple(part.first + offset for offset in part.repaired)
        splice.append(Cached(spec, part.start, len(part.ids), made == here, displaced, part.form, part.first, left_out))
        shifts.place(spec, shift)
        before = spec.record
        if part.repaired:
            record = record.keep_private(salt).repaired(part.repaired).extend(part.ids, part.start, made, False)
            splice.append(_repaired(part, record))
        else:
            record = record.extend(part.ids, part.start, made, continues)
    return tuple(splice)


def _made(spec: SegmentSpec, first: int) -> bytes:
    """The digest that a token of a segment was made under."""
    return spec.rest(first).digest if first else spec.digest


def _repaired(part: _Run, record: Context) -> Repaired:
    """Tokens of a part that are computed anew. record: behind all of the part, which says so of them."""
    ids = tuple(part.ids[offset] for offset in part.repaired)
    # The record is said to be of the same tokens once more, so that this is no place that other text could follow at.
    run = TokenRun(ids, record.end, record.repaired(part.repaired))
    return Repaired(ids, tuple(part.start + offset for offset in part.repaired), run)


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens of a prompt with their segment, if they are a range of one, and whose they are.

    kept: whether what is computed of them may be. first: the token of the segment that they begin with.
    repaired: which of them are computed anew; offsets into them. form: of ``PromptPart``. instead: of ``Fresh``.
    """

    ids: tuple[int, ...]
    start: int
    spec: SegmentSpec | None
    salt: bytes
    kept: bool = True
    first: int = 0
    repaired: tuple[int, ...] = ()
    form: str = ""
    instead: int = 0

    def goes_on_in(self, other: _Run) -> bool:
        """Whether the two are one run of tokens that the request computes for itself."""
        both = self.spec is None and other.spec is None
        same = self.salt == other.salt and self.kept == other.kept
        return both and same and self.start + len(self.ids) == other.start


def _runs(
    part: PromptPart, stored: Container[bytes], repaired: tuple[int, ...], salt: bytes, in_place: InPlace
) -> Iterator[_Run]:
    """A part as what it is read from: what is computed anew at its beginning is like the request's own text."""
    if part.start in in_place.starts:
        yield _Run(part.ids, part.start, None, in_place.salt, part.kept, instead=len(part.ids))
        return
    spec, owner = part.segment(stored), salt if part.owned else b""
    if spec is None or not repaired:
        yield _Run(part.ids, part.start, spec, owner, part.kept, form=part.form_of(spec))
        return
    first = next((at for at, offset in enumerate(repaired) if at != offset), len(repaired))
    if first:
        yield _Run(part.ids[:first], part.start, None, salt)
    if first < len(part.ids):
        rest = tuple(offset - first for offset in repaired[first:])
        yield _Run(
            part.ids[first:], part.start + first, spec, owner, first=first, repaired=rest, form=part.form_of(spec)
        )


def _joined(parts: Iterable[_Run]) -> list[_Run]:
    """The parts, those that go on in each other as one."""
    runs: list[list[_Run]] = []
    for part in parts:
        if runs and runs[-1][-1].goes_on_in(part):
            runs[-1].append(part)
        elif part.ids:
            runs.append([part])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _as_one(runs: Sequence[_Run]) -> _Run:
    return replace(runs[0], ids=tuple(_ids(runs)), instead=sum(run.instead for run in runs))


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
        spec = spec.lossless  # what was encoded behind it names that one
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


def _all_fresh(parts: Sequence[PromptPart]) -> Iterator[Fresh]:
    """Parts as runs of tokens at consecutive positions, however many parts a run is of."""
    start, ids = parts[0].start, list(parts[0].ids)
    for part in parts[1:]:
        if part.start != start + len(ids):
            yield Fresh(tuple(ids), start)
            start, ids = part.start, []
        ids += part.ids
    yield Fresh(tuple(ids), start)


def open_end(splice: Splice) -> Splice:
    """The same with at least one fresh token at the end: somebody has to compute the logits behind the last one."""
    end = len(splice) - isinstance(splice[-1], Repaired) if splice else 0
    last = splice[end - 1] if splice else None
    if not isinstance(last, Cached):
        return splice
    shorter = replace(last, length=last.length - 1)
    assert last.first + shorter.length not in last.left_out, "the last token of all is computed in any case"
    tail = Fresh(last.spec.ids[-1:], last.start + last.length - 1)
    return (*splice[: end - 1], *([shorter] if shorter.length else []), *splice[end:], tail)
