"""``inlay lint --log``: the fields that break the cache, with their cost, for logs in OpenAI's and Anthropic's form."""

from __future__ import annotations

import json

import pytest

from inlay.cli import main as command_line

RULES = "Answer from the files alone. Name the file in each answer, and quote the line that you answer from. " * 2
QUESTION = {"role": "user", "content": "Which of the files is the largest one, and who has changed it last? " * 2}


def tool(name: str) -> dict:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"name": name, "description": f"Use it to {name} a file of the folder.", "parameters": parameters}


def openai(day: str, *names: str, question: dict = QUESTION) -> dict:
    tools = [{"type": "function", "function": tool(name)} for name in names]
    system = {"role": "system", "content": f"Today is {day}.\n{RULES}"}
    return {"model": "any", "messages": [system, question], **({"tools": tools} if tools else {})}


def anthropic(*blocks: str, tools: tuple[str, ...] = ()) -> dict:
    made = [{"name": name, "input_schema": tool(name)["parameters"], "description": "Does it."} for name in tools]
    system = [{"type": "text", "text": block} for block in blocks]
    more = {"tools": made} if tools else {}
    return {"model": "any", "max_tokens": 8, "system": system, "messages": [QUESTION], **more}


@pytest.fixture
def lint(tmp_path, capsys):
    def run(*rows: dict, options: tuple[str, ...] = (), status: int = 0) -> dict:
        file = tmp_path / "log.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert command_line.main(["lint", "--log", str(file), "--json", *options]) == status
        return json.loads(capsys.readouterr().out)

    return run


def breaks(report: dict) -> dict[str, str]:
    return {each["field"]: each["kind"] for each in report["breaks"]}


def test_date_in_the_system_text_is_reported(lint):
    report = lint(openai("3 May"), openai("4 May"), openai("5 May"))
    assert breaks(report) == {"messages[0]": "date or number"}
    (found,) = report["breaks"]
    assert found["requests"] == 2
    assert found["tokens"] == report["lost_tokens"] > 2 * len(RULES) // 8
    assert (found["seconds"], report["tokens_per_s"]) == (None, None)


def test_reordered_and_new_tools_are_reported(lint):
    report = lint(openai("3 May", "read", "write", "list"), openai("3 May", "write", "read", "list"))
    assert breaks(report) == {"tools": "tool set"}
    assert report["breaks"][0]["detail"] == "the same tools in another order"
    report = lint(openai("3 May", "read", "write"), openai("3 May", "new", "read", "write"))
    assert report["breaks"][0]["detail"] == "added new"


def test_anthropic_names_the_block(lint):
    report = lint(anthropic("Stable. " * 8, "cch=1234; ", RULES), anthropic("Stable. " * 8, "cch=5678; ", RULES))
    assert breaks(report) == {"system[1]": "date or number"}
    report = lint(anthropic(RULES, tools=("read", "write")), anthropic(RULES, tools=("read", "list", "write")))
    assert breaks(report) == {"tools": "tool set"}


def test_growing_conversation_breaks_no_cache(lint):
    first = openai("3 May", "read")
    longer = {**first, "messages": [*first["messages"], {"role": "assistant", "content": "One."}, QUESTION]}
    report = lint(first, longer, options=("--strict",))
    assert (report["breaks"], report["lost_tokens"]) == ([], 0)
    assert report["cached_tokens"] > 0


def test_strict_fails_if_a_field_breaks_the_cache(lint):
    assert lint(openai("3 May"), openai("4 May"), options=("--strict",), status=1)["breaks"]


def test_the_cost_in_seconds_follows_from_the_rate_of_the_model(lint):
    report = lint(openai("3 May"), openai("4 May"), options=("--model", "demo"))
    assert report["lost_seconds"] == pytest.approx(report["lost_tokens"] / report["tokens_per_s"])


def test_the_table_shows_both_texts(tmp_path, capsys):
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(map(json.dumps, (openai("3 May"), openai("4 May")))))
    assert command_line.main(["lint", "--log", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "Today is 3 May" in printed
    assert "Today is 4 May" in printed


def test_invalid_line_is_reported_with_its_position(tmp_path, capsys):
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(openai("3 May")) + "\n{}\n")
    assert command_line.main(["lint", "--log", str(file)]) == 2
    assert f"{file}:2" in capsys.readouterr().err
