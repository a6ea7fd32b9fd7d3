"""The engine's steps: a light hook that notes them, and afterwards the least time that each could have taken."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from transformers import PreTrainedModel

from inlay.attention.plan import Part, build_plan
from inlay.base import Base
from inlay.bench.machine import Ceilings
from inlay.bench.stock import bytes_read_per_token
from inlay.models.spec import dtype_name
from inlay.slots import SlotRange as Slots


@dataclass
class Step:
    """One forward pass, noted on the engine's thread.

    parts: what it computed. rows: how many rows of logits it made. held: slots that running requests held, with those
    that are reserved for the rest of a prompt. running: how many requests ran.
    forward_s: the call of the model, with the attention's own planning. seconds: the whole step: scheduling, placing,
    planning, the call of the model, sampling, detokenizing.
    """

    parts: tuple[Part, ...]
    rows: int
    held: tuple[tuple[Slots, ...], ...]
    running: int
    forward_s: float
    seconds: float = 0.0


@contextmanager
def recording(llm: Base) -> Iterator[list[Step]]:
    """Note every step of an engine within a block; what a step keeps is references to what the engine made anyway."""
    steps: list[Step] = []
    engine = llm.local.engine
    runner: Any = engine._runner
    whole_step, forward = engine.step, runner.run

    def step(**how: Any) -> Any:
        before, started = len(steps), time.perf_counter()
        ended = whole_step(**how)
        if len(steps) > before:
            steps[-1].seconds = time.perf_counter() - started
        return ended

    def run(work: Any, rows: Sequence[int], plan: Any = None) -> Any:
        plan = plan or build_plan([each.part for each in work])
        started = time.perf_counter()
        logits = forward(work, rows, plan)
        took = time.perf_counter() - started
        allocations = [request.allocation for request in engine.scheduler.running]
        held = tuple(
            slots
            for allocation in allocations
            for slots in (allocation.modules, allocation.tail, *(segment.slots for segment in allocation.hold.segments))
        )
        steps.append(Step(plan.parts, len(rows), held, len(allocations), took))
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
        tokens = sum(part.rows for part in step.parts)
        pairs = sum(part.pairs for part in step.parts)
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
    decode = [pair for pair in zip(steps, floors, strict=True) if all(part.rows == 1 for part in pair[0].parts)]
    rows = max((len(step.parts) for step, _ in decode), default=0)
    full = [pair for pair in decode if len(pair[0].parts) == rows]
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
    for part in step.parts:
        yield from part.ranges
