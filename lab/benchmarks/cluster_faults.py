"""Kills processes of a cluster in a loop, under load: every answer must be right, every request must end.

``python lab/benchmarks/cluster.py faults`` runs it. It kills replicas, the ingress and the server of a shared tier with
SIGKILL, and compares every answer with that of one engine.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from cluster_traffic import GREEDY, Question, questions, replicas

from inlay import LLM, SamplingParams
from inlay_lab.bench.deployed import Deployed
from inlay_lab.bench.shared_server import RealServer, server_program

READY_S = 600.0  # longest time until a cluster answers again, on a busy machine
VICTIMS = {"engine": 0.5, "ingress": 0.2, "shared": 0.3}  # relative frequency of each victim


class Pauses:
    """Detects pauses of this process, as on a suspended machine. Timeouts during a pause mean nothing.

    ``seconds`` is the sum of pauses longer than LEAST_S.
    """

    LEAST_S = 5.0

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(0.2)
            gap = time.monotonic() - began
            self.seconds += gap if gap > self.LEAST_S else 0.0


class SharedTier:
    """The server of a shared tier, which can be killed, and its number of reads. Without a server program there is
    none.
    """

    def __init__(self, folder: Path) -> None:
        program = server_program()
        self._server = None if program is None else RealServer(program, folder)
        self.reads = 0  # parts of segments that were read from it

    @property
    def settings(self) -> dict[str, Any]:
        """Engine settings for the tier."""
        return {} if self._server is None else {"store_shared": self._server.address, "store_private": True}

    def kill(self, away_s: float) -> bool:
        """Kill the server and restart it empty after ``away_s`` seconds. Returns False if there is none."""
        if self._server is None:
            return False
        self._count()
        self._server.stop()
        time.sleep(away_s)
        self._server.start()
        return True

    def close(self) -> None:
        if self._server is not None:
            self._count()
            self._server.stop()

    def _count(self) -> None:
        assert self._server is not None
        self.reads += self._server.client.info("commandstats").get("cmdstat_getrange", {}).get("calls", 0)


def faults(args: argparse.Namespace) -> dict[str, Any]:
    asked = questions(40, args.zipf, args.seed)
    llm = LLM("demo", seed=0, kv_memory="256MiB", reuse="anchored")
    params = SamplingParams(temperature=0, max_tokens=GREEDY["max_tokens"])
    wanted = [llm.chat(one.messages, params)[0].outputs[0].text for one in asked]
    outcomes: Counter[str] = Counter()
    draws, longest = random.Random(args.seed), 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = SharedTier(folder)
        with replicas(folder, args.replicas, "module", args.kv_memory, shared.settings) as cluster:
            pauses, began = Pauses(), time.monotonic()

            def over() -> bool:
                return time.monotonic() - began - pauses.seconds > 60 * args.minutes

            def client(seed: int) -> None:
                nonlocal longest
                mine = random.Random(seed)
                while not over():
                    number = mine.randrange(len(asked))
                    asked_at, paused = time.monotonic(), pauses.seconds
                    said = ask_one(cluster, asked[number], wanted[number])
                    if time.monotonic() - asked_at > Pauses.LEAST_S:
                        time.sleep(0.5)  # until a pause would be detected
                    if pauses.seconds > paused:
                        said += ", over a pause"
                    else:
                        longest = max(longest, time.monotonic() - asked_at)
                    outcomes[said] += 1

            threads = [threading.Thread(target=client, args=(number,)) for number in range(args.clients)]
            for thread in threads:
                thread.start()
            kills: Counter[str] = Counter()
            while not over():
                time.sleep(args.every * draws.uniform(0.5, 1.5))
                kills += kill_one(cluster, shared, draws)
                print(f"killed {dict(kills)}: {dict(outcomes)}", file=sys.stderr, flush=True)
            for thread in threads:
                thread.join(180)
            hanging = sum(thread.is_alive() for thread in threads)
            killed_at, last = time.monotonic(), "not ready"
            with suppress(AssertionError):
                cluster.wait(cluster.ready, READY_S)
                last = ask_one(cluster, asked[0], wanted[0])
            ready_s = time.monotonic() - killed_at
        shared.close()
    return {
        "minutes": args.minutes,
        "killed": dict(kills),
        "outcomes": dict(outcomes),
        "hanging": hanging,
        "paused_s": pauses.seconds,
        "longest_s": longest,
        "shared_reads": shared.reads,
        "ready_s": ready_s,  # after the last kill
        "at the end": last,
    }


def kill_one(cluster: Deployed, shared: SharedTier, draws: random.Random) -> Counter[str]:
    """Kill a random process; returns its kind, or nothing if there was none."""
    (what,) = draws.choices(list(VICTIMS), list(VICTIMS.values()))
    if what == "shared":
        return Counter([what] if shared.kill(draws.uniform(0.5, 5.0)) else [])
    running = cluster.processes(what)
    if not running:
        return Counter()
    draws.choice(running).kill()
    return Counter([what])


def ask_one(cluster: Deployed, question: Question, wanted: str) -> str:
    """Ask a question; returns the outcome in a word or two."""
    body = {"model": "demo", "messages": question.messages, **GREEDY}
    try:
        status, answer = cluster.call("POST", "/v1/chat/completions", body, timeout=150)
    except TimeoutError:
        return "no answer in 150 s"
    except (OSError, HTTPException):
        time.sleep(0.2)
        return "connection lost"
    if status != 200:
        time.sleep(0.2)
        code = answer["error"]["code"] if isinstance(answer, dict) and "error" in answer else str(answer)[:40]
        return f"{status} {code}"
    return "right" if answer["choices"][0]["message"]["content"] == wanted else "wrong"
