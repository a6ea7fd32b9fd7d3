"""One run of many clients, and its report in JSON."""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay_lab.bench.serve.clients import HABITS, Case, Results, Wire, ask_alone, client, make_cases

#: Called with a line that reports the progress.
Progress = Callable[[str], None]

_LOOKS = 6  # at the server's memory
_PROBLEMS = 5  # that the JSON shows


@dataclass(frozen=True, kw_only=True)
class Load:
    """Options of a run.

    Attributes:
        clients: Clients at the same time.
        seconds: Duration.
        prompts: Number of different prompts.
        max_tokens: Of an answer.
        only: The habit of all clients; None for all habits.
        key: An admin's API key, if the server asks for keys.
    """

    clients: int = 64
    seconds: float = 120.0
    prompts: int = 24
    max_tokens: int = 32
    only: str | None = None
    seed: int = 0
    key: str | None = None


async def run_load(url: str, load: Load, progress: Progress) -> dict[str, Any]:
    """Ask every prompt alone, then run the clients. ``url`` is the server's, without a path."""
    return await run_clients(url, load, await ask_all(url, load, progress), progress)


async def ask_all(url: str, load: Load, progress: Progress) -> list[Case]:
    """Every prompt of a load with its reference answer."""
    cases = make_cases(load.prompts, load.max_tokens, random.Random(load.seed))
    for number, case in enumerate(cases):
        progress(f"alone: {number + 1}/{len(cases)}")
        await ask_alone(url, case, load.key)
    return cases


async def run_clients(url: str, load: Load, cases: list[Case], progress: Progress) -> dict[str, Any]:
    """Run the clients; returns client and server figures."""
    results, before, began = Results(), await numbers(url, load.key), time.perf_counter()
    until, habits = began + load.seconds, HABITS if load.only is None else {load.only: 1}
    draws = [random.Random(f"{load.seed} {number}") for number in range(load.clients)]
    clients = [asyncio.create_task(client(url, cases, habits, until, draw, results, load.key)) for draw in draws]
    memory = [before[_RSS]]
    for look in range(1, _LOOKS):
        await asyncio.sleep(max(0.0, began + load.seconds * look / _LOOKS - time.perf_counter()))
        memory.append((await numbers(url, load.key))[_RSS])
        progress(f"{look / _LOOKS:.0%} of {load.seconds:g} s: {dict(results.counts)}")
    await asyncio.gather(*clients)
    took = time.perf_counter() - began
    after = await at_rest(url, load.key)
    sizes = [round(size / 2**20, 1) for size in (*memory, after[_RSS])]
    cpu = (after[_CPU] - before[_CPU]) / max(1, results.requests)
    return {
        "clients": load.clients,
        **_seen(results, took),
        **_said(before, after, took),
        "cpu_ms_per_request": round(cpu * 1000, 3),
        "rss_mib": sizes,
    }


