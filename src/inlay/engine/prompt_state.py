"""A prompt in the engine, shared by all its answers: its composed prompt and the accounting of its tokens."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from inlay.diagnostics import SpanRead
from inlay.engine.background.profiler import KnownProfiles
from inlay.engine.order import OrderChooser, OrderEffort, Orders
from inlay.engine.text_index import DraftIndex
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.pool import Origin
from inlay.prompt.composed import (
    CachedSpan,
    ComposedPrompt,
    InPlace,
    NewSpan,
    Profiles,
    RecomputedTokens,
    Scores,
    StoredTexts,
    choose_tokens,
    compose,
    prefix_of,
    selection_prompt,
)
from inlay.prompt.request import FORMS, EngineRequest, PromptPart
from inlay.types import Usage

#: Unrelated texts behind the same modules often share this many tokens, such as the words around a question.
_FEW = 16

_HOUR_S = 3600.0


class PromptState:
    """A prompt, shared by all its answers: the caller's request and the composed prompt chosen for it.

    If the choice does not depend on the contents of the store, it is made at once, on the caller's thread.

    Attributes:
        recomputed: the recomputed tokens of its modules.
        request: the caller's request, with its free sets in the chosen order.
        orders: the chosen order of each free set, as numbers of its members.
        prefix: the prefix that may be read in place of modules. None if there is none.
        selecting: the input of the selecting pass, until that pass has run; else None.
        selector: the answer that runs the selecting pass.
    """

    __slots__ = (
        "_asked",
        "_by_profile",
        "_composed",
        "_ends",
        "_free",
        "_in_place",
        "_index",
        "_known",
        "_moved",
        "_open",
        "_origins",
        "_public",
        "_settled",
        "_stored",
        "_texts",
        "_version",
        "_work",
        "orders",
        "prefix",
        "recomputed",
        "request",
        "selecting",
        "selector",
    )

    def __init__(self, request: EngineRequest) -> None:
        self.request = self._asked = request
        self.orders: Orders = ()
        self._version: object = None  # of the store, at the last choice of orders
        self.prefix = prefix_of(request)
        self._open = request.open_segments()
        recompute = request.policy.recompute
        self._by_profile = recompute is not None and recompute.profiled and not recompute.selects
        self._free = bool(request.free_sets)
        self._work = OrderEffort()
        self._texts: StoredTexts | None = None
        self._moved: frozenset[bytes] = frozenset()  # modules that the moved text contains or follows
        self._settled = not (
            self._open or self._by_profile or self.prefix is not None or self._free or request.moves_text
        )
        self.selecting: ComposedPrompt | None = None
        self.selector: object | None = None
        self._stored: frozenset[bytes] = frozenset()
        self._in_place = InPlace()
        # The stored segments, the versions of the profiles and texts, and the stored length of the prefix, at the last
        # choice.
        self._known: tuple[frozenset[bytes], int, int, int] | None = None
        self._public: frozenset[bytes] | None = None
        self._origins: dict[int, Origin] = {}  # by the number of modules before the text
        self._index: DraftIndex | None = None
        self._ends: list[int] = []  # of the parts in the index
        self._composed: ComposedPrompt | None = None
        self.recomputed = RecomputedTokens({})
        if self._settled:
            self._choose(frozenset(), {}, InPlace())

    @property
    def composed(self) -> ComposedPrompt:
        assert self._composed is not None, "it is chosen when the first of its answers is admitted"
        return self._composed

    @property
    def public(self) -> frozenset[bytes]:
        """The keys of public segments that it may be read from, and of the segments that they attend to.

        Keys are those of lossless forms, because every form of a public segment is public.
        """
        if self._public is None:
            seen: set[SegmentSpec] = set()
            for part in self.request.parts:
                for spec in () if part.owned else part.candidates:
                    at: SegmentSpec | None = spec.lossless
                    while at is not None and at not in seen:
                        seen.add(at)
                        at = at.parent
            self._public = frozenset(spec.key for spec in seen)
        return self._public

    def origin(self, end: float) -> Origin:
        """The origin of its text up to position ``end``."""
        modules = [part for part in self.request.parts if (part.candidates or part.copies) and part.start < end]
        found = self._origins.get(len(modules))
        if found is None:
            read = frozenset(name for part in modules for spec in part.candidates for name in spec.names)
            keys = read.union(self._moved, *(part.copies for part in modules))
            found = self._origins[len(modules)] = Origin(self.request.salt, keys, self.request.moves_text)
        return found

    def text_index(self) -> DraftIndex:
        """The index of the prompt's tokens, made on first use for all its answers."""
        if self._index is None:
            self._index = DraftIndex(self.request.ids)
            self._ends = [*accumulate(len(part.ids) for part in self.request.parts)]
        return self._index

    def in_module(self, place: int) -> bool:
        """True if a token of the ``text_index``, by its number, belongs to a module."""
        return bool(self.request.parts[bisect_right(self._ends, place)].candidates)

    def follows(self, modules: frozenset[bytes]) -> None:
        """Record the modules that its moved text contains or follows, by key. Its own text then follows them, too."""
        self._moved |= modules
        self._origins.clear()

    @property
    def moved(self) -> list[SegmentSpec]:
        """The texts of earlier requests that this prompt reads behind other text."""
        parts = self._composed or ()
        return [part.spec for part in parts if isinstance(part, CachedSpan) and part.spec.detached]

    def compute_moved(self) -> None:
        """Make the prompt compute its ``moved`` texts, because one of them is no longer stored."""
        self._texts = None
        self._choose(self._stored, {}, self._in_place)

    def choose(
        self,
        stored: Callable[[Iterable[SegmentSpec]], frozenset[bytes]],
        longest: Callable[[TokenRun], int],
        profiles: KnownProfiles,
        orders: OrderChooser,
        texts: StoredTexts,
    ) -> None:
        """Choose the order of the parts, the segments to read and the tokens to recompute. Does nothing once settled.

        Args:
            stored: returns the keys of the stored segments.
            longest: returns the length of a run's stored prefix, in tokens.
            profiles: the known deviation profiles.
            orders: orders the free sets.
            texts: the stored texts of requests.
        """
        if self._settled:
            return
        if self._free and orders.version != self._version and not self._work.spent:
            self._version = orders.version
            self._order(orders.choose(self._asked, self._work))
        nodes = 0 if self.prefix is None else self.prefix.stored(longest)
        known = (
            stored(self._open) if self._open else frozenset(),
            profiles.version if self._by_profile else 0,
            texts.text_version if self.request.moves_text else 0,
            nodes,
        )
        if known != self._known:
            self._known, self._texts = known, texts if self.request.moves_text else None
            in_place = InPlace() if self.prefix is None else self.prefix.in_place(nodes)
            self._choose(known[0], profiles, in_place)
            if self._by_profile:
                self._keep_tail(longest)

    def _order(self, orders: Orders) -> None:
        if orders != self.orders:
            self.orders, self.request, self._known = orders, self._asked.ordered(orders), None
            self._origins.clear()
            self.prefix = prefix_of(self.request)

    def unprofiled(self) -> tuple[list[SegmentSpec], list[SegmentSpec]]:
        """Return ``profiled_modules`` if a module lacks a profile that the policy would have used, else empty lists."""
        if not self.request.policy.profiled or not self.recomputed.unprofiled:
            return [], []
        return self.profiled_modules()

    def to_encode(self) -> tuple[list[SegmentSpec], list[SegmentSpec]]:
        """Return the segments of text found a second time, to encode in idle time, and those of all found text.

        If the request has a cache salt, both lists contain only modules that are private.
        """
        found = [(part, part.candidates[-1].lossless) for part in self.request.parts if part.found and part.candidates]
        own = [(part, spec) for part, spec in found if spec.before.private or not self.request.salt]
        new = [spec for part, spec in own if not part.encode and part.segment(self._stored) is None]
        return new, [spec for _, spec in own]

    def profiled_modules(self) -> tuple[list[SegmentSpec], list[SegmentSpec]]:
        """Return modules that may have a deviation profile, and the modules of the prompt that serve as samples for it.

        If the request has a cache salt, both lists contain only modules that are private.
        """
        # modules that are recomputed as a whole are still parts here
        plain = compose(self.request, self._stored, in_place=self._in_place)
        parts = [part for part in plain if isinstance(part, CachedSpan)]
        own = [part for part in parts if part.spec.before.private or not self.request.salt]
        return [part.spec.lossless for part in own if not part.exact], [part.spec.lossless for part in own]

    def _choose(self, stored: frozenset[bytes], profiles: Profiles, in_place: InPlace) -> None:
        self._stored, self._in_place = stored, in_place
        self._composed = compose(self.request, stored, in_place=in_place, texts=self._texts)
        self.selecting = selection_prompt(self.request.policy.recompute, self._composed)
        if self.selecting is None:
            self._recompute(profiles)

    def _keep_tail(self, longest: Callable[[TokenRun], int]) -> None:
        """Recompute the tokens that are chosen without profiles, if more of the text behind the modules is stored so.

        A conversation thus keeps its recomputed tokens and all later turns when profiles arrive.
        """
        recompute, by_profile, composed = self.request.policy.recompute, self.recomputed, self._composed
        plain = compose(self.request, self._stored, in_place=self._in_place)
        before = choose_tokens(recompute, plain, {}, unprofiled=self.request.policy.unprofiled)
        if before.offsets == by_profile.offsets or composed is None:
            return
        other = compose(self.request, self._stored, before.offsets, self._in_place)
        if _tail(other, longest) > max(_tail(composed, longest), _FEW):
            self._composed, self.recomputed = other, replace(before, unprofiled=by_profile.unprofiled)

    def select(self, scores: Scores, profiles: Profiles) -> None:
        """Choose the recomputed tokens by the scores of the selecting pass."""
        self.selecting = None
        self._recompute(profiles, scores)

    def _recompute(self, profiles: Profiles, scores: Scores | None = None) -> None:
        policy = self.request.policy
        self.recomputed = choose_tokens(policy.recompute, self.composed, profiles, scores, policy.unprofiled)
        if self.recomputed.tokens:
            self._composed = compose(self.request, self._stored, self.recomputed.offsets, self._in_place)

    def settle(self) -> None:
        """Keep the choice for the other answers and for admissions after a preemption."""
        self._settled = True


