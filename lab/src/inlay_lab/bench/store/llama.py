"""llama.cpp's slots, which llama-server keeps in files, as rows of the benchmark of the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from transformers import PretrainedConfig

from inlay_lab.bench.decode.llama import Worker


class LlamaSlot:
    """A process of llama.cpp with a sequence of so many tokens, and the file that it was saved to.

    Seconds are those of a sequence's tokens, or of its file, and of ``new`` tokens behind it up to the first answer.
    """

    def __init__(self, worker: Worker, file: Path, tokens: int, new: int) -> None:
        self._worker, self.file = worker, file
        self._asked = {"file": str(file), "tokens": tokens, "new": new}
        self.bytes = int(self._said("save")["bytes"])
        self.token = -1  # that was the most probable one, the last time

    def computed(self) -> float:
        return self._said("computed")["seconds"]

    def held(self) -> float:
        return self._said("held")["seconds"]

    def loaded(self) -> tuple[float, float]:
        """Seconds in all, and those of reading the file."""
        said = self._said("loaded")
        return said["seconds"], said["reading"]

    def _said(self, what: str) -> dict[str, float]:
        said: dict[str, float] = self._worker.ask(json.dumps({"what": what, **self._asked}))
        self.token = int(said.get("token", -1))
        return said


@contextmanager
def llama_slot(config: PretrainedConfig, file: Path, tokens: int, new: int) -> Iterator[LlamaSlot]:
    """A random model of the same shape, in bf16, and a slot of it, saved. Raises ModelError."""
    words = (tokens + new, torch.get_num_threads())
    remedy = "leave it out with --baselines disk,safetensors"
    with closing(Worker(config, "inlay_lab.bench.store.llama_worker", words, remedy)) as worker:
        yield LlamaSlot(worker, file, tokens, new)
