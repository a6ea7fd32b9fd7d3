"""The composed prompt of one request: an ordered list of stored segments, recomputed tokens and new tokens.

``Prefix``: the prefix of a prompt up to its last module, as full prefill computes it, may be read in place of modules.
It is the same text at the same positions, encoded in one pass, so every module has seen the text before it. Its first
parts may still be modules, if they were encoded behind an equal context. The rest belongs to one salt, even over a
public schema, so that no tenant learns which modules others combine.

``choose_tokens`` chooses the tokens of modules that are recomputed, if the policy asks for it. Exact modules need none.
Of the others, ``linked`` takes the first tokens of each module. The other policies rank the tokens of all modules
together. ``profiled`` ranks by the expected deviation: the module's deviation profile, scaled by the length of the text
before the module. A module without a profile gets as many of its first tokens. ``query`` ranks by the attention of the
new text, ``blend`` by the change of keys in this prompt. Both need a pass beforehand.

The pass for ``query`` computes the new text behind the modules against the cached prompt. The pass for ``blend``
computes the modules' tokens at their places, through the first layers only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inlay.kv.identity import Context, MovedText, SegmentSpec, TextOwner, TokenRun
from inlay.policy import Recompute
from inlay.prompt.request import EngineRequest, PromptPart

#: The most pieces of text that one prompt reads behind other text. Each costs a search through the rest of the prompt.
_MOST_MOVED = 64

#: Start of a prompt part → the recomputed tokens of its module, as offsets into the part.
RecomputedOffsets = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """Tokens of a composed prompt that are read from a module's segment, which is stored or will be stored.

    Args:
        start: the position at which the request reads the first of these tokens.
        length: the number of tokens that are read. Without recomputed tokens, it is all of the segment, or all but its
            last token.
        exact: True if the segment's context equals the text before it in this prompt, at the same distances.
        displaced: True if the segment's distance from its context differs from that at encoding.
        form: the encoding form, a word of FORMS.
        first: the segment's token that the range begins with.
        left_out: recomputed tokens of the range, which are not read. Increasing offsets into the segment.
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
        """Return how many tokens the request reads if the segment's first ``stored`` tokens are stored."""
        among = min(max(stored - self.first, 0), self.length)
        return among - sum(offset < self.first + among for offset in self.left_out)


