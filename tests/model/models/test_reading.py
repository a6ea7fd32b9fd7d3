"""The reports while weights are loaded, and the order in which their files are read."""

from __future__ import annotations

import logging
import os
import threading

import pytest
import torch
from safetensors.torch import save_file

from inlay.models.formats.reading import ByteRange, ReadAhead, pieces_of, weights_progress
from inlay.models.load import MODEL_DIRECTORY, load_model


def test_pieces_are_in_the_order_of_the_layers(tmp_path):
    names = ["lm_head", "model.embed_tokens", *(f"model.layers.{i}.mlp" for i in (10, 9, 1))]
    save_file(
        {f"{name}.weight": torch.full((8, 8), float(i)) for i, name in enumerate(names)}, tmp_path / "a.safetensors"
    )
    save_file({"model.layers.2.mlp.weight": torch.full((4, 8), 7.0)}, tmp_path / "b.safetensors")
    pieces = pieces_of([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    firsts = [
        torch.frombuffer(bytearray(p.path.read_bytes()[p.offset : p.offset + 4]), dtype=torch.float32) for p in pieces
    ]
    assert [int(first) for first in firsts] == [1, 4, 7, 3, 2, 0]  # the embedding, layers 1, 2, 9 and 10, the head
    assert {piece.size for piece in pieces} == {256, 128}


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", (40).to_bytes(8, "little")])
def test_damaged_header_is_left_to_the_reader(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert sum(piece.size for piece in pieces_of([path])) <= len(content)


def test_read_ahead_stays_within_its_window(tmp_path, monkeypatch):
    """A read past the window waits for the report that the bytes before it are used."""
    path = tmp_path / "file"
    path.write_bytes(b"")
    asked: list[int] = []
    enough = threading.Event()

    def read(file: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(offset + len(buffers[0]))
        if asked[-1] >= target:
            enough.set()
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", read, raising=False)
    target = 24 << 20
    with ReadAhead([ByteRange(path, 0, 80 << 20)], window=16 << 20) as ahead:
        assert enough.wait(30)
        assert asked == [8 << 20, 16 << 20, 24 << 20]
        enough.clear()
        target = 64 << 20
        ahead.reached(0.5)
        assert enough.wait(30)
    assert asked[-1] == 64 << 20


def test_read_ahead_ends_with_its_block(tmp_path):
    with ReadAhead([ByteRange(tmp_path / "none", 0, 1 << 20)]):
        pass
    (tmp_path / "file").write_bytes(bytes(4 << 20))
    with pytest.raises(ZeroDivisionError), ReadAhead([ByteRange(tmp_path / "file", 0, 4 << 20)], window=0):
        raise ZeroDivisionError
    assert not any(thread.name == "inlay-read-ahead" for thread in threading.enumerate())


def test_progress_is_reported_and_the_rate_is_logged(caplog):
    caplog.set_level(logging.INFO, "inlay.models.formats.reading")
    told: list[tuple[int, int]] = []
    with weights_progress(lambda done, total: told.append((done, total))):
        model = load_model(MODEL_DIRECTORY, weights="stock").model
    size = sum(weight.nbytes for weight in model.state_dict().values())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    (line,) = (record.getMessage() for record in caplog.records if record.name == "inlay.models.formats.reading")
    assert f"{size / 1e9:.2f} GB of weights in " in line
    assert line.endswith("GB/s)")
