"""Module affinity: chooses the replica that answers a request soonest, by the KV it holds and by its load.

Overlap is the sum over all resident pieces, modules and exact prefixes alike, of their tokens × the credit of their
tier. Cost is the seconds of prefill that are left, plus those queued at the replica. Running answers count only above
the bound. Otherwise several requests at once would go to a replica that has just ended some. The recent work of each
replica counts too and spreads requests evenly over time.

A piece that no replica holds has a home. Rendezvous hashing chooses it among the replicas with a load within a bound
(Mirrokni, Thorup, Zadimoghaddam: consistent hashing with bounded loads, arXiv 1608.01350). If all holders of a piece
are above the bound, it gets a second home in the same way. So hot pieces spread only as far as their load requires.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from inlay.cluster.loads import Floats, Loads, RequestLoad, Words
from inlay.cluster.pieces import Wanted, WantedPiece
from inlay.cluster.residency_map import ResidencyMap
from inlay.errors import ParameterError

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
        overlap: Tokens of the request that it probably holds.
        best: The most that any replica holds.
        homeless: Tokens that no replica holds.
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
        """Return the choice for a request, or None without replicas. without: replicas to avoid."""
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
        """Return for each piece the replica that is to hold it, or an empty list without replicas.

        This is a replica that holds the piece, else its home. New pieces go to no replica beyond its share if that is
        possible.
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
