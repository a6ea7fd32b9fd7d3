"""Steps that are launched before the tokens of the last one are known, as on a device, with tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inlay import LLM, SamplingParams
from inlay.engine.runner import Runner
from inlay.engine.scheduler import Scheduler, Step
from inlay.errors import AbortedError
from inlay.sampling.sampler import PendingTokens
from tests.conftest import tiny
from tests.model.engine.driving import Driver, sample_on_device
from tests.model.equivalence.test_exact import ids
from tests.unit.engine.fakes import FakeJob, FakeMemory, make, run

PARAMS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.9, seed=1, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.9, seed=2, max_tokens=7, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(seed=3, max_tokens=11, top_k=9, bad_words=["a", "e", "the"], min_tokens=3),
    SamplingParams(seed=4, max_tokens=20, structured_outputs={"regex": "[a-f]{6}"}, n=2),
    SamplingParams(seed=5, max_tokens=1),
    SamplingParams(seed=6, max_tokens=25, stop_token_ids=list(range(60, 256, 3)), n=3),
    SamplingParams(seed=7, max_tokens=25, stop=["a", "b", "c", "\x00", "\x01", "q"]),
]
PROMPTS = [f"Prompt number {number}: {'x' * number}" for number in range(len(PARAMS))]


def answers(**settings: Any) -> list[list[Any]]:
    llm = LLM(tiny("llama"), kv_memory="16MiB", chunk_size=4, seed=0, **settings)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert llm.stats().running == 0
    return [
        [
            (one.token_ids, one.text, one.finish_reason, pytest.approx(one.cumulative_logprob, abs=1e-4))
            for one in each.outputs
        ]
        for each in outputs
    ]


@pytest.mark.parametrize("places", [64, 3])
def test_asynchronous_answers_equal_synchronous_answers(monkeypatch, places):
    expected = answers(max_num_seqs=places)
    sample_on_device(monkeypatch)
    assert answers(max_num_seqs=places) == expected


class Log:
    """The order of events: passes, with the number of their rows, and waits for a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        for owner, name in ((Runner, "run"), (PendingTokens, "wait")):
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **how: Any) -> Any:
            rows = sum(one.part.rows for one in args[1]) if name == "run" else ""
            self.said.append(f"{name} {rows}".strip())
            return real(*args, **how)

        return noted


def test_host_waits_after_launching_the_next_step(monkeypatch):
    sample_on_device(monkeypatch)
    driver = Driver(record=False)
    log = Log(monkeypatch)
    driver.run(driver.request(ids(9), 5), driver.request(ids(7, 1), 3))
    # The prefill pass is waited for. A request whose last token is in flight gets no further row.
    assert log.said == ["run 16", "wait", "run 2", "run 2", "wait", "run 1", "wait", "run 1", "wait", "wait"]


def test_cpu_steps_are_synchronous(monkeypatch):
    driver = Driver(record=False)
    log = Log(monkeypatch)
    driver.run(driver.request(ids(9), 4))
    assert log.said == ["run 9", "wait", "run 1", "wait", "run 1", "wait", "run 1", "wait"]


