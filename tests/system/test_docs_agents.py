"""docs/guides/agents.md: its example saves what it says, its command runs, and its table has every option."""

from __future__ import annotations

import inspect
import json

from inlay.cli import main as command_line
from inlay.cli.lint_log import lint_log
from tests.model.api.tool_templates import tool_model
from tests.pages import DOCS, blocks, rows

PAGE = DOCS / "guides" / "agents.md"


def tool(name: str) -> dict:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": name, "description": f"Use it to {name} a file of the folder.", "parameters": parameters}
    return {"type": "function", "function": function}


def test_example_computes_only_the_new_tool(capsys):
    (example,) = (block for block in blocks(PAGE) if block.language == "python")
    tools = {name: tool(name) for name in ("read", "write", "search")}
    exec(compile(example.text, str(example), "exec"), {"MODEL": tool_model("qwen"), **tools})
    reused, computed = map(int, capsys.readouterr().out.split())
    assert reused > 2 * computed


def test_its_lint_command_finds_a_date(tmp_path, monkeypatch, capsys):
    (command,) = (block for block in blocks(PAGE) if block.text.startswith("inlay lint"))
    rules = "Answer from the files alone, and name the file that you answer from. " * 3
    log = [{"messages": [{"role": "user", "content": f"It is {day} May. {rules}"}]} for day in (3, 4)]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    monkeypatch.chdir(tmp_path)
    assert command_line.main(command.text.split()[1:]) == 0
    assert "messages[0]" in capsys.readouterr().out


def test_its_table_has_every_option():
    named = {row[0].strip("`").split()[0] for row in rows(PAGE, "option", "")}
    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(lint_log).parameters}
    assert named == {option.replace("--as-json", "--json") for option in options}
