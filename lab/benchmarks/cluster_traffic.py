"""Traffic of ``benchmarks/cluster.py``: questions over documents in random order, and replicas of the demo model."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay_lab.bench.deployed import Deployed, deployed

DOCUMENTS, EACH = 120, 4
GREEDY = {"temperature": 0, "max_tokens": 8, "reuse": "anchored"}


@dataclass(frozen=True)
class Question:
    """A question. ``chosen`` has the documents of its prompt, in order."""

    chosen: tuple[int, ...]
    messages: list[dict[str, Any]]


def document(number: int) -> str:
    """A document of about 175 tokens, the same for the same number."""
    draws = random.Random(number)
    names = ["".join(draws.choices("abdegiklmnoprstuv", k=6)).capitalize() for _ in range(12)]
    told = [f"The {draws.choice(['mayor', 'host', 'owner', 'keeper'])} of {names[0]} is {name}." for name in names[1:]]
    return f"{names[0]} is a town. " + " ".join(told) + "\n"


def questions(count: int, exponent: float, seed: int) -> list[Question]:
    """Questions over documents in random order, drawn by Zipf's law."""
    draws = random.Random(seed)
    weights = [1 / rank**exponent for rank in range(1, DOCUMENTS + 1)]
    made = []
    for _ in range(count):
        chosen: dict[int, None] = {}
        while len(chosen) < EACH:
            chosen.update(dict.fromkeys(draws.choices(range(DOCUMENTS), weights)))
        made.append(question_over(tuple(chosen)[:EACH]))
    return made


def question_over(chosen: tuple[int, ...]) -> Question:
    parts = [{"type": "text", "text": document(one), "cache_control": {"type": "ephemeral"}} for one in chosen]
    question = {"type": "text", "text": f"Who is named in {document(chosen[0]).split()[0]}?"}
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": [*parts, question]}]
    return Question(chosen, messages)


def run_at(work: Callable[[int], None], times: Sequence[float]) -> float:
    """Begin each piece of work at its time, in seconds from now, independent of the others.

    Returns the longest delay of a start, in seconds.
    """
    began, late = time.perf_counter(), 0.0
    threads = []
    for number, at in enumerate(times):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        late = max(late, time.perf_counter() - began - at)
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return late


def replicas(
    folder: Path,
    count: int,
    router: str,
    kv_memory: str,
    engine: dict[str, Any] | None = None,
    program: Sequence[str] = ("-m", "inlay"),
) -> AbstractContextManager[Deployed]:
    """A cluster of ``count`` replicas of the demo model, with one thread each.

    Args:
        engine: Further engine settings.
        program: See ``deployed``.
    """
    settings = {"kv_memory": kv_memory, "max_num_seqs": 16, "store": "off", "seed": 0, "max_waiting": 100}
    return deployed(
        folder,
        program,
        replicas={"count": count, "cpus": 0.25, "drain_s": 5.0},
        engine={**settings, **(engine or {})},
        router={"kind": router},
    )
