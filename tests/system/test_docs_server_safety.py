"""docs/guides/operate-safely.md: its commands run, and its tables list what there is."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import inlay.server
from inlay.cli.main import main
from inlay.server.limits import Limits
from inlay.server.tenants import read_keys
from tests.pages import DOCS, blocks, rows

PAGE = DOCS / "guides/operate-safely.md"
SOURCES = ("body", "tenants", "limits", "app")
COMMANDS = [line for block in blocks(PAGE) if block.language == "sh" for line in block.text.splitlines()]


def test_the_commands_run(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ran = set()
    for command in COMMANDS:
        program, *words = shlex.split(command)
        assert program == "inlay" or (program == "python" and (DOCS.parent / words[0]).exists())
        if words[0] != "keys":
            continue
        if words[1] == "revoke":
            words[2] = next(iter(read_keys(Path("keys.json"))[0].keys))
        assert main(words) == 0, command
        ran.add(words[1])
    assert ran == {"add", "list", "limit", "revoke"}
    keys, _ = read_keys(tmp_path / "keys.json")
    assert keys.tenants["acme"].limits == Limits(max_concurrent=8, max_reuse="exact")
    assert [key.admin for key in keys.keys.values()] == [True]
    assert capsys.readouterr().out


def test_limits_are_listed():
    listed = [name.strip("`") for name, *_ in rows(PAGE, "limit", "bounds", "beyond it")]
    assert listed == [field.name for field in fields(Limits)]


def test_error_codes_are_listed():
    listed = {code.strip("`") for _, code, _ in rows(PAGE, "status", "code", "what is refused")}
    folder = Path(inlay.server.__file__).parent
    raised = {code for name in SOURCES for code in re.findall(r'code="(\w+)"', (folder / f"{name}.py").read_text())}
    assert listed == raised - {"not_ready"}  # which docs/reference/http.md has
