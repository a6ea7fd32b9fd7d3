"""Chunks of streams: OpenAI's own types read them, and together they are the whole response."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from inlay.api.call import Call
from inlay.api.openai import Endpoint, read_body, respond, translate
from inlay.api.openai.respond import Chunks
from inlay.api.tools.formats import FORMATS, ModelTools
from inlay.logprobs import Logprob
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput, Usage

NAMED: dict[str, Any] = {"name": "x", "created": 1, "model": "m", "fingerprint": "fp_1"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
HERMES = ModelTools(next(row for row in FORMATS if row.name == "hermes"))


def call_of(endpoint: Endpoint, **body: Any) -> Call:
    given = {"messages": [{"role": "user", "content": "?"}]} if endpoint is Endpoint.CHAT else {"prompt": "?"}
    return translate(read_body({"stream": True, **given, **body}, endpoint), tools=HERMES)


def answer(index: int, texts: Sequence[str], end: bool, logprobs: int | None = None) -> CompletionOutput:
    """An answer whose tokens are written so; a token's id is its place."""
    steps = [{place: Logprob(-float(place), 1, text), 999: Logprob(-9.0, 2, "?")} for place, text in enumerate(texts)]
    return CompletionOutput(
        index=index,
        text="".join(texts),
        token_ids=tuple(range(len(texts))),
        logprobs=None if logprobs is None else steps,
        finish_reason="stop" if end else None,
        stop_reason="." if end else None,
    )


def output(answers: list[CompletionOutput]) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        prompt_positions=(0, 1, 2),
        outputs=answers,
        finished=all(one.finish_reason for one in answers),
        usage=Usage(3, 2, 1, 2, 0, 0),
        metrics=RequestMetrics(ttft_s=0.25, total_s=0.5),
    )


def chunks_of(call: Call, news: Sequence[tuple[int, RequestOutput]]) -> list[dict[str, Any]]:
    chunks = Chunks(call, **NAMED)
    documents = [document for number, one in news for document in chunks.documents(number, one)]
    if call.include_usage:
        documents.append(chunks.usage())
    return [json.loads(document) for document in documents]


