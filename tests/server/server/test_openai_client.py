"""The official client, unmodified, over every field: whole and streamed, blocking and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from inlay import AsyncLLM
from inlay.api.openai.bodies import NO_EFFECT, ChatBody, CompletionBody
from tests.model.api.tool_templates import tool_model
from tests.server.server.conftest import Site, running

CHAT: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello there"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sea", "sky"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
LOOK = {"type": "function", "function": {"name": "look"}}
ALLOWED = {"mode": "required", "tools": [LOOK]}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "strict": True, "schema": {"enum": ["yes", "no"]}},
}
#: field → values that have an effect, or are accepted without one; for both endpoints.
BOTH: dict[str, list[Any]] = {
    "model": ["tiny", "other"],
    "n": [3],
    "max_tokens": [3],
    "stop": ["e", ["a", "o"]],
    "seed": [7, -1],
    "temperature": [0, 1.7],
    "top_p": [0.5],
    "presence_penalty": [1.5],
    "frequency_penalty": [-1.5],
    "logit_bias": [{"104": 20}],
    "stream_options": [{"include_usage": True}, {"include_usage": False}],
}
EXTRA: dict[str, list[Any]] = {
    "top_k": [5],
    "min_p": [0.1],
    "typical_p": [0.5],
    "repetition_penalty": [1.3],
    "min_tokens": [4],
    "ignore_eos": [True],
    "stop_token_ids": [[101]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "structured_outputs": [{"regex": "[ab]{4}"}],
    "bad_words": [["e", "the"]],
    "allowed_token_ids": [[72, 101, 108]],
    "truncate_prompt_tokens": [3],
    "priority": [2],
    "reuse": ["off", "exact", "modular"],
    "recompute": ["linked:4"],
    "promote": [False],
    "across_adapters": [True],
    "find": ["content"],
    "tolerance": [0.1],
    "positions": ["packed"],
    "diagnostics": [True],
}
ONLY: dict[str, dict[str, list[Any]]] = {
    "chat": {
        "max_completion_tokens": [3],
        "logprobs": [True],
        "top_logprobs": [2],
        "response_format": [{"type": "text"}, {"type": "json_object"}, JSON_SCHEMA],
        "tools": [[TOOL]],
        "tool_choice": ["none", "auto", "required", LOOK, {"type": "allowed_tools", "allowed_tools": ALLOWED}],
        "parallel_tool_calls": [False],
    },
    "text": {"logprobs": [0, 3], "echo": [True]},
}
#: Fields of whole answers only: test_prompt_logprobs.py. Fields that not every template takes:
#: tests/unit/api/openai/test_vllm_fields.py and test_reasoning.py.
ELSEWHERE = {
    "order",
    "prompt_cache_options",
    "prompt_logprobs",
    "add_generation_prompt",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "include_reasoning",
    "reasoning_effort",
}
#: The other fields that a field requires.
BESIDE: dict[str, dict[str, Any]] = {
    "tolerance": {"extra_body": {"reuse": "auto"}},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "required"},
    "include_stop_str_in_output": {"stop": "e"},
}
HABITS: dict[str, Any] = {
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "service_tier": "auto",
    "store": False,
    "user": "somebody",
}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", chunk_size=8, reuse="exact", seed=1)
    with running(llm) as found:
        yield found
    llm.shutdown()


@pytest.fixture(scope="module")
def client(site: Site) -> OpenAI:
    return OpenAI(base_url=site.base, api_key="any", max_retries=0)


def arguments(kind: str, field: str, value: Any) -> dict[str, Any]:
    """The arguments of a client call that sends this field."""
    given: dict[str, Any] = {"model": "tiny", "seed": 3, "max_tokens": 12, "temperature": 1.0, **BESIDE.get(field, {})}
    if field == "max_completion_tokens":
        del given["max_tokens"]
    if field in ("tools", "tool_choice", "parallel_tool_calls", "response_format"):
        given["max_tokens"] = 60
    if field in EXTRA:
        given["extra_body"] = {**given.get("extra_body", {}), field: value}
    else:
        given[field] = value
    return {**given, **({"messages": CHAT} if kind == "chat" else {"prompt": "Hello"})}


def cases() -> list[Any]:
    found = []
    for kind in ("chat", "text"):
        for field, values in {**BOTH, **EXTRA, **ONLY[kind]}.items():
            found += [pytest.param(kind, field, value, id=f"{kind}-{field}-{n}") for n, value in enumerate(values)]
    return found


def create(client: Any, kind: str, **given: Any) -> Any:
    endpoint = client.chat.completions if kind == "chat" else client.completions
    return endpoint.create(**given)


def whole(answer: Any) -> list[tuple[Any, ...]]:
    """The contents of a response, one tuple a choice."""
    found = []
    for choice in answer.choices:
        said = choice.text if hasattr(choice, "text") else choice.message.content
        calls = getattr(getattr(choice, "message", None), "tool_calls", None) or []
        told = [(call.function.name, call.function.arguments) for call in calls]
        found.append((choice.index, said or "", told, choice.finish_reason, tokens_of(choice.logprobs)))
    return found


def tokens_of(logprobs: Any) -> list[tuple[str, Any]]:
    """Tokens with log-probabilities. The second of two equal requests reads its prompt from the cache, and in float32
    a row alone may differ in its last bits from the same row in a prompt.
    """
    if logprobs is None:
        return []
    if hasattr(logprobs, "content"):
        return [(one.token, pytest.approx(one.logprob, abs=1e-4)) for one in logprobs.content]
    return [
        (token, pytest.approx(one, abs=1e-4))
        for token, one in zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    ]


def streamed(chunks: list[Any]) -> list[tuple[Any, ...]]:
    """The sum of a stream's chunks, in the form of ``whole``."""
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            state = found.setdefault(choice.index, [choice.index, "", [], None, []])
            delta = getattr(choice, "delta", choice)
            state[1] += (delta.text if delta is choice else delta.content) or ""
            for call in getattr(delta, "tool_calls", None) or []:
                if call.function.name:
                    assert call.id.startswith("call_")
                    state[2].append((call.function.name, ""))
                name, said = state[2][call.index]
                state[2][call.index] = (name, said + (call.function.arguments or ""))
            state[3] = choice.finish_reason or state[3]
            state[4] += tokens_of(choice.logprobs)
    return [tuple(found[index]) for index in sorted(found)]


