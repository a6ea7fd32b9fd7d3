"""Files of segments: readable as safetensors, and rejected if a byte is wrong."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from inlay.kv.offload import codecs, form
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.tier import Miss, TierMissError
from tests.counting import calls_of
from tests.unit.kv.offload.segments import (
    KEYS,
    LAYERS,
    alike,
    expected,
    filled,
    read,
    record_of,
    same,
    slabs_of,
    spec_of,
)

SPEC = spec_of(1)


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, bytes]:
    tier = filled(tmp_path / "whole", SPEC)
    return tier.path(SPEC.key), tier.path(SPEC.key).read_bytes()


def put_in_place(folder: Path, data: bytes) -> DiskTier:
    """A tier, opened before, whose file has this content now."""
    folder.mkdir(exist_ok=True)
    tier = filled(folder, SPEC) if not any(folder.iterdir()) else DiskTier(folder, 1 << 30)
    path = tier.path(SPEC.key)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return tier


def test_whole_file_is_read_with_one_large_request(tmp_path, monkeypatch):
    """A file of which the header alone is wanted is read no further."""
    tier = filled(tmp_path, SPEC)
    size = tier.path(SPEC.key).stat().st_size
    reads = calls_of(monkeypatch, os, "preadv")  # of a file into buffers, at an offset
    for first in (2 * size, size // 2):
        monkeypatch.setattr(form, "FIRST_BYTES", first)
        reads.clear()
        assert same(read(tier, record_of(SPEC)), slabs_of(SPEC))
        _, (buffer,), at = reads[0]
        assert (at, len(buffer)) == (0, min(first, size))
        assert (len(reads) == 1) is (first > size), "what has been read is not read again"
    reads.clear()
    assert tier.record(SPEC.key).ids == SPEC.ids
    assert max(at + len(buffer) for _, (buffer,), at in reads) < size


def test_safetensors_reads_them(whole):
    path, data = whole
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert len(data) % 4096 == 0
    assert (int.from_bytes(data[:8], "little") + 8) % 4096 == 0
    with safe_open(path, "np") as file:
        for layer, slab in enumerate(slabs_of(SPEC)):
            tensor = file.get_tensor(f"layers.{layer}.kv")
            assert tensor.shape == (2, LAYERS[layer].kv_heads, 40, LAYERS[layer].head_dim)
            assert np.array_equal(tensor.view(np.uint8), slab)


def test_segment_round_trips(tmp_path):
    tier = filled(tmp_path, SPEC, spec_of(2, tokens=1))
    assert same(read(tier, record_of(SPEC)), slabs_of(SPEC))
    assert same(read(DiskTier(tmp_path, 1 << 30), record_of(spec_of(2, tokens=1))), slabs_of(spec_of(2, tokens=1)))


def test_every_byte_counts(whole, tmp_path, caplog):
    """Every 211th byte of a file, and all around its borders, flipped in turn: never given, and unlinked."""
    caplog.set_level(logging.CRITICAL)
    _, data = whole
    borders = [at for page in range(0, len(data), 4096) for at in (page, page + 1, page - 1) if 0 <= at < len(data)]
    for at in sorted({*range(0, len(data), 211), *borders, *range(8)}):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        tier = put_in_place(tmp_path / "flipped", bytes(damaged))
        with pytest.raises(TierMissError) as miss:
            read(tier, record_of(SPEC))
        assert miss.value.reason is Miss.CORRUPT, at
        assert not tier.path(SPEC.key).exists()
        assert not tier.holds(SPEC.key)
        tier.close()


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 4095, 4096, 4097, -1, -4096])
def test_truncated_files_are_not_used(whole, tmp_path, keep):
    tier = put_in_place(tmp_path / "cut", whole[1][:keep])
    with pytest.raises(TierMissError) as miss:
        read(tier, record_of(SPEC))
    assert miss.value.reason is Miss.CORRUPT
    assert dict(tier.stats().misses) == {"corrupt": 1}


def test_file_with_trailing_bytes_is_not_used(whole, tmp_path):
    tier = put_in_place(tmp_path / "long", whole[1] + bytes(4096))
    with pytest.raises(TierMissError):
        read(tier, record_of(SPEC))


def test_file_of_another_segment_is_not_used(tmp_path, caplog):
    """Whole and sound, but of other text: an index that is wrong makes no answer wrong."""
    other = spec_of(2)
    data = filled(tmp_path / "other", other)
    tier = put_in_place(tmp_path / "here", data.path(other.key).read_bytes())
    with pytest.raises(TierMissError) as miss:
        read(tier, record_of(SPEC))
    assert miss.value.reason is Miss.CORRUPT
    assert "another segment" in caplog.text


def test_newer_format_is_kept_unread(whole, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(form, "FORM", 2)
    newer = filled(tmp_path / "newer", SPEC).path(SPEC.key)
    data = newer.read_bytes()
    monkeypatch.undo()
    tier = put_in_place(tmp_path / "older", data)
    with pytest.raises(TierMissError):
        read(tier, record_of(SPEC))
    assert "form 2, and this inlay reads form 1" in caplog.text
    assert tier.path(SPEC.key).read_bytes() == data


def test_named_pipe_is_not_waited_for(tmp_path):
    tier = filled(tmp_path, SPEC)
    tier.path(SPEC.key).unlink()
    os.mkfifo(tier.path(SPEC.key))  # to open it would wait for a writer
    with pytest.raises(TierMissError):
        read(tier, record_of(SPEC))


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:1000]))
    assert same(read(filled(tmp_path, SPEC), record_of(SPEC)), slabs_of(SPEC))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_full_disk_leaves_no_partial_file(tmp_path, monkeypatch, caplog, at):
    """The write number ``at`` is refused."""
    tier, write, calls = DiskTier(tmp_path, 1 << 30), os.write, []

    def refuse(file: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", refuse)
    assert not tier.put(record_of(SPEC), slabs_of(SPEC))
    monkeypatch.undo()
    assert not tier.holds(SPEC.key)
    assert not list(tier.folder.glob("*.safetensors"))
    assert not list(tier.folder.glob(".draft-*"))
    assert tier.stats().refused == 1
    assert "No space left on device" in caplog.text
    assert not tier.put(record_of(SPEC), slabs_of(SPEC)), "it is not tried again at once"


def test_segment_above_the_file_size_limit_is_not_stored():
    """RLIMIT_FSIZE, in a process of its own: the signal behind it is the process's to ignore, as Python does."""
    code = (
        "import sys, tempfile, pathlib, resource; from tests.unit.kv.offload.segments import *\n"
        "tier = DiskTier(pathlib.Path(tempfile.mkdtemp()), 1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "big = spec_of(1, tokens=800)\n"
        "assert not tier.put(record_of(big), slabs_of(big)); assert not list(tier.folder.glob('*.safetensors'))\n"
        "print('refused')"
    )
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr


