"""Stored GPU runs appear in the report under the device's name; a damaged one gives a clear error."""

from __future__ import annotations

import json

import pytest

from inlay.errors import ParameterError
from inlay_lab.reproduce.catalog import EXPERIMENTS
from inlay_lab.reproduce.experiment import NotHereError

FIRST = {
    "model": "random:llama-2-7b",
    "dtype": "bfloat16",
    "cached": 5120,
    "new": 32,
    "ms": {"device": 20.0, "host": 180.0, "full": 400.0},
    "times_as_fast": {"device": 20.0, "host": 400 / 180},
    "module_bytes": 2**31,
}
KERNEL = {
    "part": "table3",
    "dtype": "float16",
    "heads": 32,
    "kv_heads": 32,
    "batch": 32,
    "context": 1024,
    "shared": 1024,
    "us": {"shared": 50.0, "paged": 150.0, "sdpa": 300.0, "flex": None},
}


def store(folder, script, rows, device="nvidia-h200", **more):
    (folder / device).mkdir(exist_ok=True)
    found = {"script": script, "device": device, "dry": False, "rows": rows} | more
    (folder / device / f"{script}.json").write_text(json.dumps(found))
    return {"stored": str(folder)}


def test_first_tokens_are_listed_under_the_device(tmp_path):
    found = EXPERIMENTS["gpu-first-token"].measure(store(tmp_path, "prompt_cache", [FIRST]))
    rows = {row.what: row for row in found.rows}
    lowest = rows["nvidia-h200, modules in host memory: times as fast, lowest"]
    assert (round(lowest.ours, 2), lowest.differs) == (2.22, False)
    assert rows["nvidia-h200, modules in device memory: times as fast, highest"].differs
    assert rows["nvidia-h200: host to device"].ours == 160.0
    assert "one layer" in rows["nvidia-h200: host to device"].why
    assert found.tables[0].lines == [
        ["nvidia-h200", "random:llama-2-7b", "5,120", "32", "400.0", "180.0", "20.0", "2.2×", "20.0×"]
    ]
    assert "stored runs of nvidia-h200" in found.notes[0]


def test_kernels_are_compared_with_table_3(tmp_path):
    other = KERNEL | {"dtype": "bfloat16"}
    found = EXPERIMENTS["gpu-kernels"].measure(store(tmp_path, "attention", [KERNEL, other]))
    time, times = found.rows
    assert (time.ours, time.published.value) == (50.0, 56.0)
    assert (times.ours, times.published.value) == (3.0, 2.76)
    assert len(found.tables[0].lines) == 2


@pytest.mark.parametrize("name", ["gpu-first-token", "gpu-kernels"])
def test_missing_gpu_run_names_the_script(tmp_path, name):
    script = {"gpu-first-token": "prompt_cache", "gpu-kernels": "attention"}[name]
    dry = store(tmp_path, script, [], device="dry-x86-64", dry=True)
    for settings in ({"stored": None}, dry):
        with pytest.raises(NotHereError, match=r"it needs a GPU, and .*; run lab/benchmarks/gpu/run.sh"):
            EXPERIMENTS[name].measure(settings)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is no stored run .*; measure it again with lab/benchmarks/gpu/run.sh"),
        ("[]", "is no stored run of lab/benchmarks/gpu; take it out of the folder"),
        ('{"device": "x", "dry": false, "rows": [{"model": "m"}]}', "row 0: it lacks fields of a stored run"),
    ],
)
def test_damaged_file_is_one_sentence(tmp_path, text, sentence):
    settings = store(tmp_path, "prompt_cache", [FIRST])
    (tmp_path / "nvidia-h200" / "prompt_cache.json").write_text(text)
    with pytest.raises(ParameterError, match=sentence):
        EXPERIMENTS["gpu-first-token"].measure(settings)
