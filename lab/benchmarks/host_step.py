"""What does a decode step cost beside the model: scheduling, planning, sampling, accepting tokens?

    python lab/benchmarks/host_step.py --requests 256

The model has one small layer and random weights, so that its forward pass does not hide the rest. Its vocabulary is
bytes; benchmarks/sampling.py times the sampler at large vocabularies. Times are CPU milliseconds a step on one thread,
medians over steps in which all requests decode. *other* is untimed work, *host* is all but the forward pass and the
sampler. Below is the time to make a plan of --rows requests that read --modules stored modules each, all or none of
them shared. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from inlay import LLM, SamplingParams
from inlay.attention.plan import Item, Part, build_plan
from inlay.engine import core, forward
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.engine.scheduler import Scheduler
from inlay.models.families import describe
from inlay.models.load import LoadedModel, fingerprint
from inlay.models.random import bytes_tokenizer
from inlay.sampling.sampler import PendingTokens
from inlay.slots import SlotRange

CASES = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}
PARTS = ("schedule", "plan", "forward", "sample", "accept")
TIMED: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "step", "schedule"),
    (forward, "build_plan", "plan"),
    (forward, "advance", "plan"),
    (Runner, "run", "forward"),
    (core, "begin", "sample"),
    (PendingTokens, "wait", "sample"),
    (Request, "accept", "accept"),
)


class Clock:
    """Adds up the time of calls by part."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.spent[name] += time.thread_time() - began

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--modules", type=int, default=1000)
    options = parser.parse_args()
    steps = {name: steps_of(changes, options.requests, options.steps) for name, changes in CASES.items()}
    print(f"{'a step of':12}" + "".join(f"{part:>10}" for part in (*PARTS, "other", "host")))
    for name, parts in steps.items():
        print(f"{name:12}" + "".join(f"{ms:10.2f}" for ms in parts.values()))
    plans = plans_of(options.rows, options.modules)
    for name, ms in plans.items():
        print(f"plan, {name:30}{ms:8.2f} ms")
    print(json.dumps({"requests": options.requests, "steps_ms": steps, "plans_ms": plans}))


def steps_of(changes: dict[str, Any], requests: int, steps: int) -> dict[str, float]:
    """Milliseconds of each part of a step. ``host`` is all but the forward pass and the sampler."""
    clock = Clock()
    llm = LLM(next_to_nothing(), max_num_seqs=requests, max_num_batched_tokens=8192, kv_memory=2**28, seed=0)
    params = SamplingParams(max_tokens=steps + 40, ignore_eos=True, **changes)
    each: list[dict[str, float]] = []
    step = core.EngineCore.step

    def whole(engine: core.EngineCore, **named: Any) -> Any:
        clock.spent.clear()
        began = time.thread_time()
        ended = step(engine, **named)
        each.append({"whole": time.thread_time() - began, "decoding": len(engine.scheduler.running), **clock.spent})
        return ended

    with ExitStack() as patched:
        for owner, method, part in TIMED:
            patched.enter_context(patch.object(owner, method, clock.timed(part, getattr(owner, method))))
        patched.enter_context(patch.object(core.EngineCore, "step", whole))
        llm.generate([f"prompt number {n}" for n in range(requests)], params, use_tqdm=False)
    full = [one for one in each[10:] if one["decoding"] == requests][:steps]
    found = {part: 1000 * median(one.get(part, 0.0) for one in full) for part in (*PARTS, "whole")}
    whole_ms = found.pop("whole")
    found["other"] = whole_ms - sum(found.values())
    found["host"] = whole_ms - found["forward"] - found["sample"]
    return {part: round(ms, 2) for part, ms in found.items()}


def next_to_nothing() -> LoadedModel:
    """A llama of one layer, in fp32."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 262,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings), dtype=torch.float32).eval()
    return LoadedModel("next to nothing", model, bytes_tokenizer(), describe(model), fingerprint(model))


def plans_of(rows: int, modules: int) -> dict[str, float]:
    """Milliseconds to make plans of decode rows."""
    times = {}
    for kind in ("shared", "private"):
        parts = [part_of(row, modules, shared=kind == "shared") for row in range(rows)]
        times[f"{kind} modules"] = timed(lambda parts=parts: build_plan(parts).groups)
    return times


def part_of(row: int, modules: int, *, shared: bool) -> Part:
    """One decode row over modules of 20 tokens that are not adjacent."""
    base = 0 if shared else row * modules * 40
    context = [Item(SlotRange(base + 40 * n, 20), 20 * n) for n in range(modules)]
    return Part.of(20 * modules, 1, context, [SlotRange(10**8 + 1000 * row, 1)])


def timed(call: Callable[[], Any], runs: int = 15) -> float:
    found = []
    for _ in range(runs):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return round(1000 * median(found), 2)


if __name__ == "__main__":
    gc.freeze()
    torch.set_num_threads(1)
    main()