def test_reader_finishes_an_unlinked_file(tmp_path):
    tier = filled(tmp_path, SPEC)
    taken = []

    def take(layer, slab):
        tier.delete(SPEC.key)
        taken.append(slab.copy())

    tier.get(record_of(SPEC), take, lambda: False)
    assert same(taken, slabs_of(SPEC))


def test_slow_read_is_a_miss_and_keeps_the_file(tmp_path):
    tier = filled(tmp_path, SPEC)
    with pytest.raises(TierMissError) as miss:
        tier.get(record_of(SPEC), lambda layer, slab: None, lambda: True)
    assert miss.value.reason is Miss.LATE
    assert same(read(tier, record_of(SPEC)), slabs_of(SPEC))


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_every_byte_of_a_lossy_file_counts(tmp_path, caplog, codec):
    caplog.set_level(logging.CRITICAL)
    spec = SPEC.through(codec, KEYS)
    tier = filled(tmp_path / "whole", spec)
    data = tier.path(spec.key).read_bytes()
    assert alike(read(tier, record_of(spec)), expected(spec), codec)
    with safe_open(tier.path(spec.key), "np" if codec == "int8" else "pt") as file:
        assert file.get_tensor("layers.0.kv").shape == (2, LAYERS[0].kv_heads, 40, LAYERS[0].head_dim)
    for at in sorted({*range(0, len(data), 499), *range(8), 4095, 4096, len(data) - 1}):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        tier.path(spec.key).unlink(missing_ok=True)
        tier.path(spec.key).write_bytes(damaged)
        with pytest.raises(TierMissError) as miss:
            read(tier, record_of(spec))
        assert miss.value.reason is Miss.CORRUPT, at


def test_lossy_and_lossless_files_are_not_confused(tmp_path):
    """Nor a lossless file for a lossy one, whatever its name."""
    lossy = SPEC.through("int8", KEYS)
    for asked, there in ((SPEC, lossy), (lossy, SPEC)):
        tier = filled(tmp_path / there.codec, there)
        os.rename(tier.path(there.key), tier.path(asked.key))
        with pytest.raises(TierMissError) as miss:
            read(tier, record_of(asked))
        assert miss.value.reason is Miss.CORRUPT


def test_unknown_codec_is_kept_unread(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(codecs, "CODECS", {**codecs.CODECS, "int5": codecs.CODECS["int8"]})
    for module in ("record", "form"):
        monkeypatch.setattr(f"inlay.kv.offload.{module}.CODECS", codecs.CODECS)
    spec = SPEC.through("int5", KEYS)
    path = filled(tmp_path, spec).path(spec.key)
    monkeypatch.undo()
    (path.parent / "index.sqlite").unlink()
    again = DiskTier(tmp_path, 1 << 30)
    assert not again.holds(spec.key)
    assert "codec 'int5', and this inlay knows none, int8, fp8" in caplog.text
    assert path.exists()