@dataclass(frozen=True, slots=True)
class RecomputedSpan:
    """Recomputed tokens within the range of the segment before them.

    Each attends to the composed prompt before it: the tokens read of the segment, and the earlier recomputed tokens.

    Args:
        positions: of each token, increasing.
        run: the tokens alone, behind a record that says which tokens of which text they are.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    run: TokenRun

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class NewSpan:
    """Tokens that the request computes, or finds stored with an exact context.

    Args:
        run: the tokens with their record. None if nothing may be reused.
        instead: the number of its first tokens that are read in place of modules.
    """

    ids: tuple[int, ...]
    start: int
    run: TokenRun | None = None
    instead: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)


ComposedPrompt = tuple[CachedSpan | RecomputedSpan | NewSpan, ...]


class HasTokens(Protocol):
    """Anything with a number of ``tokens``, such as a prefix match."""

    @property
    def tokens(self) -> int: ...


class StoredTexts(Protocol):
    """The stored texts of requests; see kv.store.SegmentStore."""

    @property
    def text_version(self) -> int: ...

    def longest(self, run: TokenRun) -> HasTokens: ...

    def windows(self, ids: Sequence[int]) -> npt.NDArray[np.uint64]: ...

    def moved_text(self, owner: TextOwner, ids: Sequence[int], windows: npt.NDArray[np.uint64]) -> MovedText | None: ...


@dataclass(frozen=True, slots=True)
class InPlace:
    """Parts of a prompt that are read as full prefill computes them, in place of module segments.

    Args:
        starts: the start positions of these parts.
        salt: the salt of their KV; b"" if it is shared.
    """

    starts: frozenset[int] = frozenset()
    salt: bytes = b""


def compose(
    request: EngineRequest,
    stored: Container[bytes] = (),
    recomputed_offsets: RecomputedOffsets | None = None,
    in_place: InPlace | None = None,
    texts: StoredTexts | None = None,
) -> ComposedPrompt:
    """Return the composed prompt of a request, with at least one new token at its end.

    Args:
        stored: the keys of its stored candidates.
        recomputed_offsets: the tokens to recompute.
        in_place: the parts that are read in place of modules.
        texts: to read own text as it was computed behind other text. None to compute it.
    """
    if request.policy.reads_nothing:
        return tuple(_all_fresh(request.parts))
    salt, adapter = request.salt.encode(), request.adapter
    chosen = compose_parts(
        request.parts,
        salt=salt,
        stored=stored,
        recomputed_offsets=recomputed_offsets,
        in_place=in_place,
        adapter=adapter,
        texts=texts if request.moves_text else None,
    )
    return open_end(chosen)


def compose_parts(
    parts: Sequence[PromptPart],
    *,
    salt: bytes = b"",
    stored: Container[bytes] = (),
    recomputed_offsets: RecomputedOffsets | None = None,
    in_place: InPlace | None = None,
    adapter: bytes = b"",
    texts: StoredTexts | None = None,
) -> ComposedPrompt:
    """Choose segments for the parts that have candidates, and exact prefixes for the others.

    Recomputed tokens belong to the request: only requests with its salt find them.

    Args:
        salt: the request's salt; b"" for none.
        stored: see ``PromptPart.segment``.
        adapter: see EngineRequest. A segment of another adapter, or of none, is never exact, nor is the text behind it.
        texts: see ``compose``.
    """
    recomputed_offsets, in_place = recomputed_offsets or {}, in_place or InPlace()
    composed: list[CachedSpan | RecomputedSpan | NewSpan] = []
    record = Context.under(adapter)  # the text before the next part in this composed prompt
    before = record  # the context of the previous part, with that part
    shifts = _Shifts()
    runs = (
        run for each in parts for run in _runs(each, stored, recomputed_offsets.get(each.start, ()), salt, in_place)
    )
    left, moved = deque(_joined(runs)), 0
    while left:
        part = left.popleft()
        record, before = record.keep_private(part.salt), before.keep_private(part.salt)
        here, gap, spec = record.digest(part.start), part.start - record.end, part.spec
        made = here if spec is None else _made(spec, part.first)
        continues = made == before.digest(before.end + gap)
        if spec is None:
            run = TokenRun(part.ids, part.start, record, continues)
            if texts is not None and part.kept and not part.settled and moved < _MOST_MOVED:
                cut = _moved(part, run, texts, (salt.decode(), adapter), last=not left)
                if cut:
                    left.extendleft(reversed(cut))
                    moved += 1
                    continue
            composed.append(NewSpan(part.ids, part.start, run if part.kept else None, part.instead))
            record = record.extend(part.ids, part.start, made, continues)
            before = record
            continue
        shift = part.start - part.first - spec.start
        displaced = shift != 0 if spec.detached else shifts.differ(spec, shift)
        left_out = tuple(part.first + offset for offset in part.recomputed)
        composed.append(
            CachedSpan(spec, part.start, len(part.ids), made == here, displaced, part.form, part.first, left_out)
        )
        shifts.place(spec, shift)
        before = spec.record
        if part.recomputed:
            record = record.keep_private(salt).recomputed(part.recomputed).extend(part.ids, part.start, made, False)
            composed.append(_recomputed(part, record))
        else:
            record = record.extend(part.ids, part.start, made, continues)
    return tuple(composed)


def _moved(
    part: _TokenStretch, run: TokenRun, texts: StoredTexts, owner: TextOwner, *, last: bool
) -> list[_TokenStretch]:
    """Split own text at the first tokens that are not stored behind this text, but behind other text.

    Returns:
        The text before these tokens, the tokens, and the text behind them. Empty if there are no such tokens.
    """
    found = texts.longest(run).tokens
    windows = texts.windows(part.ids) if part.windows is None else part.windows
    text = texts.moved_text(owner, part.ids[found : len(part.ids) - last], windows[found:])
    if text is None:
        return []
    first = found + text.offset
    end = first + text.length
    before = replace(part, ids=part.ids[:first], instead=min(part.instead, first), settled=True)
    read = _TokenStretch(part.ids[first:end], part.start + first, text.spec, part.salt, first=text.first, form="moved")
    behind = replace(
        part, ids=part.ids[end:], start=part.start + end, instead=max(0, part.instead - end), windows=windows[end:]
    )
    return [each for each in (before, read, behind) if each.ids]


def _made(spec: SegmentSpec, first: int) -> bytes:
    """Return the context digest of a segment's token number ``first``."""
    return spec.rest(first).digest if first else spec.digest


