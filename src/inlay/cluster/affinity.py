"""Module affinity: chooses the replica that answers a request soonest, by the KV it holds and by its load.

Overlap is the sum over all resident pieces, modules and exact prefixes alike, of their tokens × the credit of their
tier. Cost is the seconds of prefill that are left, plus those queued at the replica. Running answers count only above
the bound. Otherwise several requests at once would go to a replica that has just ended some. The recent work of each
replica counts too and spreads requests evenly over time.

A piece that no replica holds has a home. Rendezvous hashing chooses it among the replicas with a load within a bound
(Mirrokni, Thorup, Zadimoghaddam: consistent hashing with bounded loads, arXiv 1608.01350). If all holders of a piece
are above the bound, it gets a second home in the same way. So hot pieces spread only as far as their load requires.

``ResidencyMap`` holds the replicas of each key as a router knows them: keys of 8 bytes, one bit for each replica. It is
built from the changes that replicas report (kv/changes.py), each with its own numbering, and from the router's own
history. The pieces of a request count as held by the replica that it was sent to, until that replica could have
reported them. When a replica goes or restarts, its bit is given up at once. Its old bits are cleared in small steps, so
that no call takes long.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt

from inlay.cluster.loads import Floats, Loads, RequestLoad, Words
from inlay.cluster.pieces import Wanted, WantedPiece
from inlay.errors import ParameterError
from inlay.kv.changes import StoreChanges

_SWEPT = 512  # keys that one call clears of the bits of lost replicas
_KEY_BYTES = 128  # bytes of one key: a dict entry and two numbers, the second with one bit for each replica
_REPLICAS_A_BYTE = 6
_DROPPED = 64  # keys that are dropped at a time if there are too many

Clock = Callable[[], float]


@dataclass(slots=True)
class _ReplicaState:
    """The state of one replica. slot: its bit. epoch, number: of its store, and of its last reported change."""

    slot: int
    epoch: int = 0
    number: int = 0
    below: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Sweep:
    """Bits that are being cleared, and the keys that may still have them."""

    slots: int
    keys: Iterator[int] = field(default_factory=lambda: iter(()))


class ResidencyMap:
    """Keys and the replicas that hold them. Not thread-safe.

    Args:
        max_bytes: Approximate limit of the memory. The oldest keys are dropped beyond it.
        history_s: Seconds that the keys of a sent request count as held, before the replica reports them.
    """

    def __init__(self, *, max_bytes: int = 2**30, history_s: float = 5.0, clock: Clock = time.monotonic) -> None:
        if max_bytes < 2**20:
            raise ParameterError(
                f"the router's memory is {max_bytes} bytes; give it at least 1 MiB", code="parameter.out_of_range"
            )
        self._max_bytes = max_bytes
        self.dropped = 0  # keys that were dropped for lack of memory
        self.version = 0  # increases whenever a replica joins, leaves or changes its slot
        self._history_s = history_s
        self._clock = clock
        self._masks: dict[int, int] = {}  # key → bits of the replicas that reported it
        self._below: dict[int, int] = {}  # the same for tiers below the pool
        self._recent: dict[int, int] = {}  # the same for the router's own history
        self._ends: deque[tuple[float, int, int]] = deque()  # (end time, key, bits) of the history
        self._known: dict[str, _ReplicaState] = {}
        self._names: list[str | None] = []  # by slot
        self._alive = 0
        self._sweep: _Sweep | None = None
        self._to_sweep = 0

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def most_keys(self) -> int:
        """The largest number of keys."""
        return self._max_bytes // (_KEY_BYTES + self.slots // _REPLICAS_A_BYTE)

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._known)

    @property
    def slots(self) -> int:
        """The number of bits of a mask."""
        return len(self._names)

    def slot(self, replica: str) -> int:
        """Return the bit of a replica that has joined."""
        return self._known[replica].slot

    def join(self, replica: str) -> None:
        """Add a replica without keys. A known replica stays unchanged."""
        if replica not in self._known:
            self._known[replica] = _ReplicaState(self._take_slot(replica))

    def forget(self, replica: str) -> None:
        """Remove a replica and all its keys."""
        known = self._known.pop(replica, None)
        if known is not None:
            self._give_up(known.slot)

    def heard(self, replica: str) -> tuple[int, int]:
        """Return the epoch and number of the last known change. The replica is asked for the changes since."""
        known = self._known[replica]
        return known.epoch, known.number

    def apply(self, replica: str, changes: StoreChanges) -> bool:
        """Apply the changes of a replica. Returns False if earlier changes are missing: ask for all then."""
        known = self._known.get(replica)
        if known is None:
            return True  # it has gone
        if changes.whole:
            if known.epoch or known.number:  # else nothing known could be wrong
                self._give_up(known.slot)
                known = self._known[replica] = _ReplicaState(self._take_slot(replica))
        elif changes.epoch != known.epoch or changes.first != known.number:
            known.epoch = 0
            return False
        bit = 1 << known.slot
        _set(self._masks, changes.added, bit)
        _clear(self._masks, changes.removed, bit)
        _clear(self._recent, changes.removed, bit)
        if changes.below is not None:
            below = frozenset(changes.below)
            _set(self._below, below - known.below, bit)
            _clear(self._below, known.below - below, bit)
            known.below = below
        known.epoch, known.number = changes.epoch, changes.last
        self._bound()
        return True

    def note(self, replica: str, keys: Iterable[int]) -> None:
        """Record that a request with these keys was sent to a replica."""
        known = self._known.get(replica)
        if known is None:
            return
        bit, end = 1 << known.slot, self._clock() + self._history_s
        for key in keys:
            recent = self._recent.get(key, 0)
            if not (recent | self._masks.get(key, 0)) & bit:
                self._recent[key] = recent | bit
                self._ends.append((end, key, bit))
        while len(self._ends) > self.most_keys // 4:
            self._end_first()

    def masks(self, keys: Sequence[int]) -> list[int]:
        """Return for each key the mask of the replicas with the key in their pools."""
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            self._end_first()
        self._clear_some()
        masks, recent, alive = self._masks, self._recent, self._alive
        return [(masks.get(key, 0) | recent.get(key, 0)) & alive for key in keys]

    def masks_below(self, keys: Sequence[int]) -> list[int]:
        """Return for each key the mask of the replicas with the key in their own lower tiers."""
        below, alive = self._below, self._alive
        return [below.get(key, 0) & alive for key in keys]

    def tidy(self) -> bool:
        """Do one step of clearing. Returns True if there is more to clear."""
        self._clear_some()
        return self._sweep is not None or bool(self._to_sweep)

    def _take_slot(self, replica: str) -> int:
        busy = self._to_sweep | (self._sweep.slots if self._sweep else 0)
        for slot, name in enumerate(self._names):
            if name is None and not busy >> slot & 1:
                break
        else:
            slot = len(self._names)
            self._names.append(None)
        self._names[slot] = replica
        self._alive |= 1 << slot
        self.version += 1
        return slot

    def _give_up(self, slot: int) -> None:
        self._names[slot] = None
        self._alive &= ~(1 << slot)
        self.version += 1
        self._to_sweep |= 1 << slot

    def _clear_some(self) -> None:
        """Clear the bits of lost replicas for a few more keys."""
        sweep = self._sweep
        if sweep is None:
            if not self._to_sweep:
                return
            keys = [*self._masks, *self._below, *self._recent]
            sweep = self._sweep = _Sweep(self._to_sweep, iter(keys))
            self._to_sweep = 0
        some = list(islice(sweep.keys, _SWEPT))
        for table in (self._masks, self._below, self._recent):
            _clear(table, some, sweep.slots)
        if len(some) < _SWEPT:
            self._sweep = None

    def _end_first(self) -> None:
        _, key, bit = self._ends.popleft()
        _clear(self._recent, (key,), bit)

    def _bound(self) -> None:
        """Drop the oldest keys if there are too many."""
        for table in (self._masks, self._below):
            while len(table) > self.most_keys:
                for key in list(islice(table, _DROPPED)):
                    del table[key]
                self.dropped += _DROPPED


def _set(table: dict[int, int], keys: Iterable[int], bits: int) -> None:
    for key in keys:
        table[key] = table.get(key, 0) | bits


def _clear(table: dict[int, int], keys: Iterable[int], bits: int) -> None:
    for key in keys:
        mask = table.get(key)
        if mask is not None and mask & bits:
            if mask & ~bits:
                table[key] = mask & ~bits
            else:
                del table[key]


_MOST_HOMELESS = 8  # only the largest pieces without a holder get a home
_IDLE = 0.01  # share of the time: below this mean load there is nothing to balance
_MOST_GIVEN = 2.0  # times the mean; more recent work than this costs no more

Places = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """The weights of a router.

    Args:
        prefill_s: Seconds of prefill of one token, until it is measured.
        decode_s: Seconds of one token of an answer.
        credit_below: Credit of a token in a replica's own lower tier. A token in its pool has 1, a missing one 0.
        bound: Limit of the recent work of a replica, as a factor of the mean.
        memory_s: Time constant in seconds of the recent work, which fades exponentially.
        home: Credit of a token that no replica holds, at the replica that is the home of its piece.
        balance: Cost of a replica whose recent work equals the mean, as a share of the prefill of the whole prompt. It
            steers requests to replicas that had little work.
        stalled_s: Seconds without news after which a replica with work is avoided.

    Raises:
        ParameterError: a weight is out of range.
    """

    prefill_s: float = 1e-4
    decode_s: float = 1e-4
    credit_below: float = 0.7
    bound: float = 1.25
    memory_s: float = 60.0
    home: float = 0.5
    balance: float = 0.3
    stalled_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("prefill_s", "decode_s", "memory_s", "stalled_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ParameterError(
                    f"router: {name} is {getattr(self, name)}; give a number of seconds above 0",
                    code="parameter.out_of_range",
                )
        for name in ("credit_below", "home", "balance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ParameterError(
                    f"router: {name} is {getattr(self, name)}; give a number from 0 to 1", code="parameter.out_of_range"
                )
        if not 1 < self.bound < math.inf:
            raise ParameterError(
                f"router: bound is {self.bound}; give a number above 1, such as 1.25", code="parameter.out_of_range"
            )


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen replica of a request.

    Args:
        replica: Its name.
        work: The work that the request gives to it.
        overlap: Tokens of the request that the replica probably holds.
        best: The most tokens of the request that any replica holds.
        homeless: Tokens of the request that no replica holds.
        second_home: True if some pieces get another home, because all their holders are above the bound.
    """

    replica: str
    work: RequestLoad
    overlap: int = 0
    best: int = 0
    homeless: int = 0
    second_home: bool = False

    @property
    def moved(self) -> bool:
        """True if another replica holds more of the request."""
        return self.overlap < self.best


