"""llama.cpp's first tokens: ``python -m inlay_lab.bench.ttft_llama_worker FILE LONGEST N``.

It is a separate process, as in decode/llama_worker.py. Prompts have at most LONGEST tokens. Every line on standard
input
is one run on N threads, as JSON: ``{"cached": …, "new": …, "held": …}``. The answer is a line of JSON: the seconds up
to
the most probable next token. If ``held``, only the new tokens are computed behind a cached prefix, else all tokens.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp

from inlay_lab.bench.decode.llama_worker import decode, opened, say


def main(file: str, longest: int, threads: int) -> None:
    """Serve runs until standard input ends."""
    loaded = opened(file, longest, threads)
    if loaded is None:
        return
    state, vocabulary = loaded
    decode(state, [0], vocabulary)  # the file is mapped: the first run reads it from disk
    say({"loaded": True})
    prefix = 0  # tokens in the cache
    for line in sys.stdin:
        wanted = json.loads(line)
        cached, new = wanted["cached"], wanted["new"]
        if wanted["held"] and prefix != cached:
            _keep(state, 0)
            decode(state, _ids(0, cached, vocabulary), vocabulary)
        prefix = cached if wanted["held"] else 0
        _keep(state, prefix)
        started = time.perf_counter()
        decode(state, _ids(prefix, cached + new, vocabulary), vocabulary)
        say({"seconds": time.perf_counter() - started})


def _keep(state: Any, tokens: int) -> None:
    """Remove all but the first ``tokens`` tokens from the cache."""
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(state), 0, tokens, -1)


def _ids(first: int, end: int, vocabulary: int) -> list[int]:
    return [token % vocabulary for token in range(first, end)]


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
