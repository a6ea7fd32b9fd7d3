"""Stand-ins for other engines' packages."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

STAND_INS = Path(__file__).with_name("stand_ins")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages ``vllm`` and ``llama_cpp`` for this process and its children."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def llama_package(monkeypatch: pytest.MonkeyPatch, stand_ins: None) -> ModuleType:
    """The stand-in for llama.cpp's package, in this process."""
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    return importlib.import_module("llama_cpp")
