"""``chat`` takes what ``generate`` takes, on LLM and AsyncLLM, and both give the same answers."""

from __future__ import annotations

import asyncio
import inspect
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from inlay import LLM, AsyncLLM, ParameterError, SamplingParams
from inlay.client.options import AsyncChatOptions, AsyncRequestOptions, ChatRequestOptions, RequestOptions
from inlay.errors import PolicyError
from inlay.prompt.inputs import TEMPLATE_OPTIONS
from inlay.types import RequestOutput
from tests.conftest import tiny
from tests.raising import raises

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def marked(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


DOCUMENTS = [marked("The first document is of some length. "), marked("The second one is another text. ")]
MESSAGES = [{"role": "user", "content": [*DOCUMENTS, {"type": "text", "text": "Which?"}]}]

POLICIES: tuple[dict[str, Any], ...] = (
    {"reuse": "isolated"},
    {"reuse": "modular", "recompute": "linked:4", "promote": False},
    {"reuse": "auto", "tolerance": 0.5},
    {"reuse": "anchored", "positions": "schema", "cache_salt": "mine"},
    {"reuse": "exact", "order": "any", "across_adapters": False},
)


def result_of(output: RequestOutput) -> tuple[Any, ...]:
    usage = replace(output.usage, drafted_tokens=0, accepted_tokens=0)  # earlier answers give drafts to later ones
    return output.outputs[0].token_ids, output.prompt_positions, usage, output.reuse, output.order


def engine(kind: type[LLM | AsyncLLM]) -> Any:
    return kind(tiny("llama"), kv_memory="16MiB", chunk_size=8, seed=0)


@pytest.mark.parametrize(
    ("kind", "shared", "more"),
    [(LLM, RequestOptions, ChatRequestOptions), (AsyncLLM, AsyncRequestOptions, AsyncChatOptions)],
)
def test_chat_has_every_option_of_generate(kind: type[LLM | AsyncLLM], shared: type, more: type):
    generate, chat = (inspect.signature(call).parameters for call in (kind.generate, kind.chat))
    assert generate["options"].annotation == f"Unpack[{shared.__name__}]"
    assert chat["options"].annotation == f"Unpack[{more.__name__}]"
    assert [*chat][2:] == [*generate][2:], "messages stand for prompts"
    assert set(get_type_hints(more)) == set(get_type_hints(shared)) | TEMPLATE_OPTIONS
    assert len(get_type_hints(shared)) > 8


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_every_call_refuses_unknown_options_at_once(kind):
    llm = engine(kind)
    calls = {name: call for name, call in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    open_calls = {
        name: call
        for name, call in calls.items()
        if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(call).parameters.values())
    }
    assert {"generate", "chat", "add_schema", "warm", "warm_plan", "score_cached", "pin", "evict"} < open_calls.keys()
    for name in open_calls:
        with raises("parameter.unknown", ParameterError, names=f"{kind.__name__}.{name} has no option 'cache_slat'"):
            getattr(llm, name)("s", cache_slat="a")


@pytest.mark.parametrize(
    ("call", "options", "remedy"),
    [
        ("generate", {"max_tokens": 5}, "SamplingParams(max_tokens=5)"),
        ("chat", {"max_new_tokens": 5}, "SamplingParams(max_tokens=5)"),
        ("stream", {"reused": "exact"}, "did you mean reuse?"),
        ("stored", {"max_tokens": 5}, "options are adapter, cache_salt, name, "),
    ],
)
def test_the_error_for_an_unknown_option_names_the_remedy(call, options, remedy):
    with raises("parameter.unknown", ParameterError, names=remedy):
        getattr(engine(LLM), call)("Hello", **options)


def test_modules_are_encoded_without_options_of_requests():
    llm = engine(LLM)
    for call in (llm.warm, llm.stored, llm.pin, llm.evict):
        with raises("policy.not_for_schemas", PolicyError):
            call("s", recompute="linked:3")


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["reuse"])
def test_chat_answers_under_the_policy_of_generate(policy: dict[str, Any]):
    wanted, found = engine(LLM), engine(LLM)
    for _ in range(2):  # the second finds the parts
        (expected,) = wanted.generate(MESSAGES, GREEDY, **policy)
        (output,) = found.chat(MESSAGES, GREEDY, **policy)
        assert result_of(output) == result_of(expected)
    assert output.usage.cached_tokens > 0
    if "cache_salt" in policy:
        (other,) = found.chat(MESSAGES, GREEDY, **{**policy, "cache_salt": "another"})
        assert other.usage.cached_tokens == 0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["reuse"])
def test_asynchronous_chat_answers_as_chat_does(policy: dict[str, Any]):
    llm = engine(LLM)
    wanted = [result_of(llm.chat(MESSAGES, GREEDY, **policy)[0]) for _ in range(2)]

    async def ask() -> list[Any]:
        other = engine(AsyncLLM)
        found = [
            result_of([one async for one in other.chat(MESSAGES, GREEDY, tenant="ann", **policy)][-1]) for _ in range(2)
        ]
        other.shutdown()
        return found

    assert asyncio.run(ask()) == wanted


def test_invalid_policy_of_a_chat_is_refused():
    llm = engine(LLM)
    with raises("policy.conflict"):
        llm.chat(MESSAGES, GREEDY, reuse="exact", recompute="linked:3")
    with raises("prompt.no_free_order", ParameterError):
        llm.generate("Hello", GREEDY, order="any")


def test_asynchronous_chat_takes_one_conversation():
    async def ask() -> None:
        llm = engine(AsyncLLM)
        for conversations in ([], [MESSAGES, MESSAGES]):
            with raises("parameter.wrong_count", ParameterError):
                llm.chat(conversations, GREEDY)
        llm.shutdown()

    asyncio.run(ask())


def test_a_lone_request_waits_for_no_other_thread():
    """LLM steps its engine on the caller's thread. It starts no thread and no event loop."""
    llm, started = engine(LLM), []
    begin = threading.Thread.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: (started.append(thread.name), begin(thread))[1])
        patch.setattr(asyncio, "new_event_loop", lambda: started.append("a loop"))
        threads: set[int] = set()
        llm.observe(SimpleNamespace(computed=lambda *step: threads.add(threading.get_ident())))
        params = SamplingParams(temperature=0, max_tokens=1, structured_outputs={"choice": ["a", "b"]})
        assert llm.generate("Hello", params)[0].outputs[0].text in "ab"
    assert (started, threads) == ([], {threading.get_ident()})
