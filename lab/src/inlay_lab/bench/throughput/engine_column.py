"""Other engines as columns: llama.cpp on a random model of the same shape, and vLLM on the same weights.

Each runs in a process of its own, which empties its cache before a run. llama.cpp answers in batches, as ``Stock``
does. vLLM batches continuously.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedModel

from inlay.errors import ModelError
from inlay_lab.bench.engines.engine_process import Settings
from inlay_lab.bench.engines.gguf_file import why_no_room, why_not
from inlay_lab.bench.engines.peer import Peer, llama_cpp
from inlay_lab.bench.throughput.runs import Answer, Limit, Run
from inlay_lab.bench.throughput.workload import Workload

_MEMORY_SHARE = 0.85  # of the device's memory, weights included; vLLM's default is 0.9 of an otherwise unused device


class EngineColumn:
    """Runs workloads through an engine with ``serve``. The engine starts with the first run.

    Args:
        start: Starts it, within a block.
        token_bytes: Bytes of one token's keys and values, or None if its memory is not reported.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[Peer]], token_bytes: int | None = None) -> None:
        self._start, self._token_bytes = start, token_bytes
        self._running = ExitStack()
        self._peer: Peer | None = None

    def prompt_tokens(self, workload: Workload) -> int:
        """Number of prompt tokens that a run computes. It finds prefixes, but no modules behind other text."""
        return workload.prompt_tokens(sharing=workload.schema is None)

    def run(self, workload: Workload, limit_s: float = math.inf) -> Run:
        """Answer all requests. Raises ModelError if it cannot run, DeadlineError after ``limit_s``."""
        if self._peer is None:
            self._peer = self._running.enter_context(self._start())
        limit, asks = Limit(limit_s), workload.asks
        prompts, at = [ask.ids for ask in asks], [ask.at for ask in asks]
        started = time.perf_counter()
        served = self._peer.serve(prompts, workload.completion, at, limit.left())
        if served is None:
            raise limit.passed()
        run = Run(started, [], peak_batch=served["peak_batch"])
        if self._token_bytes is not None and run.peak_batch is not None:
            held = workload.prefix + run.peak_batch * (workload.longest - workload.prefix)
            run.kv_peak = held * self._token_bytes
        # Its clock starts after reading the question, so the transfer does not count.
        for ask, ids, seconds in zip(asks, served["ids"], served["seconds"], strict=True):
            run.answers.append(Answer(started + ask.at, [started + each for each in seconds], tuple(ids), ask.ids))
        return run

    def close(self) -> None:
        """End its process and delete its file."""
        self._running.close()
        self._peer = None


def llama_column(
    config: PretrainedConfig, dtype: str, *, most: int, longest: int, shared: int, token_bytes: int
) -> EngineColumn:
    """llama.cpp, with batches of at most ``most`` requests of at most ``longest`` tokens.

    Args:
        dtype: Of our model.
        shared: Longest common prefix, in tokens.
        token_bytes: Bytes of one token's keys and values.
    """

    @contextmanager
    def start() -> Iterator[Peer]:
        if reason := why_not(config, dtype):
            raise ModelError(reason)
        remedy = "leave it out with --against off,stock"
        with llama_cpp(config, longest, remedy, own=longest - shared, most=most) as peer:
            yield peer

    return EngineColumn(start, token_bytes)


@contextmanager
def vllm_column(model: PreTrainedModel, *, most: int, longest: int) -> Iterator[EngineColumn]:
    """vLLM over a checkpoint of these weights, with at most ``most`` requests at once. Raises ModelError.

    Args:
        longest: Tokens of the longest request with its answer.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModelError("not installed; run: pip install vllm")
    if reason := why_no_room(sum(weights.nbytes for weights in model.parameters())):
        raise ModelError(reason)
    with tempfile.TemporaryDirectory(prefix="inlay-bench-") as folder:
        model.save_pretrained(folder)
        settings = Settings(
            threads=torch.get_num_threads(), longest=longest, most=most, folder=folder, device_share=_MEMORY_SHARE
        )
        remedy = "its standard error tells more"
        with closing(EngineColumn(lambda: closing(Peer("vllm", settings, remedy, errors=None)))) as column:
            yield column
