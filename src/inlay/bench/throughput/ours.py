"""inlay as a column: an AsyncLLM, a task for every request, and the engine's steps noted."""

from __future__ import annotations

import asyncio
import time

from inlay.async_llm import AsyncLLM
from inlay.bench.throughput.record import Answer, Run
from inlay.bench.throughput.steps import held_chunks, recording
from inlay.bench.throughput.workload import Ask, Workload
from inlay.types import SamplingParams


class Ours:
    """Runs workloads through an engine that has nothing stored when a run begins.

    reuse: whether anything is shared: prefixes are found as they are, modules are encoded ``isolated`` beforehand.
        Otherwise every request computes its whole prompt, for itself (``reuse="off"``).
    """

    def __init__(self, llm: AsyncLLM, *, reuse: bool) -> None:
        self._llm = llm
        self._reuse = reuse

    def run(self, workload: Workload) -> Run:
        """Ask everything, each at its time. Raises InlayError."""
        return asyncio.run(self._run(workload))

    async def _run(self, workload: Workload) -> Run:
        pool = self._llm.store.pool
        self._llm.store.clear()
        pool.peak_chunks = 0
        prepare_s = await self._prepare(workload)
        with recording(self._llm) as steps:
            started = time.perf_counter()
            answers = list(await asyncio.gather(*(self._answer(ask, workload, started) for ask in workload.asks)))
        size = pool.chunk_size * pool.bytes_per_token
        return Run(
            started,
            answers,
            prepare_s,
            kv_peak=max(held_chunks(step, pool.chunk_size) for step in steps) * size,
            pool_peak=pool.peak_chunks * size,
            peak_batch=max(step.running for step in steps),
            steps=steps,
        )

    async def _prepare(self, workload: Workload) -> float:
        """Make the schema known, and with reuse encode it; the seconds that took."""
        started = time.perf_counter()
        if workload.schema is not None:
            await self._llm.add_schema(workload.schema, encode=self._reuse, reuse="isolated", positions="packed")
        return time.perf_counter() - started

    async def _answer(self, ask: Ask, workload: Workload, started: float) -> Answer:
        answer = Answer(started + ask.at)
        await asyncio.sleep(answer.arrived - time.perf_counter())
        params = SamplingParams(max_tokens=workload.completion, temperature=0, ignore_eos=True)
        reuse = "off" if not self._reuse else "exact" if workload.schema is None else "isolated"
        positions = None if workload.schema is None else "packed"
        async for output in self._llm.generate(ask.prompt, params, reuse=reuse, positions=positions):
            answer.say(output.outputs[0].token_ids, time.perf_counter())
        answer.prompt_ids = tuple(output.prompt_token_ids)
        return answer
