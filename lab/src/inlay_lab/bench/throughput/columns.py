"""The columns of the throughput tables: engines that answer a workload's requests.

- ``Ours``: inlay, an AsyncLLM with a task for every request. The engine's steps are recorded.
- ``Stock``: fast transformers code: sdpa, a DynamicCache and a plain greedy loop, in batches decoded to their end.
  The common prefix is computed once and repeated for the rows of each batch. Prompts of unequal lengths are padded on
  the left. A batch takes the requests that have arrived, up to its size; later ones wait for the next batch.
- ``Continuous``: transformers' continuous batching with a paged cache and prefix sharing. Requests join at any step.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, PreTrainedModel

from inlay.client.async_llm import AsyncLLM
from inlay.engine.unshared_runner import with_cache
from inlay.errors import DeadlineError, ModelError
from inlay.models.interface import attention_implementation
from inlay.pml import Prompt
from inlay.prompt.inputs import PromptInput
from inlay.sampling.params import SamplingParams
from inlay_lab.bench.throughput.runs import Answer, Limit, Run
from inlay_lab.bench.throughput.steps import held_chunks, recording
from inlay_lab.bench.throughput.workload import POSITIONS, REUSE, Ask, Workload


class Ours:
    """Runs workloads through inlay. Before each run the store is emptied, then the workload's resident text is stored.

    Args:
        reuse: Share KV: prefixes exactly, modules encoded ``isolated``, and resident text computed before the run.
            If False, every request computes its whole prompt (``reuse="off"``).
    """

    def __init__(self, llm: AsyncLLM, *, reuse: bool) -> None:
        self._llm = llm
        self._reuse = reuse

    def prompt_tokens(self, workload: Workload) -> int:
        """Number of prompt tokens that a run computes."""
        return workload.prompt_tokens(sharing=self._reuse)

    def run(self, workload: Workload, limit_s: float = math.inf) -> Run:
        """Send every request at its time.

        Raises:
            DeadlineError: The run takes longer than ``limit_s``.
            InlayError: The engine failed.
        """
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
        """Wait until the engine has dropped cancelled requests. The next column must not run beside its last step."""
        await asyncio.wrap_future(self._llm.local.call(lambda: None))

    async def _prepare(self, workload: Workload) -> float:
        """Add the schema and, with reuse, compute the resident text. Returns the seconds this took."""
        started = time.perf_counter()
        if workload.schema is not None:
            await self._llm.add_schema(workload.schema, encode=False, replace=True, reuse=REUSE, positions=POSITIONS)
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
            # with clients, a request arrives at its client's turn; otherwise waiting makes it late
            answer = Answer(time.perf_counter() if workload.clients else started + ask.at)
            await asyncio.sleep(max(0.0, answer.arrived - time.perf_counter()))
            params = SamplingParams(max_tokens=workload.completion, temperature=0, ignore_eos=True)
            reuse = "off" if not self._reuse else "exact" if workload.schema is None else REUSE
            positions = None if workload.schema is None else POSITIONS
            async for output in self._llm.generate(ask.prompt, params, reuse=reuse, positions=positions):
                answer.say(output.outputs[0].token_ids, time.perf_counter())
        answer.prompt_ids, answer.usage = tuple(output.prompt_token_ids), output.usage
        return answer


class Stock:
    """Runs workloads through a stock model, in batches of at most ``most`` requests."""

    def __init__(self, model: PreTrainedModel, most: int) -> None:
        self._model = model
        self._most = most

    def prompt_tokens(self, workload: Workload) -> int:
        """Number of prompt tokens that a run computes. Only the common prefix is shared."""
        return workload.prompt_tokens(sharing=workload.schema is None)

    @torch.inference_mode()
    def run(self, workload: Workload, limit_s: float = math.inf) -> Run:
        """Answer all requests, batch by batch in the order of arrival. Raises DeadlineError after ``limit_s``."""
        waiting, limit = list(workload.asks), Limit(limit_s)
        run = Run(time.perf_counter(), [], kv_peak=0, peak_batch=0)
        with attention_implementation(self._model, "sdpa"):
            shared = self._shared(workload.asks[0].ids[: workload.prefix])
            while waiting:
                time.sleep(max(0.0, run.started + waiting[0].at - time.perf_counter()))
                now = time.perf_counter() - run.started
                batch = [ask for ask in waiting[: self._most] if ask.at <= now]
                del waiting[: len(batch)]
                self._answer(batch, shared, workload, run, limit)
        return run

    def _shared(self, ids: Sequence[int]) -> DynamicCache:
        """The keys and values of the common prefix."""
        cache = DynamicCache(config=self._model.config)
        if ids:
            base = self._model.base_model
            base(input_ids=torch.tensor([ids]), use_cache=True, **with_cache(base, cache))
        return cache

    def _answer(self, batch: list[Ask], shared: DynamicCache, workload: Workload, run: Run, limit: Limit) -> None:
        cache = copy.deepcopy(shared)
        if workload.prefix:
            each: Any = torch.zeros(len(batch), dtype=torch.long)
            cache.reorder_cache(each)  # copies it for each request, in recurrent layers too
        said, times = self._decode(batch, cache, workload, limit)
        kept = kv_bytes(cache) + kv_bytes(shared)
        run.kv_peak, run.peak_batch = max(run.kv_peak or 0, kept), max(run.peak_batch or 0, len(batch))
        for ask, ids in zip(batch, said, strict=True):
            run.answers.append(Answer(run.started + ask.at, list(times), tuple(ids), ask.ids))

    def _decode(
        self, batch: list[Ask], cache: DynamicCache, workload: Workload, limit: Limit
    ) -> tuple[list[list[int]], list[float]]:
        """Every row's answer, and the time of each token."""
        ids, mask = padded([ask.ids[workload.prefix :] for ask in batch], workload.prefix)
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, workload.prefix :]
        said: list[Tensor] = []
        times: list[float] = []
        past = with_cache(self._model, cache)
        while len(said) < workload.completion:
            limit.check()
            if said:
                ids = said[-1]
                mask = None if mask is None else torch.cat((mask, mask.new_ones(len(batch), 1)), -1)
                positions = None if positions is None else positions[:, -1:] + 1
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **past,
            )
            said.append(output.logits[:, -1:].argmax(-1))
            times.append(time.perf_counter())
        return torch.cat(said, -1).tolist(), times


