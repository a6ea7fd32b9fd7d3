"""Does a server's memory stay where it settled, over an hour of traffic that changes all the time?

    python lab/benchmarks/serve_soak.py --minutes 60

Starts ``inlay serve`` with keys for three tenants, a small pool and a small store on disk, and sends it schemas that
come, change and go, marked parts, conversations, grammars, mistakes, pins, and guests whose keys are taken back. Every
minute a line says what the server's resident memory is, and what of it is its own: pages of the libraries and weights
that it maps come and go as the system likes. The last line of stdout is one JSON object: ``flat`` says whether what is
its own stayed within 2% of what it was after ``--settle`` minutes. Ends with 1 where it did not, where a response was
not what it should be, or where something was still held at the end.

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

from inlay.server.keys import editing
from inlay_lab.bench.serve.process import serving
from inlay_lab.bench.serve.soak import Soak, run_soak


def main() -> int:
    """What the process ends with."""
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
