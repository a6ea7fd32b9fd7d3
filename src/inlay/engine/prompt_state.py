"""A prompt in the engine, which all its answers share: what it is read from, and how its tokens came about."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inlay.engine.background.profiles import KnownProfiles
from inlay.engine.order import OrderChooser, Orders, Work
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.segment import Origin
from inlay.prompt.composed import CachedSpan, ComposedPrompt, InPlace, NewSpan, compose
from inlay.prompt.prefix import prefix_of
from inlay.prompt.recompute import Choice, Profiles, Scores, choose_tokens
from inlay.prompt.request import FORMS, EngineRequest
from inlay.prompt.token_selection import selection_prompt
from inlay.types import Usage

#: Tokens that many texts begin with after the same modules: the words around a question.
_FEW = 16


class PromptState:
    """A prompt, which all its answers share: what was asked for, and the splice that the engine has chosen for it.

    Where nothing of that depends on what is stored, the splice is made at once, on the thread of whoever asks.

    recomputed: which tokens of its modules are computed anew, under the policies that ask for it.
    request: as it was asked for, its free sets in the order that was chosen. orders: that, of each set the numbers of
        its members.
    beginning: what it reads in place of modules, as far as that is stored; None where there is nothing to read so.
    selecting: what the pass before its own attends to and computes, as long as one has to find that out; else None.
    selector: the one of its answers for which that pass runs.
    """

    __slots__ = (
        "_asked",
        "_by_profile",
        "_composed",
        "_free",
        "_in_place",
        "_known",
        "_open",
        "_origins",
        "_public",
        "_settled",
        "_stored",
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
        self._version: object = None  # of what was stored when they were chosen
        self.prefix = prefix_of(request)
        self._open = request.open_segments()
        recompute = request.policy.recompute
        self._by_profile = recompute is not None and recompute.profiled and not recompute.selects
        self._free = bool(request.free_sets)
        self._work = Work()
        self._settled = not self._open and not self._by_profile and self.prefix is None and not self._free
        self.selecting: ComposedPrompt | None = None
        self.selector: object | None = None
        self._stored: frozenset[bytes] = frozenset()
        self._in_place = InPlace()
        # What was stored, of which version profiles were, and how much of its beginning is stored.
        self._known: tuple[frozenset[bytes], int, int] | None = None
        self._public: frozenset[bytes] | None = None
        self._origins: dict[int, Origin] = {}  # by how many modules it follows
        self._composed: ComposedPrompt | None = None
        self.recomputed = Choice({})
        if self._settled:
            self._choose(frozenset(), {}, InPlace())

    @property
    def composed(self) -> ComposedPrompt:
        assert self._composed is not None, "it is chosen when the first of its answers is admitted"
        return self._composed

    @property
    def public(self) -> frozenset[bytes]:
        """The keys of public schemas' segments that it may be read from, and of those that they attend to.

        Lossless ones: a form is as public as what it is of.
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
        """Where its text up to position ``end`` comes from."""
        modules = [part.candidates for part in self.request.parts if part.candidates and part.start < end]
        found = self._origins.get(len(modules))
        if found is None:
            keys = frozenset(spec.key for candidates in modules for spec in candidates)
            found = self._origins[len(modules)] = Origin(self.request.salt, keys)
        return found

    def choose(
        self,
        stored: Callable[[Iterable[SegmentSpec]], frozenset[bytes]],
        longest: Callable[[TokenRun], int],
        profiles: KnownProfiles,
        orders: OrderChooser,
    ) -> None:
        """Choose in which order its parts stand, what they are read from, and what of that is computed anew, by what is
        stored and known now.

        stored: the keys of segments that are. longest: how many tokens of a run are. Nothing changes once
        it is settled.
        """
        if self._settled:
            return
        if self._free and orders.version != self._version and not self._work.spent:
            self._version = orders.version
            self._order(orders.choose(self._asked, self._work))
        nodes = 0 if self.prefix is None else self.prefix.stored(longest)
        known = stored(self._open) if self._open else frozenset(), profiles.version if self._by_profile else 0, nodes
        if known != self._known:
            self._known = known
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
        """Modules that a repair would have had a profile of, and those that stand with them as samples.

        Where nobody shall learn what a request is made of, these are its owner's own.
        """
        if not self.request.policy.profiled or not self.recomputed.unprofiled:
            return [], []
        plain = compose(self.request, self._stored, in_place=self._in_place)  # some may be computed anew whole
        parts = [part for part in plain if isinstance(part, CachedSpan)]
        own = [part for part in parts if part.spec.before.private or not self.request.salt]
        return [part.spec.lossless for part in own if not part.exact], [part.spec.lossless for part in own]

    def _choose(self, stored: frozenset[bytes], profiles: Profiles, in_place: InPlace) -> None:
        self._stored, self._in_place = stored, in_place
        self._composed = compose(self.request, stored, in_place=in_place)
        self.selecting = selection_prompt(self.request.policy.recompute, self._composed)
        if self.selecting is None:
            self._recompute(profiles)

    def _keep_tail(self, longest: Callable[[TokenRun], int]) -> None:
        """Repair what a request repaired before there were profiles, where more of what follows is stored behind that:
        a conversation keeps its repaired tokens, and with them all that was said."""
        recompute, by_profile, composed = self.request.policy.recompute, self.recomputed, self._composed
        plain = compose(self.request, self._stored, in_place=self._in_place)
        before = choose_tokens(recompute, plain, {}, unprofiled=self.request.policy.unprofiled)
        if before.offsets == by_profile.offsets or composed is None:
            return
        other = compose(self.request, self._stored, before.offsets, self._in_place)
        if _tail(other, longest) > max(_tail(composed, longest), _FEW):
            self._composed, self.recomputed = other, replace(before, unprofiled=by_profile.unprofiled)

    def select(self, scores: Scores, profiles: Profiles) -> None:
        """Choose what is computed anew by what the pass of ``selecting`` has found out."""
        self.selecting = None
        self._recompute(profiles, scores)

    def _recompute(self, profiles: Profiles, scores: Scores | None = None) -> None:
        policy = self.request.policy
        self.recomputed = choose_tokens(policy.recompute, self.composed, profiles, scores, policy.unprofiled)
        if self.recomputed.tokens:
            self._composed = compose(self.request, self._stored, self.recomputed.offsets, self._in_place)

    def settle(self) -> None:
        """Keep the choice: the other answers read what the first one does, and so does one that was preempted."""
        self._settled = True


