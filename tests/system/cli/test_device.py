"""--device, where commands take it."""

from __future__ import annotations

import json

import pytest
import torch

from inlay.cli.options import told_device
from tests.commands import run

RUN = ("run", "examples/docs/docs.xml", "--prompt", "examples/docs/prompt.xml", "--max-tokens", "2", "--json")


def test_cpu_is_not_announced(capsys):
    status, out, err = run(capsys, *RUN, "--device", "cpu")
    assert status == 0
    assert json.loads(out)["cached_tokens"] > 0
    assert "computing on" not in err


def test_gpu_is_announced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert told_device("cuda:0") == "computing on cuda:0, NVIDIA H200"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("cuda", "device is 'cuda', and the PyTorch of this install"),
        ("gpu", "device is 'gpu'; use auto, cpu, cuda, or cuda:1 for the second GPU"),
    ],
)
def test_unavailable_device_is_rejected(capsys, device, sentence):
    status, _, err = run(capsys, *RUN, "--device", device)
    assert status != 0
    assert sentence in err
