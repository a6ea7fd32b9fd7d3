"""The output of a command while it loads: every step on a terminal; elsewhere a line every ten seconds."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time

import pytest

from inlay.cli import output
from inlay.cli.output import LoadingLines, told_loading
from tests.pages import DOCS


@pytest.mark.parametrize("terminal", [True, False])
def test_steps_are_printed_only_on_a_terminal(terminal):
    said: list[str] = []
    lines = LoadingLines(said.append, terminal=terminal, every_s=60)
    for what, done in (("the libraries", 0), ("the weights", 1), ("the weights", 2)):
        lines.report(what, done, 2 if done else 0)
    lines.end()
    assert said == (["loading the libraries", "loading the weights"] if terminal else [])


def test_long_step_is_reported_again():
    said: list[str] = []
    twice = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            twice.set()

    lines = LoadingLines(say, terminal=False, every_s=0.01)
    lines.report("the weights", 3 * 2**29, 3 * 2**30)
    assert twice.wait(30)
    lines.end()
    assert said[1] == "still loading the weights, 1.5 of 3.0 GiB (0 s so far)"


def test_failed_loading_prints_nothing(capsys, monkeypatch):
    monkeypatch.setattr(output, "EVERY_S", 60.0)
    with pytest.raises(ValueError, match="no model"), told_loading("the model"):
        raise ValueError("no model")
    assert capsys.readouterr() == ("", "")


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "serve"])
def test_commands_print_their_steps_on_a_terminal(command):
    records = DOCS.parent / "examples" / "docs"
    options = {
        "run": [str(records / "docs.xml"), "--prompt", str(records / "prompt.xml"), "--max-tokens", "1"],
        "serve": ["demo", "--port", "0"],
    }
    main, terminal = pty.openpty()
    arguments = [sys.executable, "-m", "inlay", command, *options[command], "--store", "off"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=terminal, text=True) as process:
        os.close(terminal)
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        said = b""
        try:
            while more := os.read(main, 2**16):
                said += more
        except OSError:  # the other end is closed
            pass
        os.close(main)
    steps = [said.find(f"loading the {what}".encode()) for what in ("libraries", "model")]
    assert -1 < steps[0] < steps[1], said


def test_steps_in_silence_count_together(monkeypatch):
    """Two steps of six seconds each are no silence of twelve."""
    said: list[str] = []
    told = threading.Event()
    monkeypatch.setattr(output, "last_line", time.monotonic() - 598)
    lines = LoadingLines(lambda line: (said.append(line), told.set()), terminal=False, every_s=600)
    lines.report("the model")
    assert told.wait(30)
    lines.end()
    assert said[0].startswith("still loading the model (")
