"""Many sequences in llama.cpp: ``python -m inlay_lab.bench.throughput.llama_worker FILE CELLS MOST N``.

MOST sequences share a unified KV cache of CELLS tokens and N threads. Every line on standard input is JSON.
``{"prefix": ids}`` empties the cache and computes the common prefix. ``{"prompts": [ids, …], "tokens": n}`` answers
prompts behind that prefix, greedily. The answer is a line of JSON: the tokens of each sequence, and the seconds from
the question to each step's tokens, or ``{"late": true}`` after ``within_s``. The first line reports that the model is
loaded.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

_PREFIX = 0  # sequence of the prefix; prompts use the following numbers


class LateError(Exception):
    """The time limit has passed."""


class Sequences:
    """A model with its cache. Raises RuntimeError if llama.cpp cannot load or run it."""

    def __init__(self, file: str, cells: int, most: int, threads: int) -> None:
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self._silent = silent  # called as long as the process runs
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = cells + 8
        params.n_batch = cells
        params.n_seq_max = most + 1
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = threads
        self._state = llama_cpp.llama_init_from_model(self._model, params) if self._model else None
        if not self._state:
            raise RuntimeError("llama.cpp cannot load the model")
        self._memory = llama_cpp.llama_get_memory(self._state)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(cells, 0, 1)
        self._shared = 0  # tokens of the prefix

    def begin(self, ids: Sequence[int]) -> None:
        """Empty the cache and compute the common prefix."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._shared = len(ids)
        if ids:
            self._decode([(token, at, _PREFIX, False) for at, token in enumerate(ids)])

    def answer(self, prompts: list[list[int]], tokens: int, end: float) -> dict[str, Any]:
        """Generate ``tokens`` tokens of each prompt, all sequences in every step. Raises LateError after ``end``."""
        started = time.perf_counter()
        rows = []
        for number, ids in enumerate(prompts, _PREFIX + 1):
            llama_cpp.llama_memory_seq_rm(self._memory, number, -1, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, _PREFIX, number, -1, -1)
            last = len(ids) - 1
            rows += [(token, self._shared + at, number, at == last) for at, token in enumerate(ids)]
        said: list[list[int]] = [[] for _ in prompts]
        seconds: list[float] = []
        while True:
            for answer, token in zip(said, self._decode(rows), strict=True):
                answer.append(token)
            seconds.append(time.perf_counter() - started)
            if len(seconds) == tokens:
                break
            if time.perf_counter() > end:
                raise LateError
            rows = [
                (answer[-1], self._shared + len(ids) + len(answer) - 1, number, True)
                for number, (ids, answer) in enumerate(zip(prompts, said, strict=True), _PREFIX + 1)
            ]
        for number in range(_PREFIX + 1, _PREFIX + 1 + len(prompts)):
            llama_cpp.llama_memory_seq_rm(self._memory, number, -1, -1)
        return {"ids": said, "seconds": seconds}

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run one batch of (token, position, sequence, wanted); returns the best next token of each wanted row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = wanted
        if llama_cpp.llama_decode(self._state, batch) != 0:
            raise RuntimeError("llama.cpp fails to decode")
        llama_cpp.llama_synchronize(self._state)
        return [self._best(at) for at, row in enumerate(rows) if row[3]]

    def _best(self, at: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._state, at)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())


def main(file: str, cells: int, most: int, threads: int) -> None:
    """Serve questions until standard input ends."""
    try:
        sequences = Sequences(file, cells, most, threads)
        _say({"loaded": True})
        for line in sys.stdin:
            _say(answered(sequences, json.loads(line)))
    except RuntimeError as error:
        _say({"error": str(error)})


def answered(sequences: Sequences, asked: dict[str, Any]) -> dict[str, Any]:
    end = time.perf_counter() + asked["within_s"]
    try:
        if "prefix" in asked:
            sequences.begin(asked["prefix"])
            return {"late": time.perf_counter() > end}
        return sequences.answer(asked["prompts"], asked["tokens"], end)
    except LateError:
        return {"late": True}


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
