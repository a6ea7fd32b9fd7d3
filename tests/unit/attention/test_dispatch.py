"""Which backend "auto" is, with the compiled kernel and without it."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys

import pytest

import inlay.attention.kernel
from inlay.attention import cpu
from inlay.attention import registry as dispatch
from inlay.attention.cpu import CpuBackend, instruction_sets
from inlay.attention.registry import get_backend
from inlay.errors import ParameterError
from tests.raising import raises

WARNING = (
    "inlay was installed without its compiled kernel: attention runs in PyTorch, right but slower; "
    "reinstall where a C++17 compiler is found"
)


@pytest.fixture
def no_kernel(monkeypatch):
    """As where no compiler was found."""
    monkeypatch.setattr(cpu, "kernel", None)
    dispatch.fallback.cache_clear()
    yield
    dispatch.fallback.cache_clear()


@pytest.mark.skipif(not cpu.available(), reason="installed without the compiled kernel")
def test_auto_uses_the_compiled_kernel_without_logging(caplog):
    assert get_backend("auto").name == "cpu"
    assert not caplog.records


def test_auto_without_the_kernel_uses_pytorch_and_logs_it_once(no_kernel, caplog):
    with caplog.at_level(logging.WARNING):
        assert [get_backend("auto").name for _ in range(3)] == ["torch"] * 3
    assert [record.getMessage() for record in caplog.records] == [WARNING]
    assert instruction_sets() == []


def test_missing_kernel_is_rejected(no_kernel):
    with raises("parameter.unavailable_backend", ParameterError, names="'torch'"):
        get_backend("cpu")


def test_missing_extension_is_not_an_error(monkeypatch):
    """kernel.py as it is imported where inlay/_kernel was not built."""
    monkeypatch.setitem(sys.modules, "inlay._kernel", None)  # importing it now raises ImportError
    monkeypatch.delattr("inlay._kernel", raising=False)
    spec = importlib.util.spec_from_file_location("without_kernel", inspect.getsourcefile(inlay.attention.kernel))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.kernel is None


@pytest.mark.skipif(not cpu.available(), reason="installed without the compiled kernel")
def test_unsupported_instruction_set_is_rejected():
    known = ", ".join(instruction_sets())
    with raises("parameter.unavailable_backend", ParameterError, names=known):
        CpuBackend("mmx")
    assert instruction_sets()[-1] == "portable"
