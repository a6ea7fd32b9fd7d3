"""Access to the engine: calls from inside a step, from other threads, and after the end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from inlay import LLM, AbortedError, AsyncLLM, EngineDeadError, InlayError, SamplingParams, Schema
from inlay.engine import core as engine_module
from inlay.engine import interrupts
from inlay.engine.core import Command, Inbox
from inlay.engine.forward import ForwardPass
from inlay.engine.kv_manager import KVCacheManager
from inlay.engine.pass_cost import LONE
from inlay.engine.runner import Runner
from inlay.engine.thread import Listeners
from inlay.events import TokenEvent
from inlay.models.load import LoadedModel
from inlay.types import Scope
from tests.clock import Clock
from tests.conftest import tiny
from tests.model.engine.driving import Driver, ids
from tests.model.hooks import each_pass
from tests.raising import raises

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">The first module.</module><module name="b">Another.</module></schema>'
)


@pytest.fixture
def llm() -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0)


def abandon(llm: LLM, prompt: str) -> None:
    """Begin a stream and leave it in a cycle, where only the garbage collector finds it."""
    stream = llm.stream(prompt, LONG)
    next(stream)
    cell: list[Any] = [stream]
    cell.append(cell)


def inside(monkeypatch: pytest.MonkeyPatch, moment: str, do: Callable[[], object]) -> None:
    """Have something happen once, in the middle of the next step: at admission, before or after the model, or after
    sampling."""
    owner, name = {
        "admission": (KVCacheManager, "admit"),
        "before the model": (Runner, "run"),
        "behind the model": (Runner, "run"),
        "sampling": (engine_module, "begin"),
    }[moment]
    real, left = getattr(owner, name), [do]

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if moment == "before the model" and left:
            left.pop()()
        result = real(*args, **kwargs)
        if left:
            left.pop()()
        return result

    monkeypatch.setattr(owner, name, hooked)


def answer(llm: LLM, prompt: str) -> tuple[int, ...]:
    return llm.generate(prompt, GREEDY)[0].outputs[0].token_ids


def check_nothing_held(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.held_chunks) == (0, 0, 0)
    llm.store.clear()
    assert llm.store.pool.free_chunks == llm.store.pool.chunks


# Calls from inside a step


@pytest.mark.parametrize("moment", ["admission", "before the model", "behind the model", "sampling"])
def test_stream_collected_inside_a_step_is_released_safely(llm, monkeypatch, moment):
    expected = [answer(llm, prompt) for prompt in ("Hello", "Another prompt")]
    gc.collect()
    gc.disable()
    try:
        for number in range(2):
            abandon(llm, f"an answer that nobody reads on, number {number}")
        assert llm.stats().running == 2
        inside(monkeypatch, moment, gc.collect)
        outputs = llm.generate(["Hello", "Another prompt"], GREEDY)
    finally:
        gc.enable()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    check_nothing_held(llm)


@pytest.mark.parametrize("presses", [1, 3])
@pytest.mark.parametrize("moment", ["admission", "before the model", "behind the model", "sampling"])
def test_ctrl_c_waits_for_the_end_of_a_step(llm, monkeypatch, moment, presses):
    """Tokens that count as computed are computed, and other callers get their answers."""
    prompts = ["Hello " * 40, "Another prompt"]
    expected = [answer(llm, prompt) for prompt in prompts]
    llm.store.clear()
    other = llm.stream(prompts[1], GREEDY)
    next(other)

    def press() -> None:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)

    inside(monkeypatch, moment, press)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[0], GREEDY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [output.outputs[0].token_ids for output in other][-1] == expected[1]
    assert answer(llm, prompts[0]) == expected[0]
    check_nothing_held(llm)


def test_ctrl_c_ends_a_step_that_hangs(llm, monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.0)
    went_on: list[bool] = []

    def press() -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.001)
        went_on.append(True)

    inside(monkeypatch, "before the model", press)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("Hello", GREEDY)
    assert not went_on
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", ["admission", "before the model", "behind the model", "sampling"])
def test_exception_of_a_signal_handler_waits_for_the_end_of_a_step(llm, monkeypatch, moment):
    """An application's alarm and its termination both come. Each handler is called, and then restored."""
    called: list[int] = []

    def expire(number: int, frame: FrameType | None) -> None:
        called.append(number)
        raise TimeoutError

    def come() -> None:
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGTERM)
        assert not called

    prompt = "Hello " * 40
    expected = answer(llm, prompt)
    llm.store.clear()
    before = {number: signal.signal(number, expire) for number in (signal.SIGALRM, signal.SIGTERM)}
    try:
        inside(monkeypatch, moment, come)
        with pytest.raises(TimeoutError):
            llm.generate(prompt, GREEDY)
        assert sorted(called) == sorted(before)
        assert all(signal.getsignal(number) is expire for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert answer(llm, prompt) == expected
    check_nothing_held(llm)


@pytest.mark.parametrize("error", [SystemExit, RuntimeError])
def test_nothing_is_stored_of_a_pass_that_could_not_be_made(llm, monkeypatch, error):
    """Its tokens count as computed already."""
    prompt = "Hello " * 40
    expected = answer(llm, prompt)
    llm.store.clear()
    real, left = ForwardPass.add, [1]

    def fail_once(*args: Any) -> None:
        real(*args)
        if left:
            left.pop()
            raise error

    monkeypatch.setattr(ForwardPass, "add", fail_once)
    with pytest.raises(error):
        llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].usage.cached_tokens == 0
    assert answer(llm, prompt) == expected
    check_nothing_held(llm)


