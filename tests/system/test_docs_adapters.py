"""docs/guides/adapters.md: its Python and its commands run, and its table names what configurations may say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from inlay.cli.main import main
from inlay.models.load import load_model
from inlay.models.lora.config import HONOURED
from tests.adapters import write_adapter
from tests.pages import DOCS, blocks, rows

PAGE = blocks(DOCS / "guides/adapters.md")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the project's examples, and the page's adapters."""
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    monkeypatch.chdir(tmp_path)
    demo = load_model("demo", weights="stock")
    for seed, name in enumerate(("sql", "law")):
        write_adapter(tmp_path / "adapters" / name, demo, seed=seed)


def test_python_example_runs():
    (block,) = [block for block in PAGE if block.language == "python"]
    exec(block.text, names := {})
    expected = names["llm"].distributions(names["prompts"], [[5]] * 3, adapter=["sql", "law", None])
    assert len({float(each[0, 5]) for each in expected}) == 3


def test_its_commands_run(capsys):
    commands = [line for block in PAGE if block.language == "sh" for line in block.text.splitlines()]
    assert [shlex.split(line)[1] for line in commands] == ["run", "memory", "serve"]
    for line in commands[:2]:
        assert main(shlex.split(line)[1:]) == 0
        out = capsys.readouterr().out
        assert "sql" in out
        assert "law" in out
    # A server does not exit, so a conflicting option makes it fail: the error shows that the others were parsed.
    assert main([*shlex.split(commands[2])[1:], "--adapter", "law=x"]) != 0
    assert "two adapters are called 'law'" in capsys.readouterr().err


def test_its_request_names_an_adapter():
    (block,) = [block for block in PAGE if block.language == "json"]
    assert json.loads(block.text)["model"] == "sql"


def test_every_supported_field_has_a_row():
    named = {
        name
        for row in rows(DOCS / "guides/adapters.md", "in `adapter_config.json`", "")
        for name in re.findall(r"`(\w+)`", row[0])
    }
    assert named | {"peft_type", "init_lora_weights"} == set(HONOURED)