def _recomputed(part: _TokenStretch, record: Context) -> RecomputedSpan:
    """Return the recomputed tokens of a part. ``record`` covers the whole part."""
    ids = tuple(part.ids[offset] for offset in part.recomputed)
    # The record names the same tokens twice, so that no other text can follow at this place.
    run = TokenRun(ids, record.end, record.recomputed(part.recomputed))
    return RecomputedSpan(ids, tuple(part.start + offset for offset in part.recomputed), run)


@dataclass(frozen=True, slots=True)
class _TokenStretch:
    """Tokens of a prompt with their salt and, if they are a range of a segment, its spec.

    Args:
        kept: if True, their KV may be stored.
        first: the segment's token that they begin with.
        recomputed: the recomputed tokens, as offsets into them.
        form: see ``PromptPart``.
        instead: see ``NewSpan``.
        settled: True for own text that is not looked for behind other text.
        windows: the hashes of the tokens, so that a text with many moved pieces is hashed once. None: not hashed yet.
    """

    ids: tuple[int, ...]
    start: int
    spec: SegmentSpec | None
    salt: bytes
    kept: bool = True
    first: int = 0
    recomputed: tuple[int, ...] = ()
    form: str = ""
    instead: int = 0
    settled: bool = False
    windows: npt.NDArray[np.uint64] | None = field(default=None, compare=False)

    def goes_on_in(self, other: _TokenStretch) -> bool:
        """True if both are one run of tokens that the request computes."""
        both = self.spec is None and other.spec is None
        same = self.salt == other.salt and self.kept == other.kept
        return both and same and self.start + len(self.ids) == other.start


def _runs(
    part: PromptPart, stored: Container[bytes], recomputed: tuple[int, ...], salt: bytes, in_place: InPlace
) -> Iterator[_TokenStretch]:
    """Split a part into runs. Recomputed tokens at its start become the request's own text."""
    if part.start in in_place.starts:
        yield _TokenStretch(part.ids, part.start, None, in_place.salt, part.kept, instead=len(part.ids))
        return
    spec, owner = part.segment(stored), salt if part.owned else b""
    if spec is None or not recomputed:
        yield _TokenStretch(part.ids, part.start, spec, owner, part.kept, form=part.form_of(spec))
        return
    first = next((at for at, offset in enumerate(recomputed) if at != offset), len(recomputed))
    if first:
        yield _TokenStretch(part.ids[:first], part.start, None, salt)
    if first < len(part.ids):
        rest = tuple(offset - first for offset in recomputed[first:])
        yield _TokenStretch(
            part.ids[first:], part.start + first, spec, owner, first=first, recomputed=rest, form=part.form_of(spec)
        )


def _joined(parts: Iterable[_TokenStretch]) -> list[_TokenStretch]:
    """Join neighbouring parts that form one run."""
    runs: list[list[_TokenStretch]] = []
    for part in parts:
        if runs and runs[-1][-1].goes_on_in(part):
            runs[-1].append(part)
        elif part.ids:
            runs.append([part])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _as_one(runs: Sequence[_TokenStretch]) -> _TokenStretch:
    return replace(runs[0], ids=tuple(_ids(runs)), instead=sum(run.instead for run in runs))


def _ids(parts: Iterable[_TokenStretch]) -> Iterator[int]:
    return (token for part in parts for token in part.ids)


class _Shifts:
    """The shifts of the segments in a composed prompt and of their contexts."""

    def __init__(self) -> None:
        self._placed: dict[SegmentSpec, int] = {}
        self._known: dict[SegmentSpec, frozenset[int]] = {}  # the shifts of a segment and of its context, two at most

    def differ(self, spec: SegmentSpec, shift: int) -> bool:
        """True if any segment in the context of ``spec`` is read at another shift."""
        return spec.parent is not None and not self._shifts(spec.parent) <= {shift}

    def place(self, spec: SegmentSpec, shift: int) -> None:
        spec = spec.lossless  # segments encoded behind it name the lossless one
        if spec in self._known:
            self._known.clear()  # it may stand behind segments that attend to it
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


