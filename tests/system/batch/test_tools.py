"""Batches whose requests call tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inlay import ParameterError
from inlay.batch import BatchJob
from inlay.cli.main import main
from tests.model.api.tool_templates import tool_model
from tests.raising import raises
from tests.system.batch.helpers import CHAT, bodies, line, read, run, write

MESSAGES = [{"role": "user", "content": "How is it in Rome?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": {**PARAMETERS, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": FUNCTION}]


def request(name: str, **body: Any) -> dict[str, Any]:
    return line(name, CHAT, messages=MESSAGES, tools=TOOLS, max_tokens=80, **body)


def test_calls_and_continued_conversations(tmp_path: Path):
    named = {"type": "function", "function": {"name": "weather"}}
    write(tmp_path / "in", [request("a", tool_choice="required"), request("b", tool_choice=named), request("c")])
    counts = run(tmp_path / "in", tmp_path / "out", model=tool_model("llama"))
    assert (counts.answered, counts.failed) == (3, 0)
    for name in ("a", "b"):
        (choice,) = bodies(tmp_path / "out")[name]["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (called,) = choice["message"]["tool_calls"]
        assert json.loads(called["function"]["arguments"])["city"] in ("Rome", "Oslo")
    assert "tool_calls" not in bodies(tmp_path / "out")["c"]["choices"][0]["message"]
    assert bodies(tmp_path / "out")["a"]["system_fingerprint"].startswith("fp_")

    message = bodies(tmp_path / "out")["a"]["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sunny."}
    write(tmp_path / "next", [line("d", CHAT, messages=[*MESSAGES, message, result], tools=TOOLS)])
    assert run(tmp_path / "next", tmp_path / "then", model=tool_model("llama")).answered == 1


def test_unsupported_fields_are_rejected(tmp_path: Path):
    write(
        tmp_path / "in",
        [
            request("a"),
            line("b", prompt="x", priority=1),
            line("c", prompt="x", stream_options={"include_usage": True}),
        ],
    )
    assert run(tmp_path / "in", tmp_path / "out").failed == 3
    said = {row["custom_id"]: row["response"]["body"]["error"] for row in read(tmp_path / "out")}
    assert said["a"]["message"].startswith(
        "line 1: tools are given, and this model's chat template has no place for them"
    )
    assert said["b"]["message"].startswith("line 2: priority is 1; a batch runs in the order of what prompts share")
    assert [said[name]["param"] for name in "abc"] == ["tools", "priority", "stream_options"]


def test_tool_parser_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with raises("parameter.invalid", ParameterError, names="'xlam'"):
        BatchJob(input=tmp_path / "in", output=tmp_path / "out", names=["m"], tool_parser="xlam")
    write(tmp_path / "in", [line("a", prompt="x")])
    command = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--model", "random:tiny", "--tool-parser"]
    assert main([*command, "xlam"]) == 2
    assert "tool_parser is 'xlam'; it must be one of hermes" in capsys.readouterr().err
    assert main([*command, "hermes"]) == 0
    assert main([*command, "mistral"]) == 2  # its answers would have been read in another way
    assert "holds answers of another tool parser" in capsys.readouterr().err
