"""Another engine in a separate process (engine_process.py), called in lines of JSON.

Two OpenMP runtimes in one process would fight for the cores, and two engines for a device's memory.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PretrainedConfig

from inlay.errors import ModelError
from inlay_lab.bench.engines.engine_process import Served, Settings
from inlay_lab.bench.engines.gguf_file import random_gguf

PROGRAM = Path(__file__).with_name("engine_process.py")


class Peer:
    """The process of an engine.

    Args:
        engine: Its name in ``ENGINES``.
        remedy: How to run without it, for messages.
        python: The Python that has it.
        errors: Destination of its standard error, as in ``subprocess``; None for this process's own.

    Attributes:
        version: Of the engine.
        load_s: The seconds until it was ready.

    Raises:
        ModelError: It failed to start.
    """

    def __init__(
        self,
        engine: str,
        settings: Settings,
        remedy: str,
        python: Path | str = sys.executable,
        errors: int | None = subprocess.DEVNULL,
    ) -> None:
        self._engine, self._remedy = engine, remedy
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [str(python), str(PROGRAM), engine, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            self.version: str = self._read()["version"]
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started

    def call(self, name: str, **arguments: Any) -> tuple[float, Any]:
        """Call a method of the engine; returns the seconds in it, and its result. Raises ModelError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its last line has the reason
        said = self._read()
        return said["seconds"], said["result"]

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int, texts: Sequence[str] = ()) -> float:
        """Answer prompts at once, each with ``tokens`` tokens; returns the seconds. Raises ModelError.

        Args:
            texts: The prompts as text, for an engine that takes no ids.
        """
        seconds, ids = self.call("answer", prompts=prompts, texts=texts, tokens=tokens)
        if len(ids) != tokens:
            raise ModelError(f"an answer has {len(ids)} tokens in place of {tokens}; {self._remedy}")
        return seconds

    def first_token(self, prompt: Sequence[int], cached: int = 0) -> float:
        """Seconds to llama.cpp's first token behind a prompt with ``cached`` tokens in its cache. Raises ModelError."""
        if cached:
            self.answer([prompt[:cached]], 1)
        else:
            self.call("forget")
        return self.answer([prompt], 1)

    def serve(
        self, prompts: Sequence[Sequence[int]], tokens: int, at: Sequence[float], within_s: float = math.inf
    ) -> Served | None:
        """Answer prompts as they arrive; see ``Engine``. None if ``within_s`` is too short. Raises ModelError."""
        served: Served | None
        _, served = self.call("serve", prompts=prompts, at=at, tokens=tokens, within_s=within_s)
        return served

    def peak_bytes(self) -> int:
        """The peak resident memory of the process and of its children. Linux only: 0 elsewhere."""
        with suppress(psutil.Error):
            parent = psutil.Process(self._process.pid)
            return sum(_peak_bytes(each.pid) for each in (parent, *parent.children(recursive=True)))
        return 0

    def close(self) -> None:
        """Kill it and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        ended = {"error": f"{self._engine} ended with status {self._process.wait()}"} if not line else None
        said: dict[str, Any] = ended or json.loads(line)
        if "error" in said:
            raise ModelError(f"{said['error']}; {self._remedy}")
        return said


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


@contextmanager
def llama_cpp(
    config: PretrainedConfig,
    longest: int,
    remedy: str,
    *,
    quantization: str | None = None,
    own: int = 0,
    most: int = 1,
) -> Iterator[Peer]:
    """llama.cpp on a random model of the same shape, in bf16 or quantized. Raises ModelError.

    Args:
        longest, own, most: See ``Settings``.
        remedy: How to run without it, for messages.
    """
    with random_gguf(config, quantization) as file:
        settings = Settings(threads=torch.get_num_threads(), longest=longest, own=own, most=most, gguf=str(file))
        with closing(Peer("llama.cpp", settings, remedy)) as peer:
            yield peer
