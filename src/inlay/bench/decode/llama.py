"""llama.cpp as a column of the decode benchmark, where ``llama-cpp-python`` and ``gguf`` are installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from inlay.bench.decode.gguf_file import ARCHITECTURES, write_gguf
from inlay.bench.stock import weight_bytes
from inlay.bench.timing import Meter
from inlay.errors import ModelError


def why_not(config: PretrainedConfig, dtype: str) -> str | None:
    """The reason why llama.cpp cannot be measured here; None where it can."""
    if any(importlib.util.find_spec(package) is None for package in ("llama_cpp", "gguf")):
        return "not installed; run: pip install llama-cpp-python gguf"
    if config.model_type not in ARCHITECTURES:
        return f"this benchmark writes no GGUF of type '{config.model_type}'"
    if dtype != "bfloat16":
        return f"its file is bf16, and the model is {dtype}"
    needed, free = weight_bytes(config, torch.bfloat16), shutil.disk_usage(tempfile.gettempdir()).free
    if needed > free:
        return f"its file takes {needed / 1e9:.1f} GB, and {tempfile.gettempdir()} has {free / 1e9:.1f} GB free"
    return None


@contextmanager
def llama_answers(config: PretrainedConfig, context: int, tokens: int) -> Iterator[Meter]:
    """A random model of the same shape, in bf16, in a process of its own. Raises ModelError."""
    with tempfile.TemporaryDirectory(prefix="inlay-bench-") as folder:
        file = Path(folder) / "random.gguf"
        write_gguf(config, file)
        words = [str(file), str(context), str(tokens), str(torch.get_num_threads())]
        worker = subprocess.Popen(
            [sys.executable, "-m", "inlay.bench.decode.llama_worker", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            _read(worker)
            yield lambda: _run(worker)
        finally:
            worker.kill()
            worker.communicate()


def _run(worker: subprocess.Popen[str]) -> float:
    assert worker.stdin is not None
    worker.stdin.write("run\n")
    worker.stdin.flush()
    return float(_read(worker)["seconds"])


def _read(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    said: dict[str, Any] = json.loads(line) if line else {"error": f"llama.cpp ended with status {worker.wait()}"}
    if "error" in said:
        raise ModelError(f"{said['error']}; leave it out with --baselines transformers")
    return said
