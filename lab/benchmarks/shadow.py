"""The cost of shadow sampling for requests: the same traffic with all answers compared, and with none, in turns.

    python lab/benchmarks/shadow.py --requests 60 --turns 6

One client asks questions over documents of the bundled model, with pauses, so that there is idle time. A request that
arrives during a comparison waits for the end of one short pass. Each turn has its own engine, and the other engine is
at rest.

The last line is JSON: the median and the 95th percentile of times to the first token and to the last, in ms, and the
ratios of the medians, turn by turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

import torch

from inlay import AsyncLLM, SamplingParams
from inlay.pml import Prompt, Schema
from inlay_lab.eval.setting import Setting

_REST_S = 0.01


def asked(prompts: int, seed: int) -> tuple[Schema, list[Prompt]]:
    """A schema of 12 documents, and prompts over 6 of them each."""
    each = Setting(documents=6, questions=10, seed=seed).rounds(6)[0]
    return each.schema(), [each.prompt(each.cases[number % len(each.cases)]) for number in range(prompts)]


async def turn(llm: AsyncLLM, prompts: list[Prompt], pause_s: float, seed: int) -> list[tuple[float, float]]:
    """Seconds to the first token and to the last, of each request."""
    randomly, params = random.Random(seed), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    times = []
    for prompt in prompts:
        await asyncio.sleep(randomly.expovariate(1 / pause_s))
        began, first = time.perf_counter(), 0.0
        async for _ in llm.generate(prompt, params, reuse="anchored"):
            first = first or time.perf_counter() - began
        times.append((first, time.perf_counter() - began))
    return times


async def rest(llm: AsyncLLM) -> None:
    """Wait until nothing is left to compare."""
    while (shadow := llm.stats().shadow) is not None and shadow.waiting:
        await asyncio.sleep(_REST_S)


async def measure(requests: int, turns: int, pause_s: float, seed: int) -> dict[str, Any]:
    schema, prompts = asked(requests, seed)
    times: dict[str, list[tuple[float, float]]] = {"off": [], "all": []}
    ratios = []
    llms = {
        name: AsyncLLM("demo", kv_memory="64MiB", shadow=share, promotion_memory=0, profile="off", seed=0)
        for name, share in (("off", 0.0), ("all", 1.0))
    }
    try:
        for llm in llms.values():
            await llm.add_schema(schema, reuse="anchored")
            await turn(llm, prompts[:10], pause_s, seed)
            await rest(llm)
        for number in range(turns):
            medians = {}
            for name in ("off", "all") if number % 2 else ("all", "off"):
                found = await turn(llms[name], prompts, pause_s, seed + number)
                await rest(llms[name])
                times[name] += found
                medians[name] = statistics.median(last for _, last in found)
            ratios.append(round(medians["all"] / medians["off"], 3))
        shadow = llms["all"].stats().shadow
        assert shadow is not None, "it compares answers"
        compared = {"compared": shadow.samples, "compare_ms": round(1000 * shadow.seconds / shadow.samples, 1)}
    finally:
        for llm in llms.values():
            llm.shutdown()
    return {"requests": requests * turns, "pause_s": pause_s, **compared, "ratios": ratios, **_figures(times)}


def _figures(times: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Percentiles in ms, by share."""
    return {
        name: {
            f"{what} p{percent}": round(1000 * _percentile([each[at] for each in found], percent), 2)
            for at, what in enumerate(("ttft", "total"))
            for percent in (50, 95)
        }
        for name, found in times.items()
    }


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="in a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two requests, in the mean")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    figures = asyncio.run(measure(given.requests, given.turns, given.pause, given.seed))
    print(json.dumps({"threads": torch.get_num_threads(), **figures}))
