"""llama.cpp's own server on a random model of a shape, asked with token ids."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from inlay.errors import ModelError, ParameterError
from inlay_lab.bench.engines.gguf_file import random_gguf

_START_S = 300.0
_ANSWER_S = 3600.0


def find_server(path: Path | None) -> Path | None:
    """The program of the server: ``path``, or the one on PATH. Raises ParameterError if there is no such file."""
    if path is not None and not path.is_file():
        raise ParameterError(f"--llama-server {path}: no such file; give the program llama-server of llama.cpp")
    found = path or shutil.which("llama-server")
    return None if found is None else Path(found).resolve()


@dataclass(frozen=True)
class Prefilled:
    """How the server answered a prompt: the tokens that it computed, and the seconds that they took."""

    computed_tokens: int
    seconds: float


class LlamaServer:
    """A running server. ``url`` has no path."""

    def __init__(self, url: str) -> None:
        self._url = url

    def first_token(self, ids: Sequence[int]) -> Prefilled:
        """Answer a prompt with one token. The server keeps the prompt. Raises ModelError."""
        timings = self._complete(ids, 1)["timings"]
        return Prefilled(timings["prompt_n"], timings["prompt_ms"] / 1000)

    def keep(self, ids: Sequence[int]) -> None:
        """Compute a prompt with the answer behind it, so that the next prompt finds both. Raises ModelError."""
        self._complete(ids, 0)

    def _complete(self, ids: Sequence[int], tokens: int) -> dict[str, Any]:
        body = {"prompt": list(ids), "n_predict": tokens, "cache_prompt": True, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/completion", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            raise ModelError(f"llama-server refused a prompt: {error.read().decode(errors='replace')[:300]}") from error
        except OSError as error:
            raise ModelError(f"llama-server does not answer ({error}); leave it out") from error
        return answer


@contextmanager
def llama_server(
    program: Path, config: PretrainedConfig, longest: int, quantization: str | None = None
) -> Iterator[LlamaServer]:
    """Run the server within a block, with one slot and its other defaults. Raises ModelError.

    Args:
        longest: Tokens of the longest prompt.
        quantization: Of the random model, as ours. None for bf16.
    """
    with random_gguf(config, quantization) as file:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        command = [program, "-m", file, "-c", longest + 64, "-np", 1, "-t", torch.get_num_threads()]
        command += ["--host", "127.0.0.1", "--port", port]
        log = file.with_name("log")
        with log.open("wb") as errors:
            process = subprocess.Popen([*map(str, command)], stdout=errors, stderr=errors)
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield LlamaServer(f"http://127.0.0.1:{port}")
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return once the server is ready. Raises ModelError with its last words if it is not."""
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:  # it does not listen yet, or loads (503)
            time.sleep(0.1)
    said = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise ModelError(f"llama-server did not start ({' '.join(said)[-300:]}); leave it out")