class Affinity:
    """Chooses replicas. Not thread-safe, like its map.

    Attributes:
        prefill_s, decode_s: Present estimates of the seconds of a token.
        answer: Present estimate of the tokens of an answer.
    """

    def __init__(self, residency: ResidencyMap, settings: RouterSettings) -> None:
        self.residency = residency
        self.settings = settings
        self.loads = Loads(settings.memory_s)
        self.prefill_s = settings.prefill_s
        self.decode_s = settings.decode_s
        self.answer = 64.0
        self._slots: Places = np.zeros(0, np.intp)  # index in ``loads`` → slot in the map
        self._slots_of = -1  # the version of the map that this is valid for

    def join(self, replica: str) -> None:
        """Add a replica that may be chosen."""
        self.residency.join(replica)
        self.loads.join(replica)

    def forget(self, replica: str) -> None:
        """Remove a replica and all that it held."""
        self.residency.forget(replica)
        self.loads.leave(replica)

    def choose(self, wanted: Wanted, now: float, without: Collection[str] = ()) -> Decision | None:
        """Return the choice for a request. None without replicas.

        Args:
            wanted: the pieces that the request reads.
            now: the time in seconds, on a monotonic clock.
            without: replicas to avoid.
        """
        places = self._places(without)
        if not len(places):
            return None
        loads = self.loads
        loads.fade(now)
        pieces = wanted.pieces
        sizes = np.fromiter((piece.tokens for piece in pieces), np.float64, len(pieces))
        held, found = self._held(pieces, places)
        overlap = sizes @ found
        answer_s = self.decode_s * (self.answer if wanted.answer is None else min(self.answer, wanted.answer))
        whole_s, given = wanted.tokens * self.prefill_s, loads.given_s[places]
        mean = max(float(given.mean()), _IDLE * self.settings.memory_s)
        allowed = given <= self.settings.bound * mean + whole_s + answer_s
        bonus, second_home = self._homes(pieces, sizes, held, found, allowed, places)
        left_s = (wanted.tokens - overlap) * self.prefill_s
        queue, running = loads.queue_s[places], loads.running[places]
        if not (overlap.any() or bonus.any()):
            queue = np.maximum(0.0, queue - queue.mean())  # or all requests without overlap would go to one replica
        crowd = np.maximum(0.0, running - self.settings.bound * running.mean())
        cost = left_s + queue + crowd * self.decode_s - bonus * self.prefill_s
        cost += self.settings.balance * whole_s * np.minimum(given / mean, _MOST_GIVEN)
        cost[~allowed] = math.inf
        at = int(cost.argmin())
        return Decision(
            replica=loads.names[places[at]],
            work=RequestLoad(float(left_s[at]), float(left_s[at]) + answer_s),
            overlap=round(float(overlap[at])),
            best=round(float(overlap.max())),
            homeless=round(float(sizes[~held].sum())),
            second_home=second_home,
        )

    def homes(self, pieces: Sequence[WantedPiece], without: Collection[str] = ()) -> list[str]:
        """Return for each piece the replica that is to store it, or an empty list without replicas.

        It is a replica that holds the piece already, else the home of the piece. A replica with its share of new pieces
        gets no more of them, if others have room.
        """
        places = self._places(without)
        if not len(places) or not pieces:
            return []
        _, found = self._held(pieces, places)
        weights = _weights(_last_keys(pieces), self.loads.salts[places])
        share = self.settings.bound * sum(piece.tokens for piece in pieces) / len(places)
        given, chosen = np.zeros(len(places)), []
        for piece, where, weight in zip(pieces, found, weights, strict=True):
            order = np.argsort(weight)[::-1]
            within = order[given[order] + piece.tokens <= share]
            at = where.argmax() if where.any() else within[0] if len(within) else given.argmin()
            given[at] += piece.tokens
            chosen.append(self.loads.names[places[at]])
        return chosen

    def _places(self, without: Collection[str]) -> Places:
        names = self.loads.names
        if not without:
            return np.arange(len(names))
        return np.array([at for at, name in enumerate(names) if name not in without], np.intp)

    def _held(self, pieces: Sequence[WantedPiece], places: Places) -> tuple[Bools, Floats]:
        """For each piece: whether any replica holds it, and each replica's credit, (pieces, replicas)."""
        residency, slots = self.residency, self._map_slots()[places]
        masks = _chained(pieces, residency.masks([key for piece in pieces for key in piece.keys]), "keys")
        below = residency.masks_below([key for piece in pieces for key in piece.below])
        found = _bits(masks, residency.slots)[:, slots]
        if any(below):
            lower = _bits(_chained(pieces, below, "below"), residency.slots)[:, slots]
            found = np.maximum(found, self.settings.credit_below * lower)
        held: Bools = np.asarray(found.any(axis=1))
        return held, found

    def _map_slots(self) -> Places:
        if self._slots_of != self.residency.version:
            self._slots = np.array([self.residency.slot(name) for name in self.loads.names], np.intp)
            self._slots_of = self.residency.version
        return self._slots

    def _homes(
        self, pieces: Sequence[WantedPiece], sizes: Floats, held: Bools, found: Floats, allowed: Bools, places: Places
    ) -> tuple[Floats, bool]:
        """The tokens that each replica gets as a home of pieces, and whether some of these pieces had another home
        before.
        """
        bonus = np.zeros(len(places))
        reachable = found[:, allowed].any(axis=1)
        lost = bool((held & ~reachable).any())
        homeless = np.flatnonzero(~reachable)
        if not len(homeless) or not self.settings.home:
            return bonus, lost
        if len(homeless) > _MOST_HOMELESS:
            homeless = homeless[np.argsort(-sizes[homeless], kind="stable")[:_MOST_HOMELESS]]
        weights = _weights(_last_keys([pieces[int(at)] for at in homeless]), self.loads.salts[places])
        weights[:, ~allowed] = 0
        np.add.at(bonus, weights.argmax(axis=1), sizes[homeless] * self.settings.home)
        return bonus, lost


def _last_keys(pieces: Sequence[WantedPiece]) -> Words:
    return np.array([piece.keys[-1] for piece in pieces], np.uint64)


def _chained(pieces: Sequence[WantedPiece], flat: Sequence[int], what: Literal["keys", "below"]) -> list[int]:
    """The mask of the holders of each piece. flat: the masks of all keys of all pieces, in order."""
    masks: list[int] = []
    at = 0
    for piece in pieces:
        found = 0
        for _ in piece.keys if what == "keys" else piece.below:
            found |= flat[at]
            at += 1
        masks.append(found & masks[-1] if piece.chained else found)
    return masks


def _bits(masks: Sequence[int], slots: int) -> Floats:
    """Unpack masks into rows of 0 and 1: (masks, slots)."""
    size = (slots + 7) // 8
    if not masks:
        return np.zeros((0, slots))
    packed = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in masks), np.uint8)
    return np.unpackbits(packed.reshape(len(masks), size), axis=1, bitorder="little").astype(np.float64)


def _weights(keys: Words, salts: Words) -> Words:
    """Rendezvous hashing: a pseudo-random number above 0 for each key and replica, (keys, replicas)."""
    mixed: Words = keys[:, None] ^ salts[None, :]
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed | np.uint64(1)
