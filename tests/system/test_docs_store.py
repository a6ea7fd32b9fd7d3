"""docs/guides/cache-tiers.md: its example runs, prints what the page says, and its tables name what there is."""

from __future__ import annotations

import re
import shlex

from inlay.cli.cache import app
from inlay.cli.main import main
from inlay.config import EngineConfig
from inlay.types import MISS_REASONS
from tests.pages import DOCS, blocks

PAGE = DOCS / "guides/cache-tiers.md"


def test_second_start_encodes_nothing(tmp_path, capsys):
    (block,) = [block for block in blocks(PAGE) if block.language == "python" and not block.note]
    assert "/tmp/inlay-store" in block.text
    exec(block.text.replace("/tmp/inlay-store", str(tmp_path)), {})
    (first, none), (zero, read) = [tuple(map(int, line.split())) for line in capsys.readouterr().out.splitlines()]
    assert (none, zero) == (0, 0)
    assert first >= read > 0  # the primer is encoded, too, and not read again


def test_pins_and_evictions(capsys):
    (block,) = [block for block in blocks(PAGE) if block.note == "pins"]
    exec(block.text, {})
    taken, tokens = map(int, capsys.readouterr().out.split())
    assert taken > 0 < tokens


def test_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(DOCS.parent)
    monkeypatch.setenv("INLAY_STORE", str(tmp_path))
    (block,) = [block for block in blocks(PAGE) if block.language == "sh"]
    commands = [shlex.split(line) for line in block.text.splitlines()]
    assert len(commands) == 4
    for name, *arguments in commands:
        assert name == "inlay"
        assert main(arguments) == 0
    assert "segments are whole, 0 were damaged" in capsys.readouterr().out


def test_every_command_has_a_row():
    rows = re.findall(r"^\| (`[a-z].*?) \|", PAGE.read_text().split("| command | |")[1], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([a-z]+)", row)]
    assert sorted(named) == sorted(command.name or command.callback.__name__ for command in app.registered_commands)


def test_every_setting_has_a_row():
    rows = re.findall(r"^\| `(store\w*)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [name for name in EngineConfig.__dataclass_fields__ if name.startswith("store")]


def test_every_miss_reason_is_listed():
    said = PAGE.read_text().split("## Why something is missing")[1].split("\n## ")[0]
    assert re.findall(r"`((?:other )?[a-z]+(?: seen)?)`", said.split("| reason | |")[1]) == [
        *MISS_REASONS[:2],
        *MISS_REASONS[5:],
        *MISS_REASONS[2:5],
    ]
