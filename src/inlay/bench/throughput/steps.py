"""The engine's steps: a light hook that notes them, and afterwards the least time that each could have taken.

What came of a run: when each token of each answer was there, what that took of memory, and figures of it all.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from inlay.attention.plan import Span, build_plan
from inlay.base import Base
from inlay.bench.machine import Ceilings
from inlay.bench.stock import bytes_read_per_token
from inlay.errors import DeadlineError
from inlay.kv.pool import Run as Slots
from inlay.models.spec import dtype_name
from inlay.types import Usage


@dataclass
class Step:
    """One forward pass, noted on the engine's thread.

    spans: what it computed. rows: how many rows of logits it made. held: slots that running requests held, with those
    that are reserved for the rest of a prompt. running: how many requests ran.
    forward_s: the call of the model, with the attention's own planning. seconds: the whole step: scheduling, placing,
    planning, the call of the model, sampling, detokenizing.
    """

    spans: tuple[Span, ...]
    rows: int
    held: tuple[tuple[Slots, ...], ...]
    running: int
    forward_s: float
    seconds: float = 0.0


@contextmanager
def recording(llm: Base) -> Iterator[list[Step]]:
    """Note every step of an engine within a block; what a step keeps is references to what the engine made anyway."""
    steps: list[Step] = []
    engine = llm.client.engine
    runner: Any = engine._runner
    whole_step, forward = engine.step, runner.run

    def step(**how: Any) -> Any:
        before, started = len(steps), time.perf_counter()
        ended = whole_step(**how)
        if len(steps) > before:
            steps[-1].seconds = time.perf_counter() - started
        return ended

    def run(work: Any, rows: Sequence[int], plan: Any = None) -> Any:
        plan = plan or build_plan([each.span for each in work])
        started = time.perf_counter()
        logits = forward(work, rows, plan)
        took = time.perf_counter() - started
        allocations = [request.allocation for request in engine.scheduler.running]
        held = tuple(
            slots
            for allocation in allocations
            for slots in (allocation.modules, allocation.tail, *(segment.slots for segment in allocation.hold.segments))
        )
        steps.append(Step(plan.spans, len(rows), held, len(allocations), took))
        return logits

    vars(engine)["step"], vars(runner)["run"] = step, run
    try:
        yield steps
    finally:
        del vars(engine)["step"], vars(runner)["run"]


@dataclass(frozen=True)
class Cost:
    """What a model's steps take at least.

    Floating-point operations: two for every weight of a layer and token, two for every weight of the output and row of
    logits, and those of attention. Bytes: the weights once a step, and every distinct key and value once.

    body, head: weights outside and in the output layer. pair_flops: of one query and one key, in all layers.
    kv_bytes: of a token's keys and values.
    """

    body: int
    head: int
    itemsize: int
    pair_flops: int
    kv_bytes: int
    dtype: str

    @classmethod
    def of(cls, llm: Base, longest: int) -> Cost | None:
        """The model that an engine runs, in its own dtype (weights that are not quantized).

        longest: tokens of the longest request. None where a sliding window is shorter: then layers read less than all.
        """
        model: PreTrainedModel = llm.loaded.model
        config, dtype = model.config, model.dtype
        window = getattr(config, "sliding_window", None)
        sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",))
        if window is not None and sliding and window < longest:
            return None
        head = config.vocab_size * config.hidden_size
        body = bytes_read_per_token(config, dtype) // dtype.itemsize - head
        widths = sum(layer.head_dim for layer in llm.loaded.spec.layers)
        pairs = 4 * config.num_attention_heads * widths
        return cls(body, head, dtype.itemsize, pairs, llm.store.pool.bytes_per_token, dtype_name(dtype))

    def flops(self, step: Step) -> int:
        """Floating-point operations of a step."""
        tokens = sum(span.length for span in step.spans)
        pairs = 0
        for span in step.spans:
            seen = sum(piece.run.length for piece in span.context)
            pairs += span.length * seen + span.length * (span.length + 1) // 2
        return 2 * tokens * self.body + 2 * step.rows * self.head + pairs * self.pair_flops

    def bytes(self, step: Step) -> int:
        """Bytes of a step: weights, and distinct keys and values."""
        weights = self.body + (self.head if step.rows else 0)
        return weights * self.itemsize + covered(_touched(step)) * self.kv_bytes


def summary(steps: Sequence[Step], cost: Cost, ceilings: Ceilings) -> dict[str, Any]:
    """All steps of a run: the sum of their floors, and the share of their time that this is; and the full decode steps.

    decode: the steps in which every request had one token, those with the most requests. Medians over them: of their
    time, of their floor, and of the share that the floor is of the time. None where no step was such a step.
    """
    floors = [ceilings.seconds(cost.flops(step), cost.bytes(step), cost.dtype) for step in steps]
    floor, took = sum(seconds for seconds, _ in floors), sum(step.seconds for step in steps)
    return {
        "count": len(steps),
        "seconds": round(took, 4),
        "forward_s": round(sum(step.forward_s for step in steps), 4),
        "floor_s": round(floor, 4),
        "floor_memory_s": round(sum(seconds for seconds, bound in floors if bound == "memory"), 4),
        "of_floor": round(floor / took, 4),
        "decode": _full_decode(steps, floors),
    }


def _full_decode(steps: Sequence[Step], floors: Sequence[tuple[float, str]]) -> dict[str, Any] | None:
    decode = [pair for pair in zip(steps, floors, strict=True) if all(span.length == 1 for span in pair[0].spans)]
    rows = max((len(step.spans) for step, _ in decode), default=0)
    full = [pair for pair in decode if len(pair[0].spans) == rows]
    if not full:
        return None
    bounds = Counter(bound for _, (_, bound) in full)
    return {
        "rows": rows,
        "count": len(full),
        "ms": round(statistics.median(step.seconds for step, _ in full) * 1000, 3),
        "floor_ms": round(statistics.median(floor for _, (floor, _) in full) * 1000, 3),
        "of_floor": round(statistics.median(floor / step.seconds for step, (floor, _) in full), 4),
        "bound": bounds.most_common(1)[0][0],
    }


def held_chunks(step: Step, chunk: int) -> int:
    """How many chunks the running requests held, shared ones counted once."""
    runs = chain.from_iterable(step.held)
    return covered(Slots(run.first // chunk, -(-run.end // chunk) - run.first // chunk) for run in runs if run.length)


def covered(runs: Iterable[Slots]) -> int:
    """How many slots lie in at least one of these runs."""
    total = end = 0
    for first, stop in sorted((run.first, run.end) for run in runs):
        total += max(0, stop - max(first, end))
        end = max(end, stop)
    return total


def _touched(step: Step) -> Iterator[Slots]:
    for span in step.spans:
        yield from (piece.run for piece in span.context)
        yield from span.slots


_PERCENTILES = (50, 90, 99)


@dataclass
class Answer:
    """One request's tokens. arrived, times: seconds of ``perf_counter``; one time a token.

    usage: where its prompt's keys and values came from; None where a column cannot tell.
    """

    arrived: float
    times: list[float] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    usage: Usage | None = None

    def say(self, ids: tuple[int, ...], now: float) -> None:
        """All its tokens so far. Those that are new came together."""
        self.times += [now] * (len(ids) - len(self.times))
        self.ids = ids


@dataclass
class Run:
    """One run of a workload.

    started: seconds of ``perf_counter``. prepare_s: what was computed before, once for all requests.
    kv_peak: the most bytes of KV that running requests held at once, shared ones counted once.
    pool_peak: the same with what the cache kept for later, and would give up for room.
    kv_peak, pool_peak, peak_batch: None where a column cannot tell. steps: inlay's forward passes.
    """

    started: float
    answers: list[Answer]
    prepare_s: float = 0.0
    kv_peak: int | None = None
    pool_peak: int | None = None
    peak_batch: int | None = None
    steps: list[Step] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """From the start to the last token."""
        return max(answer.times[-1] for answer in self.answers) - self.started


class Limit:
    """So many seconds from now, behind which a run ends without a result."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.perf_counter() + seconds

    def check(self) -> None:
        """Raise DeadlineError when they are over."""
        if time.perf_counter() > self._end:
            raise self.passed()

    def passed(self) -> DeadlineError:
        """What ends a run that takes too long."""
        return DeadlineError(f"not done within {self._seconds:g} s; give a larger --budget-s or fewer --requests")


