"""Decoding with llama.cpp: ``python -m inlay_lab.bench.decode.llama_worker FILE CONTEXT TOKENS N``.

It is a separate process, because two OpenMP runtimes in one would fight for the cores. Every line on standard input
starts one run on N threads: a prompt of CONTEXT tokens, then TOKENS greedy tokens one by one. The answer is a line of
JSON with the seconds of those TOKENS tokens. A first line, before any run, reports that the model is loaded.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

_kept: list[Any] = []  # callbacks that llama.cpp needs until the process ends


def main(file: str, context: int, tokens: int, threads: int) -> None:
    """Serve runs until standard input ends."""
    loaded = opened(file, context + tokens, threads)
    if loaded is None:
        return
    state, vocabulary = loaded
    _answer(state, context, 1, vocabulary)  # the file is mapped: the first run reads it from disk
    say({"loaded": True})
    for _ in sys.stdin:
        say({"seconds": _answer(state, context, tokens, vocabulary)})


def opened(file: str, tokens: int, threads: int) -> tuple[Any, int] | None:
    """A context for ``tokens`` tokens, and the vocabulary size. Prints an error and returns None if it cannot load."""
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
    """Seconds of the tokens behind a prompt and its first generated token."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(state), True)
    last = decode(state, [token % vocabulary for token in range(context)], vocabulary)
    started = time.perf_counter()
    for _ in range(tokens):
        last = decode(state, [last], vocabulary)
    return time.perf_counter() - started


def decode(state: Any, ids: list[int], vocabulary: int) -> int:
    """Run ids through the model; returns the most probable token behind them."""
    tokens = (llama_cpp.llama_token * len(ids))(*ids)  # the batch keeps only its address
    if llama_cpp.llama_decode(state, llama_cpp.llama_batch_get_one(tokens, len(ids))) != 0:
        say({"error": "llama.cpp fails to decode"})
        sys.exit(1)
    logits = llama_cpp.llama_get_logits_ith(state, -1)
    return int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
