"""Attention backends by name."""

from __future__ import annotations

import logging
from functools import cache

from inlay.attention import cpu
from inlay.attention.backend import Backend
from inlay.attention.cpu import CpuBackend
from inlay.attention.reference import ReferenceBackend
from inlay.attention.torch import TorchBackend
from inlay.errors import ParameterError

logger = logging.getLogger(__name__)

_BACKENDS: dict[str, type[Backend]] = {"cpu": CpuBackend, "torch": TorchBackend, "reference": ReferenceBackend}


def get_backend(name: str = "auto") -> Backend:
    """The backend of that name: "cpu" (the compiled kernel), "torch", "reference", or "auto". Raises ParameterError.

    "auto" is "cpu" where the kernel was built, else "torch", and says so once.
    """
    if name == "auto":
        name = "cpu" if cpu.available() else fallback()
    if name not in _BACKENDS:
        known = ", ".join(["auto", *sorted(_BACKENDS)])
        raise ParameterError(f"attention backend '{name}' does not exist; use one of {known}")
    return _BACKENDS[name]()


@cache
def fallback() -> str:
    """What "auto" is without the compiled kernel; says so once."""
    logger.warning(
        "inlay was installed without its compiled kernel: attention runs in PyTorch, right but slower; "
        "reinstall where a C++17 compiler is found"
    )
    return "torch"
