"""Pins: segments that somebody keeps in the pool, within a share of it and a budget of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from inlay.errors import PinError
from inlay.kv.identity import SegmentSpec
from inlay.kv.segment import Found, Hold
from inlay.kv.store import SegmentStore


@dataclass(eq=False, slots=True)
class _Pin:
    """A segment that stays. hold: what keeps it, or a form of it, in the pool, from when it is there."""

    spec: SegmentSpec
    owners: set[str] = field(default_factory=set)
    hold: Hold = field(default_factory=Hold)


class Pins:
    """The pins of one store. On the engine's turn.

    A segment may be pinned before it is stored, and stays from then on. It counts as the whole chunks that it may lie
    in, once for each owner, and once for the pool.

    forms: a segment and those forms of it that may be in the pool in its place, most exact first.
    share: of the pool, which all pins together may take; 0 to 1.
    """

    def __init__(
        self, store: SegmentStore, forms: Callable[[SegmentSpec], Iterable[SegmentSpec]], share: float = 0.25
    ) -> None:
        self._store = store
        self._forms = forms
        self._most = int(store.pool.chunks * share)
        self._pins: dict[bytes, _Pin] = {}
        self._chunks: frozenset[int] | None = frozenset()  # those that are held; None where that is to be found out

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def bytes(self) -> int:
        """What all of them take."""
        return self._bytes(sum(self._size(pin.spec) for pin in self._pins.values()))

    @property
    def chunks(self) -> frozenset[int]:
        """Those of the pool that are held."""
        if self._chunks is None:
            held = (slots for pin in self._pins.values() for slots in pin.hold.slots())
            self._chunks = frozenset(chunk for slots in held for chunk in self._store.pool.chunks_of(slots))
        return self._chunks

    def bytes_of(self, owner: str) -> int:
        """What an owner's pins take."""
        return self._bytes(sum(self._size(pin.spec) for pin in self._pins.values() if owner in pin.owners))

    def is_pinned(self, spec: SegmentSpec, owner: str | None = None) -> bool:
        """Whether a segment stays: by this owner's word, or by anybody's."""
        pin = self._pins.get(spec.lossless.key)
        return pin is not None and (owner is None or owner in pin.owners)

    def pin(self, specs: Iterable[SegmentSpec], owner: str, budget: int | None = None) -> None:
        """Keep segments, those that are stored from now on and the others from when they are.

        budget: the most bytes that this owner's pins may take; None for no bound but the pool's share.
        Raises PinError where that is too little; then nothing is pinned that was not before.
        """
        wanted = {spec.lossless.key: spec.lossless for spec in specs}
        new = [spec for spec in wanted.values() if not self.is_pinned(spec)]
        own = sum(self._size(spec) for spec in wanted.values() if not self.is_pinned(spec, owner))
        has, asked = self.bytes_of(owner), self._bytes(own)
        if budget is not None and has + asked > budget:
            raise PinError(
                f"these pins take {_mib(asked)} beside the {_mib(has)} that you have pinned, and {_mib(budget)} are "
                "yours to pin; unpin something, or pin fewer modules"
            )
        all_chunks = sum(self._size(pin.spec) for pin in self._pins.values()) + sum(map(self._size, new))
        if all_chunks > self._most:
            raise PinError(
                f"with these, pins take {_mib(self._bytes(all_chunks))} of the KV pool, and "
                f"{_mib(self._bytes(self._most))} of it may be pinned; unpin something, pin fewer modules, or give "
                "more kv_memory or pin_memory"
            )
        for spec in wanted.values():
            self._pins.setdefault(spec.key, _Pin(spec)).owners.add(owner)
            self.stored(spec)

    def unpin(self, specs: Iterable[SegmentSpec], owner: str) -> None:
        """Let an owner's pins of segments go."""
        for spec in specs:
            pin = self._pins.get(spec.lossless.key)
            if pin is not None:
                pin.owners.discard(owner)
                if not pin.owners:
                    self.release(pin.spec)

    def release(self, spec: SegmentSpec) -> None:
        """Let a segment go, whoever has pinned it."""
        pin = self._pins.pop(spec.lossless.key, None)
        if pin is not None:
            pin.hold.release()
            self._chunks = None

    def stored(self, spec: SegmentSpec) -> None:
        """A segment, or a form of it, may have come into the pool: where it is pinned, it stays."""
        pin = self._pins.get(spec.lossless.key)
        if pin is None:
            return
        found = next((found for form in self._forms(pin.spec) if (found := self._store.get(form)) is not None), None)
        if found is not None and not _holds(pin.hold, found):
            held = pin.hold
            pin.hold = self._store.hold(found)
            held.release()
            self._chunks = None

    def _size(self, spec: SegmentSpec) -> int:
        return self._store.pool.chunks_for(len(spec.ids))

    def _bytes(self, chunks: int) -> int:
        pool = self._store.pool
        return chunks * pool.chunk_size * pool.bytes_per_token


def _holds(hold: Hold, found: Found) -> bool:
    return all(hold.tokens.get(each.segment, 0) >= each.end for each in found.ranges)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
