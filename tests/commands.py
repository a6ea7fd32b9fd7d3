"""Commands that run in the process of a test."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Run ``inlay`` with these arguments. Returns its exit status, its output and its messages.

    Args:
        capsys: pytest's fixture.
    """
    from inlay.cli.main import main

    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def run_file(file: Path | str, *arguments: str) -> dict[str, Any]:
    """Run a file of Python as a program. Returns its names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(file), *arguments])
        return runpy.run_path(str(file), run_name="__main__")


def pipe(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    """Make this text the standard input."""
    data = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)), encoding="utf-8"))
