"""Stock transformers as a column: batches, each decoded to its end, behind one prefill of what all prompts share.

That is how it is fastest with its own means: sdpa, a DynamicCache, greedy search written out. The beginning that all
prompts share is computed once and repeated for the rows of every batch; prompts of unequal lengths are padded on the
left. A batch takes whoever has arrived, up to its size, and who comes later waits for the next one.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from inlay.bench.throughput.record import Answer, Limit, Run
from inlay.bench.throughput.workload import Ask, Workload
from inlay.models.interface import attention_implementation


class Stock:
    """Runs workloads through a stock model, in batches of at most ``most`` requests."""

    def __init__(self, model: PreTrainedModel, most: int) -> None:
        self._model = model
        self._most = most

    def prompt_tokens(self, workload: Workload) -> int:
        """How many tokens of prompts this computes: what all begin with once, and nothing else is shared."""
        return workload.prompt_tokens(sharing=workload.schema is None)

    @torch.inference_mode()
    def run(self, workload: Workload, limit_s: float = math.inf) -> Run:
        """Answer all requests, batch by batch in the order of arrival. Raises DeadlineError behind ``limit_s``."""
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
        """The keys and values of what all prompts begin with."""
        cache = DynamicCache(config=self._model.config)
        if ids:
            self._model.base_model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
        return cache

    def _answer(self, batch: list[Ask], shared: DynamicCache, workload: Workload, run: Run, limit: Limit) -> None:
        cache = copy.deepcopy(shared)
        if workload.prefix:
            cache.batch_repeat_interleave(len(batch))
        said, times = self._decode(batch, cache, workload, limit)
        kept = kv_bytes(cache) + kv_bytes(shared)
        run.kv_peak, run.peak_batch = max(run.kv_peak or 0, kept), max(run.peak_batch or 0, len(batch))
        for ask, ids in zip(batch, said, strict=True):
            run.answers.append(Answer(run.started + ask.at, list(times), tuple(ids), ask.ids))

    def _decode(
        self, batch: list[Ask], cache: DynamicCache, workload: Workload, limit: Limit
    ) -> tuple[list[list[int]], list[float]]:
        """Every row's answer, and when each of its tokens was there."""
        ids, mask = padded([ask.ids[workload.prefix :] for ask in batch], workload.prefix)
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, workload.prefix :]
        said: list[Tensor] = []
        times: list[float] = []
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
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            said.append(output.logits[:, -1:].argmax(-1))
            times.append(time.perf_counter())
        return torch.cat(said, -1).tolist(), times


def padded(texts: Sequence[Sequence[int]], prefix: int) -> tuple[Tensor, Tensor | None]:
    """Ids (batch, tokens) padded on the left, and a mask (batch, prefix + tokens); None where nothing is padded."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*[0] * (longest - len(text)), *text] for text in texts])
    if all(len(text) == longest for text in texts):
        return ids, None
    seen = [[*[1] * prefix, *[0] * (longest - len(text)), *[1] * len(text)] for text in texts]
    return ids, torch.tensor(seen)


def kv_bytes(cache: DynamicCache) -> int:
    """Bytes of the keys and values that a cache holds."""
    layers: list[Any] = cache.layers
    return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in layers if layer.is_initialized)
