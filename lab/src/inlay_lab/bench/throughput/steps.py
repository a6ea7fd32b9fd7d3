"""An observer that records the engine's steps, and the least time that each could have taken."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from inlay.attention.plan import Part
from inlay.client.base import Base
from inlay.engine.encoder import Task
from inlay.engine.forward import ForwardPass, StepObserver
from inlay.models.spec import dtype_name
from inlay.slots import SlotRange as Slots
from inlay_lab.bench.floor import Floor, Rates
from inlay_lab.bench.stock import bytes_read_per_token, is_quantized_file


@dataclass
class Step:
    """One forward pass, recorded on the engine's thread.

    Attributes:
        parts: The computed parts.
        rows: Rows of logits.
        held: Slots that running requests reference, with those reserved for the rest of a prompt.
        running: Number of running requests.
        forward_s: Seconds of the model call, including attention planning.
        seconds: Seconds of the whole step, from scheduling to detokenizing.
    """

    parts: tuple[Part, ...]
    rows: int
    held: tuple[tuple[Slots, ...], ...]
    running: int
    forward_s: float
    seconds: float = 0.0


class _Recorder(StepObserver):
    """Stores only references to objects that the engine made anyway."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps

    def computed(self, made: ForwardPass, logits: Tensor, running: Sequence[Task], seconds: float) -> None:
        allocations = [task.allocation for task in running]
        held = tuple(
            slots
            for allocation in allocations
            for slots in (allocation.modules, allocation.tail, *(segment.slots for segment in allocation.hold.segments))
        )
        parts = tuple(work.part for work in made.work)
        self._steps.append(Step(parts, len(made.sampled), held, len(allocations), seconds))

    def stepped(self, seconds: float) -> None:
        self._steps[-1].seconds = seconds


@contextmanager
def recording(llm: Base) -> Iterator[list[Step]]:
    """Record every step of an engine within a block."""
    steps: list[Step] = []
    end = llm.observe(_Recorder(steps))
    try:
        yield steps
    finally:
        end()


@dataclass(frozen=True)
class Cost:
    """The least work of a model's steps.

    Operations: two for every weight of a layer and token, two for every weight of the output layer and row of logits,
    and those of attention. Bytes: the weights once a step, and every distinct key and value once.

    Attributes:
        body, head: Number of weights outside and in the output layer.
        pair_flops: Operations for one query and one key, in all layers.
        kv_bytes: Bytes of one token's keys and values.
    """

    body: int
    head: int
    itemsize: int
    pair_flops: int
    kv_bytes: int
    dtype: str

    @classmethod
    def of(cls, llm: Base, longest: int) -> Cost | None:
        """The costs of an engine's model, or None if they cannot be counted.

        A sliding window shorter than the longest request lets layers read fewer keys than counted. Quantized weights
        have fewer bytes, and products of another kind.

        Args:
            longest: Tokens of the longest request.
        """
        if llm.loaded.form.quantization is not None or is_quantized_file(llm.loaded):
            return None
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

    def floor(self, step: Step, rates: Rates) -> Floor:
        """The least time of a step."""
        weights = self.weight_bytes(step.rows)
        kv = self.bytes(step) - weights
        return rates.floor(flops=self.flops(step), rows=_tokens(step), weight_bytes=weights, kv_bytes=kv)

    def floor_of(self, tokens: int, rows: int, keys: int, rates: Rates) -> Floor:
        """The least time of a step of ``tokens`` tokens that each read the same ``keys`` keys."""
        flops = self._flops(tokens, rows, tokens * keys)
        weights = self.weight_bytes(rows)
        return rates.floor(flops=flops, rows=tokens, weight_bytes=weights, kv_bytes=keys * self.kv_bytes)

    def flops(self, step: Step) -> int:
        """Floating-point operations of a step."""
        return self._flops(_tokens(step), step.rows, sum(part.pairs for part in step.parts))

    def _flops(self, tokens: int, rows: int, pairs: int) -> int:
        return 2 * tokens * self.body + 2 * rows * self.head + pairs * self.pair_flops

    def bytes(self, step: Step) -> int:
        """Bytes of a step: weights, and distinct keys and values."""
        return self.weight_bytes(step.rows) + covered(_touched(step)) * self.kv_bytes

    def weight_bytes(self, rows: int) -> int:
        """Bytes of the weights that a step with ``rows`` rows of logits reads."""
        return (self.body + (self.head if rows else 0)) * self.itemsize


def summary(steps: Sequence[Step], cost: Cost, rates: Rates) -> dict[str, Any]:
    """A run's steps: the sum of their floors, its share of their time, and the full decode steps.

    ``decode`` covers the steps with one token for every request and the most requests, or is None. It has medians of
    their
    time, their floor, the floor's parts and its share of the time, then the fastest time and the floor's rates.
    """
    floors = [cost.floor(step, rates) for step in steps]
    floor, took = sum(each.seconds for each in floors), sum(step.seconds for step in steps)
    return {
        "count": len(steps),
        "seconds": round(took, 4),
        "forward_s": round(sum(step.forward_s for step in steps), 4),
        "floor_s": round(floor, 4),
        "floor_memory_s": round(sum(each.seconds for each in floors if each.bound == "memory"), 4),
        "of_floor": round(floor / took, 4),
        "decode": _full_decode(steps, floors, rates),
    }


def _full_decode(steps: Sequence[Step], floors: Sequence[Floor], rates: Rates) -> dict[str, Any] | None:
    decode = [pair for pair in zip(steps, floors, strict=True) if all(part.rows == 1 for part in pair[0].parts)]
    rows = max((len(step.parts) for step, _ in decode), default=0)
    full = [pair for pair in decode if len(pair[0].parts) == rows]
    if not full:
        return None
    bounds = Counter(floor.bound for _, floor in full)
    parts = [floor.report() for _, floor in full]
    return {
        "rows": rows,
        "count": len(full),
        "ms": round(statistics.median(step.seconds for step, _ in full) * 1000, 3),
        "fastest_ms": round(min(step.seconds for step, _ in full) * 1000, 3),
        "floor_ms": round(statistics.median(floor.seconds for _, floor in full) * 1000, 3),
        **{name: statistics.median(part[name] for part in parts) for name in parts[0]},
        **rates.at(rows),
        "of_floor": round(statistics.median(floor.seconds / step.seconds for step, floor in full), 4),
        "bound": bounds.most_common(1)[0][0],
    }


def held_chunks(step: Step, chunk: int) -> int:
    """Number of chunks that running requests reference; shared ones count once."""
    runs = chain.from_iterable(step.held)
    return covered(Slots(run.first // chunk, -(-run.end // chunk) - run.first // chunk) for run in runs if run.length)


def covered(runs: Iterable[Slots]) -> int:
    """Number of slots in the union of these runs."""
    total = end = 0
    for first, stop in sorted((run.first, run.end) for run in runs):
        total += max(0, stop - max(first, end))
        end = max(end, stop)
    return total


def _touched(step: Step) -> Iterator[Slots]:
    for part in step.parts:
        yield from part.ranges


def _tokens(step: Step) -> int:
    return sum(part.rows for part in step.parts)
