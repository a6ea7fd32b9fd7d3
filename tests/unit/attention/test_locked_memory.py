"""Host memory that is locked for a device, with a stand-in for CUDA: the calls to the runtime and the order of
copies.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inlay.attention.storage import DeviceStorage, LayerShape
from inlay.slots import SlotRange


class Cuda:
    """A runtime that records its calls. fails: the error of locking."""

    def __init__(self, fails: int = 0) -> None:
        self.asked: list[tuple] = []
        self.fails = fails

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.asked.append(("lock", address, size, flags))
        return self.fails

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.asked.append(("let go", address))
        return 0


@pytest.fixture
def storage(monkeypatch):
    """One layer of a device that claims to be CUDA, with tensors on the CPU."""
    storage = DeviceStorage([LayerShape(2, 8)], torch.bfloat16, 32, torch.device("cpu"))
    storage.device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return storage


class Streams:
    """Streams and events that only record the calls to them, in order."""

    def __init__(self, monkeypatch) -> None:
        self.asked: list[str] = []
        self.events = 0
        self.current = "computing"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self._stream("copying"))
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: self._stream("computing"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._stream(self.current))
        monkeypatch.setattr(torch.cuda, "stream", self._within)

    def _stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.asked.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.asked.append(f"{name} waits for {event.name}"),
            synchronize=lambda: self.asked.append(f"the host waits for {name}"),
        )

    def _event(self) -> SimpleNamespace:
        self.events += 1
        name = f"event {self.events}"
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.asked.append(f"{name} in {stream.name}"),
            synchronize=lambda: self.asked.append(f"the host waits for {name}"),
        )

    @contextmanager
    def _within(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    return Streams(monkeypatch)


def test_memory_is_locked_and_released(storage, monkeypatch):
    cuda, block = Cuda(), np.zeros(4096, np.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    storage.lock(block)()
    assert cuda.asked == [("lock", block.ctypes.data, 4096, 0), ("let go", block.ctypes.data)]


def test_failure_to_lock_memory_is_logged(storage, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cuda(fails=2))
    assert storage.lock(np.zeros(4 << 20, np.uint8)) is None
    assert "4 MiB of host memory cannot be locked" in caplog.text


def test_nothing_is_locked_without_cuda():
    storage = DeviceStorage([LayerShape(2, 8)], torch.bfloat16, 32, torch.device("cpu"))
    assert storage.lock(np.zeros(4096, np.uint8)) is None


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("first", [0, 3])
def test_slab_in_locked_memory_is_copied_directly(storage, monkeypatch, locked, first):
    """If it is one block without scales; all else goes through memory that PyTorch has locked."""
    through = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: locked)
    monkeypatch.setattr(
        storage, "staging", lambda layer, tokens: through.append(tokens) or [torch.empty(2, 2, tokens, 8).bfloat16()]
    )
    slab = np.random.default_rng(0).integers(0, 256, (2, 2, 10, 16), np.uint8)
    storage.write_slab(0, [SlotRange(20, 4), SlotRange(5, 6 - first)], slab[:, :, first:])
    assert through == ([] if locked and not first else [10 - first])
    for which, memory in enumerate((storage.keys[0], storage.values[0])):
        rows = memory.view(torch.uint8).numpy()
        found = np.concatenate([rows[:, 20:24], rows[:, 5 : 11 - first]], axis=1)
        assert np.array_equal(found, slab[which, :, first:])


@pytest.mark.parametrize("locked", [True, False])
def test_computation_waits_for_the_layers_it_reads(storage, streams, monkeypatch, locked):
    """Copies start once, after the earlier computation, and the host waits after all of them. In between the two
    streams meet at one event a layer. Memory that is not locked makes the host wait before it is used again.
    """
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: locked)
    monkeypatch.setattr(storage, "staging", lambda layer, tokens: [torch.empty(2, 2, tokens, 8).bfloat16()])
    slab = np.zeros((2, 2, 4, 16), np.uint8)
    with storage.beside():
        first = storage.put_slab(0, [SlotRange(0, 4)], slab)
        second = storage.put_slab(0, [SlotRange(4, 4)], slab)
        first()
        second()
    assert streams.asked == [
        "copying waits for computing",
        "event 1 in copying",
        *([] if locked else ["the host waits for event 1"]),
        "event 2 in copying",
        *([] if locked else ["the host waits for event 2"]),
        "computing waits for event 1",
        "computing waits for event 2",
        "the host waits for copying",
    ]


def test_failed_copy_leaves_no_copy_running(storage, streams):
    with pytest.raises(AssertionError, match="one token for each slot"), storage.beside():
        storage.put_slab(0, [SlotRange(0, 4)], np.zeros((2, 2, 3, 16), np.uint8))
    assert streams.asked[-1] == "the host waits for copying"