def _all_fresh(parts: Sequence[PromptPart]) -> Iterator[NewSpan]:
    """Yield parts as runs of tokens at consecutive positions."""
    start, ids = parts[0].start, list(parts[0].ids)
    for part in parts[1:]:
        if part.start != start + len(ids):
            yield NewSpan(tuple(ids), start)
            start, ids = part.start, []
        ids += part.ids
    yield NewSpan(tuple(ids), start)


def open_end(composed: ComposedPrompt) -> ComposedPrompt:
    """Make the last token a new one, because the logits behind it must be computed."""
    end = len(composed) - isinstance(composed[-1], RecomputedSpan) if composed else 0
    last = composed[end - 1] if composed else None
    if not isinstance(last, CachedSpan):
        return composed
    shorter = replace(last, length=last.length - 1)
    assert last.first + shorter.length not in last.left_out, "the last token of all is computed in any case"
    tail = NewSpan(last.spec.ids[-1:], last.start + last.length - 1)
    return (*composed[: end - 1], *([shorter] if shorter.length else []), *composed[end:], tail)


#: Prefix of a salt for KV made of public text. No salt starts with this byte, because salts are UTF-8.
_OWN = b"\xff"


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a prefix, which other prompts may share up to here.

    Args:
        run: its tokens, behind the text before them.
        key: the digest behind it; equal keys mean equal prefixes.
        parts: how many of the prompt's parts the prefix has up to here.
        segments: the keys and labels of the segments that a module could be read from; () for other text.
    """

    run: TokenRun
    key: bytes
    parts: int
    segments: tuple[bytes, ...]

    @property
    def module(self) -> bool:
        """True if this part is a module."""
        return bool(self.segments)


class Prefix:
    """The prefix of a prompt, immutable and so thread-safe.

    Attributes:
        nodes: its parts behind the leading exact modules; the last one is a module.
        adapter: the digest of the adapter that computes it; b"" for the model alone.
    """

    __slots__ = ("_parts", "_runs", "_salt", "_whose", "adapter", "nodes")

    def __init__(self, parts: tuple[PromptPart, ...], exact: int, salt: bytes, adapter: bytes = b"") -> None:
        """Take the prompt's parts up to its last module. The first ``exact`` of them are read as modules."""
        self._parts = parts
        self._salt = salt
        self.adapter = adapter
        # KV of private parts is found like the request's other text.
        public = any(not part.owned for part in parts)
        starts = frozenset(part.start for part in parts[exact:] if part.ids)
        self._whose = InPlace(starts, _OWN + salt if public else salt)
        self._runs = tuple(part.run for part in self.composed(len(parts)) if isinstance(part, NewSpan) and part.run)
        self.nodes = tuple(self._nodes(exact))

    def composed(self, parts: int) -> ComposedPrompt:
        """Return the composed prompt of the first ``parts`` parts."""
        return compose_parts(self._parts[:parts], salt=self._salt, in_place=self._whose, adapter=self.adapter)

    @property
    def whose(self) -> bytes:
        """Return the salt of the KV that is read in place of modules."""
        return self._whose.salt

    def modules(self, end: int) -> frozenset[bytes]:
        """The keys and labels of the segments that its parts up to position ``end`` may be read from."""
        return frozenset(name for part in self._parts if part.start < end for name in _names(part))

    def stored(self, longest: Callable[[TokenRun], int]) -> int:
        """Return how many leading nodes are stored. ``longest`` returns the stored tokens of a run."""
        tokens = 0
        for run in self._runs:
            found = longest(run)
            tokens += found
            if found < len(run.ids):
                break
        count = 0
        for node in self.nodes:
            tokens -= len(node.run.ids)
            if tokens < 0:
                break
            count += 1
        return count

    def in_place(self, nodes: int) -> InPlace:
        """Return the parts to read in place of modules if the first ``nodes`` nodes are stored."""
        parts = max((node.parts for node in self.nodes[:nodes] if node.module), default=0)
        starts = (part.start for part in self._parts[:parts] if part.start in self._whose.starts)
        return InPlace(frozenset(starts), self._whose.salt)

    def _nodes(self, exact: int) -> Iterator[Node]:
        runs = iter(self._runs)
        rest: TokenRun | None = None
        for number, part in enumerate(self._parts[exact:], exact + 1):
            if not part.ids:
                continue
            if rest is None or not rest.ids:
                rest = next(runs)
            run, rest = rest.prefix(len(part.ids)), rest.rest(len(part.ids))
            yield Node(run, rest.digest, number, _names(part))


