"""Attention backends by name."""

from __future__ import annotations

from inlay.attention.contract import Backend
from inlay.attention.cpu import CpuBackend
from inlay.attention.reference import ReferenceBackend
from inlay.errors import ParameterError

_BACKENDS: dict[str, type[Backend]] = {"cpu": CpuBackend, "reference": ReferenceBackend}


def get_backend(name: str) -> Backend:
    """The backend of that name: "cpu" or "reference". Raises ParameterError."""
    if name not in _BACKENDS:
        raise ParameterError(f"attention backend '{name}' does not exist; use one of {', '.join(sorted(_BACKENDS))}")
    return _BACKENDS[name]()
