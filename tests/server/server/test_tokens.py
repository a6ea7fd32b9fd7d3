"""Prompts to token ids and back: the same ids that completions use."""

from __future__ import annotations

from typing import Any

import pytest

from inlay import AsyncLLM
from tests.model.api.tool_templates import tool_model
from tests.server.server.conftest import CHAT, COMPLETIONS, Site, running

MESSAGES = [{"role": "user", "content": "Hellö"}]
PROMPT = {"schema": "trip", "content": [{"import": "miami"}, "Where?"]}


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (COMPLETIONS, {"prompt": "Hellö"}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": PROMPT, "reuse": "modular"}),
        (COMPLETIONS, {"pml": '<prompt schema="trip"><miami/>Where?</prompt>'}),
        (CHAT, {"messages": MESSAGES}),
    ],
)
def test_token_ids_equal_the_completions_count(site: Site, path: str, prompt: dict[str, Any]):
    found = site.post("/tokenize", **prompt)
    assert found["count"] == len(found["tokens"]) == site.post(path, max_tokens=1, **prompt)["usage"]["prompt_tokens"]
    assert found["max_model_len"] == 2048
    assert "token_strs" not in found


def test_text_round_trips(site: Site):
    found = site.post("/tokenize", prompt="Hellö", return_token_strs=True, model="tiny")
    assert found["tokens"] == site.service.llm.tokenizer.encode("Hellö")
    assert found["token_strs"] == ["H", "e", "l", "l", "Ã", "¶"]
    assert site.post("/detokenize", tokens=found["tokens"], model="tiny") == {"prompt": "Hellö"}
    chat = site.post("/tokenize", messages=MESSAGES)["tokens"]
    assert site.post("/detokenize", tokens=chat)["prompt"].startswith("<|bos|><|start|>user<|turn|>Hellö<|end|>")


def test_special_tokens_and_tools():
    llm = AsyncLLM(tool_model("llama"), kv_memory="16MiB", chunk_size=8)
    tool = {"type": "function", "function": {"name": "look"}}
    with running(llm) as site:
        bare, shown = (site.post("/tokenize", messages=MESSAGES, tools=tools)["count"] for tools in ([], [tool]))
        assert shown > bare
        both = [site.post("/tokenize", prompt="x", add_special_tokens=switch)["tokens"] for switch in (True, False)]
        assert both == [llm.tokenizer.encode("x"), llm.tokenizer.encode("x", add_special_tokens=False)]
    llm.shutdown()


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/tokenize", [], 400, "the body is an empty list; it must be an object"),
        ("/tokenize", {}, 400, "there is no prompt; give prompt"),
        ("/tokenize", {"prompt": "x", "temperature": 1}, 400, "/tokenize takes no field 'temperature'; it takes acr"),
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt is a list of 2 prompts; tokenize them one by one"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, 400, "add_special_tokens is 1; it must be true or"),
        ("/tokenize", {"prompt": "x", "model": "gpt"}, 404, "there is no model 'gpt'"),
        ("/tokenize", {"prompt": {"schema": "none", "content": []}}, 404, "there is no schema 'none'"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0]"),
        (
            "/tokenize",
            {"prompt": "x" * (2**20 + 1)},
            400,
            "the prompt has 1,048,577 characters, and 1,048,576 are counted at once",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 2**20}]}, 400, "the prompt has 1,048,5"),
        ("/detokenize", {"tokens": [1] * (2**18 + 1)}, 400, "tokens has 262,145 ids, and 262,144 are taken at once"),
        ("/detokenize", {}, 400, "tokens is null; it must be a list of token ids"),
        ("/detokenize", {"tokens": []}, 400, "tokens is an empty list; it must be a list of token ids"),
        ("/detokenize", {"tokens": [1, 10**30]}, 400, "tokens holds the token id 1000"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens holds the token id True"),
        ("/detokenize", {"tokens": [1], "text": ""}, 400, "/detokenize takes no field 'text'; it takes model, tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, 404, "there is no model 'gpt'"),
        ("/detokenize", {"tokens": [1], "model": 1}, 400, "model is 1; it must be a text"),
    ],
)
def test_invalid_requests_are_rejected(site: Site, path: str, body: Any, status: int, sentence: str):
    found, error = site.refusal(path, body)
    assert found == status
    assert error["message"].startswith(sentence)
