"""Fingerprints: of every byte of the weights, and looked up where the files are those of the last time."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from inlay.models import fingerprint as hashing
from inlay.models import load
from inlay.models.fingerprint import Fingerprint, cache_root, fingerprint
from inlay.models.load import load_model
from tests.conftest import tiny

MODEL = copy.deepcopy(tiny("qwen2").model)
WEIGHTS = MODEL.state_dict()
BEFORE = fingerprint(MODEL)
MEGABYTES = 3 * 2**20 + 5  # more than one block, and not a whole number of them


def of(**weights: torch.Tensor) -> bytes:
    """The fingerprint of a module that has these buffers."""
    part = nn.Module()
    for name, weight in weights.items():
        part.register_buffer(name, weight)
    made = Fingerprint(MODEL.config)
    made.add("", part)
    return made.digest()


@given(st.data())
def test_any_bit_of_any_weight_counts(data: st.DataObject):
    values = WEIGHTS[data.draw(st.sampled_from(sorted(WEIGHTS)))].view(-1).view(torch.uint8)
    at, bit = data.draw(st.integers(0, len(values) - 1)), 1 << data.draw(st.integers(0, 7))
    values[at] ^= bit
    try:
        assert fingerprint(MODEL) != BEFORE
    finally:
        values[at] ^= bit
    assert fingerprint(MODEL) == BEFORE


@given(st.integers(0, MEGABYTES - 1))
def test_any_byte_of_a_large_weight_counts(at: int):
    weight = torch.zeros(MEGABYTES, dtype=torch.uint8)
    before = of(weight=weight)
    weight[at] = 1
    assert of(weight=weight) != before


def test_order_of_blocks_changes_the_fingerprint():
    weight = torch.arange(2**19)  # four blocks
    first, second, *others = weight.chunk(4)
    assert of(weight=torch.cat([second, first, *others])) != of(weight=weight)


def test_threads_do_not_count(monkeypatch):
    weight = torch.arange(2**19)
    prints = set()
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        prints.add((of(weight=weight), fingerprint(MODEL)))
    assert len(prints) == 1


def test_name_shape_and_dtype_count():
    weight = torch.zeros(4, 6)
    others = [
        of(other=weight),
        of(weight=weight.view(6, 4)),
        of(weight=weight.view(torch.int32)),
        of(weight=weight[1:]),
    ]
    assert len({of(weight=weight), *others}) == 5


@pytest.mark.parametrize(
    "weight",
    [torch.tensor(1.5), torch.zeros(0, 3), torch.ones(5, dtype=torch.bool), torch.arange(12).view(3, 4).t()],
)
def test_weights_of_all_forms(weight: torch.Tensor):
    assert of(weight=weight) == of(weight=weight.clone(memory_format=torch.contiguous_format))
    assert of(weight=weight) != of(other=weight)


@pytest.fixture
def blocks(monkeypatch, tmp_path) -> list[int]:
    """The sizes of all weights that are hashed; with a cache directory of the test's own."""
    monkeypatch.setenv("INLAY_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(hashing, "SETTLED_S", -60)  # the files of these tests have been written just now
    sizes: list[int] = []
    made = hashing.blocks_of

    def recorded(weight):
        sizes.append(weight.nbytes)
        return made(weight)

    monkeypatch.setattr(hashing, "blocks_of", recorded)
    return sizes


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "checkpoint"
    tiny("qwen2").model.save_pretrained(folder)
    tiny("qwen2").tokenizer.save_pretrained(folder)
    return folder


def records(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_the_second_load_does_not_hash(checkpoint, blocks, tmp_path):
    first = load_model(str(checkpoint)).fingerprint
    assert sum(blocks) == sum(weight.nbytes for weight in WEIGHTS.values())
    assert first == fingerprint(load_model(str(checkpoint), weights="stock").model)
    blocks.clear()
    assert load_model(str(checkpoint)).fingerprint == first
    assert load_model(f"{checkpoint}/../checkpoint", weights="stock").fingerprint == first
    rounded = load_model(str(checkpoint), quantization="int8").fingerprint
    assert not blocks
    assert rounded != first
    (record,) = records(tmp_path / "cache")
    record.unlink()
    assert load_model(str(checkpoint), quantization="int8").fingerprint == rounded


def test_another_dtype_has_its_own_fingerprint(checkpoint, blocks, tmp_path):
    prints = {load_model(str(checkpoint), dtype=dtype).fingerprint for dtype in ("float32", "bfloat16")}
    blocks.clear()
    assert {load_model(str(checkpoint), dtype=dtype).fingerprint for dtype in ("float32", "bfloat16")} == prints
    assert len(prints) == 2
    assert not blocks


def test_files_that_change_are_hashed_again(checkpoint, blocks, tmp_path):
    """One value, and neither the size of the file nor the time that it says of its content."""
    first = load_model(str(checkpoint)).fingerprint
    path = checkpoint / "model.safetensors"
    stat = path.stat()
    weights = load_file(path)
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    blocks.clear()
    changed = load_model(str(checkpoint))
    assert blocks
    assert changed.fingerprint != first
    assert len(records(tmp_path / "cache")) == 1
    blocks.clear()
    assert load_model(str(checkpoint)).fingerprint == changed.fingerprint
    assert not blocks


def digit(text: str) -> str:
    """The record with another digest."""
    record = json.loads(text)
    flipped = format(int(record["weights"][0], 16) ^ 1, "x")
    return json.dumps({**record, "weights": flipped + record["weights"][1:]})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: "[1]",
        lambda text: '{"weights": 1}',
        lambda text: json.dumps({**json.loads(text), "version": 1}),
        digit,
    ],
)
def test_damaged_record_is_recomputed(checkpoint, blocks, tmp_path, damage):
    first = load_model(str(checkpoint)).fingerprint
    (record,) = records(tmp_path / "cache")
    right = record.read_text()
    record.write_text(damage(right))
    blocks.clear()
    assert load_model(str(checkpoint)).fingerprint == first
    assert blocks
    assert record.read_text() == right


