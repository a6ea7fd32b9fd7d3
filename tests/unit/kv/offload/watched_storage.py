"""Storages whose copies a test may delay or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from inlay.attention.storage import DeviceStorage, KVStorage
from inlay.slots import SlotRange

#: Called with a layer and its slots. It may wait, or raise.
Hook = Callable[[int, Sequence[SlotRange]], object]


def nothing(layer: int, slots: Sequence[SlotRange]) -> None:
    """Let a copy go on."""


class _Watched:
    """Attributes:
    before_read: called before a layer is copied out of the pool.
    before_put: called before a layer is copied into the pool.
    """

    before_read: Hook = staticmethod(nothing)
    before_put: Hook = staticmethod(nothing)

    def read_slab(self, layer: int, slots: Sequence[SlotRange]) -> Any:
        self.before_read(layer, slots)
        return super().read_slab(layer, slots)  # type: ignore[misc]

    def put_slab(self, layer: int, slots: Sequence[SlotRange], slab: Any) -> Any:
        self.before_put(layer, slots)
        return super().put_slab(layer, slots, slab)  # type: ignore[misc]


class WatchedStorage(_Watched, KVStorage):
    """The pool of the CPU."""


class WatchedDevice(_Watched, DeviceStorage):
    """The pool of a device."""


class Held:
    """A hook that holds every copy back until ``go_on`` is set. ``reached`` is set once a copy waits."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, layer: int, slots: Sequence[SlotRange]) -> None:
        self.reached.set()
        assert self.go_on.wait(30)
