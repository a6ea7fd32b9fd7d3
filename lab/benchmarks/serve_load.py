"""Does the server hold up under many clients at once, and what does it add to each request?

    python lab/benchmarks/serve_load.py --clients 64 --seconds 120

It starts ``inlay serve`` and sends each prompt once, alone. Then every client sends one request after another: most
stream, some want whole answers, some leave early, some read slowly. Prompts share documents, or nothing. Each answer is
compared with the one given alone. It is equal, a near tie ("near_ties", the first different token had a lead of less
than 1e-3), or wrong. ``--url`` uses a running server, which must not use approximate reuse by default.

To see the model's cost of streaming, compare ``ms_per_step`` of ``--only stream`` and ``--only whole``.

The last line of stdout is one JSON object: times in milliseconds, memory in MiB, overhead in microseconds a request and
step. The clients share the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from inlay_lab.bench.serve.clients import HABITS, ask_alone, make_cases
from inlay_lab.bench.serve.collector import collecting
from inlay_lab.bench.serve.measure import Load, run_in_turns, run_load
from inlay_lab.bench.serve.process import serving


def main() -> None:
    options = parsed()
    load = Load(
        clients=options.clients,
        seconds=options.seconds,
        prompts=options.prompts,
        max_tokens=options.max_tokens,
        only=options.only,
        seed=options.seed,
    )
    if options.traces:
        found = with_traces(options, load)
    elif len(options.url) > 1:
        found = asyncio.run(run_in_turns({url: url for url in options.url}, load, options.rounds, progress))
    else:
        found = one_server(options, load)
    print(json.dumps(found))


def progress(line: str) -> None:
    print(line, file=sys.stderr)


def one_server(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """The figures of one server, a running one with ``--url``."""
    began = time.perf_counter()
    with nullcontext((None, options.url[0])) if options.url else started(options) as (process, url):
        asyncio.run(ask_alone(url, make_cases(1, 1, random.Random())[0]))
        first = round(time.perf_counter() - began, 2)
        found = asyncio.run(run_load(url, load, progress))
    about = {} if process is None else {"first_answer_s": first, "exit_status": process.returncode}
    return {"model": options.model if process else url, **about, **found}


def with_traces(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """The figures of a server without traces and of one with traces, in turns."""
    with collecting() as collector:
        sends = ["--otlp-traces-endpoint", collector.endpoint]
        with started(options) as (_, plain), started(options, *sends) as (_, traced):
            found = asyncio.run(run_in_turns({"off": plain, "on": traced}, load, options.rounds, progress))
    return {"model": options.model, **found, "traces": collector.requests, "trace_bytes": collector.size}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url", action="append", default=[], help="of a running server, such as http://127.0.0.1:8000; can be repeated"
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--clients", type=int, default=Load.clients)
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    parser.add_argument("--prompts", type=int, default=Load.prompts, help="how many different ones")
    parser.add_argument("--max-tokens", type=int, default=Load.max_tokens)
    parser.add_argument("--only", choices=tuple(HABITS), help="the one habit that all clients have")
    parser.add_argument("--seed", type=int, default=Load.seed)
    parser.add_argument("--traces", action="store_true", help="compare a server that sends traces to one that does not")
    parser.add_argument("--rounds", type=int, default=5, help="of --seconds each, when servers are compared")
    options = parser.parse_args()
    if options.traces and options.url:
        parser.error("--traces starts its own servers; leave out --url")
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return options


def started(options: argparse.Namespace, *more: str) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """A server in a separate process, and its URL. ``more``: options of ``inlay serve``."""
    command = [options.model, "--log-level", "warning", "--dtype", "float32", "--kv-memory", options.kv_memory]
    return serving([*command, "--profile", "off", "--promotion-memory", "0", *more])  # no background computation


if __name__ == "__main__":
    main()
