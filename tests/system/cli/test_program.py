"""``inlay program show``: the schema of a program in a file, and one sentence for everything that is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inlay.pml import Schema
from tests.commands import run

PROGRAMS = """\
from __future__ import annotations

import sys
from dataclasses import dataclass

from inlay.pml.program import program
from texts_beside import RULES


@dataclass
class Tool:
    name: str


HAMMER = Tool("hammer")


@program
def rules(strict: bool):
    yield RULES
    if strict:
        yield f"Use {HAMMER.name} never.\\n"


@program
def other():
    yield "Other.\\n"


number = 3

if __name__ == "__main__":
    sys.exit("this is no script here")
"""
TEXTS = 'RULES = "Be kind.\\n"\n'
PML = """\
<schema name="rules">
  Be kind.
  <module name="strict">
    Use hammer never.
  </module>
</schema>
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "not a package"
    folder.mkdir()
    (folder / "programs.py").write_text(PROGRAMS)
    (folder / "texts_beside.py").write_text(TEXTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "texts_beside", raising=False)
    return tmp_path


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return run(capsys, "program", "show", *arguments)


def test_program_show_prints_pml(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = list(sys.path)
    assert show(capsys, "not a package/programs.py:rules") == (0, PML, "")
    assert sys.path == path
    assert not list(files.rglob("programs*.pyc"))


def test_program_show_prints_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = show(capsys, "not a package/programs.py:rules", "--json")
    assert status == 0
    assert Schema.from_json(json.loads(out)).to_pml() == PML


WRONG = {
    "none.py:rules": "none.py: no such file; check the path",
    "not a package:rules": "not a package: is a folder; name a file in it",
    "none.py": "'none.py' names no program; write FILE:NAME, a Python file and the name of a program in it",
    "rules": "'rules' names no program; write FILE:NAME, a Python file and the name of a program in it",
    "not a package/programs.py": "'not a package/programs.py' names no program; write FILE:NAME, a Python file and the "
    "name of a program in it: its programs are rules, other",
    "not a package/programs.py:rule": "not a package/programs.py has no 'rule'; its programs are rules, other",
    "not a package/programs.py:number": "not a package/programs.py:number is of type int, not a program; "
    "its programs are rules, other",
    "empty.py:p": "empty.py has no 'p'; it has no program: write @inlay.program over a function",
    "fails.py:p": "fails.py:2: ZeroDivisionError: division by zero, while the file is loaded; correct it",
    "silent.py:p": "silent.py:1: KeyError, while the file is loaded; correct it",
    "syntax.py:p": "syntax.py:2: SyntaxError: '(' was never closed, while the file is loaded; correct it",
    "imports.py:p": "imports.py:1: ModuleNotFoundError: No module named 'no_such_module', while the file is loaded; "
    "correct it",
    "binary.py:p": "binary.py: SyntaxError: source code string cannot contain null bytes, while the file is loaded; "
    "correct it",
    "exits.py:p": "exits.py:1: the file exits while it is loaded; put that under if __name__ == '__main__':",
    "refused.py:p": "refused.py:4:5: a program cannot have while, which runs nobody knows how often; "
    "write for … in over a constant",
}
BROKEN = {
    "empty.py": b"",
    "fails.py": b"\n1 / 0\n",
    "silent.py": b"raise KeyError\n",
    "syntax.py": b"\nprint(\n",
    "imports.py": b"import no_such_module\n",
    "binary.py": b"a\x00b",
    "exits.py": b"raise SystemExit(0)\n",
    "refused.py": b"from inlay.pml.program import program\n@program\ndef p(a: bool):\n    while a:\n        yield 1\n",
}


@pytest.mark.parametrize(("argument", "sentence"), WRONG.items())
def test_errors_are_one_sentence(files: Path, capsys: pytest.CaptureFixture[str], argument: str, sentence: str) -> None:
    for name, content in BROKEN.items():
        (files / name).write_bytes(content)
    before = sorted(files.iterdir())
    status, out, err = show(capsys, argument)
    assert (status, out, err) == (2, "", f"inlay: {sentence}\n")
    assert sorted(files.iterdir()) == before


def test_program_show_works_without_torch(files: Path) -> None:
    code = (
        "import sys; from inlay.cli.main import main; "
        "main(['program', 'show', 'not a package/programs.py:rules']); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=files, check=True)
    assert result.stdout == f"{PML}False\n"
