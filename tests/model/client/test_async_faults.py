"""AsyncLLM under faults: failed passes, a thread that ends, a shutdown, names in use."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from inlay import AbortedError, AsyncLLM, EngineDeadError, InlayError, ParameterError, SamplingParams, Schema
from inlay.engine import core as engine_module
from inlay.engine.allocation import SequenceAllocation
from inlay.engine.core import EngineCore
from inlay.engine.kv_manager import KVCacheManager
from inlay.engine.scheduler import Scheduler
from inlay.output import RequestState
from inlay.types import RequestOutput
from tests.conftest import tiny
from tests.model.hooks import each_pass
from tests.raising import PanicException, raises

SCHEMA = Schema.from_string('<schema name="s"><module name="m">A module of some length.</module></schema>')
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1800, ignore_eos=True)
PATIENCE_S = 20  # of a test that would wait forever


def engine(**settings: Any) -> AsyncLLM:
    return AsyncLLM(tiny("llama"), kv_memory="16MiB", chunk_size=8, **settings)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test

    asyncio.run(bounded())


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


async def outcomes(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    return await asyncio.gather(*work, return_exceptions=True)


def text(output: Any) -> str:
    assert isinstance(output, RequestOutput), output
    return output.outputs[0].text


async def check_healthy(llm: AsyncLLM) -> None:
    """It answers, and nothing is held."""
    await llm.check_health()
    assert len((await last(llm.generate("Are you well?", PARAMS))).outputs[0].token_ids) == 6
    await asyncio.wrap_future(llm.client.call(llm.store.clear))
    assert (llm.stats().running, llm.stats().waiting, llm.stats().used_chunks) == (0, 0, 0)


async def until_dead(llm: AsyncLLM) -> None:
    while True:
        try:
            await llm.check_health()
        except EngineDeadError:
            return
        await asyncio.sleep(0.001)


def once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, when: Callable[..., bool]
) -> None:
    """Have a function raise, the first time that its arguments are such."""
    real, left = getattr(owner, name), [error]

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if left and when(*args):
            raise left.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, hooked)


def with_words(_: Any, request: Any) -> bool:
    return request.prompt.request.text == "broken"


# Faults


@pytest.mark.parametrize("kind", [PanicException, SystemExit, RuntimeError])
def test_fault_in_a_pass_ends_its_requests_and_not_the_thread(monkeypatch, kind):
    async def ask() -> None:
        llm = engine(max_num_seqs=1)
        once(monkeypatch, engine_module, "begin", kind("a fault"), lambda logits, rows: True)
        found = await outcomes(*(last(llm.generate(prompt, PARAMS)) for prompt in ("Hello", "Another")))
        (inside,) = [one for one in found if isinstance(one, Exception)]  # the first request
        assert type(inside) is RuntimeError
        assert "a fault" in str(inside)
        assert [text(one) for one in found if one is not inside]
        await check_healthy(llm)

    run(ask())


def test_fault_at_admission_ends_only_that_request(monkeypatch):
    async def ask() -> None:
        llm = engine()
        once(monkeypatch, KVCacheManager, "admit", RuntimeError("a fault"), with_words)
        found = await outcomes(*(last(llm.generate(prompt, PARAMS)) for prompt in ("Hello", "broken", "Another")))
        assert repr(found[1]) == "RuntimeError('a fault')"
        assert text(found[0])
        assert text(found[2])
        await check_healthy(llm)

    run(ask())


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
def test_fault_while_queueing_ends_only_that_request(monkeypatch, kind):
    async def ask() -> None:
        llm = engine()
        once(monkeypatch, EngineCore, "add", kind("a fault"), with_words)
        found = await outcomes(*(last(llm.generate(prompt, PARAMS)) for prompt in ("Hello", "broken", "Another")))
        assert type(found[1]) is RuntimeError
        assert "a fault" in str(found[1])
        assert text(found[0])
        assert text(found[2])
        await check_healthy(llm)

    run(ask())


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
def test_fault_outside_any_request_ends_all_and_not_the_thread(monkeypatch, kind):
    async def ask() -> None:
        llm = engine(max_num_seqs=1)
        once(monkeypatch, Scheduler, "step", kind("a fault"), lambda scheduler, *_: len(scheduler.waiting) == 2)
        first = llm.generate("Hello", LONG)
        await anext(first)
        others = [asyncio.create_task(last(llm.generate(prompt, PARAMS))) for prompt in ("One", "Another")]
        found = await outcomes(last(first), *others)
        assert [type(one) for one in found] == [RuntimeError] * 3
        await check_healthy(llm)

    run(ask())


def test_tokens_of_a_failed_pass_are_not_stored(monkeypatch):
    """The fault occurs when the pass is planned, before it runs."""

    async def ask() -> None:
        prompt, before, llm = "A prompt of more tokens than one chunk has.", engine(), engine()
        expected = text(await last(before.generate(prompt, PARAMS)))
        take = SequenceAllocation.take

        def faulty(allocation: SequenceAllocation, tokens: int) -> None:
            take(allocation, tokens)
            raise RuntimeError("a fault")

        with monkeypatch.context() as patch:
            patch.setattr(SequenceAllocation, "take", faulty)
            (found,) = await outcomes(last(llm.generate(prompt, PARAMS)))
        assert repr(found) == "RuntimeError('a fault')"
        assert text(await last(llm.generate(prompt, PARAMS))) == expected
        await check_healthy(llm)

    run(ask())


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
def test_failed_output_ends_its_request(monkeypatch, kind):
    async def ask() -> None:
        llm = engine()
        stream = llm.generate("broken", LONG)
        await anext(stream)
        once(monkeypatch, RequestState, "output", kind("no output"), lambda state: state.request.text == "broken")
        other, found = await outcomes(last(llm.generate("Hello", PARAMS)), last(stream))
        assert text(other)
        assert type(found) is RuntimeError
        assert "no output" in str(found)
        await check_healthy(llm)

    run(ask())


def test_when_the_thread_dies_all_requests_fail_and_none_is_accepted(monkeypatch):
    """A permanent fault: no request can be scheduled or removed."""

    async def ask() -> None:
        llm = engine(max_num_seqs=1)
        await llm.check_health()
        running = llm.generate("Hello", LONG)
        await anext(running)
        waiting = asyncio.create_task(last(llm.generate("Another", PARAMS)))
        while not llm.stats().waiting:
            await asyncio.sleep(0.001)

        def broken(*_: Any) -> None:
            raise RuntimeError("a fault that goes on")

        def ends() -> None:
            monkeypatch.setattr(EngineCore, "release", broken)
            monkeypatch.setattr(Scheduler, "step", broken)

        await asyncio.wrap_future(llm.client.call(ends))
        found = await outcomes(last(running), waiting)
        assert [str(one) for one in found] == ["a fault that goes on"] * 2
        await until_dead(llm)
        reason = r"the engine has ended by a fault, RuntimeError: a fault that goes on; make a new LLM"
        for call in (last(llm.generate("Hello", PARAMS)), llm.add_schema(SCHEMA), llm.check_health()):
            with pytest.raises(EngineDeadError, match=reason):
                await call
        llm.shutdown()

    run(ask())


# Arguments


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"priority": "high"}, "priority is 'high'; it must be a whole number, and a lower one goes first"),
        ({"priority": True}, "priority is True; it must be a whole number"),
        ({"priority": 0.5}, "priority is 0.5; it must be a whole number"),
        ({"timeout_s": "1"}, "timeout_s is '1'; it must be a number of seconds above 0"),
        ({"timeout_s": True}, "timeout_s is True; it must be"),
        ({"timeout_s": 0}, "timeout_s is 0; it must be"),
        ({"timeout_s": math.nan}, "timeout_s is nan; it must be"),
        ({"timeout_s": math.inf}, "timeout_s is inf; it must be"),
        ({"timeout_s": 10**400}, "timeout_s is 10+; it must be"),
        ({"request_id": ""}, "request_id is ''; give a text that is not empty, or None"),
        ({"request_id": 7}, "request_id is 7; give a text that is not empty, or None"),
        ({"stream_interval": "8"}, "stream_interval is '8'; it must be a whole number, or None"),
        ({"stream_interval": True}, "stream_interval is True; it must be a whole number, or None"),
        ({"sampling_params": {"n": 2}}, r"sampling_params is \{'n': 2\}; give an inlay.SamplingParams"),
    ],
)
def test_invalid_argument_gives_one_sentence(arguments, sentence):
    async def ask() -> None:
        llm = engine()
        with pytest.raises(ParameterError, match=f"^{sentence}"):
            await last(llm.generate("Hello", **{"sampling_params": PARAMS, **arguments}))
        await check_healthy(llm)

    run(ask())


# Shutdown


def test_requests_posted_during_a_pass_end_at_shutdown(monkeypatch):
    async def ask() -> None:
        llm = engine()
        computing, go_on, posted = threading.Event(), threading.Event(), threading.Semaphore(0)

        def slow(_: int) -> None:
            computing.set()
            go_on.wait(PATIENCE_S)

        def noted(post: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                made = post(*args, **kwargs)
                posted.release()
                return made

            return noted

        with each_pass(tiny("llama"), before=slow):
            running = asyncio.create_task(last(llm.generate("Hello", LONG)))
            await asyncio.to_thread(computing.wait)
            for name in ("submit", "encode"):
                monkeypatch.setattr(llm.client, name, noted(getattr(llm.client, name)))
            newcomer = asyncio.create_task(last(llm.generate("Another", PARAMS)))
            encoding = asyncio.create_task(llm.add_schema(SCHEMA))
            for _ in range(2):
                await asyncio.to_thread(posted.acquire)
            ending = asyncio.create_task(asyncio.to_thread(llm.shutdown))
            while True:  # until it is under way
                try:
                    await llm.check_health()
                except InlayError:
                    break
                await asyncio.sleep(0.001)
            with raises("engine.shut_down", InlayError):
                await last(llm.generate("Too late", PARAMS))
            go_on.set()
            found = await outcomes(running, newcomer, encoding)
            await ending
        assert [str(one) for one in found] == ["the engine was shut down before the request ended"] * 3

    run(ask())


def test_unused_model_can_be_shut_down():
    async def ask() -> None:
        llm = engine()
        llm.shutdown()
        with raises("engine.shut_down", InlayError):
            await last(llm.generate("Hello", PARAMS))
        with raises("engine.shut_down", InlayError):
            await llm.check_health()

    run(ask())


# Names


def test_second_request_with_the_same_id_is_rejected():
    async def ask() -> None:
        llm = engine()
        one, other = await outcomes(
            *(last(llm.generate(prompt, PARAMS, request_id="x")) for prompt in ("One", "Other"))
        )
        assert one.request_id == "x"
        assert type(other) is ParameterError
        assert str(other) == "request_id 'x' is taken by a request that is under way; give another one"
        assert not llm.abort("x")
        await check_healthy(llm)

    run(ask())


def test_given_and_generated_request_ids_never_collide():
    async def ask() -> None:
        llm = engine()
        names = [str(number) for number in range(12)]
        params = replace(PARAMS, max_tokens=300)
        named = [llm.generate("Hello", params, request_id=name) for name in names]
        unnamed = [llm.generate("Hello", params) for _ in names]
        first = await asyncio.gather(*(anext(stream) for stream in [*named, *unnamed]))
        assert [output.request_id for output in first[:12]] == names
        assert len({output.request_id for output in first}) == 24
        assert llm.abort("3")
        assert llm.abort(first[20].request_id)
        found = await outcomes(*(last(stream) for stream in [*named, *unnamed]))
        assert [at for at, one in enumerate(found) if isinstance(one, AbortedError)] == [3, 20]
        assert {text(one) for at, one in enumerate(found) if at not in (3, 20)} == {text(found[0])}
        await check_healthy(llm)

    run(ask())


def test_request_can_be_aborted_during_prompt_layout(monkeypatch):
    async def ask() -> None:
        llm = engine()
        making, go_on, make = threading.Event(), threading.Event(), llm.processor.process_noted

        def slow(*args: Any, **kwargs: Any) -> Any:
            making.set()
            go_on.wait(PATIENCE_S)
            return make(*args, **kwargs)

        monkeypatch.setattr(llm.processor, "process_noted", slow)
        asked = asyncio.create_task(last(llm.generate("Hello", LONG, request_id="mine")))
        assert await asyncio.to_thread(making.wait, PATIENCE_S)
        assert llm.abort("mine")
        go_on.set()
        with raises("request.aborted", AbortedError, names="mine"):
            await asked
        monkeypatch.setattr(llm.processor, "process_noted", make)
        await check_healthy(llm)

    run(ask())


def test_request_id_of_a_rejected_request_can_be_reused():
    async def ask() -> None:
        llm = engine()
        with raises("prompt.empty", ParameterError):
            await last(llm.generate([], PARAMS, request_id="mine"))
        assert (await last(llm.generate("Hello", PARAMS, request_id="mine"))).request_id == "mine"

    run(ask())


def test_thread_that_fails_to_start_is_an_error_and_can_be_retried(monkeypatch):
    async def ask() -> None:
        llm = engine()
        start = threading.Thread.start

        def full(thread: threading.Thread) -> None:
            if thread.name == "inlay-engine":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await last(llm.generate("Hello", PARAMS))
        monkeypatch.setattr(threading.Thread, "start", start)
        await check_healthy(llm)

    run(ask())
