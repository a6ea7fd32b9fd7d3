"""``inlay chat`` at a pseudo-terminal: keys, streaming, and Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>()][A-B0]?)")
CTRL_C, CTRL_D, ESCAPE_ENTER = "\x03", "\x04", "\x1b\r"


class Terminal:
    """The other end of a terminal, with everything that the session has written."""

    def __init__(self, end: int) -> None:
        self._end = end
        self.text = ""

    def send(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def type(self, keys: str) -> None:
        """Send keys once the session asks for a line."""
        self.until(">")
        self.send(keys)

    def until(self, text: str) -> str:
        """Read until a text appears; returns the output since the last call up to its end."""
        self._read(lambda: text in self.text, text)
        before, _, self.text = self.text.partition(text)
        return before + text

    def until_more(self, characters: int) -> None:
        """Read until so many characters have come since the last call."""
        self._read(lambda: len(self.text.strip()) >= characters, f"{characters} characters")

    def _read(self, enough: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 240.0
        while not enough():
            assert time.monotonic() < deadline, f"no {what!r} in {self.text!r}"
            if select.select([self._end], [], [], 1.0)[0]:
                self.text += _ESCAPES.sub("", os.read(self._end, 65536).decode(errors="replace"))


@contextmanager
def session(*arguments: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    words = [sys.executable, "-m", "inlay", "chat", *arguments, "--store", "off"]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_session_adds_two_files_drops_one_and_explains() -> None:
    with session("demo") as (terminal, process):
        terminal.until("Ctrl-D ends the session.")
        terminal.type("/add examples/folder/documents/bravel.txt examples/folder/documents/monar.txt\r")
        terminal.until("added bravel.txt, monar.txt")
        terminal.type("Who is the mayor\\\rof Monar?\r")
        assert "Pavel Brinos" in terminal.until("cached)")
        terminal.type("/drop bravel.txt\r")
        terminal.until("the next question sees monar.txt")
        terminal.type(f"Who is the mayor{ESCAPE_ENTER}of Monar?\r")
        assert "Pavel Brinos" in terminal.until("cached)")
        terminal.type("/explain\r")
        tokens, cached = re.search(r"monar.txt +(\d+) +(\d+)  pool", terminal.until("; reuse modular")).groups()
        assert tokens == cached
        terminal.type("/wrong\r")
        terminal.until("/wrong is not a command")
        terminal.type(CTRL_D)
        assert process.wait(timeout=120) == 0


def test_ctrl_c_ends_the_answer_and_not_the_session() -> None:
    with session("random:tiny", "--max-tokens", "100000") as (terminal, process):
        terminal.until("Ctrl-D ends the session.")
        terminal.type(f"half a question{CTRL_C}")
        terminal.until("\r\n")  # the line is discarded
        terminal.type("Well?\r")
        terminal.until("\r\n")
        terminal.until_more(5)
        terminal.send(CTRL_C)
        terminal.until("stopped)")
        terminal.type("/stats\r")
        terminal.until("1 question,")
        terminal.type("/quit\r")
        assert process.wait(timeout=120) == 0
