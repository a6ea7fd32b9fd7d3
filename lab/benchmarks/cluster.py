"""Replicas of the bundled model on this machine: routers side by side, and processes killed in a loop.

    python lab/benchmarks/cluster.py routers --requests 300 --rate 6
    python lab/benchmarks/cluster.py faults --minutes 10

``routers`` sends the same questions over the same documents at the same times through each router. It prints the share
of cached prompt tokens and the clients' time to the first token, beside the simulator's values for the same traffic.
The simulator's costs are measured before and after. ``ray-prefix`` is the prefix-aware router of Ray Serve LLM.

``faults`` kills replicas, the ingress and the server of a shared tier with SIGKILL under load. It compares every answer
with one engine's, and counts wrong answers, requests that never end, and error responses. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from cluster_faults import faults
from cluster_traffic import GREEDY, Question, question_over, questions, replicas, run_at

from inlay import LLM, SamplingParams
from inlay.client.engine import Prepared
from inlay.cluster.pieces import Wanted, wanted_by
from inlay.prompt.request import EngineRequest
from inlay_lab.bench.deployed import Deployed
from inlay_lab.simulate.costs import Costs
from inlay_lab.simulate.routers import ROUTERS as SIMULATED
from inlay_lab.simulate.run import SimulationResult, simulate
from inlay_lab.simulate.traces import SimulatedRequest

RAY_PREFIX = "ray-prefix"
ROUTERS = ("module", "prefix", RAY_PREFIX, "power-of-two", "round-robin")
FIGURES = ("hit_share", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms")
IDLE = 15  # requests to an idle cluster, to calibrate
WARM = 4  # the first 1/WARM of the requests do not count


def routers(args: argparse.Namespace) -> dict[str, Any]:
    asked = questions(args.requests, args.zipf, args.seed)
    draws = random.Random(args.seed)
    times = list(accumulate(draws.expovariate(args.rate) for _ in asked))
    wanted, pool = pieces_of(asked, args.kv_memory)
    trace = [SimulatedRequest(at, one, 1) for at, one in zip(times, wanted, strict=True)]
    rows = []
    for router in args.routers.split(","):
        row, costs = measured(args, router, asked, times)
        if router in SIMULATED:
            spent = replace(costs, pool=pool)
            said = simulate(trace, router=router, replicas=args.replicas, costs=spent, seed=args.seed)
            row["simulated"] = simulated(said, row["front_ms"])
        rows.append(row)
        print(line_of(row), file=sys.stderr, flush=True)
    return {"requests": len(asked), "rate": args.rate, "replicas": args.replicas, "pool": pool, "rows": rows}


def measured(
    args: argparse.Namespace, router: str, asked: Sequence[Question], times: Sequence[float]
) -> tuple[dict[str, Any], Costs]:
    """The results of the questions under one router, and the costs of its replicas.

    Costs are means of measurements before and after, on one thread as replicas have, while the cluster is idle.
    ``front_ms`` is the time of a request outside its engine, for HTTP and the ingress.
    """
    ours = router != RAY_PREFIX
    program = ["-m", "inlay"] if ours else [str(Path(__file__).with_name("cluster_ray_prefix.py"))]
    ttft: dict[int, float] = {}
    counts: dict[int, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind = router if ours else "module"
        with replicas(folder, args.replicas, kind, args.kv_memory, program=program) as cluster:

            def ask(number: int) -> None:
                ttft[number], counts[number] = first_token(cluster, asked[number])

            before = calibrated(cluster, folder)
            late_s = run_at(ask, times)
            after = calibrated(cluster, folder)
            predicted = share(cluster, "predicted_tokens", "prompt_tokens") if ours else None
    first = len(asked) // WARM
    found, tokens = (sum(counts[at][which] for at in range(first, len(asked))) for which in (0, 1))
    seconds = [ttft[at] for at in range(first, len(asked))]
    costs = {name: (before[name] + after[name]) / 2 for name in before}
    row = {
        "router": router,
        "hit_share": found / tokens,
        "predicted_share": predicted,
        "ttft_mean_ms": 1000 * statistics.fmean(seconds),
        "ttft_p50_ms": 1000 * percentile(seconds, 50),
        "ttft_p99_ms": 1000 * percentile(seconds, 99),
        "latest_ms": 1000 * late_s,
        "front_ms": 1000 * costs.pop("front_s"),
        "costs_before": before,
        "costs_after": after,
    }
    return row, Costs(machine="this one, meanwhile", **costs)


def calibrated(cluster: Deployed, folder: Path) -> dict[str, float]:
    """Seconds, as in ``Costs``, and front_s: the time of an idle cluster's request outside its engine."""
    path = folder / "costs.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "inlay", "simulate", "--calibrate", str(path), "--force", "--model", "demo"]
    subprocess.run(command, check=True, env=env, stderr=subprocess.DEVNULL)
    costs = Costs.from_file(path)
    tiny = question_over((0,))
    taken = [first_token(cluster, tiny, reuse="off") for _ in range(IDLE)]
    engine_s = costs.pass_s + costs.decode_s + taken[0][1][1] * costs.prefill_s
    front_s = max(0.0, statistics.median(took for took, _ in taken) - engine_s)
    return {"prefill_s": costs.prefill_s, "pass_s": costs.pass_s, "decode_s": costs.decode_s, "front_s": front_s}


