"""Does a small tenant notice attacks of another tenant on the server, and does the server recover?

    python lab/benchmarks/serve_attack.py --seconds 5
    python lab/benchmarks/serve_attack.py --clients 64 --seconds 120

It starts ``inlay serve`` with keys for two tenants. The victim streams answers of 4 tokens in a loop; its wait is from
sending to the first token. Attacks run beside it one after another: clients send large, deep, slow and wrong requests,
and hang up. ``/health`` is polled all the time. Prints a table, and ends with 1 if

- a wait of the victim or of ``/health`` was longer than a second,
- the victim got anything but its answers, or the attacker a 5xx,
- the server's resident memory does not return to within 5% of its size before the attack, in 15 seconds.

Before the first attack the KV pool is filled, and batches of 1 to 64 answers run. So the pool's pages and oneDNN's
cached products for each number of rows count from the start.

With ``--clients`` there is no table. That many clients stream answers beside one attacker of each kind, all at once, in
fp32. Each answer is compared with the one given alone, as in benchmarks/serve_load.py. It ends with 1 if an answer is
wrong or missing.

The attackers share the machine with the server. ``--json`` prints one JSON object and no table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inlay.config import EngineConfig
from inlay.server.limits import Limits
from inlay.server.tenants import editing
from inlay_lab.bench.serve.attacks import FILL, Attack, attacks
from inlay_lab.bench.serve.clients import Wire
from inlay_lab.bench.serve.measure import Load, ask_all, numbers, run_clients
from inlay_lab.bench.serve.process import serving
from inlay_lab.bench.serve.under_attack import Keys, Seen, run_attack, send_on

_HEAD = (
    "| attack | victim's worst wait, s (median) | worst `/health`, s | the attacker got | MiB before, peak, after |\n"
    "|---|---|---|---|---|"
)
_FILLING_IDS = 1000  # of a prompt that fills the pool
_TOKENS_PER_MINUTE = 500
_TIMEOUT_S = 60.0


def main() -> int:
    """Run the benchmark; returns the exit status."""
    options = parsed()
    with tempfile.TemporaryDirectory() as folder, attacked(options, Path(folder) / "keys.json") as (process, url, keys):
        run = beside_clients if options.clients else one_by_one
        problems = asyncio.run(run(options, process.pid, url, keys))
        if process.poll() is not None:
            problems.append(f"the server ended with {process.returncode}")
    if process.returncode:
        problems.append(f"the server ended with {process.returncode} when it was stopped")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="such as random:qwen2.5-0.5b")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack, or beside --clients of all")
    names = tuple(attacks(filling=1))
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--clients", type=int, default=0, help="that stream beside all attacks at once")
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    return parser.parse_args()


@contextmanager
def attacked(options: argparse.Namespace, file: Path) -> Iterator[tuple[subprocess.Popen[str], str, Keys]]:
    """A server in a separate process with its URL and keys, until the end of the block."""
    with editing(file) as tenants:
        keys = Keys(*(tenants.add(name, admin=name == "victim")[0] for name in ("victim", "attacker", "limited")))
        tenants.tenants["limited"].limits = Limits(tokens_per_minute=_TOKENS_PER_MINUTE)
    command = [options.model, "--log-level", "error", "--keys", str(file), "--kv-memory", options.kv_memory]
    command += ["--profile", "off", "--promotion-memory", "0"]  # no background computation
    command += ["--drain", "5"]
    command += ["--timeout", str(_TIMEOUT_S + options.seconds)]  # no deadline ends an attack early
    if options.clients:
        command += ["--dtype", "float32"]
    with serving(command) as (process, url):
        yield process, url, keys


async def one_by_one(options: argparse.Namespace, pid: int, url: str, keys: Keys) -> list[str]:
    """Run every attack alone and print a table. Returns the problems."""
    problems, rows = [], []
    chosen = await chosen_attacks(options, url, keys)
    await fill_pool(url, keys.victim)
    await warm_up(url, keys.victim)
    if not options.json:
        print(_HEAD, flush=True)
    for name, attack in chosen.items():
        seen = await run_attack(url, pid, keys, attack, options.seconds)
        rows.append(row_of(name, seen))
        problems += [f"{name}: {problem}" for problem in seen.problems()]
        if not options.json:
            print(line_of(attack, seen), flush=True)
    if options.json:
        print(json.dumps({"model": options.model, "seconds": options.seconds, "attacks": rows}))
    return problems


async def chosen_attacks(options: argparse.Namespace, url: str, keys: Keys) -> dict[str, Attack]:
    """The attacks of --only, or all. They depend on the size of the pool."""
    wire = Wire(url, keys.victim)
    _, answer = await wire.ask("POST", "/tokenize", {"prompt": FILL})
    wire.leave()
    chunks = (await numbers(url, keys.victim))["inlay:kv_chunks{}"]
    # all of it but two chunks for the schema's own text
    filling = int((chunks - 2) * EngineConfig().chunk_size / (json.loads(answer)["count"] + 8))
    return {name: attack for name, attack in attacks(filling).items() if not options.only or name in options.only}


async def fill_pool(url: str, key: str | None) -> None:
    """Write every chunk of the pool once."""
    wire, draw = Wire(url, key), random.Random(0)
    found = await numbers(url, key)
    while found["inlay:kv_chunks_used{}"] < found["inlay:kv_chunks{}"]:
        body = {"prompt": draw.choices(range(3, 200), k=_FILLING_IDS), "max_tokens": 2, "ignore_eos": True}
        status, answer = await wire.ask("POST", "/v1/completions", body)
        if status != 200:
            raise ValueError(answer.decode())
        before, found = found, await numbers(url, key)
        if found["inlay:kv_chunks_used{}"] <= before["inlay:kv_chunks_used{}"]:
            break
    wire.leave()


async def warm_up(url: str, key: str | None) -> None:
    """Run batches of many sizes, from 16 answers down to one, and prompts of many lengths beside them."""

    async def ask(number: int) -> None:
        wire = Wire(url, key)
        body = {"prompt": [3] * (20 * number), "max_tokens": 12 * number, "temperature": 1, "ignore_eos": True}
        await wire.ask("POST", "/v1/completions", body)
        wire.leave()

    await asyncio.gather(*(ask(number) for number in range(1, 17)))


def row_of(name: str, seen: Seen) -> dict[str, Any]:
    """One attack in JSON, in seconds and MiB."""
    return {
        "attack": name,
        "requests": len(seen.waits),
        "alone_s": round(seen.alone, 3),
        "worst_s": round(seen.worst, 3),
        "median_s": round(seen.median, 3),
        "health_s": round(seen.health, 3),
        "statuses": dict(seen.said),
        "rss_mib": [round(size / 2**20, 1) for size in (seen.before, seen.peak, seen.after)],
        "problems": seen.problems(),
    }


def line_of(attack: Attack, seen: Seen) -> str:
    """One attack as a row of the table."""
    got = ", ".join(f"{times} × {status}" for status, times in sorted(seen.said.items()))
    sizes = ", ".join(f"{size / 2**20:.0f}" for size in (seen.before, seen.peak, seen.after))
    waits = f"{seen.worst:.2f} ({seen.median:.2f})"
    return f"| {attack.what} | {waits} | {seen.health:.2f} | {got or 'nothing'} | {sizes} |"


async def beside_clients(options: argparse.Namespace, pid: int, url: str, keys: Keys) -> list[str]:
    """Stream with many clients beside one attacker of each kind. Returns the problems."""
    chosen = await chosen_attacks(options, url, keys)
    said: Counter[str] = Counter()
    load = Load(clients=options.clients, seconds=options.seconds, only="stream", key=keys.victim)
    prepared = [(keys.of(attack), attack.before(), attack.rounds()) for attack in chosen.values()]
    for key, before, _ in prepared:
        for send in before:
            await Wire(url, key).ask(send.method, send.path, send.body)
    cases = await ask_all(url, load, report)
    attackers = [
        asyncio.create_task(send_on(url, key, rounds, 1, options.seconds, said)) for key, _, rounds in prepared
    ]
    found = await run_clients(url, load, cases, report)
    await asyncio.gather(*attackers)
    print(json.dumps({"model": options.model, "attackers": len(prepared), "statuses": dict(said), **found}))
    problems = [f"{found[kind]} answers are {kind}" for kind in ("wrong", "errors") if found[kind]]
    problems += [f"the attackers got {status}" for status in said if status.startswith("5")]
    return problems + found["problems"]


def report(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
