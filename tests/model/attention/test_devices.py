"""The backend of each device, and the error for a device without one."""

from __future__ import annotations

import logging

import pytest
import torch

from inlay import LLM, ParameterError
from inlay.attention import registry
from inlay.attention.registry import get_backend
from inlay.config import EngineConfig
from inlay.engine.background.profiler import deviation
from inlay.errors import CapacityError
from inlay.models.device import find_device, free_bytes, put_on
from inlay.models.load import load_model
from inlay.slots import SlotRange
from tests.conftest import tiny

from inlay.attention.storage import DeviceStorage  # isort: skip
from inlay.attention.storage import KVStorage, LayerShape  # isort: skip
from tests.raising import raises

GPU = torch.device("cuda", 0)


@pytest.fixture
def one_gpu(monkeypatch):
    """As on a machine with one GPU, as far as nothing is computed there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * 2**30, 80 * 2**30))


@pytest.fixture(autouse=True)
def no_log_yet():
    registry.on_device.cache_clear()
    yield
    registry.on_device.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_auto_without_a_gpu_uses_the_cpu_and_gpu_devices_are_rejected():
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:1"):
        with raises("parameter.unavailable_device", ParameterError, names=f"'{name}'"):
            find_device(name)


def test_with_a_gpu_auto_is_that(one_gpu):
    assert find_device("auto") == find_device("cuda") == find_device("cuda:0") == GPU
    assert find_device("cpu") == torch.device("cpu")
    with raises("parameter.unavailable_device", ParameterError, names="'cuda:0'"):
        find_device("cuda:1")


def test_auto_on_a_gpu_uses_triton_and_logs_it_once(monkeypatch, caplog):
    made = []
    monkeypatch.setattr("inlay.attention.triton.backend.TritonBackend", lambda device: made.append(device))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            get_backend("auto", GPU)
    assert made == [GPU] * 3
    assert [record.getMessage() for record in caplog.records] == ["attention runs on the GPU in Triton's kernels"]


def test_auto_without_triton_uses_pytorch_and_logs_it_once(monkeypatch, caplog):
    monkeypatch.setattr(registry, "has_triton", lambda: False)
    assert [(each.name, each.device) for each in (get_backend("auto", GPU), get_backend("auto", GPU))] == [
        ("torch", GPU)
    ] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "Triton is not installed: attention on the GPU runs in PyTorch, right but slower; "
        "install it with pip install 'inlay-llm[gpu]'"
    ]
    with raises("parameter.unavailable_backend", ParameterError, names="'inlay-llm[gpu]'"):
        get_backend("triton", GPU)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_cpu_backends_are_rejected_on_a_gpu(name):
    with raises("parameter.unavailable_backend", ParameterError, names="'auto'"):
        get_backend(name, GPU)


def test_triton_without_a_gpu_and_without_its_interpreter(monkeypatch):
    triton = pytest.importorskip("inlay.attention.triton.backend")
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with raises("parameter.unavailable_backend", ParameterError, names="'auto'"):
        get_backend("triton")


def test_weights_of_the_cpu_are_refused_on_a_gpu(one_gpu):
    for name, value in (("weights", "packed"), ("quantization", "int8")):
        with raises("parameter.conflict", ParameterError, names=f"{name} '{value}'"):
            load_model("demo", device="cuda", **{name: value})


def test_model_is_moved_to_the_device(one_gpu, monkeypatch):
    loaded = tiny("llama")
    moved = []
    monkeypatch.setattr(type(loaded.model), "to", lambda self, device: moved.append(device) or self)
    put_on(loaded.model, "m", torch.device("cpu"))
    assert moved == []
    put_on(loaded.model, "m", GPU)
    assert moved == [GPU]

    def full(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(loaded.model), "to", full)
    with raises("model.too_large", CapacityError, names="cuda:0"):
        put_on(loaded.model, "m", GPU)


def test_loaded_model_stays_on_its_device(one_gpu):
    assert LLM(tiny("llama"), kv_memory="4MiB").loaded.model.device.type == "cpu"
    with raises("parameter.conflict", ParameterError, names="device"):
        LLM(tiny("llama"), device="cuda")


def test_pool_takes_most_of_the_free_device_memory(one_gpu):
    assert free_bytes(torch.device("cpu")) is None
    assert free_bytes(GPU) == 30 * 2**30
    assert EngineConfig().kv_bytes(10 * 2**30, free_bytes(GPU)) == 18 * 2**30
    assert EngineConfig(kv_memory="1GiB").kv_bytes(0, free_bytes(GPU)) == 2**30


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_device_storage_equals_host_storage(dtype, shared):
    layers = [LayerShape(2, 8, shared), LayerShape(1, 4, shared)]
    host, device = KVStorage(layers, dtype, 64), DeviceStorage(layers, dtype, 64, torch.device("cpu"))
    runs, generator = [SlotRange(3, 5), SlotRange(20, 2)], torch.Generator().manual_seed(0)
    for layer, shape in enumerate(layers):
        keys, values = (torch.randn(shape.kv_heads, 5, shape.head_dim, generator=generator) for _ in range(2))
        values = keys if shared else values
        for memory in (host, device):
            memory.write(layer, runs[0], keys, values)
            memory.write(layer, torch.tensor([20, 21, 40, 41, 42]).numpy(), keys, values)
        slab = device.read_slab(layer, runs)
        assert (slab == host.read_slab(layer, runs)).all()
        for where in (slice(2, 9), torch.tensor([3, 42, 5])):
            assert torch.equal(device.read_keys(layer, where), host.read_keys(layer, where))
            assert torch.equal(device.read_values(layer, where), host.read_values(layer, where))
        device.write_slab(layer, [SlotRange(50, 7)], slab)
        assert (device.read_slab(layer, [SlotRange(50, 7)]) == slab).all()
    assert device.values[0] is device.keys[0] or not shared
    assert deviation(device, runs[:1], runs[:1]).tolist() == [0.0] * 5
