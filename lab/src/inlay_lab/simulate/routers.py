"""Routers for a simulated cluster: the real module affinity, and common alternatives."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from inlay.cluster.affinity import Affinity, Decision, ResidencyMap, RouterSettings
from inlay.cluster.loads import RequestLoad
from inlay.cluster.pieces import Wanted
from inlay.kv.changes import StoreChanges
from inlay_lab.simulate.costs import Costs
from inlay_lab.simulate.replica import Job, Replica

_TOGETHER = 8  # typical number of answers that share a pass's fixed cost


class Router(Protocol):
    """Chooses a replica for each request. ``tells`` is true if it needs the changes of replicas' stores."""

    tells: bool

    def choose(self, wanted: Wanted, now: float) -> Decision: ...

    def first_token(self, job: Job) -> None: ...

    def end(self, job: Job) -> None: ...

    def apply(self, replica: str, changes: StoreChanges) -> None: ...


class _Deaf:
    """A router that needs no store changes."""

    tells = False

    def first_token(self, job: Job) -> None: ...

    def end(self, job: Job) -> None: ...

    def apply(self, replica: str, changes: StoreChanges) -> None: ...


class RoundRobin(_Deaf):
    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._next = 0

    def choose(self, wanted: Wanted, now: float) -> Decision:
        replica = self._replicas[self._next % len(self._replicas)]
        self._next += 1
        return decision_for(replica)


class PowerOfTwo(_Deaf):
    """The one with fewer running requests of two random replicas."""

    def __init__(self, replicas: Sequence[Replica], seed: int) -> None:
        self._replicas = replicas
        self._random = random.Random(seed)

    def choose(self, wanted: Wanted, now: float) -> Decision:
        pair = self._random.sample(self._replicas, min(2, len(self._replicas)))
        return decision_for(min(pair, key=lambda replica: replica.running))


class PrefixAffinity(_Deaf):
    """The replica that was sent the longest prefix of the prompt before, by SGLang's rules and defaults.

    If less than half of the prompt matches, or loads are out of balance, the replica with the fewest running requests.
    """

    _LEAST_MATCH = 0.5
    _BALANCE_ABSOLUTE, _BALANCE_RELATIVE = 64, 1.5

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._sent: list[OrderedDict[int, int]] = [OrderedDict() for _ in replicas]  # chain → tokens, by replica
        self._tokens = [0] * len(replicas)
        self._where: dict[int, int] = {}  # chain → bit mask of replicas

    def choose(self, wanted: Wanted, now: float) -> Decision:
        chains = _chains(wanted)
        running = [replica.running for replica in self._replicas]
        fewest, most = min(running), max(running)
        balanced = most - fewest <= self._BALANCE_ABSOLUTE or most <= self._BALANCE_RELATIVE * fewest
        matched, mask = self._longest(chains) if balanced else (0, 0)
        among = range(len(running))
        if matched > self._LEAST_MATCH * wanted.tokens:
            among = [at for at in among if mask >> at & 1]  # type: ignore[assignment]
        at = min(among, key=lambda one: (running[one], one))
        self._remember(at, chains)
        return decision_for(self._replicas[at])

    def _longest(self, chains: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The tokens of the longest prefix sent before, and the bit mask of its replicas."""
        matched, mask = 0, 0
        for chain, tokens in chains:
            here = self._where.get(chain, 0)
            if not here:
                break
            matched, mask = matched + tokens, here
        return matched, mask

    def _remember(self, at: int, chains: Sequence[tuple[int, int]]) -> None:
        sent, bit = self._sent[at], 1 << at
        for chain, tokens in reversed(chains):
            if chain in sent:
                sent.move_to_end(chain)
                continue
            sent[chain] = tokens
            self._tokens[at] += tokens
            self._where[chain] = self._where.get(chain, 0) | bit
        while self._tokens[at] > self._replicas[at].costs.pool:
            chain, tokens = sent.popitem(last=False)
            self._tokens[at] -= tokens
            self._where[chain] &= ~bit
            if not self._where[chain]:
                del self._where[chain]


class ModuleAffinity:
    """The cluster's own router, with its map of the replicas' stores."""

    tells = True

    def __init__(self, replicas: Sequence[Replica], costs: Costs, settings: RouterSettings | None = None) -> None:
        self._now = 0.0
        self.residency = ResidencyMap(clock=lambda: self._now)
        credit = 1 - min(1.0, costs.below_s / costs.prefill_s)
        decode_s = costs.decode_s + costs.pass_s / _TOGETHER
        settings = settings or RouterSettings(prefill_s=costs.prefill_s, decode_s=decode_s, credit_below=credit)
        self.affinity = Affinity(self.residency, settings)
        for replica in replicas:
            self.affinity.join(replica.name)

    def choose(self, wanted: Wanted, now: float) -> Decision:
        self._now = now
        decision = self.affinity.choose(wanted, now)
        assert decision is not None, "there are replicas"
        self.affinity.loads.begin(decision.replica, decision.work)
        self.residency.note(decision.replica, wanted.keys)
        return decision

    def first_token(self, job: Job) -> None:
        self.affinity.loads.first_token(job.decision.replica, job.decision.work)

    def end(self, job: Job) -> None:
        self.affinity.loads.end(job.decision.replica)

    def apply(self, replica: str, changes: StoreChanges) -> None:
        assert self.residency.apply(replica, changes), "no change is lost here"


class Timed:
    """A router that records the thread time of each decision, in microseconds."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.micros: list[float] = []

    def choose(self, wanted: Wanted, now: float) -> Decision:
        began = time.thread_time()
        decision = self.router.choose(wanted, now)
        self.micros.append((time.thread_time() - began) * 1e6)
        return decision


def make_router(name: str, replicas: Sequence[Replica], costs: Costs, seed: int) -> Router:
    """The router of this name from ROUTERS."""
    if name == "module":
        return ModuleAffinity(replicas, costs)
    if name == "prefix":
        return PrefixAffinity(replicas)
    return PowerOfTwo(replicas, seed) if name == "power-of-two" else RoundRobin(replicas)


ROUTERS = ("module", "prefix", "power-of-two", "round-robin")


def decision_for(replica: Replica) -> Decision:
    return Decision(replica.name, RequestLoad(0.0, 0.0))


def _chains(wanted: Wanted) -> list[tuple[int, int]]:
    """The prefixes of a prompt at each piece: a hash of the prefix, and the tokens of the piece."""
    chains, before = [], 0
    for piece in wanted.pieces:
        before = hash((before, piece.keys[-1]))
        chains.append((before, piece.tokens))
    return chains
