"""docs/guides/talk-to-a-model.md: its session and commands print the shown output, and its table is complete."""

from __future__ import annotations

import re
import shlex

import pytest

from inlay.cli.chat_session import HELP
from inlay.cli.main import main
from tests.commands import pipe
from tests.pages import DOCS, Block, blocks, rows

pytestmark = pytest.mark.long

PAGE = DOCS / "guides/talk-to-a-model.md"
BLOCKS = blocks(PAGE)
(SESSION,) = [block for block in BLOCKS if block.note == "session"]
_TIMES = re.compile(r"[\d.,]+ (s to the first token|tokens/s)")


def test_the_recorded_session(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(DOCS.parent)
    typed = [line[2:] for line in SESSION.text.splitlines() if line.startswith("> ")]
    shown = [line for line in SESSION.text.splitlines() if not line.startswith("> ")]
    pipe(monkeypatch, "".join(f"{line}\n" for line in typed))
    assert main(["chat", "demo", "--store", "off"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [line for line in shown if not line.startswith("(")]
    assert notes(err) == notes(SESSION.text)
    assert len(notes(err)) == 3


def notes(text: str) -> list[str]:
    """The lines about answers, without times."""
    lines = [_TIMES.sub(r"# \1", line) for line in text.splitlines() if line.startswith("(")]
    return [line.replace("# tokens/s, ", "") for line in lines]  # an answer of one token has no speed


@pytest.mark.parametrize("block", [block for block in BLOCKS if "inlay run" in block.text], ids=str)
def test_one_question_prints_the_shown_answer(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(DOCS.parent)
    assert main([*shlex.split(block.text)[1:], "--store", "off"]) == 0
    assert capsys.readouterr().out == BLOCKS[BLOCKS.index(block) + 1].text


def test_the_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(DOCS.parent)
    (block,) = [block for block in BLOCKS if "printf" in block.text and block.language == "sh"]
    printed, _, command = block.text.partition(" | ")
    pipe(monkeypatch, shlex.split(printed)[1].replace("\\n", "\n"))
    assert main([*shlex.split(command)[1:], "--store", "off"]) == 0
    assert capsys.readouterr().out.splitlines() == ["added bravel.txt", "Rosa Tilen"]


def test_every_command_has_a_row() -> None:
    assert rows(PAGE, "command", "effect") == [(f"`{usage}`", text) for usage, text in HELP.items()]
