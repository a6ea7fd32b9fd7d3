"""The lab's tests use the settings of the wheel's tests."""

from __future__ import annotations

import pytest

from tests.conftest import any_model, clock, patient, pytest_collection_finish, rotary_model, tiny

__all__ = ["any_model", "clock", "patient", "pytest_collection_finish", "rotary_model"]


@pytest.fixture
def quick_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model in memory replaces any named model."""
    for module in ("inlay.models.load", "inlay_lab.bench.stock", "inlay_lab.bench.throughput.measure"):
        monkeypatch.setattr(f"{module}.load_model", lambda *arguments, **keywords: tiny("llama"))