def _names(part: PromptPart) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(name for spec in part.candidates for name in spec.names))


def prefix_of(request: EngineRequest) -> Prefix | None:
    """Return the prefix of a request; None if the policy has no promotion or all modules are exact."""
    if not request.policy.reads_promoted:
        return None
    parts, salt, adapter = request.parts, request.salt.encode(), request.adapter
    exact = _exact(parts, salt, adapter)
    kept = next((number for number, part in enumerate(parts) if number >= exact and not part.kept), len(parts))
    end = max((number for number, part in enumerate(parts[:kept], 1) if part.candidates and part.ids), default=0)
    return Prefix(parts[:end], exact, salt, adapter) if end > exact else None


@dataclass(frozen=True, slots=True)
class AsModules:
    """A prefix of exact modules.

    Args:
        salt: of the request.
        record: the modules' record, at the positions of their encoding.
        shift: the distance from these positions to those in the prompt.
    """

    salt: bytes
    record: Context
    shift: int = 0

    @classmethod
    def none(cls, salt: bytes, adapter: bytes) -> AsModules:
        """Return the empty prefix."""
        return cls(salt, Context.under(adapter))

    def longer(self, parts: Iterable[PromptPart]) -> tuple[int, AsModules]:
        """Return how many of the next parts are exact modules in every form, and the prefix with them."""
        record, shift, count = self.record, self.shift, 0
        for part in parts:
            if not part.encode:
                break
            spec = part.candidates[-1]
            here = record.keep_private(self.salt if part.owned else b"").digest(part.start - shift)
            if any(each.digest != here for each in part.candidates):
                break
            record, shift, count = spec.record, part.start - spec.start, count + 1
        return count, AsModules(self.salt, record, shift)


def _exact(parts: tuple[PromptPart, ...], salt: bytes, adapter: bytes) -> int:
    """Return how many leading parts are exact modules that are always encoded."""
    return AsModules.none(salt, adapter).longer(parts)[0]


#: By segment key, the deviation of each token. Any scale, the same for all.
Profiles = Mapping[bytes, npt.NDArray[np.float16]]

#: By the module's start in the prompt, the weight of each token, (tokens,). Any scale.
Scores = Mapping[int, npt.NDArray[np.floating]]


#: Deviations grow as a power of the number of preceding tokens unseen by the encoding (docs/internals/results.md).
_EXPONENT = 0.25


@dataclass(frozen=True, slots=True)
class RecomputedTokens:
    """The recomputed tokens of a composed prompt.

    Attributes:
        offsets: by the start of each part, the offsets of its chosen tokens.
        tokens: their number.
        linked: how many of them are first tokens, chosen without scores.
        unprofiled: True if a module had no profile and the policy would have used one.
    """

    offsets: RecomputedOffsets
    tokens: int = 0
    linked: int = 0
    unprofiled: bool = False


def choose_tokens(
    recompute: Recompute | None,
    composed: ComposedPrompt,
    profiles: Profiles,
    scores: Scores | None = None,
    unprofiled: Recompute | None = None,
) -> RecomputedTokens:
    """Choose the tokens of a composed prompt that a policy recomputes.

    A share counts all tokens of inexact modules.

    Args:
        recompute: None for no recomputation.
        composed: the prompt without recomputed tokens. Its last token is computed in any case.
        profiles: see ``Profiles``.
        scores: the scores of a pass, for all inexact modules, if the policy needs them.
        unprofiled: see ReusePolicy.
    """
    modules = inexact_modules(composed)
    if recompute is None or not modules:
        return RecomputedTokens({})
    expected = expected_deviations(composed, profiles) if recompute.profiled else {}
    matters = _scores(modules, expected, scores or {}) if recompute.by_attention or recompute.by_keys else expected
    missing = (
        {part.start for part in modules if part.spec.lossless.key not in profiles} if recompute.profiled else set()
    )
    first = {part.start for part in modules if part.start not in matters} | (missing if unprofiled else set())
    known = [part for part in modules if part.start not in first]
    others = unprofiled or recompute
    linked = {part.start: tuple(range(others.tokens(part.length))) for part in modules if part.start in first}
    chosen = {**linked, **_most(known, recompute, matters)}
    offsets = {start: some for start, some in chosen.items() if some}
    wants_profiles = recompute.amount > 0 and bool(missing)
    return RecomputedTokens(offsets, sum(map(len, offsets.values())), sum(map(len, linked.values())), wants_profiles)


