"""Compare eviction policies: traces of accesses against a pool smaller than their distinct tokens.

It simulates sizes only, without a model. The eviction queue and the policies are the engine's.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

from inlay.errors import ParameterError
from inlay.kv.policies import POLICIES, EvictionQueue, PassCost, Use
from inlay_lab.options import check_least

#: Called with the number of accesses done and their total.
Progress = Callable[[int, int], None]

_THINGS = 10_000  # modules in a trace; each is asked for ten times on average
_SPARE = 1 / 32  # share of the capacity that is evicted beyond the need, as in the pool


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of an access.

    Attributes:
        number: Unique number of the segment.
        tokens: Length in tokens.
        module: True for a schema's module.
    """

    number: int
    tokens: int
    module: bool


#: The pieces of one prompt, in order. A piece can be reused only if all pieces before it are stored.
Access = Sequence[Piece]


@dataclass(frozen=True, kw_only=True)
class EvictionSetting:
    """Options of the simulation. Raises ParameterError.

    Attributes:
        capacities: In percent of the trace's distinct tokens.
        cost: Cost of the prefill that a hit saves.
    """

    accesses: int = 100_000
    capacities: tuple[float, ...] = (1, 5, 20)
    policies: tuple[str, ...] = tuple(POLICIES)
    traces: tuple[str, ...] = ("zipf", "scan", "shifting", "conversations")
    cost: PassCost = field(default_factory=PassCost)
    seed: int = 0

    def __post_init__(self) -> None:
        for what, named, known in (("policy", self.policies, POLICIES), ("trace", self.traces, TRACES)):
            for name in named:
                if name not in known:
                    raise ParameterError(f"there is no {what} '{name}'; use some of {', '.join(known)}")
        check_least(1, accesses=self.accesses)
        if not all(0 < capacity <= 100 for capacity in self.capacities):
            raise ParameterError("--capacity has percents of the trace's tokens; each must be above 0 and at most 100")