async def run_in_turns(urls: Mapping[str, str], load: Load, rounds: int, progress: Progress) -> dict[str, Any]:
    """Run the same clients against several servers in turns, so that a busy machine slows all of them.

    Args:
        urls: Of the servers, by name. The first one is the baseline.
        rounds: Runs of each server. Every second round has the reverse order.

    Returns:
        By name the medians of the rounds, and for each later server the median ratio to the baseline of its round.
    """
    cases = {name: await ask_all(url, load, progress) for name, url in urls.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
    for number in range(rounds):
        for name in list(urls)[:: -1 if number % 2 else 1]:
            progress(f"round {number + 1}/{rounds}: {name}")
            found[name].append(await run_clients(urls[name], load, cases[name], progress))
    figures = {name: [_compared(run) for run in runs] for name, runs in found.items()}
    baseline, *others = urls
    medians = {name: _medians(rows) for name, rows in figures.items()}
    ratios = {name: _medians(list(map(_ratios, figures[name], figures[baseline]))) for name in others}
    counts = {
        name: {kind: sum(run[kind] for run in runs) for kind in ("requests", "wrong", "errors")}
        for name, runs in found.items()
    }
    return {
        "clients": load.clients,
        "rounds": rounds,
        **{name: {**counts[name], **medians[name]} for name in urls},
        "ratio": {f"{name} / {baseline}": ratio for name, ratio in ratios.items()},
    }


def _compared(run: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a run that servers are compared by."""
    times = {name: run[name]["p50"] for name in ("ttft_ms", "between_events_ms") if run[name] is not None}
    overhead = round(sum(run["overhead_us"].values()), 1)
    return {
        "requests_per_s": run["requests_per_s"],
        "cpu_ms_per_request": run["cpu_ms_per_request"],
        "overhead_us": overhead,
        "trace_us": run["overhead_us"].get("trace", 0.0),  # an older server has no such step
        **times,
    }


def _ratios(row: Mapping[str, float], of: Mapping[str, float]) -> dict[str, float]:
    return {name: value / of[name] for name, value in row.items() if of.get(name)}


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = rows[0].keys() & set.intersection(*(set(row) for row in rows))
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0] if name in names}


_LABELS_OF_ALL = re.compile(r'(?<=[{,])(model_name|engine)="[^"]*",?')
_RSS = "process_resident_memory_bytes"
_CPU = "process_cpu_seconds_total"


async def numbers(url: str, key: str | None = None) -> dict[str, float]:
    """The server's metrics by name and labels, without the labels ``model_name`` and ``engine``."""
    wire = Wire(url, key)
    _, text = await wire.ask("GET", "/metrics")
    wire.leave()
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if line and not line.startswith("#")]
    return {_LABELS_OF_ALL.sub("", name): float(value) for name, value in lines}


async def at_rest(url: str, key: str | None) -> dict[str, float]:
    """The server's metrics once nothing runs. Clients that left must not keep the server busy."""
    for _ in range(100):
        found = await numbers(url, key)
        if not found["inlay:num_requests_running{}"] and not found["inlay:num_requests_waiting{}"]:
            break
        await asyncio.sleep(0.05)
    return found


def _seen(results: Results, took: float) -> dict[str, Any]:
    """The clients' figures."""
    return {
        "seconds": round(took, 1),
        "requests": results.requests,
        "habits": {habit: results.counts[habit] for habit in HABITS},
        **{kind: results.counts[kind] for kind in ("equal", "near_ties", "wrong", "errors")},
        "problems": results.problems[:_PROBLEMS],
        "requests_per_s": round(results.requests / took, 2),
        "tokens_per_s": round(results.tokens / took, 1),
        "ttft_ms": _percentiles(results.ttft),
        "between_events_ms": _percentiles(results.gaps),
    }


def _said(before: dict[str, float], after: dict[str, float], took: float) -> dict[str, Any]:
    """The server's figures."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    overhead = {}
    for name, total in grown.items():
        if step := re.fullmatch(r'inlay:server_overhead_seconds_sum\{.*step="(\w+)".*\}', name):
            times = grown[name.replace("_sum", "_count")]
            overhead[step[1]] = round(total / max(1.0, times) * 1e6, 1)
    steps = grown["inlay:engine_steps_total{}"]
    hits, queries = grown["inlay:prefix_cache_hits_total{}"], grown["inlay:prefix_cache_queries_total{}"]
    return {
        "overhead_us": overhead,
        "engine_steps": int(steps),
        "ms_per_step": round(took / max(1.0, steps) * 1000, 2),
        "cached_share": round(hits / max(1.0, queries), 3),
        "held_chunks_at_the_end": int(after["inlay:kv_chunks_held{}"]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    """The 50th, 90th and 99th percentile in milliseconds."""
    if len(seconds) < 2:
        return None
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{percent}": round(cuts[percent - 1] * 1000, 2) for percent in (50, 90, 99)}
