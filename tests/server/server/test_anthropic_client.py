"""Anthropic's own client, unmodified: messages, streams, tools, counts and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inlay import AsyncLLM
from tests.model.api.tool_templates import tool_model
from tests.server.server.conftest import Site, running

anthropic = pytest.importorskip("anthropic")

ASKED: Any = {"role": "user", "content": "Hello there"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS: list[Any] = [{"name": "weather", "description": "Weather.", "input_schema": CITY}]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", chunk_size=8, seed=1)
    with running(llm) as found:
        yield found
    llm.shutdown()


@pytest.fixture(scope="module")
def client(site: Site) -> Any:
    return anthropic.Anthropic(base_url=site.base.removesuffix("/v1"), api_key="any", max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 20, "messages": [ASKED], "extra_body": {"seed": 3}, **more}


def test_a_message(client: Any) -> None:
    message = client.messages.create(
        **asked(system=[{"type": "text", "text": "Be kind."}], stop_sequences=["never said"])
    )
    assert message.model == "tiny"
    assert message.content[0].text
    assert message.usage.output_tokens <= 20
    assert message._request_id


def test_a_stream_is_read_as_the_whole_message(client: Any) -> None:
    whole = client.messages.create(**asked())
    with client.messages.stream(**asked()) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"message_start", "content_block_start", "text", "content_block_stop", "message_stop"} <= set(kinds)
    assert message.content[0].text == whole.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_over_two_turns(client: Any, streamed: bool) -> None:
    given = asked(tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=80)
    if streamed:
        with client.messages.stream(**given) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**given)
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    assert block.input["city"] in CITY["properties"]["city"]["enum"]  # type: ignore[index]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "Sunny."}]}
    turns = [ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**asked(messages=turns, tools=TOOLS)).role == "assistant"


def test_marks_with_lifetimes(client: Any) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    document = {"type": "text", "text": "A document of some length, for an hour.", "cache_control": mark}
    question = {"type": "text", "text": "Why?"}
    given = asked(messages=[{"role": "user", "content": [document, question]}], cache_control={"type": "ephemeral"})
    usage = client.messages.create(**given).usage
    assert usage.cache_creation.ephemeral_1h_input_tokens == len(document["text"])
    assert client.messages.create(**given).usage.cache_read_input_tokens >= len(document["text"])


def test_tokens_are_counted(client: Any) -> None:
    fewer = client.messages.count_tokens(model="tiny", messages=[ASKED]).input_tokens
    more = client.messages.count_tokens(model="tiny", messages=[ASKED], tools=TOOLS, system="Be kind.").input_tokens
    assert more > fewer > len(ASKED["content"])


def test_errors_are_raised_as_the_clients_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**asked(model="claude"))
    assert missing.value.error_code == "model_not_found"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**asked(messages=[{"role": "user", "content": [image]}]))
    assert wrong.value.error_code == "unsupported_content"
    assert wrong.value.request_id
    late = client.with_options(default_headers={"X-Request-Timeout": "0.2"})
    with pytest.raises(anthropic.APIStatusError) as ended:
        list(late.messages.create(**asked(max_tokens=1900, stream=True, extra_body={"ignore_eos": True})))
    assert ended.value.error_code == "deadline_exceeded"


def test_closing_a_stream_releases_its_slot(site: Site, client: Any) -> None:
    stream = client.messages.create(**asked(max_tokens=1900, stream=True, extra_body={"ignore_eos": True}))
    next(iter(stream))
    stream.close()
    assert site.quiet(5)
