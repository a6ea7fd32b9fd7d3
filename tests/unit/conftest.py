"""Unit tests need no model and no process. If they run alone, the import of model code fails."""

from __future__ import annotations

import importlib.abc
import subprocess
import sys
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

import pytest

_MOVE = "move its file to tests/model, tests/server or tests/system"


class NoModels(importlib.abc.MetaPathFinder):
    """Refuses the import of model code, so that a file that needs it fails."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name == "transformers.modeling_utils":
            raise ImportError(f"a unit test needs a model; {_MOVE}")
        return None


def pytest_configure(config: pytest.Config) -> None:
    """See the module. Pytest calls this at the start for the folders that its command line names."""
    if config.args and all("tests/unit" in str(each).replace("\\", "/") for each in config.args):
        sys.meta_path.insert(0, NoModels())


def _no_process(*_: Any, **__: Any) -> NoReturn:
    pytest.fail(f"a unit test starts a process; {_MOVE}")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit test starts no process."""
    monkeypatch.setattr(subprocess, "Popen", _no_process)