def test_caller_of_a_lost_request_gets_an_error(llm, monkeypatch):
    monkeypatch.setattr(Listeners, "add", lambda *_: None)
    with pytest.raises(AbortedError, match="send it again"):
        llm.generate("Hello", GREEDY)


def test_streams_in_reference_cycles_are_released_safely(llm):
    expected = answer(llm, "Hello")
    thresholds = gc.get_threshold()
    gc.set_threshold(97, 1, 1)  # at any line
    try:
        for number in range(12):
            abandon(llm, f"an answer that nobody reads on, number {number}")
            assert answer(llm, "Hello") == expected
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    check_nothing_held(llm)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("From inside", GREEDY),
        lambda llm: next(llm.stream("From inside", GREEDY)),
        lambda llm: llm.add_schema(SCHEMA),
        lambda llm: llm.warm(SCHEMA.prompt().use("a").text("?")),
    ],
    ids=["generate", "stream", "add_schema", "warm"],
)
def test_call_from_inside_a_step_is_rejected_at_once(llm, monkeypatch, call):
    expected = answer(llm, "Hello")
    llm.add_schema(SCHEMA, encode=False)
    refused: list[BaseException] = []

    def from_inside() -> None:
        with raises("engine.inside") as caught:
            call(llm)
        refused.append(caught.value)

    inside(monkeypatch, "behind the model", from_inside)
    assert answer(llm, "Hello") == expected
    assert len(refused) == 1
    check_nothing_held(llm)


def test_shutdown_from_inside_a_step_ends_the_engine_after_it(llm, monkeypatch):
    inside(monkeypatch, "behind the model", llm.shutdown)
    with raises("engine.shut_down"):
        llm.generate("Hello", GREEDY)
    with raises("engine.shut_down"):
        llm.generate("Hello", GREEDY)
    check_nothing_held(llm)


def test_progress_callback_may_call_the_model(llm):
    """Between two passes of an encoding others may run."""
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0, max_num_batched_tokens=16)
    expected, answers = answer(llm, "Hello"), []
    llm.add_schema(SCHEMA, progress=lambda done, total: answers.append(answer(llm, "Hello")))
    assert answers
    assert set(answers) == {expected}
    llm.store.clear()
    check_nothing_held(llm)


# Other threads


