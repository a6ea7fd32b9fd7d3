"""Attention backends by name, and the default backend for each kind of device."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

from inlay.attention import cpu
from inlay.attention.backend import Backend
from inlay.attention.cpu import CpuBackend
from inlay.attention.reference import ReferenceBackend
from inlay.attention.torch import TorchBackend
from inlay.errors import ParameterError

logger = logging.getLogger(__name__)

NAMES = ("cpu", "reference", "torch", "triton")
_CPU = torch.device("cpu")


def get_backend(name: str = "auto", device: torch.device = _CPU) -> Backend:
    """Return the backend of a name for a device.

    Args:
        name: "cpu" (the compiled kernel), "torch", "triton", "reference" or "auto". "auto" means "triton" on a GPU and
            "cpu" on a CPU. Where that is not installed, it means "torch", and a warning is logged once.
        device: The device to compute on.

    Raises:
        ParameterError: If the backend is unknown, not installed, or does not support the device.
    """
    if name == "auto":
        name = _on_cpu() if device.type == "cpu" else on_device()
    if name not in NAMES:
        known = ", ".join(["auto", *NAMES])
        raise ParameterError(
            f"attention backend '{name}' does not exist; use one of {known}", code="parameter.unknown_choice"
        )
    if name == "triton":
        return _triton(device)
    if name == "torch":
        return TorchBackend(device)
    if device.type != "cpu":
        raise ParameterError(
            f"attention backend '{name}' computes on the CPU, and the device is {device}; use 'auto', or device 'cpu'",
            code="parameter.unavailable_backend",
        )
    return CpuBackend() if name == "cpu" else ReferenceBackend()


def _on_cpu() -> str:
    return "cpu" if cpu.available() else fallback()


@cache
def fallback() -> str:
    """Return the backend that "auto" uses on a CPU without the compiled kernel. Logs a warning once."""
    logger.warning(
        "inlay was installed without its compiled kernel: attention runs in PyTorch, right but slower; "
        "reinstall where a C++17 compiler is found"
    )
    return "torch"


@cache
def on_device() -> str:
    """Return the backend that "auto" uses on a GPU. Logs the choice once."""
    if has_triton():
        logger.info("attention runs on the GPU in Triton's kernels")
        return "triton"
    logger.warning(
        "Triton is not installed: attention on the GPU runs in PyTorch, right but slower; "
        "install it with pip install 'inlay-llm[gpu]'"
    )
    return "torch"


def has_triton() -> bool:
    """Return True if Triton is installed."""
    return find_spec("triton") is not None


def _triton(device: torch.device) -> Backend:
    if not has_triton():
        raise ParameterError(
            "attention backend 'triton' needs Triton, which is not installed; pip install 'inlay-llm[gpu]', or use "
            "'auto'",
            code="parameter.unavailable_backend",
        )
    # imported late, because it takes a while and few processes need it
    from inlay.attention.triton.backend import TritonBackend

    return TritonBackend(device)