def figures(run: Run) -> dict[str, Any]:
    """A run as it stands in the JSON; latency is normalized: the mean over requests of their time by their tokens."""
    tokens = sum(len(answer.times) for answer in run.answers)
    latency = [(answer.times[-1] - answer.arrived) / len(answer.times) for answer in run.answers]
    first = [answer.times[0] - answer.arrived for answer in run.answers]
    between = np.concatenate([np.diff(answer.times) for answer in run.answers])
    return {
        "wall_s": round(run.wall_s, 4),
        "prepare_s": round(run.prepare_s, 4),
        "tokens_s": round(tokens / run.wall_s, 2),
        "requests_s": round(len(run.answers) / run.wall_s, 4),
        "latency_ms_per_token": round(float(np.mean(latency)) * 1000, 3),
        "ttft_ms": percentiles(first),
        "inter_token_ms": percentiles(between) if len(between) else None,
        "requests": len(run.answers),
        "hit_rate": _hit_rate(run),
        "kv_peak_bytes": run.kv_peak,
        "pool_peak_bytes": run.pool_peak,
        "peak_batch": run.peak_batch,
    }


def percentiles(seconds: Any) -> dict[str, float]:
    """Milliseconds of some seconds: the one in the middle, and those that 10 % and 1 % exceed."""
    values = np.percentile(np.asarray(seconds) * 1000, _PERCENTILES)
    return {f"p{q}": round(float(value), 3) for q, value in zip(_PERCENTILES, values, strict=True)}


def _hit_rate(run: Run) -> float | None:
    """The share of all prompts' tokens whose keys and values were stored."""
    used = [answer.usage for answer in run.answers if answer.usage is not None]
    if not used:
        return None
    return round(sum(usage.cached_tokens for usage in used) / sum(usage.prompt_tokens for usage in used), 4)
