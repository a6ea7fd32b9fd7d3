"""The Responses API over HTTP, by OpenAI's own client and raw requests: streams, stored responses, and tenants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from inlay import AsyncLLM
from tests.model.api.tool_templates import tool_model
from tests.model.server.site import Site as Guarded
from tests.model.server.site import with_keys
from tests.server.server.conftest import Site, running

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "Hello there", "max_output_tokens": 8, "seed": 3}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "description": "x", "parameters": CITY, "strict": True}


@pytest.fixture(scope="module")
def tools_site() -> Iterator[Site]:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", chunk_size=8, seed=1)
    with running(llm) as found:
        yield found
    llm.shutdown()


@pytest.fixture(scope="module")
def client(tools_site: Site) -> OpenAI:
    return OpenAI(base_url=tools_site.base, api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    yield from with_keys(Path(tmp_path_factory.mktemp("keys")))


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "Hello there", "max_output_tokens": 20, "extra_body": {"seed": 3}, **more}


def test_a_stream_is_read_as_the_whole_response(client: OpenAI) -> None:
    whole = client.responses.create(**asked())
    with client.responses.stream(**asked()) as stream:
        events = list(stream)
    kinds, final = {event.type for event in events}, events[-1].response  # type: ignore[union-attr]
    assert {"response.created", "response.output_text.delta", "response.output_item.done"} <= kinds
    assert (final.output_text, final.status) == (whole.output_text, whole.status)
    assert whole.usage is not None
    assert final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_over_two_turns(client: OpenAI, streamed: bool) -> None:
    given = asked(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_output_tokens=80)
    if streamed:
        with client.responses.stream(**given) as stream:
            first = stream.get_final_response()
    else:
        first = client.responses.create(**given)
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    stored = client.responses.create(**asked(input=[result], previous_response_id=first.id, tools=[WEATHER]))
    past: Any = [{"role": "user", "content": "Hello there"}, call.model_dump(exclude_none=True), result]
    sent = client.responses.create(**asked(input=past, tools=[WEATHER]))
    assert stored.output_text == sent.output_text
    assert stored.usage is not None
    assert sent.usage is not None
    assert stored.usage.input_tokens == sent.usage.input_tokens


def test_format_is_enforced(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    said = client.responses.create(**asked(text=form, max_output_tokens=80)).output_text
    assert json.loads(said)["city"] in ("Oslo", "Rome")


def test_a_stored_response_is_read_listed_and_deleted(client: OpenAI) -> None:
    first = client.responses.create(**asked(metadata={"a": "b"}))
    second = client.responses.create(**asked(input="And then?", previous_response_id=first.id))
    found = client.responses.retrieve(second.id)
    assert (found.output_text, found.previous_response_id) == (second.output_text, first.id)
    assert client.responses.retrieve(first.id).metadata == {"a": "b"}
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    client.responses.delete(first.id)
    for refused in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            refused(first.id)
    assert client.responses.create(**asked(previous_response_id=second.id)).status
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**asked(previous_response_id=first.id))


def test_a_response_that_is_not_stored_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(client.responses.create(**asked(store=False)).id)


def test_conversation_with_its_stored_part_is_bounded(tools_site: Site) -> None:
    many = [{"type": "reasoning", "summary": []}] * 5_000 + [{"role": "user", "content": "Hello"}]
    first = tools_site.post(RESPONSES, **{**BODY, "input": many})
    status, _, refused = tools_site.call(
        "POST", RESPONSES, {**BODY, "input": many, "previous_response_id": first["id"]}
    )
    assert (status, refused["error"]["param"]) == (400, "input")


def test_a_short_question_about_a_long_stored_conversation_counts_as_long(
    tools_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies are read on the event loop if they are short, and a stored conversation is read with them."""
    sizes: list[int] = []

    class Workers:
        async def run(self, work: Any, *, size: int, **_: Any) -> Any:
            sizes.append(size)
            return work()

    many = [{"type": "reasoning", "summary": []}] * 1_000 + [{"role": "user", "content": "Hello"}]
    first = tools_site.post(RESPONSES, **{**BODY, "input": many})
    monkeypatch.setattr(tools_site.service, "body_workers", Workers())
    tools_site.post(RESPONSES, **{**BODY, "previous_response_id": first["id"]})
    tools_site.post(RESPONSES, **{**BODY, "previous_response_id": None})
    assert sizes[0] > 20_000 > sizes[1]