def _tail(composed: ComposedPrompt, longest: Callable[[TokenRun], int]) -> int:
    """The number of stored tokens behind the last module of a composed prompt."""
    last = max((number for number, part in enumerate(composed) if not isinstance(part, NewSpan)), default=-1)
    return sum(longest(part.run) for part in composed[last + 1 :] if isinstance(part, NewSpan) and part.run is not None)


@dataclass(eq=False, slots=True)
class PrefillRecord:
    """How the tokens of a prompt were obtained.

    Attributes:
        admitted_at: the time of the first admission, on the clock of the request's arrival.
        fetch_s: duration of that admission, including waits for lower tiers.
        encode_s: the time to compute its missing modules.
        awaited: keys of segments that were loaded from a lower tier while it waited.
        waited_since: the start of that wait.
        encoded: keys of modules that it computed and wrote to lower tiers, and of their forms.
        ahead: the number of tokens loaded before its admission. None if none were.
        looked: the version of the residency when loading them last failed.
        found: stored tokens of modules (by key) and runs (by digest and start) when the selecting pass was admitted.
        misses: the missing tokens by reason, at the same time.
        selecting_tokens: see Usage.
        reasons: by key, the reasons for missing modules, at the same time. Empty without diagnostics.
        reads: the sources of the prompt's tokens. Empty without diagnostics.
    """

    usage: Usage | None = None
    admitted_at: float | None = None
    fetch_s: float = 0.0
    encode_s: float = 0.0
    awaited: frozenset[bytes] = frozenset()
    waited_since: float | None = None
    encoded: list[bytes] = field(default_factory=list)
    ahead: int | None = None
    looked: object = None
    found: dict[object, int] = field(default_factory=dict)
    misses: Mapping[str, int] = field(default_factory=dict)
    selecting_tokens: int = 0
    reasons: Mapping[bytes, str] = field(default_factory=dict)
    reads: tuple[SpanRead, ...] = ()

    @property
    def waited_s(self) -> float:
        """The time spent waiting for a lower tier, in seconds."""
        return 0.0 if self.waited_since is None else time.perf_counter() - self.waited_since


