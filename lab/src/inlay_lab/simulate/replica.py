"""A simulated replica: passes over prompt chunks and answers together, and a store that evicts.

A pass takes ``pass_s``, the decode of each running answer, and up to a chunk of the queued prompts in order. At its end
complete prompts get their first token and every answer gets one more. New requests wait for that end. All answers share
a clock that counts passes, and each ends at its start plus its length. So passes without prompts need no single steps.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from inlay.cluster.affinity import Decision
from inlay.cluster.pieces import Wanted
from inlay.kv.changes import StoreChanges
from inlay_lab.simulate.costs import Costs
from inlay_lab.simulate.traces import SimulatedRequest

_NOTHING = 1e-6  # of a pass: tolerance for rounding


@dataclass(eq=False, slots=True)
class Job:
    """A request on a replica.

    Attributes:
        found: Tokens in the pool when its prefill began.
        read: Tokens in tiers below at that time.
        left: Remaining work in tokens, including the cost of reading; None before its prefill begins.
    """

    request: SimulatedRequest
    decision: Decision
    found: int = 0
    read: int = 0
    left: int | None = None
    ttft_s: float = math.nan


class TokenStore:
    """Pieces of at most ``tokens`` tokens together; the least recently used one is evicted first."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self._pieces: OrderedDict[int, int] = OrderedDict()
        self.tokens = 0

    def __contains__(self, key: int) -> bool:
        return key in self._pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def put(self, key: int, tokens: int) -> list[int]:
        """Store a piece or mark its use; returns the evicted keys."""
        if key in self._pieces:
            self._pieces.move_to_end(key)
            return []
        if tokens > self._most:
            return []
        gone = []
        while self.tokens + tokens > self._most:
            other, size = self._pieces.popitem(last=False)
            self.tokens -= size
            gone.append(other)
        self._pieces[key] = tokens
        self.tokens += tokens
        return gone


class Replica:
    """One replica.

    Attributes:
        busy_s: Seconds of computation so far.
        running: Running requests.
        now: The simulated time.

    Args:
        first_token, end: Called with a job at its first token and at its end.
    """

    def __init__(self, name: str, costs: Costs, first_token: Callable[[Job], None], end: Callable[[Job], None]) -> None:
        self.name = name
        self.costs = costs
        self.pool = TokenStore(costs.pool)
        self.below = TokenStore(costs.below)
        self.busy_s = 0.0
        self.running = 0
        self.now = 0.0
        self._first_token = first_token
        self._end = end
        self._clock = 0.0  # passes so far; whole at the end of each
        self._until: float | None = None  # end of the pass that prompts are in or wait for
        self._in_pass: list[tuple[Job, int]] = []  # prompts, and tokens of each
        self._answers: list[tuple[float, int, Job]] = []  # by the clock at their ends
        self._prompts: deque[Job] = deque()
        self._coming: Counter[int] = Counter()  # keys of prompts that have begun
        self._count = 0
        self._changed: dict[int, bool] = {}
        self._number = 0

    def add(self, job: Job, now: float) -> None:
        """A request arrives."""
        self.advance(now)
        self.running += 1
        self._prompts.append(job)
        if self._until is None:
            left = math.ceil(self._clock - _NOTHING) - self._clock
            if self._answers and left > _NOTHING:
                self._until = now + left * self._decode_s()
            else:
                self._begin()

    def next_event(self) -> float:
        """The time of the next event; infinity for none."""
        if self._until is not None:
            return self._until
        if not self._answers:
            return math.inf
        return self.now + max(0.0, self._answers[0][0] - self._clock) * self._decode_s()

    def advance(self, now: float) -> None:
        """Advance the simulated time to ``now``."""
        while (until := self.next_event()) <= now:
            self._run(until)
            if until == self._until:
                self._finish()
            self._settle()
            if self._until is None and self._prompts:
                self._begin()
        if now > self.now:
            self._run(now)

    def changes(self) -> StoreChanges:
        """The changes of the store since the last call, as a replica reports them."""
        added = array("Q", (key for key, here in self._changed.items() if here))
        removed = array("Q", (key for key, here in self._changed.items() if not here))
        first, self._number = self._number, self._number + len(self._changed)
        self._changed = {}
        return StoreChanges(1, first, self._number, added, removed, whole=not first)

    def _decode_s(self) -> float:
        """Seconds of a pass without prompts."""
        return self.costs.pass_s + self.costs.decode_s * len(self._answers)

    def _begin(self) -> None:
        """Begin a pass with the first prompts of the queue."""
        room = self.costs.chunk
        for job in self._prompts:
            if not room:
                break
            if job.left is None:
                self._look_up(job)
            assert job.left is not None, "it has been looked up"
            tokens = min(room, job.left)
            room -= tokens
            self._in_pass.append((job, tokens))
        self._until = self.now + self._decode_s() + self.costs.prefill_s * (self.costs.chunk - room)

    def _run(self, until: float) -> None:
        if self._until is not None or self._answers:
            self.busy_s += until - self.now
        if self._until is None and self._answers:
            self._clock += (until - self.now) / self._decode_s()
        self.now = until

    def _finish(self) -> None:
        """End a pass with prompts, or one that they waited for."""
        self._clock = math.floor(self._clock + _NOTHING) + 1.0
        self._until, ran, self._in_pass = None, self._in_pass, []
        for job, tokens in ran:
            assert job.left is not None, "it has been looked up"
            job.left -= tokens
            if not job.left:
                self._answer(self._prompts.popleft())

    def _answer(self, job: Job) -> None:
        """A prompt is complete."""
        job.ttft_s = self.now - job.request.at
        self._keep(job.request.wanted)
        self._count += 1
        heapq.heappush(self._answers, (self._clock + job.request.answer, self._count, job))
        self._first_token(job)

    def _settle(self) -> None:
        """End the answers that are complete."""
        while self._answers and self._answers[0][0] <= self._clock + _NOTHING:
            self.running -= 1
            self._end(heapq.heappop(self._answers)[2])

    def _look_up(self, job: Job) -> None:
        """Begin a prompt: count its stored tokens, including those that running prompts will store."""
        costs, behind, reading = self.costs, True, 0.0
        for piece in job.request.wanted.pieces:
            key, behind = piece.keys[-1], behind or not piece.chained
            if behind and (key in self.pool or key in self._coming):
                job.found += piece.tokens
            elif behind and (key in self.below or costs.shared_s is not None):
                seconds = costs.below_s if key in self.below else costs.shared_s or 0.0
                job.read += piece.tokens
                reading += piece.tokens * min(1.0, seconds / costs.prefill_s)
            else:
                behind = False
        job.left = max(1, math.ceil(job.request.wanted.tokens - job.found - job.read + reading))
        self._coming.update(piece.keys[-1] for piece in job.request.wanted.pieces)

    def _keep(self, wanted: Wanted) -> None:
        for piece in reversed(wanted.pieces):  # so that the start of a chain is evicted last
            key = piece.keys[-1]
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]
            if key not in self.pool and piece.tokens <= self.costs.pool:
                self._changed[key] = True
            for gone in self.pool.put(key, piece.tokens):
                self._changed[gone] = False
            if self.costs.below:
                self.below.put(key, piece.tokens)
