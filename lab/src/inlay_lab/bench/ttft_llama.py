"""llama.cpp as columns of the time-to-first-token benchmark: a whole prompt, and one with a cached prefix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PretrainedConfig

from inlay_lab.bench.decode.llama import Worker
from inlay_lab.bench.machine import Meter


@dataclass(frozen=True)
class LlamaFirstTokens:
    """A running llama.cpp process."""

    worker: Worker

    def meters(self, cached: int, new: int) -> dict[str, Meter]:
        """The meters of one row: all tokens computed, and only the new ones behind a cached prefix."""
        return {
            "llama_ms": partial(self._seconds, cached, new, held=False),
            "llama_held_ms": partial(self._seconds, cached, new, held=True),
        }

    def _seconds(self, cached: int, new: int, *, held: bool) -> float:
        said = self.worker.ask(json.dumps({"cached": cached, "new": new, "held": held}))
        return float(said["seconds"])


@contextmanager
def llama_first_tokens(
    config: PretrainedConfig, longest: int, quantization: str | None = None
) -> Iterator[LlamaFirstTokens]:
    """A random model of the same shape, in bf16 or quantized. Raises ModelError.

    Args:
        longest: Tokens of the longest prompt.
    """
    words = (longest, torch.get_num_threads())
    remedy = "leave it out with --baselines transformers"
    with closing(Worker(config, "inlay_lab.bench.ttft_llama_worker", words, remedy, quantization)) as worker:
        yield LlamaFirstTokens(worker)