def joined(call: Call, chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that chunks add up to, by the rules for clients."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = found.setdefault(part["index"], {"index": part["index"], "logprobs": None, "finish_reason": None})
            assert choice["finish_reason"] is None, "nothing comes behind the end"
            if call.endpoint is Endpoint.CHAT:
                _add(choice.setdefault("message", {"refusal": None}), part["delta"])
            else:
                choice["text"] = choice.get("text", "") + part["text"]
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {key: [] for key in part["logprobs"]}
                for key, value in part["logprobs"].items():
                    choice["logprobs"][key] = None if value is None else choice["logprobs"][key] + value
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part.get("stop_reason")
    return [found[index] for index in sorted(found)]


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for piece in value:
                if piece["index"] == len(calls):
                    calls.append({key: part for key, part in piece.items() if key != "index"})
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        elif key == "content":
            message["content"] = message.get("content", "") + value
        else:
            message[key] = value


def whole(call: Call, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    return respond(call, outputs, **NAMED)["choices"]


texts = st.lists(st.sampled_from(["", "a", "é\n", '"\\', "</s>", "\u2028", "日本"]), min_size=1, max_size=6)


@given(
    endpoint=st.sampled_from(list(Endpoint)),
    answers=st.lists(texts, min_size=1, max_size=4),
    logprobs=st.sampled_from([None, 1]),
    usage=st.booleans(),
    seed=st.integers(0, 999),
)
def test_chunks_add_up_to_the_response(endpoint, answers, logprobs, usage, seed):
    asked = {
        None: {},
        1: {"logprobs": 1} if endpoint is Endpoint.COMPLETIONS else {"logprobs": True, "top_logprobs": 1},
    }
    body = {"n": len(answers), "temperature": 1, **asked[logprobs]}
    call = call_of(endpoint, **body, **({"stream_options": {"include_usage": True}} if usage else {}))
    draw, said = random.Random(seed), [0] * len(answers)
    news = []
    while any(at < len(one) for at, one in zip(said, answers, strict=True)):
        steps = [draw.randint(0, 2) for _ in answers]
        said = [min(len(one), at + step) for at, one, step in zip(said, answers, steps, strict=True)]
        now = [
            answer(i, one[:at], at == len(one), logprobs) for i, (at, one) in enumerate(zip(said, answers, strict=True))
        ]
        news.append((0, output(now)))
    chunks = chunks_of(call, news)
    expected = whole(call, [news[-1][1]])
    assert joined(call, chunks) == expected
    last = chunks[-1]
    assert last["inlay"] == respond(call, [news[-1][1]], **NAMED)["inlay"]
    assert all("inlay" not in chunk for chunk in chunks[:-1])
    if usage:
        assert last["choices"] == []
        assert last["usage"] == respond(call, [news[-1][1]], **NAMED)["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)
    for chunk in chunks:
        if endpoint is Endpoint.CHAT:
            ChatCompletionChunk.model_validate(chunk, strict=True)
        elif chunk["choices"]:
            assert {choice["finish_reason"] for choice in chunk["choices"]} <= {None, "stop"}


def test_a_chat_begins_with_its_role_and_ends_with_its_reason():
    call = call_of(Endpoint.CHAT)
    chunks = chunks_of(call, [(0, output([answer(0, ["He", "llo"], True)]))])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": "", "refusal": None}, {"content": "Hello"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert chunks[-1]["choices"][0]["stop_reason"] == "."
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {("chatcmpl-x", "chat.completion.chunk")}
    assert ChatCompletion.model_validate(respond(call, [output([answer(0, ["a"], True)])], **NAMED)).id == "chatcmpl-x"


def test_prompts_and_answers_are_numbered_as_in_the_response():
    call = call_of(Endpoint.COMPLETIONS, prompt=["a", "b"], n=2)
    outputs = [output([answer(i, [f"{number}{i}"], True) for i in range(2)]) for number in range(2)]
    chunks = chunks_of(call, [(1, outputs[1]), (0, outputs[0])])
    assert joined(call, chunks) == whole(call, outputs)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [2, 2, 3, 3, 0, 0, 1, 1]
    assert chunks[-1]["inlay"]["exact_tokens"] == 4
    finished = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert Completion.model_validate(finished[0]).object == "text_completion"


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("cuts", [[1], [3, 9, 20, 31], list(range(1, 60))])
def test_tool_calls_are_streamed_in_pieces(cuts, logprobs):
    text = 'Well. <tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    call = call_of(Endpoint.CHAT, tools=[TOOL], logprobs=logprobs)
    kept = 0 if logprobs else None
    news = [(0, output([answer(0, list(text[:cut]), False, kept)])) for cut in cuts if cut < len(text)]
    news.append((0, output([answer(0, list(text), True, kept)])))
    chunks = chunks_of(call, news)
    (expected,) = whole(call, [news[-1][1]])
    (found,) = joined(call, chunks)
    assert found == expected
    assert found["finish_reason"] == "tool_calls"
    assert json.loads(found["message"]["tool_calls"][0]["function"]["arguments"]) == {"at": "é"}


def test_running_usage_is_sent_on_request():
    call = call_of(Endpoint.CHAT, stream_options={"include_usage": True, "continuous_usage_stats": True})
    words = ["One", " two", " three"]
    chunks = chunks_of(call, [(0, output([answer(0, words[:n], n == 3, None)])) for n in range(1, 4)])
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks] == [3] * len(chunks)
    said = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert said == sorted(said)
    assert (said[0], said[-1]) == (1, 3)
    assert chunks[-1]["choices"] == []
    without = call_of(Endpoint.CHAT, stream_options={"continuous_usage_stats": True})
    assert not without.include_usage
    assert not without.running_usage