def measure_eviction(setting: EvictionSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Measure every policy on every trace at every capacity: the token hit ratio, and the seconds saved."""
    rows: list[dict[str, Any]] = []
    runs = len(setting.traces) * len(setting.capacities) * len(setting.policies)
    for trace in setting.traces:
        accesses = list(TRACES[trace](setting.accesses, random.Random(f"{trace} {setting.seed}")))
        distinct = sum({piece.number: piece.tokens for access in accesses for piece in access}.values())
        for capacity in setting.capacities:
            cells = {}
            for policy in setting.policies:
                cells[policy] = _run(accesses, max(1, int(distinct * capacity / 100)), policy, setting.cost)
                if progress is not None:
                    progress(len(rows) * len(setting.policies) + len(cells), runs)
            rows.append({"trace": trace, "capacity": capacity, "tokens": distinct, "policies": cells})
    return {"accesses": setting.accesses, "seed": setting.seed, "cost": asdict(setting.cost), "rows": rows}


# The pool


@dataclass(eq=False, slots=True)
class _Stored:
    use: Use
    number: int
    parent: _Stored | None
    listed: int | None = None
    behind: dict[int, _Stored] = field(default_factory=dict)


def _run(accesses: Sequence[Access], capacity: int, policy: str, cost: PassCost) -> dict[str, float]:
    pool = _Pool(capacity, policy, cost)
    asked = hit = 0
    saved_s = 0.0
    for access in accesses:
        found, saved = pool.access(access)
        asked += sum(piece.tokens for piece in access)
        hit += found
        saved_s += saved
    return {"hit_ratio": hit / asked, "saved_s": saved_s}


class _Pool:
    """Stored pieces of at most ``capacity`` tokens."""

    def __init__(self, capacity: int, policy: str, cost: PassCost) -> None:
        self._capacity, self._cost = capacity, cost
        self._stored: dict[int, _Stored] = {}
        self._used = 0
        self._order: EvictionQueue[_Stored] = EvictionQueue(POLICIES[policy], cost, lambda one: one.behind.values())

    def access(self, access: Access) -> tuple[int, float]:
        """Read a prompt and store all of it. Returns the tokens found and the seconds that computing them would
        take.
        """
        found, saved_s = 0, 0.0
        path: list[_Stored] = []
        for piece in access:
            one = self._stored.get(piece.number)
            if one is None:
                break
            saved_s += self._cost.seconds(piece.tokens, found)
            found += piece.tokens
            path.append(one)
        for one in reversed(path):  # so that the end of a prefix is evicted before its start
            self._order.read(one)
        self._add(access[len(path) :], found, path)
        return found, saved_s

    def _add(self, missing: Access, context: int, path: list[_Stored]) -> None:
        for piece in missing:
            if not self._make_room(piece.tokens, path):
                return  # larger than everything that is not in use
            parent = path[-1] if path else None
            one = _Stored(Use(piece.tokens, context, piece.module), piece.number, parent)
            self._stored[piece.number] = one
            self._used += piece.tokens
            if parent is not None:
                parent.behind[piece.number] = one
            self._order.add(one, piece.number)
            path.append(one)
            context += piece.tokens

    def _make_room(self, tokens: int, in_use: Sequence[_Stored]) -> bool:
        over = self._used + tokens - self._capacity
        if over <= 0:
            return True
        wanted, going, gone = over + int(self._capacity * _SPARE), 0, []
        kept = set(in_use)
        with self._order.next() as ordered:
            for one in ordered:
                if one not in kept:
                    gone.append(one)
                    going += one.use.tokens
                    if going >= wanted:
                        break
        if going < over:
            return False
        for one in gone:
            self._order.evicted(one)
            self._order.remove(one, one.number)
            del self._stored[one.number]
            self._used -= one.use.tokens
            if one.parent is not None:
                del one.parent.behind[one.number]
        return True


# Traces


def _zipf(accesses: int, draw: random.Random) -> Iterator[Access]:
    """Modules whose popularity follows Zipf's law (exponent 0.9)."""
    modules, pick = _modules(accesses, draw), _Zipf(max(1, min(_THINGS, accesses // 10)), draw)
    for _ in range(accesses):
        yield (modules[pick()],)


def _scan(accesses: int, draw: random.Random) -> Iterator[Access]:
    """Zipf accesses that alternate with scans: texts that are read only once, half of all accesses."""
    modules, pick = _modules(accesses, draw), _Zipf(max(1, min(_THINGS, accesses // 10)), draw)
    number, length = len(modules), max(1, accesses // 50)
    for at in range(accesses):
        if at // length % 2:
            number += 1
            yield (Piece(number, _tokens(draw), False),)
        else:
            yield (modules[pick()],)


def _shifting(accesses: int, draw: random.Random) -> Iterator[Access]:
    """Zipf accesses whose popular modules change ten times in the trace."""
    modules = _modules(accesses, draw)
    pick = _Zipf(len(modules), draw)
    for at in range(accesses):
        if at % max(1, accesses // 10) == 0:
            draw.shuffle(modules)
        yield (modules[pick()],)


def _conversations(accesses: int, draw: random.Random) -> Iterator[Access]:
    """Turns of conversations behind one of 50 system prompts: six turns on average, with pauses between them.

    A turn reads all turns before it. Most conversations go on within some hundred turns of others, some much later, and
    some never.
    """
    heads = [Piece(number, _tokens(draw), True) for number in range(50)]
    pick = _Zipf(len(heads), draw)
    waiting: list[tuple[float, int, list[Piece]]] = []
    number = len(heads)
    for now in range(accesses):
        said = heappop(waiting)[2] if waiting and waiting[0][0] <= now else [heads[pick()]]
        number += 1
        said = [*said, Piece(number, int(draw.lognormvariate(5, 0.8)) + 8, False)]
        yield said
        if draw.random() < 5 / 6:
            heappush(waiting, (now + draw.lognormvariate(6, 1.5), number, said))


TRACES: Mapping[str, Callable[[int, random.Random], Iterator[Access]]] = {
    "zipf": _zipf,
    "scan": _scan,
    "shifting": _shifting,
    "conversations": _conversations,
}


def _modules(accesses: int, draw: random.Random) -> list[Piece]:
    return [Piece(number, _tokens(draw), True) for number in range(max(1, min(_THINGS, accesses // 10)))]


def _tokens(draw: random.Random) -> int:
    """Tokens of a document: half have more than 400 tokens, one in fifty more than 3,000."""
    return min(32_768, int(draw.lognormvariate(6, 1)) + 16)


class _Zipf:
    """Draws numbers below ``count``; the n-th has the weight n ** -0.9."""

    def __init__(self, count: int, draw: random.Random) -> None:
        self._sums = list(accumulate((n + 1) ** -0.9 for n in range(count)))
        self._draw = draw

    def __call__(self) -> int:
        return bisect_left(self._sums, self._draw.random() * self._sums[-1])
