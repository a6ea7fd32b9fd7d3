"""In how many runs do keys and values lie after long use? Only the pool, the store, eviction and the scheduler.

    python lab/benchmarks/pool_runs.py
    python lab/benchmarks/pool_runs.py --steps 10000 --chunk-size 16 --chunks 2048

Mixed traffic without a model: conversations behind shared system prompts, questions about modules of schemas that come
and go, short prompts, and prompts of up to half the pool. Answers grow by the chunk, requests are preempted when the
pool is full, and ended requests stay stored until eviction. A run is a stretch of adjacent slots. At best, each
allocation lies in one run. Prints a table, and the same as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

from inlay.engine.encoder import Encoding, Task
from inlay.engine.kv_manager import KVCacheManager
from inlay.engine.prompt_state import PromptState
from inlay.engine.request import Answer, Request, SamplingState
from inlay.engine.scheduler import Scheduler, Step
from inlay.kv.identity import KeyMaker, SegmentSpec, specify
from inlay.kv.pool import KVPool
from inlay.kv.store import SegmentStore
from inlay.policy import ReusePolicy
from inlay.prompt.request import EngineRequest, PromptPart
from inlay.sampling.params import SamplingParams
from inlay.slots import SlotRange, total

KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=False)
PARAMS = SamplingParams(temperature=0)
POLICY = ReusePolicy.parse("modular", "packed")
PLACES, TOKENS, PREFILL = 32, 2048, 512
#: Allocations are grouped by chunks: growth, and prompts of up to each size.
SIZES = (1, 7, 31, 127)

Ids = tuple[int, ...]


@dataclass
class Said:
    """The part of an Answer that the simulation needs."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: None = None


@dataclass(frozen=True)
class Chosen:
    """The part of a SamplingState that the simulation needs."""

    params: SamplingParams = PARAMS


@dataclass
class Conversation:
    """A conversation.

    Attributes:
        history: All its tokens so far.
        turns: Remaining turns.
    """

    history: Ids
    turns: int


