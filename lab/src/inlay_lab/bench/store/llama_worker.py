"""llama.cpp's slots: ``python -m inlay_lab.bench.store.llama_worker FILE LONGEST N``.

It is a separate process, as in decode/llama_worker.py. A sequence has at most LONGEST tokens. Every line on standard
input is JSON, ``{"what": …, "file": …, "tokens": …, "new": …}``. The answer is a line of JSON; N threads compute it:

- ``save``: write the sequence of ``tokens`` to the file, as llama-server saves a slot. Returns its bytes.
- ``computed``, ``held``, ``loaded``: compute ``new`` tokens and return the seconds and the most probable next
  ``token``. The sequence before them is computed too, already in the cache, or loaded from the file. ``reading`` is
  the seconds of loading.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp

from inlay_lab.bench.decode.llama_worker import decode, opened, say

_SEQUENCE = 0


def main(file: str, longest: int, threads: int) -> None:
    """Serve requests until standard input ends."""
    loaded = opened(file, longest, threads)
    if loaded is None:
        return
    state, vocabulary = loaded
    decode(state, [0], vocabulary)  # the file is mapped: the first run reads it from disk
    say({"loaded": True})
    for line in sys.stdin:
        asked = json.loads(line)
        tokens, end = asked["tokens"], asked["tokens"] + asked["new"]
        if asked["what"] == "held":
            _keep(state, tokens)
        else:
            _keep(state, 0)
        if asked["what"] == "save":
            decode(state, _ids(0, tokens, vocabulary), vocabulary)
            say({"bytes": _save(state, asked["file"], _ids(0, tokens, vocabulary))})
            continue
        started = time.perf_counter()
        if asked["what"] == "loaded":
            _load(state, asked["file"], tokens)
        reading = time.perf_counter() - started
        token = decode(state, _ids(0 if asked["what"] == "computed" else tokens, end, vocabulary), vocabulary)
        say({"seconds": time.perf_counter() - started, "reading": reading, "token": token})


def _save(state: Any, file: str, ids: list[int]) -> int:
    written = llama_cpp.llama_state_seq_save_file(
        state, file.encode(), _SEQUENCE, (llama_cpp.llama_token * len(ids))(*ids), len(ids)
    )
    if not written:
        say({"error": f"llama.cpp cannot write {file}"})
        sys.exit(1)
    return int(written)


def _load(state: Any, file: str, tokens: int) -> None:
    found, count = (llama_cpp.llama_token * tokens)(), ctypes.c_size_t()
    read = llama_cpp.llama_state_seq_load_file(state, file.encode(), _SEQUENCE, found, tokens, ctypes.byref(count))
    if not read or count.value != tokens:
        say({"error": f"llama.cpp cannot read {file}"})
        sys.exit(1)


def _keep(state: Any, tokens: int) -> None:
    """Remove all but the first ``tokens`` tokens from the cache."""
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(state), _SEQUENCE, tokens, -1)


def _ids(first: int, end: int, vocabulary: int) -> list[int]:
    return [token % vocabulary for token in range(first, end)]


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
