"""llama.cpp as a column: sequences run at once in one unified KV cache, and the common prefix is computed once.

It runs a random bf16 model of the same shape in a separate process (llama_worker.py). Batches are made as in
``Stock``: requests that have arrived, up to the maximum, are decoded greedily to their end.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import torch
from transformers import PretrainedConfig

from inlay.errors import ModelError
from inlay_lab.bench.decode.llama import Worker, why_not
from inlay_lab.bench.throughput.runs import Answer, Limit, Run
from inlay_lab.bench.throughput.workload import Ask, Workload

WORKER = "inlay_lab.bench.throughput.llama_worker"
_REMEDY = "leave it out with --against off,stock"


class LlamaCpp:
    """Runs workloads through llama.cpp, in batches of at most ``most`` requests of at most ``longest`` tokens.

    Args:
        shared: Longest common prefix, in tokens.
        token_bytes: Bytes of one token's keys and values.
    """

    def __init__(
        self, config: PretrainedConfig, dtype: str, *, most: int, longest: int, shared: int, token_bytes: int
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._words = (shared + most * (longest - shared), most)
        self._most = most
        self._token_bytes = token_bytes
        self._worker: Worker | None = None

    def prompt_tokens(self, workload: Workload) -> int:
        """Number of prompt tokens that a run computes. The common prefix counts once."""
        return workload.prompt_tokens(sharing=True)

    def run(self, workload: Workload, limit_s: float = math.inf) -> Run:
        """Answer all requests, batch by batch. Raises ModelError if it cannot run, DeadlineError after ``limit_s``."""
        if reason := why_not(self._config, self._dtype):
            raise ModelError(reason)
        worker = self._started()
        waiting, limit = list(workload.asks), Limit(limit_s)
        run = Run(time.perf_counter(), [], kv_peak=0, peak_batch=0)
        self._ask(worker, limit, {"prefix": waiting[0].ids[: workload.prefix]})
        while waiting:
            time.sleep(max(0.0, run.started + waiting[0].at - time.perf_counter()))
            now = time.perf_counter() - run.started
            batch = [ask for ask in waiting[: self._most] if ask.at <= now]
            del waiting[: len(batch)]
            self._answer(worker, batch, workload, run, limit)
        return run

    def close(self) -> None:
        """End its process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _started(self) -> Worker:
        if self._worker is None:
            self._worker = Worker(self._config, WORKER, (*self._words, torch.get_num_threads()), _REMEDY)
        return self._worker

    def _answer(self, worker: Worker, batch: list[Ask], workload: Workload, run: Run, limit: Limit) -> None:
        own = [ask.ids[workload.prefix :] for ask in batch]
        asked = time.perf_counter()
        said = self._ask(worker, limit, {"prompts": own, "tokens": workload.completion})
        held = workload.prefix + sum(len(ids) + workload.completion for ids in own)
        run.kv_peak = max(run.kv_peak or 0, held * self._token_bytes)
        run.peak_batch = max(run.peak_batch or 0, len(batch))
        for ask, ids in zip(batch, said["ids"], strict=True):
            times = [asked + seconds for seconds in said["seconds"]]
            run.answers.append(Answer(run.started + ask.at, times, tuple(ids), ask.ids))

    def _ask(self, worker: Worker, limit: Limit, what: dict[str, Any]) -> dict[str, Any]:
        said = worker.ask(json.dumps({**what, "within_s": limit.left()}))
        if said.get("late"):
            raise limit.passed()
        return said
