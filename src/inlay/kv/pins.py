"""Pins keep segments in the pool, within a share of the pool and a budget per owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from inlay.errors import PinError
from inlay.kv.identity import SegmentSpec
from inlay.kv.segment import Hold, PrefixMatch
from inlay.kv.store import SegmentStore

BY_KEY = "key"  # the reason of a pin by segment key


@dataclass(eq=False, slots=True)
class _Pin:
    """A pinned segment. ``hold`` references the segment, or a form of it, once it is stored.

    ``reasons`` are by owner; the pin ends with the last of them.
    """

    spec: SegmentSpec
    reasons: dict[str, set[str]] = field(default_factory=dict)
    hold: Hold = field(default_factory=Hold)


class Pins:
    """The pins of one store. Call with the engine lock held.

    A segment may be pinned before it is stored. It counts as the whole chunks of its tokens, once per owner and once
    for
    the pool. An owner may have several reasons and remove each by itself: BY_KEY, or the name of one pin of a schema.

    Args:
        forms: a segment and its forms that may replace it in the pool, most exact first.
        share: the part of the pool that all pins together may take, 0 to 1.
    """

    def __init__(
        self, store: SegmentStore, forms: Callable[[SegmentSpec], Iterable[SegmentSpec]], share: float = 0.25
    ) -> None:
        self._store = store
        self._forms = forms
        self._most = int(store.pool.chunks * share)
        self._pins: dict[bytes, _Pin] = {}
        self._chunks: frozenset[int] | None = frozenset()  # pinned chunks; None if they must be recounted

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def bytes(self) -> int:
        """Bytes of all pins."""
        return self._bytes(sum(self._size(pin.spec) for pin in self._pins.values()))

    @property
    def chunks(self) -> frozenset[int]:
        """The pool's pinned chunks."""
        if self._chunks is None:
            held = (slots for pin in self._pins.values() for slots in pin.hold.slots())
            self._chunks = frozenset(chunk for slots in held for chunk in self._store.pool.chunks_of(slots))
        return self._chunks

    def bytes_of(self, owner: str) -> int:
        """Bytes of an owner's pins."""
        return self._bytes(sum(self._size(pin.spec) for pin in self._pins.values() if owner in pin.reasons))

    def of(self, owner: str) -> list[SegmentSpec]:
        """The segments that an owner has pinned."""
        return [pin.spec for pin in self._pins.values() if owner in pin.reasons]

    def by_key(self) -> list[SegmentSpec]:
        """The segments that any owner has pinned by key."""
        return [pin.spec for pin in self._pins.values() if any(BY_KEY in why for why in pin.reasons.values())]

    def is_pinned(self, spec: SegmentSpec, owner: str | None = None) -> bool:
        """True if this owner, or any owner if None, has pinned the segment."""
        pin = self._pins.get(spec.lossless.key)
        return pin is not None and (owner is None or owner in pin.reasons)

    def pin(
        self,
        specs: Iterable[SegmentSpec],
        owner: str,
        reason: str,
        budget: int | None = None,
        *,
        instead: str | None = None,
    ) -> None:
        """Pin segments. A segment that is not stored yet is kept from the time it is stored.

        Args:
            budget: the most bytes of this owner's pins; None for no bound but the pool's share.
            instead: a reason of the same owner to remove. Pins that have no other reason do not count for either bound.

        Raises:
            PinError: a bound is exceeded; nothing has changed then.
        """
        wanted = {spec.lossless.key: spec.lossless for spec in specs}
        left = [pin for pin in self._pins.values() if set(pin.reasons) != {owner} or pin.reasons[owner] != {instead}]
        own = {pin.spec.key for pin in left if pin.reasons.get(owner, set()) - {instead}}
        has = self._bytes(sum(self._size(self._pins[key].spec) for key in own))
        asked = self._bytes(sum(self._size(spec) for spec in wanted.values() if spec.key not in own))
        if budget is not None and has + asked > budget:
            raise PinError(
                f"these pins take {_size(asked)} beside the {_size(has)} that you have pinned, and {_size(budget)} are "
                "yours to pin; unpin something, or pin fewer modules"
            )
        all_pinned = {pin.spec.key: pin.spec for pin in left} | wanted
        all_chunks = sum(map(self._size, all_pinned.values()))
        if all_chunks > self._most:
            raise PinError(
                f"with these, pins take {_size(self._bytes(all_chunks))} of the KV pool, and "
                f"{_size(self._bytes(self._most))} of it may be pinned; unpin something, pin fewer modules, or give "
                "more kv_memory or pin_memory"
            )
        for spec in wanted.values():
            self._pins.setdefault(spec.key, _Pin(spec)).reasons.setdefault(owner, set()).add(reason)
            self.stored(spec)
        if instead is not None:
            self.unpin(self.of(owner), owner, instead)

    def unpin(self, specs: Iterable[SegmentSpec], owner: str | None, reason: str) -> None:
        """Remove this reason of an owner, or of all owners if None, from segments."""
        for spec in specs:
            pin = self._pins.get(spec.lossless.key)
            if pin is None:
                continue
            for each in list(pin.reasons) if owner is None else [owner]:
                pin.reasons.get(each, set()).discard(reason)
            pin.reasons = {each: why for each, why in pin.reasons.items() if why}
            if not pin.reasons:
                self.release(pin.spec)

    def release(self, spec: SegmentSpec) -> None:
        """Unpin a segment for all owners and reasons."""
        pin = self._pins.pop(spec.lossless.key, None)
        if pin is not None:
            pin.hold.release()
            self._chunks = None

    def stored(self, spec: SegmentSpec) -> None:
        """Called when a segment, or a form of it, may have entered the pool. Acquires it if it is pinned."""
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


def _holds(hold: Hold, found: PrefixMatch) -> bool:
    return all(hold.tokens.get(each.segment, 0) >= each.end for each in found.ranges)


def _size(size: int) -> str:
    """Bytes as text for a message; in KiB if MiB would show zero."""
    return f"{size / 2**20:,.1f} MiB" if size >= 0.05 * 2**20 else f"{size / 2**10:,.1f} KiB"
