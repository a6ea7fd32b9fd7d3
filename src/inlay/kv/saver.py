"""What goes down: segments are copied from the pool under a hold, and written to the tiers below, behind what goes on.

What a tier is to forget, and until when it keeps what has a lifetime, goes the same way, in the order in which it was
said.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from inlay.kv.codecs.codec import Slab
from inlay.kv.identity import SegmentSpec
from inlay.kv.segment import Hold
from inlay.kv.store import SegmentStore
from inlay.kv.tiers.record import SegmentRecord, SlabMemory, is_finite
from inlay.kv.tiers.tier import Tier, TierMissError
from inlay.kv.worker import Worker
from inlay.slots import SlotRange

#: So many segments wait to be written; of more, the oldest are not.
_MOST_WAITING = 4096
_MOST_PROMOTIONS = 64  # segments that wait to be copied from a tier to those nearer than it; more are not


@dataclass(eq=False, slots=True)
class _Save:
    """A segment that is copied and written. hold: what keeps it in the pool until it is copied.

    slots: where it lies there; none where it has gone to a tier that is not written so, and is read from that.
    """

    spec: SegmentSpec
    slots: tuple[SlotRange, ...]
    hold: Hold
    copied: bool = False
    over: bool = False
    given_up: bool = False


class Saver:
    """Writes segments of one store to the tiers below it, and has them forget some.

    nearest: the number of the first tier that is written; those before it only forget.

    forms: a segment and those forms of it that the tiers have. record_of: what is written of one.
    tell: told, on any thread, that something has come further; tell_waiting, that there is nothing for others to do.
    """

    def __init__(
        self,
        store: SegmentStore,
        memory: SlabMemory,
        tiers: tuple[Tier, ...],
        *,
        forms: Callable[[SegmentSpec], Iterator[SegmentSpec]],
        record_of: Callable[[SegmentSpec], SegmentRecord],
        nearest: int = 0,
        tell: Callable[[], None],
        tell_waiting: Callable[[], None],
    ) -> None:
        self.not_written = 0  # segments that had gone, or were too many, before they could be written
        self._store = store
        self._memory = memory
        self._tiers = tiers
        self._nearest = nearest
        self._forms = forms
        self._record_of = record_of
        self._tell = tell
        self._tell_waiting = tell_waiting
        self._writer = Worker("inlay-writer")
        self._promoting = 0  # segments that are copied from tier to tier, or wait for that
        self._counting = threading.Lock()
        self._waiting: OrderedDict[bytes, tuple[SegmentSpec, float]] = OrderedDict()  # by key, and since when
        self._saving: _Save | None = None
        self._deleting: set[bytes] = set()  # what is still to be removed from the tiers

    @property
    def copying(self) -> bool:
        """Whether a segment is held until it is copied."""
        saving = self._saving
        return saving is not None and not saving.copied

    @property
    def waiting(self) -> int:
        """How many segments are to be written, those included that are being written."""
        return len(self._waiting) + (self._saving is not None)

    @property
    def settled(self) -> bool:
        """Whether nothing is to be written or removed."""
        return not self.waiting and not self._deleting and not self._promoting

    @property
    def lag_s(self) -> float:
        """For how long the first of them has waited."""
        for _, since in self._waiting.copy().values():  # the engine may change it meanwhile
            return time.monotonic() - since
        return 0.0

    def forgets(self, key: bytes) -> bool:
        """Whether a segment is still to be removed from the tiers."""
        return key in self._deleting

    # On the engine's turn

    def save(self, spec: SegmentSpec) -> None:
        """See Residency.save."""
        if spec.key in self._waiting or self._is_written(spec):
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popitem(last=False)
            self.not_written += 1
        self._waiting[spec.key] = spec, time.monotonic()
        self._save_next()

    def forget(self, key: bytes) -> None:
        """See Residency.forget."""
        self._waiting.pop(key, None)
        if self._saving is not None and self._saving.spec.key == key:
            self._saving.given_up = True
            self._saving.hold.release()
        self._deleting.add(key)
        self._writer.submit(lambda: self._delete(key))

    def expire_at(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """See Residency.expire_at."""
        self._writer.submit(lambda: self._expire_at(keys, ttl_s))

    def poll(self) -> None:
        """Let go of what has been copied, and begin with the next one."""
        saving = self._saving
        if saving is not None and saving.copied:
            saving.hold.release()
        if saving is not None and saving.over:
            self._saving = None
        self._save_next()

    def _save_next(self) -> None:
        while self._saving is None and self._waiting:
            _, (spec, _) = self._waiting.popitem(last=False)
            found = self._store.get(spec)
            if found is None and not any(tier.holds(spec.key) for tier in self._tiers[: self._nearest]):
                self.not_written += 1
            elif not self._is_written(spec):
                slots, hold = ((), Hold()) if found is None else (found.slots, self._store.hold(found))
                save = self._saving = _Save(spec, slots, hold)
                self._writer.submit(partial(self._write, save))

    def _is_written(self, spec: SegmentSpec) -> bool:
        """Whether each tier has a segment as it writes it, which is not to be removed from there."""
        written = [(tier, self._written_by(tier, spec).key) for tier in self._tiers[self._nearest :]]
        return all(tier.holds(key) and key not in self._deleting for tier, key in written)

    def _written_by(self, tier: Tier, spec: SegmentSpec) -> SegmentSpec:
        """A segment as a tier writes it."""
        return spec if spec.source is not None else spec.through(tier.codec, self._store.keys)

    def close(self, timeout: float) -> bool:
        """End the thread behind what it is at; returns whether it has ended by then."""
        return self._writer.close(timeout)

    def promote(self, record: SegmentRecord, slabs: list[Slab], number: int) -> None:
        """Have the tiers that are nearer than that number keep what came from there, behind what is going on."""
        with self._counting:
            if self._promoting >= _MOST_PROMOTIONS:
                return
            self._promoting += 1

        def put() -> None:
            try:
                for tier in self._tiers[self._nearest : number]:
                    if self._tiers[number].holds(record.key):  # it has not been forgotten meanwhile
                        tier.put(record, slabs)
            finally:
                with self._counting:
                    self._promoting -= 1
                self._tell_waiting()

        self._writer.submit(put)

    def _write(self, save: _Save) -> None:
        try:
            slabs = self._slabs(save)
            save.copied = True
            self._tell()
            dtype = self._store.keys.kv_dtype
            if save.given_up or not slabs or not all(is_finite(slab, dtype) for slab in slabs):
                return
            for tier in self._tiers[self._nearest :]:
                tier.put(self._record_of(self._written_by(tier, save.spec)), slabs)
            if save.given_up:
                for form in self._forms(save.spec):
                    self._delete(form.key)
        finally:
            save.copied = save.over = True
            self._tell()

    def _slabs(self, save: _Save) -> list[Slab]:
        """Those of a segment; none where it has gone from the tier that it went to meanwhile."""
        if save.slots:
            return [self._memory.read_slab(layer, save.slots) for layer in range(len(self._memory.layers))]
        slabs: list[Slab] = []
        record = self._record_of(save.spec)
        for tier in self._tiers[: self._nearest]:
            with suppress(TierMissError):
                tier.get(record, lambda layer, slab: slabs.append(slab.copy()), lambda: False)
        if len(slabs) < len(self._memory.layers):
            self.not_written += 1
            return []
        return slabs

    def _delete(self, key: bytes) -> None:
        try:
            for tier in self._tiers:
                tier.delete(key)
        finally:
            self._deleting.discard(key)
            self._tell_waiting()

    def _expire_at(self, keys: Sequence[bytes], ttl_s: float) -> None:
        for key in keys:
            for tier in self._tiers:
                tier.expire(key, ttl_s)
