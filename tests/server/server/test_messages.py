"""The Messages API over HTTP: marks, usage, keys, limits, errors and disconnects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inlay import AsyncLLM
from tests.model.api.tool_templates import tool_model
from tests.model.server.site import Site as Guarded
from tests.model.server.site import with_keys
from tests.server.server.conftest import Site, running
from tests.server.server.test_completions import asking

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED = {"role": "user", "content": "Hello there"}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": [ASKED], "seed": 3}
HOUR, FIVE = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral", "ttl": "5m"}
DOCUMENT = "A document that several questions are about. " * 3


@pytest.fixture(scope="module")
def tools_site() -> Iterator[Site]:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", chunk_size=8, seed=1)
    with running(llm) as found:
        yield found
    llm.shutdown()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    yield from with_keys(Path(tmp_path_factory.mktemp("keys")))


def events(site: Site, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, headers, text = site.call("POST", MESSAGES, {**body, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), text
    return [json.loads(event.split("\ndata: ")[1]) for event in text.split("\n\n") if event.startswith("event: ")]


def test_a_stream_ends_in_the_whole_message(tools_site: Site) -> None:
    message = tools_site.post(MESSAGES, **BODY)
    told = events(tools_site, BODY)
    assert [told[0]["type"], told[-1]["type"]] == ["message_start", "message_stop"]
    said = "".join(one["delta"].get("text", "") for one in told if one["type"] == "content_block_delta")
    assert said == "".join(block["text"] for block in message["content"])
    assert told[-2]["delta"]["stop_reason"] == message["stop_reason"] == "max_tokens"
    assert told[-2]["usage"]["output_tokens"] == message["usage"]["output_tokens"] == 8


def test_both_dialects_give_the_same_answer(tools_site: Site) -> None:
    chat = {"model": "tiny", "max_tokens": 8, "seed": 3, "messages": [{"role": "system", "content": "Be kind."}, ASKED]}
    said = tools_site.post("/v1/chat/completions", **chat)["choices"][0]["message"]["content"]
    blocks = tools_site.post(MESSAGES, **BODY, system="Be kind.")["content"]
    assert "".join(block["text"] for block in blocks) == said


def test_tokens_are_counted_as_the_message_reads_them(tools_site: Site) -> None:
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    more = {"system": "Be kind.", "tools": tools}
    usage = tools_site.post(MESSAGES, **BODY, **more)["usage"]
    whole = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    body = {"model": "tiny", "messages": [ASKED], **more}
    assert tools_site.post(COUNT, **body) == {"input_tokens": whole}


def marked(question: str, *, mark: dict[str, Any], said: str = DOCUMENT, before: str = "") -> dict[str, Any]:
    blocks = [{"type": "text", "text": said, "cache_control": mark}, {"type": "text", "text": question}]
    system = [{"type": "text", "text": before or "Be kind."}]
    return {**BODY, "system": system, "messages": [{"role": "user", "content": blocks}], "reuse": "modular"}


def test_marked_block_is_found_after_other_text(tools_site: Site) -> None:
    first = tools_site.post(MESSAGES, **marked("What is it?", mark=HOUR))
    assert first["usage"]["cache_creation_input_tokens"] > 0
    chat = {"role": "user", "content": "Before it, another question."}
    again = marked("And why?", mark=HOUR)
    again["messages"] = [chat, {"role": "assistant", "content": "Yes."}, *again["messages"]]
    tools_site.post(MESSAGES, **again)  # the first prompt has the block in its exact form, which stays in its place
    second = tools_site.post(MESSAGES, **again)
    assert second["inlay"]["module_tokens"] >= len(DOCUMENT) - 8
    assert second["usage"]["cache_read_input_tokens"] >= len(DOCUMENT) - 8


def test_a_marked_system_block_is_found_again(tools_site: Site) -> None:
    system = [{"type": "text", "text": DOCUMENT * 2, "cache_control": FIVE}, {"type": "text", "text": "Monday."}]
    tools_site.post(MESSAGES, **BODY, system=system)
    system[1] = {"type": "text", "text": "Tuesday."}
    usage = tools_site.post(MESSAGES, **BODY, system=system)["usage"]
    assert usage["cache_read_input_tokens"] >= 2 * len(DOCUMENT)


@pytest.mark.parametrize("reuse", ["exact", "modular"])
def test_cache_writes_are_counted_by_lifetime(tools_site: Site, reuse: str) -> None:
    long, short = f"{reuse}: an hour of it. " * 4, f"{reuse}: five minutes of it. " * 4
    blocks = [{"type": "text", "text": long, "cache_control": HOUR}]
    blocks += [{"type": "text", "text": short, "cache_control": FIVE}, {"type": "text", "text": "Why?"}]
    body = {**BODY, "messages": [{"role": "user", "content": blocks}], "reuse": reuse}
    usage = tools_site.post(MESSAGES, **body)["usage"]
    written = usage["cache_creation"]
    assert written["ephemeral_1h_input_tokens"] == len(long)
    assert written["ephemeral_5m_input_tokens"] >= len(short)
    assert sum(written.values()) == usage["cache_creation_input_tokens"]
    again = tools_site.post(MESSAGES, **body)["usage"]
    assert again["cache_creation"]["ephemeral_1h_input_tokens"] == 0
    assert again["cache_read_input_tokens"] >= len(long) + len(short)


def test_forced_call_has_valid_arguments(tools_site: Site) -> None:
    schema = {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"]}
    tools = [{"name": "look", "input_schema": schema}]
    more = {"tools": tools, "tool_choice": {"type": "tool", "name": "look"}, "max_tokens": 80}
    message = tools_site.post(MESSAGES, **{**BODY, **more})
    (block,) = message["content"]
    assert (block["type"], block["name"], message["stop_reason"]) == ("tool_use", "look", "tool_use")
    assert block["input"]["at"] in ("sea", "sky")


def test_a_stop_sequence_ends_the_answer(tools_site: Site) -> None:
    body = {**BODY, "max_tokens": 40}
    whole = "".join(block["text"] for block in tools_site.post(MESSAGES, **body)["content"])
    letter = next(one for one in whole[3:] if one.isalnum())
    message = tools_site.post(MESSAGES, **body, stop_sequences=[letter])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", letter)
    assert message["content"][0]["text"] == whole[: whole.index(letter)]


def test_prefilled_answer_is_continued(tools_site: Site) -> None:
    body = {**BODY, "temperature": 0, "max_tokens": 12, "allowed_token_ids": list(b"abcdefgh")}
    whole = tools_site.post(MESSAGES, **body)["content"][0]["text"]
    start = whole[:5]
    rest = tools_site.post(MESSAGES, **{**body, "messages": [ASKED, {"role": "assistant", "content": start}]})
    assert (start + rest["content"][0]["text"]).startswith(whole)


def test_an_error_that_ends_a_stream_has_the_request_id() -> None:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", chunk_size=8, seed=1)
    endless = {**BODY, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    text = b""
    with running(llm, drain_s=0.1) as site, asking(site, endless, MESSAGES) as connection:
        text += connection.recv(1000)
        site.server.loop.call_soon_threadsafe(site.server.stop)
        while part := connection.recv(65536):
            text += part
    llm.shutdown()
    event = json.loads(text.split(b"data: ")[-1].split(b"\n\n")[0])
    assert (event["type"], event["error"]["code"]) == ("error", "server_stopping")
    assert f"x-request-id: {event['request_id']}".encode() in text


def test_an_error_has_anthropics_envelope_and_the_request_id(tools_site: Site) -> None:
    wrong = {**BODY, "messages": [{"role": "user", "content": [{"type": "text"}]}]}
    for path, body, status, kind, code in (
        (MESSAGES, wrong, 400, "invalid_request_error", "invalid_value"),
        (COUNT, wrong, 400, "invalid_request_error", "invalid_value"),
        (MESSAGES, {**BODY, "model": "gpt"}, 404, "not_found_error", "model_not_found"),
        (MESSAGES, None, 400, "invalid_request_error", "invalid_value"),
    ):
        found, headers, answer = tools_site.call("POST", path, body)
        assert (found, answer["type"], answer["error"]["type"], answer["error"]["code"]) == (
            status,
            "error",
            kind,
            code,
        )
        assert answer["request_id"] == headers["request-id"] == headers["x-request-id"]


def test_overlong_prompt_error_has_anthropics_wording(tools_site: Site) -> None:
    status, _, answer = tools_site.call("POST", MESSAGES, {**BODY, "system": "a" * 5000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["message"].startswith("prompt is too long")


def test_ignored_fields_are_named_in_a_header(tools_site: Site) -> None:
    body = {**BODY, "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "x"}}
    _, headers, _ = tools_site.call("POST", MESSAGES, body, anthropic_beta="a,b", anthropic_version="2023-06-01")
    assert headers["x-inlay-ignored-fields"] == "thinking, thinking.budget_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_the_request(tools_site: Site, stream: bool) -> None:
    connection = tools_site.open()
    body = {**BODY, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    connection.request("POST", MESSAGES, json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().read(40)
    else:
        while not tools_site.service.llm.stats().running:
            pass
    connection.close()
    assert tools_site.quiet(5)


def test_key_is_accepted_in_anthropics_header(guarded: Guarded) -> None:
    body = {"model": "demo", "max_tokens": 2, "messages": [ASKED]}
    key = guarded.keys["ann"]
    assert guarded.call("POST", MESSAGES, body, key=None, headers={"x-api-key": key})[0] == 200
    assert guarded.call("POST", MESSAGES, body, key="ann", headers={"x-api-key": key})[0] == 200
    for headers in ({}, {"x-api-key": "wrong"}):
        status, _, answer = guarded.call("POST", MESSAGES, body, key=None, headers=headers)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
    status, _, answer = guarded.call("POST", MESSAGES, body, key="bob", headers={"x-api-key": key})
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_limits_are_in_anthropics_headers(guarded: Guarded) -> None:
    body = {"model": "demo", "max_tokens": 2, "messages": [ASKED]}
    _, headers, _ = guarded.call("POST", MESSAGES, body, key="few")
    assert headers["anthropic-ratelimit-requests-limit"] == "2"
    assert headers["anthropic-ratelimit-requests-remaining"] == "1"
    assert headers["anthropic-ratelimit-tokens-reset"].endswith("Z")
    assert "x-ratelimit-limit-requests" not in headers
    guarded.call("POST", MESSAGES, body, key="few")
    status, headers, answer = guarded.call("POST", MESSAGES, body, key="few")
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert int(headers["retry-after"]) > 0
