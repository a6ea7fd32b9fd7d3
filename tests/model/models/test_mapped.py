"""Weights that are read from their file in place of being copied out of mapped memory."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from inlay.models.formats import mapped
from inlay.models.formats.mapped import MappedFiles, copy, mapped_files
from inlay.models.linear import joined, packed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is mapped")


def write(path, seed):
    draw = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(600, 700, generator=draw).bfloat16() for name in "abc"}
    save_file(weights, path)
    return weights


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "with a space.safetensors"
    return path, write(path, 0)


def opened(path):
    with safe_open(path, "pt") as tensors:
        return {name: tensors.get_slice(name)[...] for name in "abc"}


@pytest.fixture
def reads(monkeypatch):
    """How many bytes each read gave."""
    counts, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (counts.append(preadv(*args)), counts[-1])[1])
    return counts


def test_tensors_and_parts_of_them_are_read_from_the_file(file, reads, monkeypatch):
    path, weights = file
    monkeypatch.setattr(mapped, "STEP", 100_000)
    found = opened(path)
    with mapped_files([path]):
        for name, tensor in found.items():
            for rows in (slice(None), slice(17, 400)):
                into = torch.zeros_like(weights[name][rows])
                reads.clear()
                copy(tensor[rows], into)
                assert torch.equal(into, weights[name][rows])
                assert sum(reads) == into.nbytes
                assert len(reads) == -(-into.nbytes // 100_000)


def test_joined_weights_are_read_side_by_side(file, reads):
    path, weights = file
    layers = []
    for tensor in opened(path).values():
        layers.append(torch.nn.Linear(700, 600, bias=False, device="meta", dtype=torch.bfloat16))
        layers[-1].weight = torch.nn.Parameter(tensor, requires_grad=False)
    x = torch.randn(3, 700).bfloat16()
    with mapped_files([path]):
        made = joined(layers, packed)
    assert sum(reads) == sum(weight.nbytes for weight in weights.values())
    expected = joined([_linear(weight) for weight in weights.values()], packed)
    assert torch.equal(made(x), expected(x))


def _linear(weight):
    layer = torch.nn.Linear(700, 600, bias=False, device="meta", dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def test_tensors_outside_the_files_are_copied(file, reads, tmp_path):
    path, weights = file
    other = tmp_path / "other.safetensors"
    theirs = write(other, 1)
    into = torch.zeros(600, 700, dtype=torch.bfloat16)
    with mapped_files([path]):
        for tensor, expected in ((opened(other)["a"], theirs["a"]), (weights["b"].clone(), weights["b"])):
            copy(tensor, into)
            assert torch.equal(into, expected)
    copy(opened(path)["c"], into)  # outside of the block
    assert torch.equal(into, weights["c"])
    assert reads == []


def test_replaced_file_gives_the_mapped_contents(file, tmp_path):
    path, weights = file
    found = opened(path)
    write(tmp_path / "new", 2)
    os.replace(tmp_path / "new", path)
    into = torch.zeros(600, 700, dtype=torch.bfloat16)
    with mapped_files([path]):
        copy(found["a"], into)
    assert torch.equal(into, weights["a"])


def test_other_dtypes_and_strides_are_not_read(file):
    path, _ = file
    tensor, files = opened(path)["a"], MappedFiles([path])
    assert files.read(tensor, torch.zeros(600, 700, dtype=torch.bfloat16))
    assert not files.read(tensor, torch.zeros(600, 700))
    assert not files.read(tensor.t(), torch.zeros(700, 600, dtype=torch.bfloat16))
    files.close()


def test_failed_or_short_read_is_completed_by_copying(file, monkeypatch):
    path, weights = file
    found = opened(path)

    def fails(*_):
        raise OSError("no such luck")

    for preadv in (fails, lambda *_: 0):
        into = torch.zeros(600, 700, dtype=torch.bfloat16)
        with mapped_files([path]), monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            copy(found["a"], into)
        assert torch.equal(into, weights["a"])