def _tail(composed: ComposedPrompt, longest: Callable[[TokenRun], int]) -> int:
    """How many tokens are stored of what stands behind a splice's last module."""
    last = max((number for number, part in enumerate(composed) if not isinstance(part, NewSpan)), default=-1)
    return sum(longest(part.run) for part in composed[last + 1 :] if isinstance(part, NewSpan) and part.run is not None)


@dataclass(eq=False, slots=True)
class PrefillRecord:
    """How a prompt's tokens came about.

    admitted_at: when the request first had a place in the pool, on the clock of its arrival. fetch_s: how long that
    took. encode_s: how long modules took that it missed. awaited: the keys of segments that came up from a lower tier
    while it waited for them, and waited_since: from when on. encoded: the keys of modules that it computed and lower
    tiers were given, and of their forms. ahead: how many tokens were brought up before its turn; None while they
    are not. looked: the version of the residency when they last could not be.

    Of a pass that chooses what is repaired: found says of the modules (by key) and runs (by digest and start) that it
    has looked up how many tokens were stored, misses why others were not; selecting_tokens: see Usage.
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

    @property
    def waited_s(self) -> float:
        """For how long it has waited for a lower tier."""
        return 0.0 if self.waited_since is None else time.perf_counter() - self.waited_since


def usage_of(
    composed: ComposedPrompt,
    stored: Mapping[bytes, int],
    prefixes: Sequence[int],
    *,
    duplicates: int = 0,
    recomputed: Choice | None = None,
    awaited: Mapping[bytes, str] | None = None,
    adapter: bytes = b"",
) -> Usage:
    """How the tokens of a splice came about.

    stored: of each module segment, by key, how many tokens were stored when it was admitted; none where it is left out.
    beginnings: for each part, how many tokens of it were stored as they stand here.
    duplicates: how many were stored and are computed nevertheless. awaited: of those that came up from a lower tier,
    by key, which one that was. recomputed: what of its modules is computed anew. adapter: the request's.
    """
    total = exact = promoted = shifted = across = kept = 0
    lower: dict[str, int] = {}
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
    anew = recomputed or Choice({})
    return Usage(
        total,
        cached,
        total - cached,
        exact,
        module,
        shifted,
        duplicates,
        scaffold_tokens=forms["scaffold"],
        anchored_tokens=forms["anchored"] + forms["reanchored"],
        reanchored_tokens=forms["reanchored"],
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
