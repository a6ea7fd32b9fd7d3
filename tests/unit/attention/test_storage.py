"""The memory of keys and values: how much a token takes, and that it is taken on first write."""

from __future__ import annotations

import numpy as np
import psutil
import torch

from inlay.attention.storage import KVStorage, LayerShape, bytes_per_token
from inlay.slots import SlotRange


def test_bytes_of_a_token():
    assert bytes_per_token([LayerShape(8, 128), LayerShape(1, 4)], torch.bfloat16) == 2 * 2 * (8 * 128 + 4)


def test_slots_can_be_written_as_ranges_and_numbers():
    storage = KVStorage([LayerShape(1, 2)], torch.bfloat16, 8)
    storage.write(0, SlotRange(2, 2), torch.ones(1, 2, 2), 2 * torch.ones(1, 2, 2))
    storage.write(0, np.array([7, 0]), torch.tensor([[[7.0, 7.0], [1.0, 0.0]]]), torch.zeros(1, 2, 2))
    assert storage.keys[0][0, :, 0].tolist() == [1, 0, 1, 1, 0, 0, 0, 7]
    assert storage.values[0][0, :, 0].tolist() == [0, 0, 2, 2, 0, 0, 0, 0]


def test_unwritten_memory_is_not_allocated():
    process = psutil.Process()
    before = process.memory_info().rss
    big = KVStorage([LayerShape(8, 128)] * 4, torch.bfloat16, 2**17)
    assert process.memory_info().rss - before < 2**27
    big.write(3, SlotRange(64, 1), torch.ones(8, 1, 128), torch.ones(8, 1, 128))
    assert big.keys[3][:, 64].float().sum() == 8 * 128
    assert big.keys[2][:, 64].float().sum() == 0
