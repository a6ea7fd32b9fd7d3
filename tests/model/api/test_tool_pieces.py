"""Tools in every dialect: a mark asks for modules, and each tool is a module of its own under a modular policy."""

from __future__ import annotations

import pytest

from inlay import LLM
from inlay.api.dialect import dialect_of
from inlay.api.tools.formats import model_tools
from tests.model.api.tool_templates import tool_model

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
ASK = [{"role": "user", "content": "Which files are there?"}]


def openai(**mark) -> dict:
    functions = [{"name": name, "description": f"Use it to {name}.", "parameters": PARAMETERS} for name in "ab"]
    tools = [{"type": "function", "function": function} for function in functions]
    tools[-1] |= mark
    return {"model": "m", "messages": ASK, "tools": tools}


def openai_function(**mark) -> dict:
    body = openai()
    body["tools"][-1]["function"] |= mark
    return body


def anthropic(**mark) -> dict:
    tools = [{"name": name, "description": f"Use it to {name}.", "input_schema": PARAMETERS} for name in "ab"]
    tools[-1] |= mark
    return {"model": "m", "max_tokens": 1, "messages": ASK, "tools": tools}


def responses() -> dict:
    tools = [{"type": "function", "name": name, "description": "Use it.", "parameters": PARAMETERS} for name in "ab"]
    return {"model": "m", "input": "Which files are there?", "tools": tools}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tool_model("qwen"), kv_memory="16MiB", seed=0)


def prompt_of(llm: LLM, path: str, body: dict):
    dialect = dialect_of(path)
    call = dialect.translate(dialect.read(body, path), tools=model_tools(llm.tokenizer), reasoning=None)
    return call.prompts[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", openai), ("/v1/chat/completions", openai_function), ("/v1/messages", anthropic)],
)
def test_a_mark_of_a_tool_makes_the_tools_modules(llm, path, body):
    marked, plain = prompt_of(llm, path, body(**MARK)), prompt_of(llm, path, body())
    laid = llm.lay_out(marked)
    assert [part.origin.ttl_s for part in laid.parts if part.marked] == [None, 3600.0]
    assert not llm.lay_out(plain).in_pieces
    assert laid.ids == llm.lay_out(plain).ids  # a token a byte: encoding apart changes nothing


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", openai), ("/v1/messages", anthropic), ("/v1/responses", responses)],
)
def test_tools_of_every_dialect_are_modules_under_a_modular_policy(llm, path, body):
    laid = llm.lay_out(prompt_of(llm, path, body()), reuse="modular")
    assert [part.origin.tool for part in laid.parts if part.marked] == [0, 1]