def inexact_modules(composed: ComposedPrompt) -> list[CachedSpan]:
    """The modules that were encoded under another context than that of a full prefill."""
    return [part for part in composed if isinstance(part, CachedSpan) and not part.exact]


def expected_deviations(composed: ComposedPrompt, profiles: Profiles) -> dict[int, npt.NDArray[np.floating]]:
    """By start, the expected deviation of each token of the modules that have a profile, (tokens,). Any scale.

    Profiles were made behind samples of equal length. So each is scaled by a power of the text length before the
    module.
    """
    moves, before = {}, 0
    for part in composed:
        if isinstance(part, CachedSpan) and not part.exact and part.spec.lossless.key in profiles:
            moved = profiles[part.spec.lossless.key][: part.length].astype(np.float32)
            moves[part.start] = moved * max(1, before - part.spec.before.tokens) ** _EXPONENT
        before += part.length
    return moves


def _scores(modules: list[CachedSpan], known: Scores, scores: Scores) -> Scores:
    """Return by start the score of each token: that of the selecting pass, times the profile if there are profiles.

    A module without a profile gets the mean of all others. Without a pass and profiles, all scores are 0: then all
    tokens are chosen, or none.

    Args:
        modules: the inexact modules.
        known: see ``expected_deviations``.
        scores: of the selecting pass.
    """
    found = {part.start: scores.get(part.start, np.zeros(part.length))[: part.length] for part in modules}
    if not known:
        return found
    mean = np.concatenate(list(known.values())).mean(dtype=np.float64)
    return {start: own * known.get(start, mean) for start, own in found.items()}


def _most(modules: list[CachedSpan], recompute: Recompute, matters: Scores) -> dict[int, tuple[int, ...]]:
    """Choose the tokens with the highest scores, over all modules together. Of equal tokens, the earlier is chosen."""
    if not modules:
        return {}
    scores = np.concatenate([matters[part.start][: part.length] for part in modules])
    most = np.argsort(-scores, kind="stable")[: recompute.tokens(scores.size)]
    of = np.zeros(scores.size, dtype=bool)
    of[most] = True
    borders = np.cumsum([part.length for part in modules])[:-1]
    return {
        part.start: tuple(np.flatnonzero(own).tolist())
        for part, own in zip(modules, np.split(of, borders), strict=True)
    }


#: The most tokens at a prompt's end whose attention chooses tokens.
MOST_ROWS = 256


def selection_prompt(recompute: Recompute | None, composed: ComposedPrompt) -> ComposedPrompt | None:
    """Return the composed prompt of the selecting pass. None if the policy chooses without a pass.

    Args:
        recompute: of the policy.
        composed: the prompt without recomputed tokens.
    """
    if recompute is None or not recompute.selects or not inexact_modules(composed):
        return None
    return tuple(_checked(composed)) if recompute.by_keys else _asking(composed)


def _asking(composed: ComposedPrompt) -> ComposedPrompt:
    """Return the prompt of the pass for ``query``: its last tokens are computed even if stored, and not stored."""
    last = composed[-1]
    assert isinstance(last, NewSpan), "somebody computes the last token of a prompt"
    rows = min(len(last.ids), MOST_ROWS)
    before = len(last.ids) - rows
    asking = NewSpan(last.ids[before:], last.start + before)
    if not before:
        return (*composed[:-1], asking)
    run = None if last.run is None else TokenRun(last.ids[:before], last.start, last.run.before, last.run.continues)
    return (*composed[:-1], NewSpan(last.ids[:before], last.start, run), asking)


def _checked(composed: ComposedPrompt) -> Iterator[CachedSpan | NewSpan]:
    """Return the prompt of the pass for ``blend``: modules up to the last inexact one are computed in place.

    The request's own text is not stored either, because the upper layers do not run.
    """
    last = composed.index(inexact_modules(composed)[-1])
    for part in composed[: last + 1]:
        if isinstance(part, NewSpan):
            yield replace(part, run=None)
        elif isinstance(part, CachedSpan) and part.exact:
            yield part
        elif isinstance(part, CachedSpan):
            first, end = part.first, part.first + part.length
            yield replace(part, left_out=tuple(range(first, end)))
            yield NewSpan(part.spec.ids[first:end], part.start)
