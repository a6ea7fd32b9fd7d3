"""The arithmetic of codecs and layers, by hand."""

from __future__ import annotations

import pytest

from inlay.authoring.memory import CODECS, KVLayer, KVShape, Vectors, codec_named
from inlay.config import KV_CACHE_DTYPES
from inlay.errors import ParameterError
from inlay.models.load import DTYPES
from tests.raising import raises

#: codec → bytes of one vector of 128, of 100 and of 7 elements
BY_HAND = {
    "fp32": (512, 400, 28),
    "bf16": (256, 200, 14),
    "fp16": (256, 200, 14),
    "fp8": (132, 104, 11),
    "int8": (132, 104, 11),
    "int4": (64 + 2 * 4, 50 + 2 * 4, 4 + 4),
}


@pytest.mark.parametrize("name", list(CODECS))
def test_vectors(name):
    codec = codec_named(name)
    assert tuple(codec.vector_bytes(width) for width in (128, 100, 7)) == BY_HAND[name]


def test_runnable_codecs_are_the_model_and_pool_dtypes():
    bits = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}
    assert KV_CACHE_DTYPES == ("auto", "int8", "fp8")
    runs = {name: codec.bits for name, codec in CODECS.items() if codec.runs}
    assert runs == {"fp32": bits["float32"], "bf16": bits["bfloat16"], "int8": 8, "fp8": 8}
    assert len(runs) == len(DTYPES) + 2


def test_an_unknown_codec():
    with raises("parameter.unknown_choice", ParameterError, names="--codec"):
        codec_named("int3")


def test_a_shape_with_a_window():
    far = KVLayer(Vectors(2, 8), Vectors(2, 8))
    near = KVLayer(Vectors(2, 8), Vectors(2, 4), window=10)
    shape = KVShape("x", (far, near, near))
    assert shape.bytes_per_token(CODECS["bf16"]) == (32 + 24 + 24) * 2
    assert shape.windows == (10, 10)
    for tokens, near_tokens in ((1, 1), (9, 9), (10, 9), (1000, 9)):
        assert shape.sequence_bytes(tokens, CODECS["bf16"]) == tokens * 64 + near_tokens * 2 * 48