def test_cancelling_does_not_wait_for_a_step_on_another_thread(llm, monkeypatch):
    expected = answer(llm, "Hello")
    stream = llm.stream("Quite another prompt", LONG)
    next(stream)
    computing, go_on, answers = threading.Event(), threading.Event(), []

    def wait() -> None:
        computing.set()
        assert go_on.wait(20), "whoever gave up waits for the step to end"

    inside(monkeypatch, "before the model", wait)
    other = threading.Thread(target=lambda: answers.append(answer(llm, "Hello")))
    other.start()
    assert computing.wait(20)
    stream.close()
    go_on.set()
    other.join()
    assert answers == [expected]
    check_nothing_held(llm)


def test_callers_on_several_threads_get_their_answers():
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0)
    prompts = [f"Prompt number {number}" for number in range(6)]
    expected = [answer(llm, prompt) for prompt in prompts]
    answers: dict[int, tuple[int, ...]] = {}

    def ask(number: int) -> None:
        answers[number] = answer(llm, prompts[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [answers.get(number) for number in range(len(prompts))] == expected
    check_nothing_held(llm)


# Inbox


def command(done: list[object], name: object) -> Command:
    return Command(lambda: done.append(name), lambda error: done.append((name, str(error))))


def test_commands_are_run_in_order():
    inbox, done = Inbox(interruptible=False), []
    for name in ("a", "b"):
        inbox.put(command(done, name))
    assert inbox.waiting
    inbox.carry_out()
    assert done == ["a", "b"]
    assert not inbox.waiting


def test_command_after_the_end_fails_at_once():
    inbox, done = Inbox(interruptible=False), []
    inbox.put(command(done, "done"))
    inbox.carry_out()
    inbox.put(command(done, "left"))
    inbox.refuse(lambda: InlayError("it is over"))
    inbox.close(InlayError("it ends"))
    inbox.put(command(done, "late"))  # its sender had looked before
    assert done == ["done", ("left", "it ends"), ("late", "it is over")]
    with pytest.raises(InlayError, match="it is over"):
        inbox.check_open()


def test_failing_command_fails_alone():
    inbox, done = Inbox(interruptible=False), []

    def broken() -> None:
        raise BaseException("broken")

    inbox.put(Command(broken, lambda error: done.append(repr(error))))
    inbox.put(command(done, "next"))
    inbox.carry_out()
    assert done == ["RuntimeError('BaseException: broken')", "next"]


def test_keyboard_interrupt_is_raised_after_its_command_failed():
    inbox, done = Inbox(interruptible=True), []

    def interrupted() -> None:
        raise KeyboardInterrupt

    inbox.put(Command(interrupted, lambda error: done.append(repr(error))))
    inbox.put(command(done, "next"))
    with pytest.raises(KeyboardInterrupt):
        inbox.carry_out()
    inbox.carry_out()
    assert done == ["RuntimeError('KeyboardInterrupt: ')", "next"]


# Time


@contextmanager
def timed_passes(clock: Clock, loaded: LoadedModel) -> Iterator[list[float]]:
    """The clock advances only when the model computes: 20 ms a pass and 1 ms a token. Yields the time of each pass."""
    passes: list[float] = []

    def computes(tokens: int) -> None:
        passes.append(0.02 + 0.001 * tokens)
        clock.advance(passes[-1])

    clock.stop()
    with each_pass(loaded, before=computes):
        yield passes


def test_deadline_is_kept_during_a_long_prefill(clock):
    """During a prefill of nearly 2,000 tokens, a deadline is exceeded by at most one pass, whose time is bounded."""
    free = Driver(max_num_seqs=1)
    (expected,) = free.run(free.request(ids(1900), 3))
    driver = Driver(max_num_seqs=1, max_pass_s=0.25)
    with timed_passes(clock, driver.loaded) as passes:
        deadline = time.perf_counter() + 0.6
        long, late = driver.request(ids(1900), 3), driver.request(ids(9, 1), 3, deadline=deadline)
        driver.add(long, late)
        told: list[float] = []
        for _ in range(100):
            if told:
                break
            driver.engine.step(on_leave=lambda request: told.append(time.perf_counter()))
        assert "its deadline has passed" in str(late.error)
        assert told[0] <= deadline + 0.25
        assert long.prompt_left > 1000
        assert max(passes) <= 0.25
        driver.finish()
    assert max(passes) <= LONE * 0.25
    assert len(passes) < 15
    assert tuple(long.token_ids) == expected, "an answer depends on how its prompt was cut"


def test_an_encoding_is_cut_into_passes_of_bounded_time(clock):
    texts = "".join(f'<module name="m{n}">{n} is a module. {"It goes on. " * n}</module>' for n in range(16))
    llm = LLM(tiny("llama"), kv_memory="16MiB", seed=0, reuse="anchored")
    told: list[tuple[int, int]] = []
    with timed_passes(clock, tiny("llama")) as passes:
        schema = Schema.from_string(f'<schema name="s">{texts}</schema>')
        llm.add_schema(schema, progress=lambda *news: told.append(news))
    assert told[-1][0] == told[-1][1] > 1000
    assert llm.store.tokens > 1000
    assert len(passes) == sum(done > 0 for done, _ in told)
    assert max(passes) <= LONE * 0.25
    assert max(passes) > 0.6


def test_displaced_and_cancelled_request_does_not_end_its_namesake():
    driver = Driver(record=False, max_num_seqs=1, max_waiting=3)
    client, llm = driver.llm.client, driver.llm
    heard: dict[str, list[TokenEvent]] = {}

    def submit(name: str, request_id: str, tenant: str) -> None:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        made = llm.processor.process([1, 2, 3], params, llm.policy(), Scope(tenant=tenant), request_id=request_id)
        client.submit(client.prepare(made), heard.setdefault(name, []).extend)

    for n in range(3):
        submit(f"a{n}", f"a{n}", "a")
    submit("b", "b", "b")  # puts out the last one of a
    client.cancel("a2")
    client.cancel("a1")
    submit("again", "a2", "b")
    while driver.engine.busy:
        client.pump()
    assert heard["a2"] == []
    assert [event.error for event in heard["again"]] == [None] * 3


def test_failing_listener_ends_no_request_of_the_pass(clock):
    """One answer of several leaves at its deadline while the others are scheduled; its listener fails at that once."""
    driver = Driver(record=False)
    request = driver.request("Tell me something.", 12, n=3, temperature=1.0)
    faults, heard = [RuntimeError("no telling")], []

    def listener(events):
        if any(event.error for event in events) and faults:
            raise faults.pop()
        heard.extend(events)

    request.family[2].deadline = 1e9
    driver.llm.client.submit(request, listener)
    for _ in range(4):
        driver.llm.client.pump()
    clock.advance(1e9)
    while not request.answered:
        driver.llm.client.pump()
        driver.audit()
    assert not faults
    assert [len(member.token_ids) for member in request.family[:2]] == [12, 12]
    assert [event.index for event in heard if event.error] == [2]
    assert driver.all_free()


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_engine_used_in_a_forked_process_raises_an_error(kind):
    """The engine's threads do not exist in the fork, so waiting for them would hang. The end of the fork must not
    hang either.
    """
    llm = kind(tiny("llama"), kv_memory="4MiB")

    async def last() -> None:
        async for _ in llm.generate("Once", SamplingParams(max_tokens=1)):
            pass

    def ask() -> None:
        if kind is LLM:
            llm.generate("Once", SamplingParams(max_tokens=1))
        else:
            asyncio.run(last())

    ask()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            ask()
        except EngineDeadError as error:
            llm.shutdown()
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    said = os.read(reading, 1000).decode()
    assert f"made in process {os.getpid()}" in said
    assert f"process {child} is a fork of that" in said
    ask()
    llm.shutdown()
