"""Eviction policies: how much a segment is worth keeping, as pure functions of what is known of its use.

The pool, the disk tier and ``inlay bench eviction`` rank by the same functions. What is held or pinned is never asked
about, and what follows a segment goes before it, whatever the ranks say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Use:
    """What is known of a segment's use.

    tokens: its length. context: how many tokens stand before it. module: whether it is a module, not other text.
    seen: when it was last asked for. frequency: how often it was read; last, before: when that was, and the time before
    that; 0 for never. floor: the worth of what had been evicted when it was read last, so that old merits fade.
    returned: how often of that it only came back from a lower tier, which counts for what goes first alone.
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

    @property
    def uses(self) -> int:
        """How often it has been computed or read."""
        return self.frequency - self.returned

    def read(self, at: float, floor: float) -> None:
        """Note that it is read."""
        self.seen = at
        self.before, self.last = self.last, at
        self.frequency += 1
        self.floor = floor


@dataclass(frozen=True, slots=True)
class PassCost:
    """What prefill costs: ``token_s`` seconds a token, and ``pair_s`` for each token that it attends to.

    Only their ratio changes an order. An engine measures it (engine/pass_cost.py); the defaults are those of half a
    billion parameters on two cores, for traces and for pools that are too small to measure in.
    """

    token_s: float = 2.5e-3
    pair_s: float = 3e-7

    def seconds(self, tokens: int, context: int) -> float:
        """To compute so many tokens behind so many others."""
        return tokens * (self.token_s + self.pair_s * (context + tokens / 2))


#: What goes first is less: a class, a worth within it, and when it was asked for last, where both are equal. No use
#: makes it fall.
Rank = tuple[int, float, float]
Policy = Callable[[Use, PassCost], Rank]


def lru(use: Use, cost: PassCost) -> Rank:
    """Least recently used first."""
    return 0, 0.0, use.seen


def lru2(use: Use, cost: PassCost) -> Rank:
    """Least recently used twice first (LRU-K, O'Neil et al. 1993): what was used once goes before all others."""
    return 0, use.before, use.seen


def lfu(use: Use, cost: PassCost) -> Rank:
    """Least frequently used first, with old merits fading (LFU with dynamic aging, Arlitt et al. 2000)."""
    return 0, use.floor + use.frequency, use.seen


def hybrid(use: Use, cost: PassCost) -> Rank:
    """Requests' own text first, least recently used; then modules as ``lfu`` has them."""
    return (1, use.floor + use.frequency, use.seen) if use.module else (0, 0.0, use.seen)


def cost(use: Use, cost: PassCost) -> Rank:
    """Least seconds saved for a byte first (GreedyDual-Size-Frequency, Cherkasova 1998).

    H = L + frequency × seconds to compute it ÷ bytes. All tokens of a pool have as many bytes, so they are counted.
    """
    return 0, use.floor + use.frequency * cost.seconds(use.tokens, use.context) / max(1, use.tokens), use.seen


POLICIES: Mapping[str, Policy] = {"lru": lru, "lru2": lru2, "lfu": lfu, "hybrid": hybrid, "cost": cost}

#: What ``inlay bench eviction`` shows to be best on most traces.
DEFAULT_EVICTION = "hybrid"