def first_token(cluster: Deployed, question: Question, **fields: Any) -> tuple[float, tuple[int, int]]:
    """Seconds to the only token of an answer, the cached prompt tokens, and all prompt tokens."""
    body = {"model": "demo", "messages": question.messages, **GREEDY, "max_tokens": 1, **fields}
    began = time.perf_counter()
    status, answer = cluster.call("POST", "/v1/chat/completions", body, timeout=120)
    took = time.perf_counter() - began
    assert status == 200, answer
    usage = answer["usage"]
    return took, (usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])


def share(cluster: Deployed, part: str, whole: str) -> float:
    of = cluster.metric(f"inlay:router_{whole}_total")
    return cluster.metric(f"inlay:router_{part}_total") / of if of else 0.0


def pieces_of(asked: Sequence[Question], kv_memory: str) -> tuple[list[Wanted], int]:
    """The ingress's view of each question, and the number of tokens in a replica's pool."""
    llm = LLM("demo", kv_memory=kv_memory, seed=0, reuse=str(GREEDY["reuse"]))
    client = llm.client
    made: list[Wanted] = []
    prepare = client.prepare

    def listen(request: EngineRequest, grammar: Any = None) -> Prepared:
        made.append(wanted_by(request, client.model.keys))
        return prepare(request, grammar)

    client.prepare = listen  # type: ignore[method-assign]
    for question in asked:
        llm.chat(question.messages, SamplingParams(max_tokens=1, temperature=0))
    llm.shutdown()
    return made, llm.store.pool.slots


def simulated(said: SimulationResult, front_ms: float) -> dict[str, float]:
    """The simulator's figures from the clients' view."""
    return {
        "hit_share": said.hit_share,
        "ttft_mean_ms": 1000 * said.ttft_mean_s + front_ms,
        "ttft_p50_ms": 1000 * said.ttft_p50_s + front_ms,
        "ttft_p99_ms": 1000 * said.ttft_p99_s + front_ms,
        "utilization": said.utilization,
    }


def line_of(row: dict[str, Any]) -> str:
    """A router's figures, each with the simulator's value and its error."""
    said = [f"{row['router']:>12}"]
    for name in FIGURES:
        measured_, unit = row[name], "" if name == "hit_share" else " ms"
        text = f"{name} {measured_:.2f}" if not unit else f"{name} {measured_:.0f}{unit}"
        if "simulated" in row:
            other = row["simulated"][name]
            error = f"{100 * (other - measured_):+.0f} points" if not unit else f"{100 * (other / measured_ - 1):+.0f}%"
            text += f" (simulated {other:.2f}, {error})" if not unit else f" (simulated {other:.0f}, {error})"
        said.append(text)
    return "  ".join(said)


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("routers", "faults"))
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kv-memory", default="96MiB", help="of a replica")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    of_routers = parser.add_argument_group("routers")
    of_routers.add_argument("--routers", default=",".join(ROUTERS))
    of_routers.add_argument("--requests", type=int, default=300)
    of_routers.add_argument("--rate", type=float, default=6.0, help="requests a second, a Poisson process")
    of_faults = parser.add_argument_group("faults")
    of_faults.add_argument("--minutes", type=float, default=10.0)
    of_faults.add_argument("--every", type=float, default=10.0, help="seconds between two kills, about")
    of_faults.add_argument("--clients", type=int, default=6, help="that ask one thing after the other")
    args = parser.parse_args()
    print(json.dumps({"routers": routers, "faults": faults}[args.what](args)))


if __name__ == "__main__":
    main()
