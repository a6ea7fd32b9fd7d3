"""A pool with tiers below it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inlay.attention.storage import LayerShape, bytes_per_token
from inlay.errors import CapacityError
from inlay.kv.identity import SegmentSpec
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.loader import Coming
from inlay.kv.offload.residency import Residency
from inlay.kv.offload.tier import Tier
from inlay.kv.pool import KVPool
from inlay.kv.store import SegmentStore
from inlay.slots import SlotRange, cut
from tests.unit.kv.offload.segments import KEYS, LAYERS, alike, expected, slabs_of
from tests.unit.kv.offload.watched_storage import WatchedDevice, WatchedStorage


class Site:
    """A pool of so many tokens, whose residency is polled at once wherever it asks for that.

    host: where there is one, the pool is as a device has it, in memory of its own.
    """

    def __init__(
        self, tiers: Sequence[Tier], *, tokens: int = 256, timeout_s: float = 30.0, host: HostTier | None = None
    ) -> None:
        shapes = [LayerShape(*layer) for layer in LAYERS]
        size = bytes_per_token(shapes, torch.float32)
        self.pool = KVPool(tokens * size, size, 16)
        device = torch.device("cpu")
        self.storage: WatchedStorage | WatchedDevice = WatchedStorage(shapes, torch.float32, self.pool.slots)
        if host is not None:
            self.storage = WatchedDevice(shapes, torch.float32, self.pool.slots, device)
        self.store = SegmentStore(self.pool, KEYS)
        self.residency = Residency(self.store, self.storage, tiers, host=host, model="a model", timeout_s=timeout_s)

    def compute(self, spec: SegmentSpec) -> None:
        """Store a segment in the pool as if it had been computed, and write it behind. Raises CapacityError.

        Waits for copies to the host tier to make room.
        """
        room = self.allocate(len(spec.ids))
        slots = cut(room, 0, len(spec.ids))
        for layer, slab in enumerate(slabs_of(spec)):
            self.storage.write_slab(layer, slots, slab)
        self.store.insert(spec, slots)
        self.pool.free(room)
        self.residency.computed(spec)
        self.residency.save(spec)

    def allocate(self, tokens: int) -> tuple[SlotRange, ...]:
        """Allocate slots, once the evicted segments are copied to the host tier. Raises CapacityError."""
        while True:
            try:
                return self.store.allocate(tokens)
            except CapacityError:
                if not self.residency.moving:
                    raise
                self.residency.wait(0.05)  # a copy may hang
                self.residency.poll()

    def written(self) -> None:
        """Wait until nothing is to be written."""
        while self.residency.waiting:
            self.residency.wait(10)
            self.residency.poll()

    def settled(self) -> None:
        """Wait until nothing is to be copied from tier to tier, either."""
        while not self.residency.settled or self.residency.demoting:
            self.residency.wait(10)
            self.residency.poll()

    def seek(self, *specs: SegmentSpec) -> None:
        """Query the shared tiers for segments, and wait for their answers."""
        self.residency.seek([spec for spec in specs if self.residency.unsure(spec.key)])
        while self.residency.moving:
            self.residency.wait(10)
            self.residency.poll()

    def form(self, spec: SegmentSpec, codec: str) -> SegmentSpec:
        """A segment as it comes back through a codec."""
        return spec.through(codec, self.store.keys)

    def bring_up(self, *specs: SegmentSpec) -> None:
        """Read segments, and wait for them."""
        assert self.residency.bring_up([(spec, self.store.longest(spec)) for spec in specs]) is not Coming.NOT
        while self.store.demotion is not None and not self.residency.bringing(spec.key for spec in specs):
            self.residency.wait(10)  # until there is room
            self.residency.poll()
            assert self.residency.bring_up([(spec, self.store.longest(spec)) for spec in specs]) is not Coming.NOT
        while self.residency.bringing(spec.key for spec in specs):
            self.residency.wait(10)
            self.residency.poll()

    def lies_right(self, spec: SegmentSpec) -> bool:
        """Whether the pool has a segment with the keys and values that are its own, or its form's."""
        found = self.store.get(spec)
        if found is None:
            return False
        lies = [self.storage.read_slab(layer, found.slots) for layer in range(len(LAYERS))]
        return alike(lies, expected(spec), spec.codec)

    def close(self) -> None:
        self.residency.close()
