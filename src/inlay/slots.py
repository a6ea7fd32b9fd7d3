"""Token slots of the KV pool, as plain numbers: what the store, the plan and the engine speak of alike.

Slots are numbered from 0; a chunk is ``chunk_size`` of them side by side, the unit in which the pool gives them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots ``first`` … ``first + length - 1``, side by side."""

    first: int
    length: int

    @property
    def end(self) -> int:
        """The slot behind the last one."""
        return self.first + self.length


def total(ranges: Iterable[SlotRange]) -> int:
    """How many slots these ranges hold."""
    return sum(each.length for each in ranges)


def cut(ranges: Sequence[SlotRange], start: int, length: int) -> tuple[SlotRange, ...]:
    """The slots of tokens ``start`` … ``start + length - 1`` of what is stored in ``ranges``."""
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
    """The same slots in the same order, ranges that follow each other without a gap as one."""
    joined: list[SlotRange] = []
    for each in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.end == each.first:
            joined[-1] = SlotRange(last.first, last.length + each.length)
        else:
            joined.append(each)
    return tuple(joined)


def chunks_for(tokens: int, chunk_size: int) -> int:
    """How many chunks hold that many tokens."""
    return -(-tokens // chunk_size)


def chunks_of(ranges: Iterable[SlotRange], chunk_size: int) -> list[int]:
    """The chunks that hold slots of these ranges, each once."""
    found: dict[int, None] = {}
    for each in ranges:
        if each.length:
            found.update(dict.fromkeys(range(each.first // chunk_size, -(-each.end // chunk_size))))
    return list(found)
