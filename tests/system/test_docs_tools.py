"""docs/guides/tools.md: its example runs with the official client, and its tables are complete."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import inlay
from inlay import LLM
from inlay.api.openai import Endpoint, read_body, respond, translate
from inlay.api.openai.bodies import ChatBody, Function
from inlay.api.tools.formats import FORMATS, ModelTools, model_tools
from tests.model.api.tool_templates import tool_model, tool_tokenizer
from tests.pages import DOCS, blocks, rows
from tests.raising import raises

PAGE = DOCS / "guides/tools.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tool_model("qwen"), kv_memory="16MiB", seed=0)


class _Server(ThreadingHTTPServer):
    """Answers chats on this machine. sent: the bodies of requests."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.llm, self.tools, self.sent = llm, model_tools(llm.tokenizer), list[dict[str, Any]]()

    def answer(self, body: dict[str, Any]) -> bytes:
        self.sent.append(body)
        call = translate(read_body(body, Endpoint.CHAT), tools=self.tools)
        outputs = self.llm.generate(list(call.prompts), call.params)
        return json.dumps(respond(call, outputs, name=str(len(self.sent)), created=1, model="m")).encode()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, _Server)
        assert self.path == Endpoint.CHAT
        answer = self.server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_its_examples_run(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With OpenAI's own client, unmodified."""
    monkeypatch.setattr(inlay, "LLM", lambda model: llm)
    names: dict[str, Any] = {"MODEL": "tiny-qwen"}
    python = [block for block in blocks(PAGE) if block.language == "python"]
    with _Server(llm) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever, 0.01)
        try:
            for block in python:
                source = block.text.replace("127.0.0.1:8000", f"127.0.0.1:{server.server_port}")
                exec(compile(source, str(block), "exec"), names)
        finally:
            names["client"].close()
            server.shutdown()
    first, second = server.sent
    assert len(python) == 2
    assert capsys.readouterr().out.startswith("tool_calls\n")
    assert names["arguments"] in ({"city": "Rome"}, {"city": "Oslo"})
    assert first["tool_choice"] == "required"
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["tool_calls"][0]["id"] == second["messages"][2]["tool_call_id"]


def test_every_format_has_a_row() -> None:
    table = rows(PAGE, "format", "an answer that calls", "used if the template has")
    texts = {name: f"{shown} {told}" for names, shown, told in table for name in re.findall(r"`(\w+)`", names)}
    assert sorted(texts) == sorted(row.name for row in FORMATS)
    for row in FORMATS:
        shown = texts[row.name].replace("\\|", "|")
        assert row.opens is None or row.opens in shown or "the same with" in shown, row.name


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral", "simple"])
def test_example_answers_of_the_table_are_calls(family: str) -> None:
    tools = model_tools(tool_tokenizer(family))
    assert isinstance(tools, ModelTools)
    table = rows(PAGE, "format", "an answer that calls", "used if the template has")
    (shown,) = (shown for name, shown, _ in table if name == f"`{tools.format.name}`")
    from inlay.api.openai.respond import as_message
    from inlay.api.pieces import WholeAnswer
    from inlay.api.tools import ToolUse

    for answer in re.findall(r"`(.*?)`", shown.replace("\\|", "|")):
        if "{" not in answer:
            continue  # a mark alone
        text = answer.replace('"name": …', '"name": "weather"').replace("{…}", '{"city": "Rome"}')
        parser = ToolUse(tools, {"weather": {}}, held=False, parallel=True).parser()
        message = as_message(WholeAnswer.of([*parser.feed(text), *parser.finish()]), "x", 0)
        assert message["content"] is None
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "weather", "arguments": '{"city": "Rome"}'}
        ]


def test_every_field_has_a_row() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT))
    fields = {name for name in ChatBody.model_fields if "tool" in name}
    assert {*fields, *Function.model_fields} - {"description"} <= named


def test_model_without_tools_rejects_them() -> None:
    tools = model_tools(LLM("demo", kv_memory="16MiB").tokenizer)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    with raises("unsupported_field", inlay.ParameterError, field="tools"):
        translate(read_body(body, Endpoint.CHAT), tools=tools)
