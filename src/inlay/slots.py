"""Token slots of the KV pool as plain numbers, shared by the store, the plan and the engine.

Slots are numbered from 0. The pool allocates them in chunks of ``chunk_size`` consecutive slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Consecutive slots ``first`` … ``first + length - 1``."""

    first: int
    length: int

    @property
    def end(self) -> int:
        """The slot behind the last one."""
        return self.first + self.length


def total(ranges: Iterable[SlotRange]) -> int:
    """Return the number of slots in these ranges."""
    return sum(each.length for each in ranges)


def cut(ranges: Sequence[SlotRange], start: int, length: int) -> tuple[SlotRange, ...]:
    """Return the slots of tokens ``start`` … ``start + length - 1`` among the tokens stored in ``ranges``."""
    found: list[SlotRange] = []
    for each in ranges:
        if length <= 0:
            break
        if start < each.length:
            taken = min(each.length - start, length)
            found.append(SlotRange(each.first + start, taken))
            length -= taken
            start = 0
        else:
            start -= each.length
    assert length <= 0, "a cut beyond the end of its runs"
    return tuple(found)


def join(ranges: Iterable[SlotRange]) -> tuple[SlotRange, ...]:
    """Merge ranges that follow each other without a gap."""
    joined: list[SlotRange] = []
    for each in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.end == each.first:
            joined[-1] = SlotRange(last.first, last.length + each.length)
        else:
            joined.append(each)
    return tuple(joined)


def chunks_for(tokens: int, chunk_size: int) -> int:
    """Return the number of chunks for that many tokens."""
    return -(-tokens // chunk_size)


def chunks_of(ranges: Iterable[SlotRange], chunk_size: int) -> list[int]:
    """Return the chunks with slots of these ranges, each once."""
    found: dict[int, None] = {}
    for each in ranges:
        if each.length:
            found.update(dict.fromkeys(range(each.first // chunk_size, -(-each.end // chunk_size))))
    return list(found)
