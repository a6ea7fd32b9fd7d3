"""Eviction policies: pure functions that rank a segment by its use.

The pool, the disk tier and ``inlay bench eviction`` use the same functions. Segments with references or pins are never
ranked. Text behind a segment is always evicted before it, independent of rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Use:
    """The known use of a segment.

    Attributes:
        tokens, context: its length, and the number of tokens before it.
        module: True for a module, False for other text.
        seen: time of the last lookup.
        frequency: number of reads.
        last, before: times of the last two reads; 0 for never.
        floor: the worth of evicted segments at the last read. It lets old uses count less.
        returned: number of these reads that were only returns from a lower tier. Only ``uses`` subtracts them.
        read_s: the last read, in seconds of ``time.monotonic``.
    """

    tokens: int
    context: int = 0
    module: bool = False
    seen: float = 0
    frequency: int = 0
    last: float = 0
    before: float = 0
    floor: float = 0.0
    returned: int = 0
    read_s: float = 0.0

    @property
    def uses(self) -> int:
        """How often it was computed or read."""
        return self.frequency - self.returned

    def read(self, at: float, floor: float) -> None:
        """Record a read."""
        self.seen = at
        self.before, self.last = self.last, at
        self.read_s = time.monotonic()
        self.frequency += 1
        self.floor = floor


@dataclass(frozen=True, slots=True)
class PassCost:
    """The cost of prefill: ``token_s`` seconds a token, plus ``pair_s`` for each token that it attends to.

    Only their ratio affects an order. An engine measures it (engine/pass_cost.py). The defaults fit half a billion
    parameters on two cores; they serve traces and pools that are too small to measure in.
    """

    token_s: float = 2.5e-3
    pair_s: float = 3e-7

    def seconds(self, tokens: int, context: int) -> float:
        """Seconds to compute ``tokens`` tokens behind ``context`` others."""
        return tokens * (self.token_s + self.pair_s * (context + tokens / 2))


#: The lowest rank is evicted first: (class, worth within the class, time of the last lookup). A use never lowers it.
Rank = tuple[int, float, float]
Policy = Callable[[Use, PassCost], Rank]


def lru(use: Use, cost: PassCost) -> Rank:
    """Least recently used first."""
    return 0, 0.0, use.seen


def lru2(use: Use, cost: PassCost) -> Rank:
    """Least recently used twice first (LRU-K, O'Neil et al. 1993). Segments that were used once go before all
    others.
    """
    return 0, use.before, use.seen


def lfu(use: Use, cost: PassCost) -> Rank:
    """Least frequently used first; old uses count less (LFU with dynamic aging, Arlitt et al. 2000)."""
    return 0, use.floor + use.frequency, use.seen


def hybrid(use: Use, cost: PassCost) -> Rank:
    """Requests' own text first, least recently used; then modules as in ``lfu``."""
    return (1, use.floor + use.frequency, use.seen) if use.module else (0, 0.0, use.seen)


def cost(use: Use, cost: PassCost) -> Rank:
    """Fewest saved seconds per byte first (GreedyDual-Size-Frequency, Cherkasova 1998).

    H = L + frequency × seconds to compute it ÷ bytes. All tokens of a pool have the same size, so tokens stand for
    bytes.
    """
    return 0, use.floor + use.frequency * cost.seconds(use.tokens, use.context) / max(1, use.tokens), use.seen


POLICIES: Mapping[str, Policy] = {"lru": lru, "lru2": lru2, "lfu": lfu, "hybrid": hybrid, "cost": cost}

#: The best policy on most traces of ``inlay bench eviction``.
DEFAULT_EVICTION = "hybrid"
