"""Decoding with llama.cpp: ``python -m inlay_lab.bench.decode.llama_worker FILE CONTEXT TOKENS N``.

A process of its own, because two OpenMP runtimes in one would fight for the cores. Every line on standard input is
one run: a prompt of CONTEXT tokens and TOKENS more, one by one and greedily, on N threads. The answer is a line of
JSON: the seconds of those TOKENS tokens. The first line, before any run, says that the model is loaded.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

_kept: list[Any] = []  # what llama.cpp calls for as long as the process lives


def main(file: str, context: int, tokens: int, threads: int) -> None:
    """Serve runs until standard input ends."""
    loaded = opened(file, context + tokens, threads)
    if loaded is None:
        return
    state, vocabulary = loaded
    _answer(state, context, 1, vocabulary)  # the file is mapped, and read from disk the first time
    say({"loaded": True})
    for _ in sys.stdin:
        say({"seconds": _answer(state, context, tokens, vocabulary)})


def opened(file: str, tokens: int, threads: int) -> tuple[Any, int] | None:
    """A context for so many tokens, and the size of the vocabulary; None, which is said, where there is none."""
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    _kept.append(silent)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = tokens + 8
    params.n_threads = params.n_threads_batch = threads
    state = llama_cpp.llama_init_from_model(model, params) if model else None
    if not state:
        say({"error": "llama.cpp cannot load the model"})
        return None
    return state, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))


def _answer(state: Any, context: int, tokens: int, vocabulary: int) -> float:
    """Seconds of the tokens behind a prompt and its first one."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(state), True)
    last = decode(state, [token % vocabulary for token in range(context)], vocabulary)
    started = time.perf_counter()
    for _ in range(tokens):
        last = decode(state, [last], vocabulary)
    return time.perf_counter() - started


def decode(state: Any, ids: list[int], vocabulary: int) -> int:
    """Run ids through the model; returns the most probable token behind them."""
    tokens = (llama_cpp.llama_token * len(ids))(*ids)  # a batch holds its address alone
    if llama_cpp.llama_decode(state, llama_cpp.llama_batch_get_one(tokens, len(ids))) != 0:
        say({"error": "llama.cpp fails to decode"})
        sys.exit(1)
    logits = llama_cpp.llama_get_logits_ith(state, -1)
    return int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
