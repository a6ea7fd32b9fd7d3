"""vLLM as a column: continuous batching with automatic prefix caching, over a checkpoint of the same weights.

It runs in a separate process (vllm_worker.py), gets token ids, and empties its cache between runs.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import tempfile
import time
from typing import Any

from transformers import PreTrainedModel

from inlay.errors import ModelError
from inlay_lab.bench.throughput.runs import Answer, Limit, Run
from inlay_lab.bench.throughput.workload import Workload
from inlay_lab.bench.worker import Worker, module_command

WORKER = "inlay_lab.bench.throughput.vllm_worker"
_MEMORY_SHARE = 0.85  # of the device's memory, weights included; vLLM's default is 0.9 of an otherwise unused device


class Vllm:
    """Runs workloads through vLLM, at most ``most`` requests at once, of at most ``longest`` tokens with their answers.

    Args:
        model: The weights. They are written to a file at once; the caller may drop the model then.

    Raises:
        ModelError: vLLM cannot run.
    """

    def __init__(self, model: PreTrainedModel, *, most: int, longest: int) -> None:
        if reason := why_not(model):
            raise ModelError(reason)
        self._words = (most, longest, _MEMORY_SHARE)
        self._worker: Worker | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="inlay-bench-")
        try:
            model.save_pretrained(self._folder.name)
        except BaseException:
            self._folder.cleanup()
            raise

    def prompt_tokens(self, workload: Workload) -> int:
        """Number of prompt tokens that a run computes. It finds prefixes, but no modules behind other text."""
        return workload.prompt_tokens(sharing=workload.schema is None)

    def run(self, workload: Workload, limit_s: float = math.inf) -> Run:
        """Answer all requests. Raises ModelError if it cannot run, DeadlineError after ``limit_s``."""
        worker, limit = self._started(), Limit(limit_s)
        asks = [{"ids": ask.ids, "at": ask.at} for ask in workload.asks]
        started = time.perf_counter()
        said = worker.ask(json.dumps({"asks": asks, "tokens": workload.completion, "within_s": limit.left()}))
        if said.get("late"):
            raise limit.passed()
        # Its clock starts after reading the question, so the transfer does not count.
        run = Run(started, [])
        for ask, answer in zip(workload.asks, said["answers"], strict=True):
            times = [started + seconds for seconds in answer["seconds"]]
            run.answers.append(Answer(started + ask.at, times, tuple(answer["ids"]), ask.ids))
        return run

    def close(self) -> None:
        """End its process and delete its file."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._folder.cleanup()

    def _started(self) -> Worker:
        if self._worker is None:
            words: tuple[Any, ...] = (self._folder.name, *self._words)
            self._worker = Worker("vLLM", module_command(WORKER, words), "its standard error tells more", errors=None)
        return self._worker


def why_not(model: PreTrainedModel) -> str | None:
    """The reason that vLLM cannot be measured here, or None."""
    if importlib.util.find_spec("vllm") is None:
        return "not installed; run: pip install vllm"
    needed = sum(weights.nbytes for weights in model.parameters())
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if needed > free:
        return f"its file takes {needed / 1e9:.1f} GB, and {tempfile.gettempdir()} has {free / 1e9:.1f} GB free"
    return None