class RecordedPool(KVPool):
    """Records the number of runs of every allocation, by its size in chunks."""

    def __init__(self, chunks: int, chunk_size: int) -> None:
        super().__init__(chunks * chunk_size, 1, chunk_size)
        self.seen: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.continued: Counter[bool] = Counter()  # whether a tail's next chunk directly followed it

    def allocate(self, tokens: int, *, after: SlotRange | None = None) -> tuple[SlotRange, ...] | None:
        ranges = super().allocate(tokens, after=after)
        if ranges and after is not None:
            self.continued[ranges[0].first == after.end] += 1
        elif ranges:
            self.seen[total(ranges) // self.chunk_size][len(ranges)] += 1
        return ranges


class Traffic:
    """Random requests from a seed, independent of the pool."""

    def __init__(self, seed: int, most: int) -> None:
        self.random = random.Random(seed)
        self._most = most  # tokens of the longest prompt
        self._systems = [self.text(200) for _ in range(8)]
        self._conversations: list[Conversation] = []
        self._schemas = [self._schema() for _ in range(6)]

    def text(self, tokens: int) -> Ids:
        return tuple(self.random.choices(range(50_000), k=tokens))

    def _schema(self) -> list[SegmentSpec]:
        head = specify(self.text(100), 0, (), KEYS)
        return [head] + [specify(self.text(self.random.randint(60, 700)), 100, (head,), KEYS) for _ in range(10)]

    def replace_schema(self) -> Encoding:
        """Replace a schema by a new one; returns the task to encode its modules."""
        number = self.random.randrange(len(self._schemas))
        self._schemas[number] = self._schema()
        return Encoding("schema", tuple(self._schemas[number]))

    def encodings(self) -> list[Encoding]:
        return [Encoding("schema", tuple(specs)) for specs in self._schemas]

    def request(self, number: int) -> tuple[Request, int, Conversation | None]:
        """The next request, the length of its answer, and its conversation."""
        kind = self.random.choices(["chat", "modules", "short", "long"], (45, 25, 25, 5))[0]
        answer = min(1 + int(self.random.expovariate(1 / 120)), 800)
        if kind == "chat":
            conversation = self._conversation()
            conversation.history += self.text(self.random.randint(10, 150))
            return self._fresh(number, conversation.history), answer, conversation
        if kind == "modules":
            return self._of_modules(number), answer, None
        length = self.random.randint(10, 300) if kind == "short" else self.random.randint(self._most // 8, self._most)
        return self._fresh(number, self.text(length)), answer, None

    def resume(self, conversation: Conversation, said: Ids) -> None:
        """Continue a conversation after an answer, if it has turns left."""
        conversation.history += said
        conversation.turns -= 1
        if conversation.turns and len(conversation.history) < self._most:
            self._conversations.append(conversation)

    def _conversation(self) -> Conversation:
        if len(self._conversations) < 60:
            return Conversation(self.random.choice(self._systems), self.random.randint(1, 8))
        late = int(len(self._conversations) * self.random.random() ** 0.5)  # recent ones more often
        return self._conversations.pop(late)

    def _fresh(self, number: int, ids: Ids) -> Request:
        return _request(number, (PromptPart(ids, 0),))

    def _of_modules(self, number: int) -> Request:
        specs = self._schemas[int(len(self._schemas) * self.random.random() ** 2)]
        parts, at = [], 0
        for spec in [specs[0], *self.random.sample(specs[1:], 3)]:
            parts.append(PromptPart(spec.ids, at, candidates=(spec,), encode=True))
            at += len(spec.ids)
        return _request(number, (*parts, PromptPart(self.text(self.random.randint(10, 60)), at)))


def _request(number: int, parts: tuple[PromptPart, ...]) -> Request:
    ids = tuple(token for part in parts for token in part.ids)
    asked = EngineRequest(
        text=None, ids=ids, positions=(), parts=parts, policy=POLICY, params=PARAMS, fingerprint=KEYS.fingerprint
    )
    return Request(
        str(number),
        PromptState(asked),
        cast(SamplingState, Chosen()),
        cast(Answer, Said()),
        arrival=float(number),
    )


class Simulation:
    """The engine's steps without the forward passes."""

    def __init__(self, pool: RecordedPool, seed: int = 0) -> None:
        self.pool, self.store = pool, SegmentStore(pool, KEYS)
        self.memory = KVCacheManager(self.store)
        self.scheduler: Scheduler[Task] = Scheduler(PLACES, TOKENS, PREFILL, None, self.memory)
        self.traffic = Traffic(seed, pool.slots // 4)
        self.answers: dict[Task, tuple[int, Conversation | None]] = {}
        self.requests = self.preempted = self.failed = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.held: list[float] = []  # share of the pool that running requests reference, sampled
        self.tails: list[float] = []  # runs per chunk of a request's own slots at its end
        for encoding in self.traffic.encodings():
            self.scheduler.add(encoding)

    def run(self, steps: int) -> None:
        for now in range(steps):
            self._arrive(now)
            self._pass(self.scheduler.step(now))
            if now % 100 == 0:
                self.held.append(self._held())

    def _arrive(self, now: int) -> None:
        crowd = PLACES // 2 if now // 2000 % 2 else PLACES + 8  # quiet and busy hours
        while len(self.answers) < crowd:
            request, answer, conversation = self.traffic.request(self.requests)
            self.requests += 1
            self.answers[request] = answer, conversation
            self.scheduler.add(request)
        if now % 1500 == 1499:
            encoding = self.traffic.replace_schema()
            encoding.arrival = float(self.requests)
            self.scheduler.add(encoding)

    def _pass(self, step: Step[Task]) -> None:
        self.preempted += len(step.preempted)
        for task, _ in step.failed:
            self.failed += 1
            self.answers.pop(task, None)
        sampled: list[Task] = list(step.decode)
        completed = []
        for task, tokens in step.prefill:
            completed += [(task, prefill) for prefill in task.allocation.take(tokens)[1]]
            if isinstance(task, Request) and not task.prompt_left:
                sampled.append(task)
        for task, prefill in completed:
            self.memory.computed(task, prefill)
        for task in step.decode:
            task.allocation.decode()
        for task, _ in step.prefill:
            if isinstance(task, Encoding) and not task.prompt_left:
                self._next_batch(task)
        for task in sampled:
            self._say(cast(Request, task))

    def _next_batch(self, encoding: Encoding) -> None:
        if encoding.left:
            self.scheduler.requeue(encoding)
        else:
            self.scheduler.remove(encoding)

    def _say(self, request: Request) -> None:
        request.token_ids.append(len(request.token_ids))
        answer, conversation = self.answers[request]
        if len(request.token_ids) < answer:
            return
        usage = request.usage
        assert usage is not None, "it was admitted"
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        tail = request.allocation.tail
        self.tails.append(len(tail) / (total(tail) / self.pool.chunk_size))
        self.scheduler.remove(request)
        del self.answers[request]
        if conversation is not None:
            self.traffic.resume(conversation, tuple(request.token_ids))

    def _held(self) -> float:
        held: set[int] = set()
        for task in self.scheduler.running:
            for slots in (task.allocation.modules, task.allocation.tail, *task.allocation.hold.slots()):
                held.update(self.pool.chunks_of(slots))
        return len(held) / self.pool.chunks


def summary(simulation: Simulation, seconds: float) -> dict[str, Any]:
    pool = simulation.pool
    sizes: dict[str, dict[str, float]] = {}
    low = 1
    for high in (*SIZES, pool.chunks):
        seen = Counter[int]()
        for chunks in range(low, high + 1):
            seen.update(pool.seen.get(chunks, {}))
        runs = sorted(seen.elements())
        if runs:
            sizes[f"{low}-{high}"] = {
                "allocations": len(runs),
                "mean": round(statistics.fmean(runs), 2),
                "p50": runs[len(runs) // 2],
                "p99": runs[int(len(runs) * 0.99)],
            }
        low = high + 1
    return {
        "requests": simulation.requests,
        "preempted": simulation.preempted,
        "failed": simulation.failed,
        "hit_ratio": round(simulation.cached_tokens / simulation.prompt_tokens, 4),
        "held_p10": round(statistics.quantiles(simulation.held, n=10)[0], 2),
        "held_p90": round(statistics.quantiles(simulation.held, n=10)[-1], 2),
        "free_spans": len(pool.free_ranges),
        "continued": round(pool.continued[True] / max(1, pool.continued.total()), 3),
        "runs_per_chunk_of_tails": round(statistics.fmean(simulation.tails), 3),
        "runs": sizes,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Run the simulation and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--chunks", type=int, default=1024)
    parser.add_argument("--chunk-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    simulation = Simulation(RecordedPool(args.chunks, args.chunk_size), args.seed)
    began = time.perf_counter()
    simulation.run(args.steps)
    found = summary(simulation, time.perf_counter() - began)
    for name, value in found.items():
        if name != "runs":
            print(f"{name:26}{value:>12}")
    print(f"{'chunks at once':26}{'allocations':>12}{'mean':>8}{'p50':>6}{'p99':>6}   runs")
    for name, runs in found["runs"].items():
        print(f"{name:26}{runs['allocations']:>12}{runs['mean']:>8}{runs['p50']:>6}{runs['p99']:>6}")
    print(json.dumps({"steps": args.steps, "chunks": args.chunks, "chunk_size": args.chunk_size} | found))


if __name__ == "__main__":
    main()