@pytest.mark.parametrize(("kind", "field", "value"), cases())
def test_every_field_streamed_and_not(client: OpenAI, kind: str, field: str, value: Any):
    given = arguments(kind, field, value)
    chunks = list(create(client, kind, stream=True, **given))
    given.pop("stream_options", None)
    answer = create(client, kind, **given)
    assert streamed(chunks) == whole(answer)
    wants_usage = field == "stream_options" and value["include_usage"]
    told = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(told) == wants_usage
    if wants_usage:
        assert (told[0].prompt_tokens, told[0].completion_tokens) == (
            answer.usage.prompt_tokens,
            answer.usage.completion_tokens,
        )
    assert chunks[-1].inlay["timing"]["total_s"] > 0
    assert answer.inlay["computed_tokens"] >= 1
    check(field, value, answer)


def check(field: str, value: Any, answer: Any) -> None:
    """Check that the field had its effect, where one answer shows it."""
    (first, *others) = answer.choices
    if field == "n":
        assert len(others) == value - 1
    if field in ("max_tokens", "max_completion_tokens"):
        assert answer.usage.completion_tokens <= value
    if field == "model":
        assert answer.model == value
    if field == "response_format" and value["type"] != "text" and first.finish_reason == "stop":
        json.loads(first.message.content)
    if field == "structured_outputs":
        said = first.text if hasattr(first, "text") else first.message.content
        assert len(said) == 4
        assert set(said) <= {"a", "b"}
    if field == "tool_choice" and value not in ("none", "auto") and first.finish_reason == "tool_calls":
        (call, *_) = first.message.tool_calls
        assert json.loads(call.function.arguments)["at"] in ("sea", "sky")
    if field == "logprobs" and value is not False:
        assert len(tokens_of(first.logprobs)) == answer.usage.completion_tokens


def test_every_field_is_covered():
    rest = {"messages", "prompt", "pml", "stream"}
    chat, text = set(BOTH) | set(EXTRA) | set(ONLY["chat"]), set(BOTH) | set(EXTRA) | set(ONLY["text"])
    assert set(ChatBody.model_fields) == chat | rest | ELSEWHERE | {"echo"}
    assert set(CompletionBody.model_fields) - ELSEWHERE | {"response_format"} == text | rest - {"messages"} | {
        "response_format"
    }


def test_fields_without_effect_change_nothing(client: OpenAI):
    given = arguments("chat", "seed", 3)
    assert {name for name in NO_EFFECT if not name.startswith("prompt_cache")} == set(HABITS)
    assert whole(create(client, "chat", **given, **HABITS)) == whole(create(client, "chat", **given))
    assert whole(create(client, "chat", **given, prompt_cache_key="x")) == whole(create(client, "chat", **given))


def test_asynchronous_and_concurrent_requests(site: Site, client: OpenAI):
    given = arguments("chat", "seed", 3)

    async def ask() -> list[list[tuple[Any, ...]]]:
        async with AsyncOpenAI(base_url=site.base, api_key="any") as patient:

            async def one(seed: int) -> list[tuple[Any, ...]]:
                stream = await patient.chat.completions.create(stream=True, **{**given, "seed": seed})
                return streamed([chunk async for chunk in stream])

            return await asyncio.gather(*(one(seed) for seed in range(8)))

    expected = [whole(create(client, "chat", **{**given, "seed": seed})) for seed in range(8)]
    assert asyncio.run(ask()) == expected


def test_closing_a_stream_releases_its_slot(site: Site, client: OpenAI):
    endless: dict[str, Any] = {"prompt": "x", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(model="tiny", stream=True, **endless)
    next(iter(stream))
    stream.close()
    assert site.quiet(1)


def test_errors_are_raised_as_the_clients_own(client: OpenAI):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.chat.completions.create(model="gpt", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=CHAT, temperature=-1)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.APIStatusError) as late:
        client.with_options(default_headers={"X-Request-Timeout": "0.01"}).completions.create(
            model="tiny", prompt="x", max_tokens=1900, extra_body={"ignore_eos": True}
        )
    assert late.value.status_code == 504
    with pytest.raises(openai.APIError, match="its deadline has passed"):
        list(
            client.with_options(default_headers={"X-Request-Timeout": "0.2"}).completions.create(
                model="tiny", prompt="x", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
            )
        )


def test_models(client: OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").owned_by == "inlay"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