class Waits(TorchDispatchMode):
    """Counts operations that would wait for a device: numbers that are read, and shapes that follow from them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2"}:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_decode_step_waits_only_for_its_tokens(monkeypatch):
    sample_on_device(monkeypatch)
    driver = Driver(record=False)
    driver.add(*(driver.llm.local.prepare(prepared(driver, one)) for one in PARAMS[:5]))
    for _ in range(4):
        driver.engine.step()
    log = Log(monkeypatch)
    with Waits() as waits:
        torch.ones(2).nonzero()
        driver.engine.step()
    assert waits.found == ["nonzero"], "which is counted, and nothing else is there"
    assert log.said == ["run 6", "wait"]


def prepared(driver: Driver, params: SamplingParams) -> Any:
    return driver.llm.processor.process("Once upon a time", params, driver.llm.policy())


def test_request_ended_by_a_stop_token_wastes_one_row(monkeypatch):
    (said,) = Driver(record=False).run(Driver(record=False).request(ids(9), 8))
    sample_on_device(monkeypatch)
    driver = Driver(record=False)
    stops = driver.request(ids(9), 8, stop_token_ids=[said[3]])
    goes_on = driver.request(ids(7, 1), 8)
    expected = said[: said.index(said[3]) + 1]
    log = Log(monkeypatch)
    found, other = driver.run(stops, goes_on)
    assert found == expected
    assert len(other) == 8
    assert "run 1" in log.said
    driver.engine.forget()
    assert driver.store.pool.free_chunks == driver.store.pool.chunks


def test_new_request_starts_without_delay(monkeypatch):
    sample_on_device(monkeypatch)
    driver = Driver(record=False)
    first, second = driver.request(ids(9), 20), driver.request(ids(7, 1), 5)
    driver.add(first)
    driver.step(4)
    log = Log(monkeypatch)
    driver.add(second)
    driver.step()
    assert log.said == ["wait", "run 8", "wait"], "it computes its prompt beside the other's token"
    driver.finish()
    assert (len(first.token_ids), len(second.token_ids)) == (20, 5)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_cancelled_request_gets_no_token_and_others_continue(monkeypatch, steps):
    (expected,) = Driver(record=False).run(Driver(record=False).request(ids(7, 1), 9))
    sample_on_device(monkeypatch)
    driver = Driver(record=False)
    first, second = driver.request(ids(9), 9), driver.request(ids(7, 1), 9)
    driver.add(first, second)
    driver.step(steps)
    said = list(first.token_ids)
    driver.engine.release(first)
    driver.finish()
    assert first.token_ids == said
    assert tuple(second.token_ids) == expected


def test_cancelling_the_only_request_leaves_the_engine_idle(monkeypatch):
    sample_on_device(monkeypatch)
    driver = Driver(record=False)
    only = driver.request(ids(9), 9)
    driver.add(only)
    driver.step(3)
    driver.engine.release(only)
    assert not driver.engine.busy
    assert driver.run(driver.request(ids(9), 2))[0] == tuple(only.token_ids[:2])


@pytest.mark.parametrize(("owner", "name"), [(Runner, "run"), (PendingTokens, "wait"), (PendingTokens, "__init__")])
def test_fault_ends_only_the_requests_of_its_step(monkeypatch, owner, name):
    sample_on_device(monkeypatch)
    driver = Driver(record=False)
    inside = [driver.request(ids(9 + n, n), tokens) for n, tokens in enumerate((3, 9))]
    driver.add(*inside)
    driver.step(3)
    assert [len(each.token_ids) for each in inside] == [2, 2]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        driver.step()
    driver.finish()
    assert str(inside[1].error) == "broken"
    if owner is Runner:  # a request with its last token in flight was not in the pass
        assert inside[0].error is None
        assert len(inside[0].token_ids) == 3
    else:
        assert all(each.finished for each in inside)
    driver.audit()
    assert len(driver.run(driver.request(ids(9), 4))[0]) == 4


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken")


def test_interrupted_wait_raises_and_ends_the_step(monkeypatch):
    sample_on_device(monkeypatch)
    driver = Driver(record=False)
    only = driver.request(ids(9), 9)
    driver.add(only)
    driver.step(3)

    def interrupted(_: PendingTokens) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PendingTokens, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.step()
    assert isinstance(only.error, AbortedError)
    assert not driver.engine.busy


def test_forced_answers_are_synchronous(monkeypatch):
    expected, driver = Driver(), Driver()
    (said,) = expected.run(expected.request(ids(9), forced="hello"))
    sample_on_device(monkeypatch)
    log = Log(monkeypatch)
    assert driver.run(driver.request(ids(9), forced="hello"))[0] == said
    assert log.said == ["run 9", "wait"] + ["run 1", "wait"] * 4


# The scheduler's decisions


def running(chunks: int, *answering: FakeJob) -> tuple[Scheduler[FakeJob], FakeMemory]:
    """A scheduler with two slots, whose jobs have generated their first token."""
    scheduler, memory = make(chunks=chunks, requests=2)
    for job in answering:
        scheduler.add(job)
    run(scheduler, memory, scheduler.step(0))
    return scheduler, memory


def test_step_is_repeated_while_nothing_changes():
    one, other, third = (FakeJob(number, 2, 5) for number in range(3))
    scheduler, _ = running(100, one, other)
    assert scheduler.again(0, ()) == Step(decode=[one, other])
    assert scheduler.again(0, {one}) == Step(decode=[other])
    assert scheduler.again(0, {one, other}) is None
    scheduler.add(third)
    assert scheduler.again(0, ()) == Step(decode=[one, other]), "there is no place for it"
    scheduler.remove(other)
    assert scheduler.again(0, ()) is None, "there is one now"


def test_deadline_full_memory_or_waiting_tenant_stops_step_repetition():
    scheduler, _ = running(100, FakeJob(0, 2, 5, deadline=3.0))
    assert scheduler.again(2.9, ()) is not None
    assert scheduler.again(3.0, ()) is None
    scheduler, memory = running(4, FakeJob(1, 2, 5))
    assert scheduler.again(0, ()) is not None
    memory.chunks = 3
    memory.held = dict.fromkeys(memory.held, 3)
    assert scheduler.again(0, ()) is None
    scheduler, _ = running(100, *(FakeJob(number, 2, 5, tenant="one") for number in range(2)))
    assert scheduler.again(0, ()) is not None
    scheduler.add(FakeJob(2, 2, 5, tenant="other"))
    assert scheduler.again(0, ()) is None
