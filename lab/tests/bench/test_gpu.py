"""Dry runs of the GPU scripts: tiny sizes on the CPU, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from inlay.attention.triton.tables import CostModel

SCRIPTS = Path(__file__).parents[2] / "benchmarks/gpu"
pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"), pytest.mark.long]


def dry(script: str, out: Path, *more: str) -> dict:
    """The script's result and its printed lines before that."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{script}.py", "--dry", "--out", out, *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *said, last = done.stdout.splitlines()
    result = json.loads(last)
    (kept,) = out.glob(f"*/{script}.json")
    assert json.loads(kept.read_text()) == result
    assert result["script"] == script
    assert result["dry"]
    return result | {"said": said}


def test_attention(tmp_path):
    result = dry("attention", tmp_path)
    assert [row["part"] for row in result["rows"]] == ["table3"] * 2 + ["figure3"] * 2 + ["figure4"] * 2
    for row in result["rows"]:
        assert row["us"].keys() >= {"shared", "paged", "sdpa", "flex"}
        assert max(row["difference"].values()) < 1e-5
        assert 0 < row["floor_us"] < row["us"]["shared"]


def test_calibrate(tmp_path):
    result = dry("calibrate", tmp_path)
    costs = CostModel.read(tmp_path / result["device"] / "costs.json")
    assert costs.measured_on == result["device"]
    assert 0 < costs.byte_s < 1e-6
    assert {row["case"]["shared"] for row in result["rows"]} == {64}


@pytest.mark.triton
@pytest.mark.parametrize(("kept", "kept_bytes"), [("auto", 32 * 4), ("int8", 32 + 4), ("fp8", 32 + 4)])
def test_prompt_cache(tmp_path, kept, kept_bytes):
    (row,) = dry("prompt_cache", tmp_path, "--kv-cache-dtype", kept)["rows"]
    assert row["kv_dtype"] == ("float32" if kept == "auto" else kept)
    assert (row["cached"], row["new"], row["beyond"]) == (64, 4, False)
    assert row["ms"]["host"] > row["ms"]["device"] > 0
    assert row["module_bytes"] == 64 * 2 * 4 * 4 * kept_bytes  # tokens, key and value, layers, heads, bytes of one


def test_throughput(tmp_path):
    result = dry("throughput", tmp_path, "--completion", "3")
    (drawn,) = tmp_path.glob("*/throughput.svg")
    assert b"<svg" in drawn.read_bytes()
    rows = result["rows"]
    assert [(row["part"], row["requests"]) for row in rows] == [
        *(("prefix", 1), ("prefix", 3)), *(("modules", 1), ("modules", 3)),
    ]  # fmt: skip
    for row in rows:
        assert row["completion"] == 3
        cells = row["columns"]
        assert cells.keys() == {"inlay", "off", "transformers", "vllm"}
        for name in ("inlay", "off", "transformers"):
            assert cells[name]["requests"] == row["requests"]
            assert cells[name]["tokens_s"] > 0
            if name != "inlay" or row["part"] == "prefix":
                assert cells[name]["as_off"] == 1, "all of them compute the same"
        assert row["ratio"].keys() >= {"off", "transformers"}
        assert row["of_floor"] == pytest.approx(cells["inlay"]["tokens_s"] / row["floor_tokens_s"], rel=0.02)
    shared = [row["columns"]["inlay"]["hit_rate"] for row in rows]
    assert shared[0] == 0
    assert min(shared[1:]) > 0.5
    assert all(row["columns"]["off"]["hit_rate"] == 0 for row in rows)
    if find_spec("vllm") is None:
        assert all(row["columns"]["vllm"] == {"skipped": ABSENT} for row in rows)
        assert f"vllm is left out: {ABSENT}" in result["said"]


ABSENT = "not installed; run: pip install vllm"


@pytest.mark.triton
def test_checks(tmp_path):
    rows = dry("checks", tmp_path)["rows"]
    assert len(rows) == 38
    assert all(row["passed"] for row in rows)
    (row,) = [row for row in rows if row["check"] == "modules read before their last layer is up"]
    assert row["passes"] > 0


def test_missing_gpu_is_one_sentence():
    done = subprocess.run(
        [sys.executable, SCRIPTS / "attention.py"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "PyTorch finds no GPU here; --dry tries the script on the CPU, in tiny sizes\n"
