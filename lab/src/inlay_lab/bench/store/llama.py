"""llama.cpp's slots, which llama-server keeps in files, as rows of the store benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from transformers import PretrainedConfig

from inlay_lab.bench.decode.llama import Worker


class LlamaSlot:
    """A llama.cpp process with a sequence of ``tokens`` tokens, and the file of its saved slot.

    Each method returns seconds to the first token: of the sequence's tokens or its file, then ``new`` tokens behind it.
    """

    def __init__(self, worker: Worker, file: Path, tokens: int, new: int) -> None:
        self._worker, self.file = worker, file
        self._asked = {"file": str(file), "tokens": tokens, "new": new}
        self.bytes = int(self._said("save")["bytes"])
        self.token = -1  # the most probable token of the last call

    def computed(self) -> float:
        return self._said("computed")["seconds"]

    def held(self) -> float:
        return self._said("held")["seconds"]

    def loaded(self) -> tuple[float, float]:
        """Seconds in all, and of reading the file."""
        said = self._said("loaded")
        return said["seconds"], said["reading"]

    def _said(self, what: str) -> dict[str, float]:
        said: dict[str, float] = self._worker.ask(json.dumps({"what": what, **self._asked}))
        self.token = int(said.get("token", -1))
        return said


@contextmanager
def llama_slot(config: PretrainedConfig, file: Path, tokens: int, new: int) -> Iterator[LlamaSlot]:
    """A slot of a random bf16 model of the same shape, saved to ``file``. Raises ModelError."""
    words = (tokens + new, torch.get_num_threads())
    remedy = "leave it out with --baselines disk,safetensors"
    with closing(Worker(config, "inlay_lab.bench.store.llama_worker", words, remedy)) as worker:
        yield LlamaSlot(worker, file, tokens, new)