def usage_of(
    composed: ComposedPrompt,
    stored: Mapping[bytes, int],
    prefixes: Sequence[int],
    *,
    duplicates: int = 0,
    recomputed: RecomputedTokens | None = None,
    awaited: Mapping[bytes, str] | None = None,
    adapter: bytes = b"",
    prefix: tuple[str, int] | None = None,
) -> Usage:
    """Count the tokens of a composed prompt by their source.

    Args:
        stored: stored tokens of each module segment at admission, by key; 0 if the key is absent.
        prefixes: for each part, the length of its stored prefix in this prompt, in tokens.
        duplicates: the number of tokens that were stored and are computed again.
        recomputed: the recomputed tokens of modules.
        awaited: the tier of each segment that was loaded from a lower tier, by key.
        adapter: the adapter of the request.
        prefix: the tier that the first tokens of the prompt were loaded from, and their number. None for none.
    """
    total = exact = promoted = shifted = across = kept = 0
    lower: dict[str, int] = {}
    if prefix is not None and composed:  # a prefix lies at the start of the prompt's own text
        lower[prefix[0]] = min(prefixes[0], prefix[1])
    forms = dict.fromkeys(FORMS, 0)
    for part, begun in zip(composed, prefixes, strict=True):
        if not isinstance(part, CachedSpan):
            total += len(part.ids)
            exact += begun
            kept += len(part.ids) - begun if part.run is not None else 0
            promoted += min(begun, part.instead) if isinstance(part, NewSpan) else 0
            continue
        total += part.length - len(part.left_out)
        read = part.read(stored.get(part.spec.key, 0))
        kept += part.length - len(part.left_out) - read
        exact += read if part.exact else 0
        forms[part.form] += 0 if part.exact else read
        shifted += read if part.displaced else 0
        tier = (awaited or {}).get(part.spec.key, "")
        lower[tier] = lower.get(tier, 0) + read
        across += read if part.spec.before.adapter != adapter else 0
    last = composed[-1] if composed else None
    module = sum(forms.values())
    cached = exact + module
    anew = recomputed or RecomputedTokens({})
    return Usage(
        total,
        cached,
        total - cached,
        exact,
        module,
        shifted,
        duplicates,
        scaffold_tokens=forms["scaffold"],
        anchored_tokens=forms["anchored"] + forms["reanchored"] + forms["primed"],
        reanchored_tokens=forms["reanchored"],
        primed_tokens=forms["primed"],
        moved_tokens=forms["moved"],
        isolated_tokens=forms["isolated"],
        promoted_tokens=promoted,
        recomputed_tokens=anew.tokens,
        linked_tokens=anew.linked,
        host_tokens=lower.get("host", 0),
        disk_tokens=lower.get("disk", 0),
        shared_tokens=lower.get("shared", 0),
        across_tokens=across,
        written_tokens=kept - (duplicates if isinstance(last, NewSpan) and last.run is not None else 0),
    )