def test_a_cache_that_cannot_be_used(checkpoint, blocks, tmp_path):
    first = load_model(str(checkpoint)).fingerprint
    (record,) = records(tmp_path / "cache")
    record.unlink()
    record.mkdir()
    assert load_model(str(checkpoint)).fingerprint == first
    record.rmdir()
    record.parent.rmdir()
    record.parent.write_text("in the way")
    assert load_model(str(checkpoint)).fingerprint == first
    assert records(tmp_path / "cache") == [record.parent]


def test_files_changed_while_read_leave_no_record(checkpoint, blocks, tmp_path, monkeypatch):
    read = load.AutoModelForCausalLM.from_pretrained

    def changed(*arguments, **keywords):
        os.utime(checkpoint / "model.safetensors")
        return read(*arguments, **keywords)

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", changed)
    load_model(str(checkpoint))
    assert records(tmp_path / "cache") == []


def test_recently_changed_files_leave_no_record(checkpoint, blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "SETTLED_S", 3600)
    load_model(str(checkpoint))
    assert records(tmp_path / "cache") == []


def test_checkpoint_with_an_adapter_leaves_no_record(checkpoint, blocks, tmp_path):
    config = load.read_config(str(checkpoint))
    assert hashing.Checkpoint.of(str(checkpoint), config) is not None
    (checkpoint / "adapter_config.json").write_text("{}")
    assert hashing.Checkpoint.of(str(checkpoint), config) is None


def test_models_without_a_checkpoint_leave_no_record(blocks, tmp_path):
    load_model("random:tiny")
    load_model("demo")
    assert records(tmp_path) == []


def test_location_of_records(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == Path(os.environ["INLAY_CACHE_ROOT"])
    monkeypatch.delenv("INLAY_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "inlay"
    for relative in ("", "xdg"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_root() == tmp_path / ".cache" / "inlay"
