"""A process that writes segments to a folder until it is killed: python -m tests.unit.kv.offload.writing FOLDER SEED"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from inlay.kv.offload.disk import DiskTier
from tests.unit.kv.offload.segments import record_of, slabs_of, spec_of


def write(folder: Path, seed: int) -> None:
    tier = DiskTier(folder, 1 << 20)
    print("begun", flush=True)
    for number in count(seed):
        spec = spec_of(1 + number % 20, tokens=300)
        tier.put(record_of(spec), slabs_of(spec))
        tier.delete(spec_of(1 + (number + 7) % 20, tokens=300).key)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
