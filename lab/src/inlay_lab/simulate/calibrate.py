"""Measures the costs of a simulated replica on this machine with a model."""

from __future__ import annotations

import platform
import statistics
import time

from inlay.client.llm import LLM
from inlay.sampling.params import SamplingParams
from inlay_lab.simulate.costs import Costs

_RUNS = 5
_ANSWER = 32  # tokens
_BATCH = 8


def calibrate(model: str) -> Costs:
    """The costs of a replica with this model on this machine; medians of several runs. Raises InlayError."""
    llm = LLM(model, seed=0)
    try:
        longest = llm.client.model.max_positions - _ANSWER - 1
        short, long = min(64, longest // 4), min(1024, longest)
        ids = {length: [7 + number % 50 for number in range(length)] for length in (1, short, long)}
        few, many = (_prefill_s(llm, ids[length]) for length in (short, long))
        prefill_s = max((many - few) / (long - short), 1e-9)
        alone, together = (_decode_s(llm, ids[1], batch) for batch in (1, _BATCH))
        decode_s = max((together - alone) / (_BATCH - 1), 1e-9)
        return Costs(
            machine=f"{model} on {platform.processor() or platform.machine()}, one replica alone",
            prefill_s=prefill_s,
            pass_s=max(alone - decode_s, 1e-9),
            decode_s=decode_s,
            chunk=llm.config.prefill_chunk,
            pool=llm.store.pool.slots,
        )
    finally:
        llm.shutdown()


def _prefill_s(llm: LLM, ids: list[int]) -> float:
    """Seconds to the first token of a prompt without stored tokens."""
    params = SamplingParams(max_tokens=1, temperature=0)
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        llm.generate([ids], params, reuse="off")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _decode_s(llm: LLM, ids: list[int], batch: int) -> float:
    """Seconds of a pass that generates a token for each of ``batch`` answers."""
    params = SamplingParams(max_tokens=_ANSWER, temperature=0, ignore_eos=True)
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        llm.generate([ids] * batch, params, reuse="off")
        times.append((time.perf_counter() - began) / _ANSWER)
    return statistics.median(times)
