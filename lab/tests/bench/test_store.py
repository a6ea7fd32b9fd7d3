"""The baselines of the store benchmark: cold files, and other ways to read the same bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inlay.errors import ModelError, ParameterError
from inlay_lab.bench.engines.peer import llama_cpp
from inlay_lab.bench.store.files import LikePool, cached_share, drop_pages, read_through
from inlay_lab.bench.store.measure import LlamaSlot, StoreSetting, measure_store
from tests.commands import run_file
from tests.conftest import tiny

FILE = Path(__file__).parents[2] / "benchmarks" / "store.py"
IN_MEMORY = Path("/dev/shm")
OURS = ["encoded", "store, cold", "store", "in the pool"]
OTHERS = ["disk, cold", "disk", "load_file and copy, cold", "load_file and copy"]


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A folder with files that the page cache can drop."""
    (tmp_path / "probe").write_bytes(bytes(4096))
    if not drop_pages(tmp_path / "probe"):
        pytest.skip("temporary files lie in memory")
    return tmp_path


def test_a_file_is_cold_until_it_is_read(on_disk: Path):
    file = on_disk / "file"
    file.write_bytes(bytes(5 << 20))
    assert cached_share(file) == 1
    assert drop_pages(file)
    assert cached_share(file) == 0
    read_through(file)
    assert cached_share(file) == 1


@pytest.mark.skipif(not IN_MEMORY.is_dir(), reason="there is no file system in memory")
def test_a_file_system_in_memory_is_never_cold():
    file = IN_MEMORY / "inlay-test-cold"
    file.write_bytes(bytes(8192))
    try:
        assert not drop_pages(file)
    finally:
        file.unlink()


def test_pool_like_memory_has_the_files_shape(tmp_path: Path):
    file, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path in (file, other):
        save_file({f"layers.{n}.kv": torch.randn(2, 3, 5, 4) for n in range(2)} | {"filling": torch.ones(7)}, path)
    pool = LikePool(file, 9)
    assert not pool.holds(file)
    pool.load(file)
    assert pool.holds(file)
    assert not pool.holds(other)


def measured(folder: Path, **settings: Any) -> dict[str, Any]:
    setting = {"model": "random:tiny", "tokens": 48, "runs": 1, "baselines": ("disk", "safetensors")} | settings
    return measure_store(StoreSetting(folder=folder, **setting))


@pytest.mark.long
def test_rows_of_a_folder(on_disk: Path):
    found = measured(on_disk)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == OURS + OTHERS
    for name, row in rows.items():
        assert ("first_token_ms" in row) == (name in OURS)
        assert ("reading_ms" in row) == (name not in ("encoded", "in the pool"))
        if "reading_ms" in row:
            assert row["bytes"] == found["bytes"]
            assert 0 < row["reading_ms"] <= row.get("first_token_ms", row["reading_ms"])
            assert row["mb_s"] == pytest.approx(row["bytes"] / row["reading_ms"] / 1e3, rel=0.1)
    assert found["left_out"] == {}
    assert found["new"] > 0


@pytest.mark.long
def test_unavailable_measurements_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("inlay_lab.bench.store.measure.drop_pages", lambda file: False)
    monkeypatch.setattr("inlay_lab.bench.store.measure.why_not", lambda *arguments: "not here")
    found = measured(tmp_path, codec="int8", baselines=("disk", "llama.cpp"))
    assert [row["name"] for row in found["rows"]] == ["encoded", "store", "in the pool", "disk"]
    assert found["left_out"].pop("llama.cpp") == "not here"
    assert [*found["left_out"]] == ["store, cold", "disk, cold"]
    assert all("name a folder on a disk" in why for why in found["left_out"].values())


@pytest.mark.long
def test_llama_cpp_has_rows(on_disk: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("gguf")
    monkeypatch.setattr("inlay_lab.bench.store.measure.why_not", lambda *arguments: None)  # its file is never fp32
    rows = {row["name"]: row for row in measured(on_disk, baselines=("llama.cpp",))["rows"]}
    slots = ["llama.cpp, slot, cold", "llama.cpp, slot"]
    assert list(rows) == [*OURS, "llama.cpp, computed", *slots, "llama.cpp, held"]
    for name in slots:
        assert 0 < rows[name]["reading_ms"] < rows[name]["first_token_ms"]


def test_llama_cpp_slot_that_is_broken_is_one_sentence(tmp_path: Path, stand_ins: None):
    pytest.importorskip("gguf")
    with llama_cpp(tiny("llama").model.config, 40, "leave it out") as peer:
        slot = LlamaSlot(peer, tmp_path / "slot", list(range(34)), 30)
        whole, reading = slot.loaded()
        assert 0 < reading < whole
        slot.file.write_bytes(b"no slot")
        with pytest.raises(ModelError, match=r"llama\.cpp: .*cannot read .*slot; leave it out"):
            slot.loaded()


@pytest.mark.long
def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]):
    options = ["--model", "random:tiny", "--tokens", "32", "--runs", "1", "--baselines", "none"]
    run_file(FILE, *options)
    head, line, *rows, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert (found["tokens"], line) == (32, "|---|---|---|---|")
    assert head.startswith("| 32 tokens, ")
    assert [row.split(" | ")[0] for row in rows] == [f"| {row['name']}" for row in found["rows"]]
    assert f" {found['rows'][-1]['first_token_ms']:,.1f} |" in rows[-1]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"tokens": 0}, "tokens is 0; it must be at least 1"),
        ({"baselines": ("tape",)}, "baseline is 'tape'; use one of disk, safetensors, llama.cpp"),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], sentence: str):
    with pytest.raises(ParameterError, match=re.escape(sentence)):
        StoreSetting(model="random:tiny", folder=Path("/nowhere"), **wrong)
