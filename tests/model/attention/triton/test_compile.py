"""The kernels compile for GPUs, and fit into the shared memory of each; the interpreter sees neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

#: Compute capability → the most shared memory of a block of threads, in bytes: A100, RTX 30, H100 and H200.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}


def compile_for(capability: int, cache: Path, *options: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.attention.triton.compiled", str(capability), *options],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_the_kernels_compile_without_a_gpu(tmp_path):
    made = compile_for(90, tmp_path, "--quick")
    assert [each for each in made if each["stack"] and not each.get("everything")] == []  # nothing is spilled
    assert {each["kernel"] for each in made} == {"attend", "store", "merge"}
    assert [each for each in made if each["shared"] > SHARED_MEMORY[90]] == []


@pytest.mark.triton
@pytest.mark.parametrize("capability", list(SHARED_MEMORY))
def test_every_tile_fits_into_shared_memory(capability, tmp_path):
    made = compile_for(capability, tmp_path)
    assert len(made) > 20
    plain = [each for each in made if each.get("dtype") == "bf16" and not each["everything"]]
    assert [each for each in plain if each["stack"] > 512] == []  # bytes of a thread that registers do not hold
    assert [each for each in made if each["shared"] > SHARED_MEMORY[capability]] == []