def test_a_finished_response_is_not_cancelled(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.cancel(client.responses.create(**asked()).id)
    assert refused.value.code == "not_cancellable"


def test_errors_are_raised_as_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(**asked(background=True))
    assert (wrong.value.code, wrong.value.param) == ("unsupported_field", "background")
    body = asked(max_output_tokens=1900, extra_body={"ignore_eos": True})
    events: list[Any] = []
    for seconds in ("0.2", "2", "20"):  # a busy machine may begin no stream before the first deadline
        late = client.with_options(default_headers={"X-Request-Timeout": seconds})
        with suppress(openai.InternalServerError):
            events = list(late.responses.create(stream=True, **body))
            break
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "deadline_exceeded"  # type: ignore[comparison-overlap]


def test_marked_part_is_found_after_other_text(tools_site: Site) -> None:
    document = "A document that several questions are about. " * 3
    part = {"type": "input_text", "text": document, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    turns = [{"role": "user", "content": "Before."}, {"role": "assistant", "content": "Yes."}]
    for before in ([], turns, turns):  # directly after the system turn, the part is exact and stays in its place
        question = {"role": "user", "content": [part, {"type": "input_text", "text": "Why?"}]}
        answer = tools_site.post(RESPONSES, **{**BODY, "input": [*before, question], "reuse": "modular"})
    assert answer["inlay"]["module_tokens"] >= len(document) - 8
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= len(document) - 8


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_the_request(tools_site: Site, stream: bool) -> None:
    connection = tools_site.open()
    body = {**BODY, "max_output_tokens": 1900, "ignore_eos": True, "stream": stream}
    connection.request("POST", RESPONSES, json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().read(40)
    else:
        while not tools_site.service.llm.stats().running:
            pass
    connection.close()
    assert tools_site.quiet(5)


@pytest.mark.parametrize("stream", [False, True])
def test_response_of_another_tenant_is_not_found(guarded: Guarded, stream: bool) -> None:
    body = {"model": "demo", "input": "A secret.", "max_output_tokens": 2, "stream": stream}
    status, _, answer = guarded.call("POST", RESPONSES, body, key="ann")
    assert status == 200
    if stream:
        answer = json.loads(answer.decode().split("\n\n")[-2].split("\ndata: ")[1])["response"]
    name = answer["id"]
    assert guarded.call("GET", f"{RESPONSES}/{name}", key="ann")[0] == 200
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        found = [guarded.call(method, f"{RESPONSES}/{one}{path}", key="bob") for one in (name, "resp_unknown")]
        assert [status for status, _, _ in found] == [404, 404]
        told = [answer["error"]["message"].replace(name, "resp_unknown") for _, _, answer in found]
        assert told[0] == told[1]
    for one in (name, "resp_unknown"):
        status, _, refused = guarded.call("POST", RESPONSES, {**body, "previous_response_id": one}, key="bob")
        assert (status, refused["error"]["code"]) == (404, "response_not_found")
    assert guarded.call("GET", f"{RESPONSES}/{name}", key="ann")[0] == 200


def test_a_stored_response_needs_a_key(guarded: Guarded) -> None:
    assert guarded.call("GET", f"{RESPONSES}/resp_1", key=None)[0] == 401


def test_the_number_of_stored_responses_is_a_setting() -> None:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", seed=1)
    with running(llm, max_stored_responses=1) as found:
        names = [found.post(RESPONSES, **BODY)["id"] for _ in range(2)]
        assert [found.call("GET", f"{RESPONSES}/{name}")[0] for name in names] == [404, 200]
    llm.shutdown()
