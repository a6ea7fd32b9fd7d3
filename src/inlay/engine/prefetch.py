"""Prefetch: loads segments from the lower tiers into the pool before a request has to wait for them.

It loads the segments of queued requests. With ``likely`` it also loads segments that are probably read next. These are
siblings of the union members in a prompt, and the modules that followed this prompt's modules last time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from inlay.engine.encoder import Task
from inlay.engine.lower_tiers import LowerTiers
from inlay.engine.request import Request
from inlay.kv.identity import SegmentSpec
from inlay.kv.offload.loader import Coming
from inlay.kv.offload.residency import Residency
from inlay.kv.segment import PrefixMatch
from inlay.kv.store import SegmentStore

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

        Each part is assumed to be read in its most exact form among those stored now.
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
