"""Prefetch: what will be read is brought up from the tiers below before somebody has to wait for it.

That is what requests in line for a place read, and, where it is asked for, what is likely to be read next: the siblings
of what a prompt takes of a union, and the modules that followed those of this prompt the last time.
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

#: Of those who wait, so many are looked at, the first in line.
_AHEAD = 8
#: The part of the pool that what is brought up for all of them may take: more would push itself out again.
_SHARE = 1 / 4
#: The part of it that what is likely may take, for one request.
_LIKELY_SHARE = 1 / 16
#: Of so many prompts it is known what followed them, and so many segments of what did.
_MOST_FOLLOWED, _MOST_FOLLOWING = 4096, 32
#: These segments take about so many bytes at most: some for each, and some for each of its tokens.
MOST_BYTES, _SEGMENT_BYTES, _TOKEN_BYTES = 4 * 2**20, 4096, 8
_MOST_SALTS = 1024


class Prefetcher:
    """Brings segments of one store up ahead of time.

    likely: whether that goes for what may be read next, too. lower: asks the tiers that others fill.
    """

    def __init__(self, store: SegmentStore, residency: Residency, lower: LowerTiers, *, likely: bool = False) -> None:
        self._store = store
        self._residency = residency
        self._lower = lower
        self._likely = likely
        self._followed: OrderedDict[tuple[str, bytes], tuple[SegmentSpec, ...]] = OrderedDict()
        self._followed_bytes = 0
        self._last: OrderedDict[str, tuple[SegmentSpec, ...]] = OrderedDict()  # what the last prompt of a salt read

    def look_ahead(self, waiting: Iterable[Task]) -> None:
        """Have segments read into the pool for the first of those who wait, once for each, with room to spare.

        A request is taken to read the most exact form of each part that is at hand now.
        """
        if not self._residency.tiers:
            return
        room, version = int(self._store.pool.slots * _SHARE), self._residency.version
        for task in islice(waiting, _AHEAD):
            if not isinstance(task, Request):
                continue
            if task.prefill.ahead is None:
                if task.prefill.looked == version:  # nothing has come up since it was looked up in vain
                    return
                task.prefill.looked = version
                if self._lower.is_sought(
                    task, (spec for part in task.prompt.request.parts for spec in part.candidates)
                ):
                    continue  # what others have written is known in a moment
                wanted = self._wanted(task)
                tokens = sum(len(spec.ids) - found.tokens for spec, found in wanted)
                if tokens > room or (wanted and self._residency.bring_up(wanted) is not Coming.ON_ITS_WAY):
                    return
                task.prefill.ahead = tokens
                task.prefill.awaited |= self._residency.bringing(spec.key for spec, _ in wanted)
            room -= task.prefill.ahead

    def admitted(self, request: Request, read: Sequence[SegmentSpec]) -> None:
        """A request has begun to read these modules: bring up what is likely to be read next."""
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
        """Note what follows what, for each salt apart."""
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
        """The segments that are below and not in the pool, each with what of it is."""
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
    """What names a prompt's modules: the last one, which tells most of what comes next."""
    return read[-1].lossless.key
