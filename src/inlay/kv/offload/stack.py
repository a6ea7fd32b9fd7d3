"""The pool of one store with the tiers below it, as the loader, the saver and the demoter share them.

``MissReasons`` explains why a segment is missing, from earlier observations of it or of the same text.

The reasons reveal nothing about other tenants. Of private segments only the keys are remembered, and no other tenant
can ask for these keys.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from inlay.kv.identity import LOSSLESS, KeyMaker, SegmentSpec
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.record import SegmentRecord, SlabMemory, StateMemory, salt_digest, text_digest
from inlay.kv.offload.tier import Tier, TierEntry
from inlay.kv.store import SegmentStore
from inlay.workpool import WorkPool

NEVER_SEEN, EVICTED, LATE, EXPIRED = "never seen", "evicted", "late", "expired"
_MOST = 4096  # remembered segments, 0.4 KiB each
_MOST_LABELLED = 65_536  # segments whose labels are remembered, 0.3 KiB each


@dataclass(frozen=True, slots=True)
class Made:
    """How the KV of a text was made. A miss is explained by the first field that differs."""

    model: bytes
    version: str
    codec: str
    salt: bytes
    context: bytes

    def difference(self, other: Made) -> tuple[int, str]:
        """The number of fields that differ, and the first one as a reason."""
        differing = [name for name in self.__slots__ if getattr(self, name) != getattr(other, name)]
        return len(differing), f"other {differing[0]}" if differing else EVICTED


class MissReasons:
    """Observations of segments in an engine's pool and in the tiers below it.

    Args:
        keys: the engine's keys.
        most: the number of segments to remember.
    """

    def __init__(self, keys: KeyMaker, most: int = _MOST) -> None:
        self._most = most
        # shared by all segments of this engine
        codec, salt = f"{keys.kv_dtype} {keys.codec}", salt_digest(keys.salt)
        self._mine = Made(keys.fingerprint, keys.numerics, codec, salt, b"")
        self._lock = threading.Lock()  # tiers report failures from their own threads
        self._reasons: OrderedDict[bytes, str] = OrderedDict()  # by key, for missing segments
        self._made: OrderedDict[bytes, tuple[Made, ...]] = OrderedDict()  # by text

    def stored(self, spec: SegmentSpec) -> None:
        """Record that a segment, or a form of it, is in the pool. If it is missing later, it was evicted."""
        self.failed(spec, EVICTED)
        if not spec.before.private:
            self._add(text_digest(spec.ids), self._of(spec))

    def listed(self, entry: TierEntry) -> None:
        """Record that a tier has a segment."""
        if not entry.private:
            self._add(entry.text, Made(entry.fingerprint, entry.numerics, entry.codec, entry.salt, entry.context))

    def failed(self, spec: SegmentSpec, reason: str) -> None:
        """Record that a tier did not deliver a segment or a form of it."""
        key = spec.lossless.key
        with self._lock:
            self._reasons[key] = reason
            self._reasons.move_to_end(key)
            if len(self._reasons) > self._most:
                self._reasons.popitem(last=False)

    def explain(self, spec: SegmentSpec) -> str:
        """The reason why a segment is missing: one of MISS_REASONS."""
        known = self._reasons.get(spec.lossless.key)
        if known is not None:
            return known
        mine = self._of(spec)
        others = self._made.get(text_digest(spec.ids), ())
        return min((mine.difference(other) for other in others), default=(0, NEVER_SEEN))[1]

    def _of(self, spec: SegmentSpec) -> Made:
        return replace(self._mine, context=spec.lossless.digest)

    def _add(self, text: bytes, made: Made) -> None:
        known = self._made.get(text, ())
        if made not in known:
            self._made[text] = (*known, made)[-8:]  # the ways that were seen last
        self._made.move_to_end(text)
        if len(self._made) > self._most:
            self._made.popitem(last=False)


#: The most tokens of segments below the pool that are remembered for listing and eviction.
_MOST_KNOWN = 4 * 2**20


class TransferThreads:
    """The threads that move segments. Each pool has one thread, so its jobs run in order.

    Attributes:
        reader: reads from the written tiers.
        host_reader: reads from the host tier, so that these reads wait for no disk.
        seeker: asks tiers with other writers what they have.
        writer: writes, removes and expires segments, and promotes them to nearer tiers.
        copier: copies modules to the host tier before the pool evicts them.
    """

    def __init__(self) -> None:
        self.reader = WorkPool("reader", 1)
        self.host_reader = WorkPool("host-reader", 1)
        self.seeker = WorkPool("seeker", 1)
        self.writer = WorkPool("writer", 1)
        self.copier = WorkPool("copier", 1)

    def close(self, timeout: float) -> bool:
        """End all threads after their current jobs. Returns True if each has ended in ``timeout`` seconds."""
        ended = True
        for pool in (self.seeker, self.host_reader, self.reader, self.writer, self.copier):
            ended = pool.close(timeout) and ended
        return ended


class TierStack:
    """The pool and the tiers below it, nearest first. Thread-safe.

    Args:
        memory: of the pool.
        written: the tiers that computed segments are written to, nearest first.
        host: the tier that receives evicted modules; nearer than all others. None for none.
        model: the model's public name.
        states: the states of a model with recurrent layers. None without.
        wake: called on any thread when ``Residency.poll`` has work.

    Attributes:
        tiers: all tiers, nearest first.
        codecs: the codecs whose forms of a segment may be read in its place, nearest first.
        misses: why segments are missing.
        told: replaced at each progress that may free slots of the pool.
        news: set at each progress, cleared by ``Residency.poll``.
    """

    def __init__(
        self,
        store: SegmentStore,
        memory: SlabMemory,
        written: Sequence[Tier],
        *,
        host: HostTier | None,
        model: str,
        states: StateMemory | None,
        wake: Callable[[], None],
    ) -> None:
        self.store = store
        self.memory = memory
        self.states = states
        self.host = host
        self.written = tuple(written)
        self.tiers: tuple[Tier, ...] = self.written if host is None else (host, *written)
        self.codecs = tuple(dict.fromkeys(tier.codec for tier in self.tiers if tier.codec != LOSSLESS))
        self.threads = TransferThreads()
        self.misses = MissReasons(store.keys)
        for tier in self.tiers:
            for entry in tier.iterate():
                self.misses.listed(entry)
        self.told: object = None
        self.news = threading.Event()
        self.wake = wake
        self._model = model
        self._known: OrderedDict[bytes, SegmentSpec] = OrderedDict()  # written or read below, latest last
        self._known_tokens = 0
        self._labels: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()  # by lossless key, latest last
        self._knowing = threading.Lock()

    @property
    def layers(self) -> int:
        """The number of layers with KV."""
        return len(self.memory.layers)

    def forms(self, spec: SegmentSpec) -> Iterator[SegmentSpec]:
        """A segment and the forms that may be read in its place, most exact first."""
        yield spec
        if spec.source is None:
            for codec in self.codecs:
                yield spec.through(codec, self.store.keys)

    def form_in(self, tier: Tier, spec: SegmentSpec) -> SegmentSpec:
        """Return the segment in the form in which a tier stores it: through the tier's codec."""
        return spec if spec.source is not None else spec.through(tier.codec, self.store.keys)

    def nearer(self, tier: Tier) -> tuple[Tier, ...]:
        """Return the written tiers nearer than ``tier``. They get a copy of segments that are read from it."""
        return self.written[: self.written.index(tier)] if tier in self.written else ()

    def is_in_host(self, key: bytes) -> bool:
        """True if the host tier has a segment."""
        return self.host is not None and self.host.holds(key)

    def record(self, spec: SegmentSpec) -> SegmentRecord:
        """Return the record of a segment for the tiers. ``known`` lists the segment from now on."""
        self._know(spec.lossless)
        state = () if self.states is None else self.states.layout
        record = SegmentRecord.of(spec, self.store.keys, self.memory.layers, self._model, state)
        return replace(record, labels=self.labels(spec))

    def labels(self, spec: SegmentSpec) -> tuple[bytes, ...]:
        """Return the labels of a segment: its own, and those of equal segments that this process has read."""
        with self._knowing:
            return tuple(dict.fromkeys((*spec.labels, *self._labels.get(spec.lossless.key, ()))))

    def add_labels(self, specs: Iterable[SegmentSpec]) -> list[SegmentSpec]:
        """Add the labels of segments that are read. Returns those with a label that is new to this process.

        Equal text of several schemas is one segment. It has the labels of them all, so that each can evict it.
        """
        changed = []
        with self._knowing:
            for spec in specs:
                key = spec.lossless.key
                known = self._labels.get(key, ())
                if all(label in known for label in spec.labels):
                    continue
                self._labels[key] = tuple(dict.fromkeys((*known, *spec.labels)))
                self._labels.move_to_end(key)
                changed.append(spec)
                if len(self._labels) > _MOST_LABELLED:
                    self._labels.popitem(last=False)
        return changed

    def known(self) -> list[SegmentSpec]:
        """The segments that this process has written to the tiers or read from them; some may have left since."""
        with self._knowing:
            return list(self._known.values())

    def tell(self) -> None:
        """Report progress: ``Residency.poll`` has work."""
        self.told = object()
        self.news.set()
        self.wake()

    def _know(self, spec: SegmentSpec) -> None:
        with self._knowing:
            if self._known.pop(spec.key, None) is None:
                self._known_tokens += len(spec.ids)
            self._known[spec.key] = spec
            while self._known_tokens > _MOST_KNOWN:
                self._known_tokens -= len(self._known.popitem(last=False)[1].ids)
