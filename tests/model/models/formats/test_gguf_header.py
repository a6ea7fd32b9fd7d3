"""The header of a GGUF file is read once, and a damaged or hostile one gives one sentence."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
import torch

from inlay import ModelError
from inlay.models.formats import gguf_file
from inlay.models.formats.gguf_header import read_header
from inlay.models.load import load_model
from tests.counting import calls_of

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

from tests.model.models.formats.gguf_files import random_model, write_gguf  # noqa: E402
from tests.model.models.formats.gguf_vocabularies import byte_level, write_vocabulary  # noqa: E402
from tests.raising import raises  # noqa: E402


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(*, version=3, tensors=0, count=1, rest=b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + rest


def test_a_file_is_read_once(tmp_path, monkeypatch):
    """And by this reader alone: transformers' and ``gguf``'s make objects of every item."""
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", "Q8_0")
    reads = calls_of(monkeypatch, gguf_file, "read_header")
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda *_: pytest.fail("gguf reads the file"))
    for name in ("modeling_gguf_pytorch_utils.load_gguf_checkpoint", "integrations.gguf.reader.read_gguf_metadata"):
        monkeypatch.setattr(f"transformers.{name}", lambda *_, **__: pytest.fail("transformers reads the file"))
    load_model(path)
    assert reads == [(path,)]


def test_header_equals_the_gguf_reader(tmp_path):
    path = write_vocabulary(tmp_path / "model.gguf", byte_level("gpt-2"))
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert ours.metadata == {k: v.contents() for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert (own.tensor_type, list(own.shape)) == (tensor.tensor_type, tensor.shape.tolist())
        assert np.array_equal(own.data, tensor.data)


TOKENS = text("tokenizer.ggml.tokens") + struct.pack("<I", 9)
ENTRY = text("a.weight") + struct.pack("<IQ", 1, 64)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GGUF", "it has 4 bytes, and a header alone has 24"),
        (b"safe" + bytes(40), "it does not begin with GGUF"),
        (header(version=1), "it is of version 1, and 2 and 3 are read"),
        (header(version=3 << 24), "it is big-endian"),
        (header(count=1 << 60), "its header is cut short"),
        (header(tensors=1 << 60, count=0), "its header is cut short"),
        (header(rest=struct.pack("<Q", 1 << 62) + b"key"), "its header is cut short"),
        (header(rest=text("key") + struct.pack("<IQ", 8, 1 << 62)), "its header is cut short"),
        (header(rest=text("key") + struct.pack("<I", 99)), "key is of the type 99, which GGUF does not have"),
        (header(rest=text("key") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"), "a text of its header is not UTF-8"),
        (header(rest=TOKENS + struct.pack("<IQ", 8, 1 << 40)), r"tokens has 1,099,511,627,776 items, more than"),
        (header(rest=TOKENS + struct.pack("<IQ", 9, 1)), "tokens is an array of the type 9, which is not read"),
        (header(count=2, rest=(text("key") + struct.pack("<IB", 7, 1)) * 2), "it says key twice"),
        (header(rest=text("general.alignment") + struct.pack("<II", 4, 3)), "alignment is 3, which is no power of two"),
        (header(tensors=1, count=0, rest=text("a") + struct.pack("<I", 7)), "a has 7 dimensions; 1 to 4 are read"),
        (header(tensors=1, count=0, rest=ENTRY + struct.pack("<IQ", 999, 0)), "a.weight is of the type 999"),
        (header(tensors=1, count=0, rest=ENTRY + struct.pack("<IQ", 14, 0)), "rows of 64 weights, which are no whole"),
        (
            header(tensors=1, count=0, rest=ENTRY + struct.pack("<IQ", 0, 1 << 63)),
            "a.weight ends behind the end of the",
        ),
        (header(tensors=2, count=0, rest=(ENTRY + struct.pack("<IQ", 0, 0)) * 2 + bytes(512)), "two tensors named a.w"),
    ],
)
def test_damaged_file_is_refused_in_one_sentence(tmp_path, content, reason):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"bad\.gguf: is damaged, cut short or no GGUF: .*{reason}.*; download it ag"):
        gguf_file.GGUFFile((path,)).config()


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_raises_only_model_errors(tmp_path, seed):
    """Bytes of the header are changed at random, or the file is cut."""
    content = bytearray(write_vocabulary(tmp_path / "whole.gguf", byte_level("gpt-2")).read_bytes())
    rng = np.random.default_rng(seed)
    for at in rng.integers(4, 20000 if seed % 2 else 700, 3):
        content[at] = rng.integers(256)
    path = tmp_path / "bad.gguf"
    path.write_bytes(content[: int(rng.integers(24, len(content)))] if seed % 5 == 0 else content)
    file = gguf_file.GGUFFile((path,))
    for read in (file.config, file.tokenizer):
        with suppress(ModelError):  # any other error fails the test
            read()


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("block_count", 1 << 31, "model.damaged_file"),
        ("embedding_length", 128, "model.damaged_file"),
        ("attention.head_count", 0, "model.unsupported_setting"),
        ("attention.head_count_kv", 2**64 - 1, "model.unsupported_setting"),
        ("feed_forward_length", 2**64 - 1, "model.unsupported_setting"),
        ("attention.key_length", 2**64 - 1, "model.unsupported_setting"),
        ("attention.key_length", -1, "model.unsupported_setting"),
        ("attention.key_length", 1e30, "model.unsupported_setting"),
    ],
)
def test_sizes_that_contradict_the_tensors_are_rejected(tmp_path, key, value, code):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", more={f"llama.{key}": value})
    with raises(code, ModelError, names=f"llama.{key}"):
        load_model(path)


@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
def test_head_count_that_does_not_divide_the_width_is_rejected(tmp_path, architecture):
    key = f"{architecture}.attention.head_count"
    path = write_gguf(tmp_path / "model.gguf", random_model(architecture), architecture, more={key: 3})
    with raises("model.damaged_file", ModelError, names=key):
        load_model(path)


def test_sizes_that_overflow_together_are_rejected(tmp_path):
    largest = 2**32 - 1
    more = {"llama.attention.head_count_kv": largest, "llama.attention.key_length": largest}
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", more=more)
    with raises("model.unreadable_config", ModelError, names="model.gguf"):
        load_model(path)


def test_layer_without_tensors_is_rejected_before_any_layer_is_built(tmp_path, monkeypatch):
    more, extra = {"llama.block_count": 1000}, {"blk.999.x": torch.zeros(1)}
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", more=more, extra=extra)
    built = calls_of(monkeypatch, gguf_file, "on_meta")
    with raises("model.damaged_file", ModelError, names="llama.block_count"):
        load_model(path)
    assert built == []


def test_file_without_a_model_may_have_any_type(tmp_path):
    more = {"general.type": ["adapter"]}
    model = random_model("llama")
    path = write_gguf(tmp_path / "a.gguf", model, "llama", more=more, part=lambda name: "attn_q" in name, tokens=False)
    with raises("model.missing_weights", ModelError, names="a.gguf"):
        load_model(path)
