"""Loads segments from the lower tiers for requests, and writes computed segments to them.

``Prefetch`` loads segments before a request has to wait for them: those of queued requests. With ``likely`` it also
loads segments that are probably read next. These are siblings of the union members in a prompt, and the modules that
followed this prompt's modules last time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from inlay.engine.encoder import Task
from inlay.engine.lookup import Lookup
from inlay.engine.request import Request
from inlay.engine.scheduler import Admission
from inlay.kv.choices import Kept
from inlay.kv.identity import SegmentSpec, TokenRun
from inlay.kv.offload.loader import Arrival, Coming
from inlay.kv.offload.residency import Residency
from inlay.kv.pool import PrefixMatch
from inlay.kv.store import SegmentStore
from inlay.prompt.contexts import in_encoding_order


class LowerTiers:
    """The tiers below one store's pool, as the admission of requests uses them. Call with the engine lock held.

    Args:
        kept: which segments they may hold.
    """

    def __init__(self, store: SegmentStore, residency: Residency, *, kept: Kept) -> None:
        self._store = store
        self._residency = residency
        self._kept = kept

    def is_whole(self, spec: SegmentSpec) -> bool:
        """True if the pool has the segment in any form."""
        return any(self._store.get(form) is not None for form in self._residency.forms(spec))

    def nearest(self, spec: SegmentSpec) -> SegmentSpec:
        """The most exact form of a segment in a lower tier; the segment itself if there is none."""
        return next((form for form in self._residency.forms(spec) if self._residency.below(form.key)), spec)

    def at_hand(self, specs: Iterable[SegmentSpec]) -> frozenset[bytes]:
        """The keys of the segments that need not be computed."""
        return frozenset(
            spec.key for spec in specs if self._residency.below(spec.key) or self._store.get(spec) is not None
        )

    def in_pool(self, specs: Iterable[SegmentSpec]) -> frozenset[bytes]:
        """The keys of the segments in the pool."""
        return frozenset(spec.key for spec in specs if self._store.get(spec) is not None)

    def is_sought(self, task: Task, specs: Iterable[SegmentSpec]) -> bool:
        """Ask the tiers that other servers fill for these segments. Returns True if the request waits for an answer."""
        if not self._residency.tiers:
            return False
        unsure = [spec for spec in specs if self._residency.unsure(spec.key)]
        wanted = [spec for spec in unsure if task.may_be_kept(spec, self._kept)]
        missing = [spec for spec in wanted if not self.is_at_hand(spec.lossless)]
        return bool(missing) and self._residency.seek(missing)

    def bring_up(self, wanted: Sequence[SegmentSpec], lookup: Lookup) -> Admission | None:
        """Start loading the missing modules, and the context of those to compute, from the lower tiers.

        Args:
            wanted: the modules that are read or encoded.

        Returns:
            The reason to wait; None for no wait.
        """
        if not self._residency.tiers or not lookup.missing:
            return None
        keys = {spec.key for spec in wanted}
        computed = [spec for spec, _ in lookup.missing if spec.key in keys and not self._residency.below(spec.key)]
        needed = keys | {spec.key for spec in in_encoding_order(computed)}
        coming = [(spec, found) for spec, found in lookup.missing if spec.key in needed]
        coming = [(spec, found) for spec, found in coming if self._residency.below(spec.key)]
        answer = self._residency.bring_up(coming) if coming else Coming.NOT
        if answer is Coming.FREEING:  # keeps the room from later requests
            return Admission.FREEING
        return None if answer is Coming.NOT else Admission.COMING

    def bring_prefix(self, spec: SegmentSpec) -> Admission | None:
        """Start loading a prefix with its recurrent state, if a lower tier has it and the pool lacks its KV.

        Returns:
            The reason to wait; None for no wait.
        """
        found = self._store.longest(spec)
        if not self._residency.tiers or found.tokens == len(spec.ids):
            return None
        if self._residency.unsure(spec.key) and self._residency.seek([spec]):
            return Admission.COMING
        if not self._residency.below(spec.key):
            return None
        answer = self._residency.bring_up([(spec, found)])
        if answer is Coming.FREEING:
            return Admission.FREEING
        return None if answer is Coming.NOT else Admission.COMING

    def write_prefix(self, spec: SegmentSpec) -> None:
        """Write a prefix with its recurrent state to the lower tiers, if its state is stored and they may have it."""
        found = self._store.get(spec)
        allowed = self._kept is Kept.ALL or not spec.before.private
        if self._residency.tiers and allowed and found is not None and found.state is not None:
            self._residency.computed(spec)
            self._residency.save(spec)

    def by_layer(self, wanted: Sequence[SegmentSpec], lookup: Lookup) -> tuple[Lookup, tuple[Arrival, ...]] | None:
        """Return the lookup as if all loading layers were resident, and the arrivals that the request then reads.

        Args:
            wanted: the modules that are read.

        Returns:
            None if a missing module is not loading layer by layer yet.
        """
        modules: dict[bytes, tuple[SegmentSpec, PrefixMatch]] = {}
        arrivals: list[Arrival] = []
        for key in dict.fromkeys(spec.key for spec in wanted):
            spec, found = lookup.modules[key]
            if found.tokens < len(spec.ids):
                arrival = self._residency.arriving(key)
                if arrival is None or found.tokens < arrival.done:
                    return None
                arrivals.append(arrival)
                found = PrefixMatch((*found.part(0, arrival.done).ranges, arrival.stored))
            modules[key] = spec, found
        return Lookup(modules, lookup.prefixes), tuple(arrivals)

    def write_behind(self, task: Task, run: TokenRun) -> None:
        """Write a computed module to the lower tiers, if they may store it."""
        if not isinstance(run, SegmentSpec):
            return
        self._residency.computed(run)
        if not self._residency.tiers:
            return
        found = self._store.get(run)
        if found is None:
            return
        if isinstance(task, Request):  # recorded for any module, because the host tier may get it
            task.prefill.encoded += [form.key for form in self._residency.forms(run)]
        own = isinstance(task, Request) and run.lossless.key not in task.prompt.public
        if own and _uses(found) < 2 and not self._residency.has_room:
            return  # most modules of single requests are never reused, and would displace reused ones
        if task.may_be_kept(run, self._kept):
            self._residency.save(run)

    def write_used_again(self, request: Request, lookup: Lookup) -> None:
        """Write modules of messages to the lower tiers at their first reuse, if the tiers may hold them.

        Modules that found room in the tiers were written when they were computed.
        """
        if self._kept is Kept.SCHEMAS or not self._residency.tiers:
            return
        for spec, found in lookup.modules.values():
            if spec.detached:  # text of a request, which no tier below the pool holds
                continue
            own = spec.lossless.key not in request.prompt.public
            whole = found.tokens == len(spec.ids)
            if own and whole and _uses(found) == 2 and request.may_be_kept(spec, self._kept):
                self._residency.save(spec)

    def is_at_hand(self, spec: SegmentSpec) -> bool:
        """True if a segment need not be computed, because the pool or a lower tier has it in some form."""
        return self.is_whole(spec) or any(self._residency.below(form.key) for form in self._residency.forms(spec))


def _uses(found: PrefixMatch) -> int:
    """How often a segment has been computed or read."""
    return min((segment.use.uses for segment in found.segments), default=0)


#: The number of queued tasks that are looked at, from the front of the queue.
_AHEAD = 8
#: The share of the pool for prefetched segments. With more, they would evict each other.
_SHARE = 1 / 4
#: The share of the pool for likely segments, per request.
_LIKELY_SHARE = 1 / 16
#: Limits of the record of likely segments: how many prompts have one, and how many segments each has.
_MOST_FOLLOWED, _MOST_FOLLOWING = 4096, 32
#: The limit of that record in bytes, and its estimated bytes per segment and per token.
MOST_BYTES, _SEGMENT_BYTES, _TOKEN_BYTES = 4 * 2**20, 4096, 8
_MOST_SALTS = 1024


class Prefetcher:
    """Loads segments of one store ahead of time.

    Args:
        likely: if True, segments that are probably read next are loaded too.
        lower: the tiers below the pool, including those that other processes fill.
    """

    def __init__(self, store: SegmentStore, residency: Residency, lower: LowerTiers, *, likely: bool = False) -> None:
        self._store = store
        self._residency = residency
        self._lower = lower
        self._likely = likely
        self._followed: OrderedDict[tuple[str, bytes], tuple[SegmentSpec, ...]] = OrderedDict()
        self._followed_bytes = 0
        # by salt: the segments that its last prompt read
        self._last: OrderedDict[str, tuple[SegmentSpec, ...]] = OrderedDict()

    def look_ahead(self, waiting: Iterable[Task]) -> None:
        """Load segments into the pool for the first queued requests, once for each, while there is room.

        Of the forms of a part that are stored now, the most exact one is loaded.
        """
        if not self._residency.tiers:
            return
        room, version = int(self._store.pool.slots * _SHARE), self._residency.version
        for task in islice(waiting, _AHEAD):
            if not isinstance(task, Request):
                continue
            if task.prefill.ahead is None:
                if task.prefill.looked == version:  # no segment was loaded since the last look
                    return
                task.prefill.looked = version
                if self._lower.is_sought(
                    task, (spec for part in task.prompt.request.parts for spec in part.candidates)
                ):
                    continue  # the shared tier answers soon
                wanted = self._wanted(task)
                tokens = sum(len(spec.ids) - found.tokens for spec, found in wanted)
                if tokens > room or (wanted and self._residency.bring_up(wanted) is not Coming.ON_ITS_WAY):
                    return
                task.prefill.ahead = tokens
                task.prefill.awaited |= self._residency.bringing(spec.key for spec, _ in wanted)
            room -= task.prefill.ahead

    def admitted(self, request: Request, read: Sequence[SegmentSpec]) -> None:
        """Load the segments that are likely to be read next. The request has begun to read the modules in ``read``."""
        if not self._likely or not self._residency.tiers or not read:
            return
        salt = request.prompt.request.salt
        self._note(salt, read)
        followed = self._followed.get((salt, _named(read)), ())
        wanted: dict[bytes, tuple[SegmentSpec, PrefixMatch]] = {}
        room = int(self._store.pool.slots * _LIKELY_SHARE)
        for spec in (*followed, *request.prompt.request.likely):
            if self._lower.is_whole(spec) or spec.key in wanted:
                continue
            form = self._lower.nearest(spec)
            if self._residency.below(form.key) and len(form.ids) <= room:
                wanted[spec.key] = form, self._store.longest(form)
                room -= len(form.ids)
        if wanted:
            self._residency.bring_up(wanted.values())

    def _note(self, salt: str, read: Sequence[SegmentSpec]) -> None:
        """Note which modules follow which, separately for each salt."""
        before = self._last.pop(salt, ())
        self._last[salt] = tuple(read)
        if len(self._last) > _MOST_SALTS:
            self._last.popitem(last=False)
        known = {spec.lossless.key for spec in before}
        new = tuple(spec.lossless for spec in read if spec.lossless.key not in known)[:_MOST_FOLLOWING]
        if before and new:
            name = salt, _named(before)
            self._followed_bytes += _bytes(new) - _bytes(self._followed.pop(name, ()))
            self._followed[name] = new
            while len(self._followed) > _MOST_FOLLOWED or self._followed_bytes > MOST_BYTES:
                self._followed_bytes -= _bytes(self._followed.popitem(last=False)[1])

    def _wanted(self, request: Request) -> list[tuple[SegmentSpec, PrefixMatch]]:
        """The segments that are in a lower tier and not wholly in the pool, each with its prefix match in the pool."""
        wanted: dict[bytes, tuple[SegmentSpec, PrefixMatch]] = {}
        for part in request.prompt.request.parts:
            below = frozenset(spec.key for spec in part.candidates if self._residency.below(spec.key))
            if not below:
                continue
            spec = part.segment(below | {spec.key for spec in part.candidates if self._store.get(spec) is not None})
            if spec is not None and spec.key in below and spec.key not in wanted:
                found = self._store.longest(spec)
                if found.tokens < len(spec.ids):
                    wanted[spec.key] = spec, found
        return list(wanted.values())


def _bytes(specs: Sequence[SegmentSpec]) -> int:
    return sum(_SEGMENT_BYTES + _TOKEN_BYTES * len(spec.ids) for spec in specs)


def _named(read: Sequence[SegmentSpec]) -> bytes:
    """The key of a prompt's record: its last module, the best predictor of the next ones."""
    return read[-1].lossless.key