def reads_of(
    composed: ComposedPrompt,
    stored: Mapping[bytes, int],
    prefixes: Sequence[int],
    awaited: Mapping[bytes, str],
    reasons: Mapping[bytes, str],
    recomputed: RecomputedTokens,
) -> tuple[SpanRead, ...]:
    """Return the sources of a composed prompt's tokens.

    Args:
        composed, stored, prefixes, awaited: see ``usage_of``.
        reasons: by key, the reasons for missing modules.
        recomputed: the recomputed tokens of modules.
    """
    found = [
        SpanRead(start, 0, 0, module=True, recomputed=tuple(offsets)) for start, offsets in recomputed.offsets.items()
    ]
    for part, begun in zip(composed, prefixes, strict=True):
        if isinstance(part, NewSpan):
            form = "exact" if begun else "new"
            kept = part.run is not None
            found.append(SpanRead(part.start, len(part.ids), begun, form=form, tier="pool" if begun else "", kept=kept))
        elif isinstance(part, CachedSpan):
            key = part.spec.key
            cached = min(max(stored.get(key, 0) - part.first, 0), part.length)
            read = SpanRead(
                part.start,
                part.length,
                cached,
                module=True,
                form="exact" if part.exact else part.form,
                tier=(awaited.get(key) or "pool") if cached else "",
                shift=part.start - part.first - part.spec.start,
                reason=reasons.get(key, "") if cached < part.length else "",
            )
            found.append(read)
    return tuple(found)


def lasting_tokens(
    parts: Sequence[PromptPart], composed: ComposedPrompt, stored: Mapping[bytes, int], prefixes: Sequence[int]
) -> int:
    """Count the newly stored tokens of parts with a lifetime of at least an hour.

    Args:
        parts: of the request.
        composed, stored, prefixes: see ``usage_of``.
    """
    long = (part for part in parts if part.ttl_s is not None and part.ttl_s >= _HOUR_S)
    lasting = {position for part in long for position in range(part.start, part.start + len(part.ids))}
    if not lasting:
        return 0
    written: list[Sequence[int]] = []
    for span, begun in zip(composed, prefixes, strict=True):
        if isinstance(span, CachedSpan):
            offsets = range(span.first, span.first + span.length)
            read = span.read(stored.get(span.spec.key, 0))
            left_out = frozenset(span.left_out)
            written.append([span.start + at - span.first for at in offsets if at not in left_out][read:])
        elif isinstance(span, NewSpan):
            end = span.start + len(span.ids) if span.run is not None else span.start
            written.append(range(span.start + begun, end))
        else:
            written.append(span.positions[begun:])
    return sum(position in lasting for positions in written for position in positions)
