"""The ``inlay`` command before its modules are imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_interrupted_import_ends_in_one_line(tmp_path: Path):
    """A module of the command line that is interrupted stands in for Ctrl-C at that moment."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    command = [sys.executable, "-m", "inlay", "--version"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "inlay: interrupted\n")


def test_console_script_starts_as_the_module_does():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"inlay": "inlay.__main__:entry"}