def padded(texts: Sequence[Sequence[int]], prefix: int) -> tuple[Tensor, Tensor | None]:
    """Ids (batch, tokens) padded on the left, and a mask (batch, prefix + tokens), or None without padding."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*[0] * (longest - len(text)), *text] for text in texts])
    if all(len(text) == longest for text in texts):
        return ids, None
    seen = [[*[1] * prefix, *[0] * (longest - len(text)), *[1] * len(text)] for text in texts]
    return ids, torch.tensor(seen)


def kv_bytes(cache: DynamicCache) -> int:
    """Bytes of a cache's keys, values and recurrent states."""
    tensors: list[Tensor | None] = []
    for layer in cache.layers:
        tensors += (getattr(layer, "keys", None), getattr(layer, "values", None))
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors += states.values()
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


_PAGE = 64  # tokens of a page, as in our pool; the default of 256 shares less
_STEP_TOKENS = 1024  # in a forward pass; its masks are this by all slots of the cache


class Continuous:
    """Runs workloads through ``ContinuousBatchingManager``. Each run uses a new one, so nothing is stored."""

    def __init__(self, model: PreTrainedModel, most: int) -> None:
        self._model = model
        self._most = most

    def prompt_tokens(self, workload: Workload) -> int:
        """Number of prompt tokens that a run computes. It finds prefixes, but no modules behind other text."""
        return workload.prompt_tokens(sharing=workload.schema is None)

    def run(self, workload: Workload, limit_s: float = math.inf) -> Run:
        """Answer all requests.

        Raises:
            DeadlineError: The run takes longer than ``limit_s``.
            ModelError: It cannot run; the message has transformers' reason.
        """
        # eos -1: no token ends an answer. It needs sdpa where no flash kernels are installed.
        make: Any = GenerationConfig
        generation = make(max_new_tokens=workload.completion, do_sample=False, eos_token_id=-1)
        settings = self._settings(workload)
        factory: Any = self._model
        try:
            with (
                attention_implementation(self._model, "sdpa"),
                factory.continuous_batching_context_manager(generation, continuous_batching_config=settings) as manager,
            ):
                return _ask(manager, workload, Limit(limit_s))
        except (ModelError, DeadlineError):
            raise
        except Exception as error:  # whatever its reason is, it is reported
            raise ModelError(f"transformers' continuous batching: {_reason(error)}") from error

    def _settings(self, workload: Workload) -> ContinuousBatchingConfig:
        """On a GPU it chooses the other settings itself, with flash kernels if they are installed."""
        if self._model.device.type == "cuda":
            return ContinuousBatchingConfig(max_requests_per_batch=self._most)
        return ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=self._most * (-(-workload.longest // _PAGE) + 1),
            max_batch_tokens=_STEP_TOKENS,
            max_requests_per_batch=self._most,
            auto_switch_to_flash=False,
        )


def _ask(manager: Any, workload: Workload, limit: Limit) -> Run:
    run = Run(time.perf_counter(), [])
    for number, ask in enumerate(workload.asks):
        time.sleep(max(0.0, run.started + ask.at - time.perf_counter()))
        manager.add_request(list(ask.ids), request_id=str(number), record_timestamps=True)
    made: dict[str, Any] = {}
    while len(made) < len(workload.asks):
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise ModelError(f"transformers' continuous batching: {result.error}")
        if result is not None and result.is_finished():
            made[result.request_id] = result
        elif result is None and not manager.is_running():
            raise ModelError("transformers' continuous batching: its thread has ended without a word")
        limit.check()
    for number, ask in enumerate(workload.asks):
        result = made[str(number)]
        answer = Answer(run.started + ask.at, list(result.timestamps), tuple(result.generated_tokens), ask.ids)
        run.answers.append(answer)
    return run


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
