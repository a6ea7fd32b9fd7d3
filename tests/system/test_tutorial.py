"""docs/tutorial/first-schema.md works: the test writes its files, runs its commands, and compares their output.

Answers, times and counts of tokens depend on the model in the package and are left out of the comparison.
"""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from inlay.cli.main import main
from inlay.pml import Prompt, Schema, resolve
from tests.pages import DOCS, blocks

pytestmark = pytest.mark.long

BLOCKS = blocks(DOCS / "tutorial/first-schema.md")
TABLE = "reuse, positions"


def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    said = ""
    for block in BLOCKS:
        if block.language == "sh":
            said = run(block.text, capfd)
        elif block.language == "text":
            assert form(said) == form(block.text), block
        elif block.language == "python":
            exec(compile(block.text, "prompt.py", "exec", dont_inherit=True), {"__name__": "__main__"})
            counts = [int(count) for count in re.findall(r"cached_tokens=(\d+)", capfd.readouterr().out)]
            assert len(counts) == 2
            assert min(counts) > 0
        else:
            Path(block.note).write_text(block.text, encoding="utf-8")
            if block.note != "wrong.xml":
                check(Path(block.note))


def test_every_block_is_a_file_or_a_command_with_output() -> None:
    for block in BLOCKS:
        assert block.language in ("sh", "text", "python") or (block.language == "xml" and block.note), block
        assert block.language != "sh" or (block.text.startswith("inlay ") and block.text.count("\n") == 1), block
    for block, following in pairwise(BLOCKS):
        assert (block.language == "sh") == (following.language == "text"), block
    commands = [block.text for block in BLOCKS if block.language == "sh"]
    assert sum(command.startswith("inlay run ") for command in commands) >= 5
    assert any("--compare" in command for command in commands)


def check(file: Path) -> None:
    """A schema is right, and a prompt fits the schema so far; raises PMLError."""
    schema = Schema.from_file("guide.xml")
    if file.name != "guide.xml":
        resolve(schema, Prompt.from_file(file))


def run(command: str, capfd: pytest.CaptureFixture[str]) -> str:
    """The output of a command, or its errors if it fails."""
    capfd.readouterr()
    status = main(shlex.split(command)[1:])
    out, err = capfd.readouterr()
    if status:
        return err[max(err.rfind("inlay: "), 0) :]  # after the output of loading the model
    if TABLE in out:
        rows = re.findall(r"^(\w+), \w+ +([\d,]+) ", out, re.MULTILINE)
        cached = {policy: int(count.replace(",", "")) for policy, count in rows}
        assert cached.pop("modular") > 0, out
        assert cached == ({"off": 0} if "--compare" in command else {}), out
    return out


def form(said: str) -> str:
    """The output without its model-dependent parts: errors unchanged, tables and trees without their numbers."""
    if TABLE in said:
        said = said[said.index(TABLE) :]
    elif "tokens" not in said:
        return said
    return " ".join(re.sub(r"[\d,.]*\d", "0", re.sub("[│├└─]", "", said)).split())


def test_form() -> None:
    assert form("x.xml:1:2: wrong\n") == "x.xml:1:2: wrong\n"
    assert form(f"glass\n\n{TABLE}  cached\nanchored, packed   1,046  29.1 ms\n") == form(
        f"no\nidea\n{TABLE} cached\nanchored, packed 7 2 ms"
    )
    assert form("the argument is 16 tokens long\n") == form("the argument is 9 tokens long\n")
    assert form("├── text  7 tokens, positions 2…8\n") != form("├── union  7 tokens, positions 2…8\n")
