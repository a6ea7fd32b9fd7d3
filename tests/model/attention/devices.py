"""A simulated device: PyTorch's attention over device memory that is really the host's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inlay.attention.storage import LayerShape
from inlay.attention.torch import TorchBackend
from tests.unit.kv.offload.watched_storage import WatchedDevice


class OnDevice(TorchBackend):
    """PyTorch's attention, over pools as devices have them."""

    def make_pool(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> WatchedDevice:
        return WatchedDevice(layers, dtype, slots, self.device)


def pretend(monkeypatch) -> None:
    """Make the LLMs of a test compute on such a device, regardless of the backend that they name."""
    monkeypatch.setattr("inlay.client.local.get_backend", lambda name, device: OnDevice())
