"""Settings of an engine that ask for more than there is, or for nothing."""

from __future__ import annotations

import errno

import psutil
import pytest

from inlay import LLM, CapacityError, InlayError, ModelError, ParameterError
from inlay.config import EngineConfig, allocating
from inlay.settings import parse_bytes
from tests.conftest import tiny
from tests.raising import raises

GIB = 2**30


@pytest.mark.parametrize("kv_memory", ["999TiB", 10**30, psutil.virtual_memory().total + 1])
def test_pool_larger_than_memory_is_one_sentence(kv_memory):
    with raises("engine.no_memory", CapacityError, names="kv_memory"):
        LLM(tiny("llama"), kv_memory=kv_memory)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        OverflowError("cannot fit 'int' into an index-sized integer"),
        RuntimeError("CUDA out of memory. Tried to allocate 400 GiB"),
    ],
)
def test_refused_allocation_is_one_sentence(error):
    with (
        raises("engine.no_memory", CapacityError, names="host_memory"),
        allocating("host_memory", 3 * GIB, "3GiB", 4 * GIB, "this machine"),
    ):
        raise error


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), RuntimeError("a fault of the model"), ValueError("no")])
def test_other_errors_are_raised_unchanged(error):
    with pytest.raises(type(error)), allocating("kv_memory", GIB, None, 4 * GIB, "this machine"):
        raise error


@pytest.mark.parametrize("size", ["9" * 400, "0.3", "", "0", 0, -1, True])
def test_invalid_size_is_rejected(size):
    with raises("parameter.invalid_size", ParameterError, names="kv_memory"):
        parse_bytes("kv_memory", size)


@pytest.mark.parametrize("name", sorted(EngineConfig.__dataclass_fields__.keys() - {"cache_salt", "attention_backend"}))
def test_no_setting_may_be_empty(name):
    """Often it is an environment variable that is not set. Salts may be empty; backends are checked later."""
    with pytest.raises(ParameterError, match=name):
        EngineConfig(**{name: ""})


@pytest.mark.parametrize("model", ["", "  "])
def test_a_model_has_a_name(model):
    with raises("model.empty_name", ModelError):
        LLM(model)


@pytest.mark.parametrize("name", ["weights", "quantization", "dtype"])
def test_no_setting_of_the_weights_may_be_empty(name):
    with pytest.raises(InlayError, match=name):
        LLM("random:tiny", **{name: ""})
