"""inlay as a column: an AsyncLLM, a task for every request, and the engine's steps noted."""

from __future__ import annotations

import asyncio
import math
import time

from inlay.async_llm import AsyncLLM
from inlay.bench.throughput.modules import POSITIONS, REUSE
from inlay.bench.throughput.record import Answer, Limit, Run
from inlay.bench.throughput.steps import held_chunks, recording
from inlay.bench.throughput.workload import Ask, Workload
from inlay.inputs import PromptInput
from inlay.pml import Prompt
from inlay.types import SamplingParams


class Ours:
    """Runs workloads through an engine that has nothing stored when a run begins, but what the workload says.

    reuse: whether anything is shared: prefixes are found as they are, modules are encoded ``isolated``, and what is to
        be resident is computed beforehand. Otherwise every request computes its whole prompt, for itself
        (``reuse="off"``).
    """

    def __init__(self, llm: AsyncLLM, *, reuse: bool) -> None:
        self._llm = llm
        self._reuse = reuse

    def prompt_tokens(self, workload: Workload) -> int:
        """How many tokens of prompts this computes."""
        return workload.prompt_tokens(sharing=self._reuse)

    def run(self, workload: Workload, limit_s: float = math.inf) -> Run:
        """Ask everything, each at its time. Raises InlayError; DeadlineError ``limit_s`` behind the first request."""
        return asyncio.run(self._run(workload, limit_s))

    async def _run(self, workload: Workload, limit_s: float) -> Run:
        pool = self._llm.store.pool
        self._llm.store.clear()
        prepare_s = await self._prepare(workload)
        pool.peak_chunks = 0
        with recording(self._llm) as steps:
            started = time.perf_counter()
            answers = await self._ask(workload, started, limit_s)
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

    async def _ask(self, workload: Workload, started: float, limit_s: float) -> list[Answer]:
        gate = asyncio.Semaphore(workload.clients or len(workload.asks))
        limit = Limit(limit_s)
        try:
            async with asyncio.timeout(None if math.isinf(limit_s) else limit_s):
                return list(
                    await asyncio.gather(*(self._answer(ask, workload, started, gate) for ask in workload.asks))
                )
        except TimeoutError:
            await self._at_rest()
            raise limit.passed() from None

    async def _at_rest(self) -> None:
        """Wait until the engine has dropped what was given up: the next column must not run beside its last step."""
        await asyncio.wrap_future(self._llm._thread.call(lambda: None))

    async def _prepare(self, workload: Workload) -> float:
        """Make the schema known, and with reuse compute what is to be resident; the seconds that took."""
        started = time.perf_counter()
        if workload.schema is not None:
            await self._llm.add_schema(workload.schema, encode=False, reuse=REUSE, positions=POSITIONS)
        for prompt in workload.resident if self._reuse else ():
            await self._store(prompt)
        return time.perf_counter() - started

    async def _store(self, prompt: PromptInput) -> None:
        if isinstance(prompt, Prompt):
            await self._llm.warm(prompt, reuse=REUSE, positions=POSITIONS)
            return
        async for _ in self._llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), reuse="exact"):
            pass

    async def _answer(self, ask: Ask, workload: Workload, started: float, gate: asyncio.Semaphore) -> Answer:
        async with gate:
            # A client of several asks when its turn has come; a request with a time of its own is late if it waits.
            answer = Answer(time.perf_counter() if workload.clients else started + ask.at)
            await asyncio.sleep(max(0.0, answer.arrived - time.perf_counter()))
            params = SamplingParams(max_tokens=workload.completion, temperature=0, ignore_eos=True)
            reuse = "off" if not self._reuse else "exact" if workload.schema is None else REUSE
            positions = None if workload.schema is None else POSITIONS
            async for output in self._llm.generate(ask.prompt, params, reuse=reuse, positions=positions):
                answer.say(output.outputs[0].token_ids, time.perf_counter())
        answer.prompt_ids, answer.usage = tuple(output.prompt_token_ids), output.usage
        return answer
