"""Does a server's memory stay at its settled size, over an hour of varied traffic?

    python lab/benchmarks/serve_soak.py --minutes 60

It starts ``inlay serve`` with keys for three tenants, a small pool and a small store on disk. It sends schemas that
come, change and go, marked parts, conversations, grammars, mistakes, pins, and guests whose keys are revoked. Every
minute it prints the server's resident memory and the server's own part of it. The system moves pages of mapped
libraries and weights at will. The last line of stdout is one JSON object. ``flat`` is true if the own part stayed
within
2% of its size after ``--settle`` minutes. Ends with 1 if it did not, if a response was wrong, or if something was still
referenced at the end.

The clients share the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from inlay.server.tenants import editing
from inlay_lab.bench.serve.process import serving
from inlay_lab.bench.serve.soak import Soak, run_soak


def main() -> int:
    """Run the soak test; returns the exit status."""
    options = parsed()
    soak = Soak(
        minutes=options.minutes,
        settle=options.settle,
        interval_s=options.interval,
        rate=options.rate,
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        with editing(keys) as file:
            file.add("operator")
        command = [options.model, "--log-level", "error", "--keys", str(keys), "--kv-memory", options.kv_memory]
        command += ["--store", f"{folder}/store", "--store-bytes", options.store_bytes, "--store-private"]
        command += ["--shadow", "0.1", "--prefetch", "likely"]
        with serving(command) as (process, url):
            say = partial(print, flush=True)
            found = asyncio.run(run_soak(url, process.pid, partial(editing, keys), soak, say))
        print(json.dumps({"model": options.model, "exit_status": process.returncode, **found}))
    return int(not found["flat"] or bool(found["problems"]) or bool(process.returncode))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=Soak.minutes)
    parser.add_argument("--settle", type=float, default=Soak.settle, help="minutes after which memory should be flat")
    parser.add_argument("--interval", type=float, default=Soak.interval_s, help="seconds between two lines")
    parser.add_argument("--rate", type=float, default=Soak.rate, help="requests a second, at most")
    parser.add_argument("--kv-memory", default="64MiB")
    parser.add_argument("--store-bytes", default="256MiB")
    parser.add_argument("--seed", type=int, default=Soak.seed)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
