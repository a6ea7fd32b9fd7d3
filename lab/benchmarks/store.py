"""Time to the first token of a prompt that reads one module: encoded, read from the store, and in the pool.

    python lab/benchmarks/store.py
    python lab/benchmarks/store.py --codec int8 --baselines none
    python lab/benchmarks/store.py --address unix:///tmp/valkey.sock --baselines none

The store is a folder on the disk of --folder, or the server at an address. A file is read from the page cache, or
*cold* after it is dropped from there. The same turns time other readings. ``disk`` is a plain read of that file, or of
one as large as a server's entry. ``safetensors.torch.load_file`` is timed with a copy into memory shaped like a pool.
llama.cpp's slots, which llama-server keeps in files, are of a random model of the same shape. Rows that cannot be
measured are left out with a message.

Prints a table of medians, then a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay_lab.bench.store.measure import BASELINES, StoreSetting, measure_store

_COLUMNS = {"first_token_ms": 1, "reading_ms": 1, "mb_s": 0}  # and their decimals


def main() -> None:
    options = parsed()
    baselines = () if options.baselines == "none" else tuple(options.baselines.split(","))
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            setting = StoreSetting(
                model=options.model,
                folder=Path(folder),
                tokens=options.tokens,
                codec=options.codec,
                address=options.address,
                runs=options.runs,
                baselines=baselines,
            )
            found = measure_store(setting)
    except (InlayError, OSError) as error:
        sys.exit(f"store.py: {error}")
    for name, why in found["left_out"].items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    print(table(found))
    print(json.dumps(found))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--tokens", type=int, default=StoreSetting.tokens, help="of the module")
    parser.add_argument("--codec", choices=("none", "int8", "fp8"), default=StoreSetting.codec)
    parser.add_argument("--address", help="of a Valkey or Redis server, in place of a folder")
    parser.add_argument("--baselines", default=",".join(BASELINES), help="%(default)s, some of them, or none")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; that of temporary files by default")
    parser.add_argument("--runs", type=int, default=StoreSetting.runs)
    return parser.parse_args()


def table(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    tokens, mib = found["tokens"], found["bytes"] / 2**20
    lines = [f"| {tokens:,} tokens, {mib:.1f} MiB | first token, ms | reading, ms | MB/s |", "|---|---|---|---|"]
    for row in found["rows"]:
        cells = [f"{row[key]:,.{digits}f}" if key in row else "" for key, digits in _COLUMNS.items()]
        lines.append(f"| {' | '.join([row['name'], *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
