"""Large bodies: the threads that parse them, the memory that they leave, and the latency of other requests."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from inlay.api.failures import BodyError
from inlay.api.openai import OpenAI
from inlay.server import body as guard
from inlay.server.threads import BodyWorkers, MemoryTrimmer
from inlay.workpool import Pacer
from tests.model.engine.background.test_pacing import burn
from tests.server.server.conftest import CHAT, COMPLETIONS, Site

LARGE = 2**20
S = 30.0  # seconds until a test gives up


class Gate:
    """Work that begins, and ends when it is let."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def work(self) -> str:
        self.begun.set()
        assert self.open.wait(S)
        return threading.current_thread().name


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    """As many as a test needs; open at its end, so that no thread stays."""
    made = [Gate() for _ in range(4)]
    yield made
    for gate in made:
        gate.open.set()


async def begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.begun.wait, S)


async def turns(times: int = 5) -> None:
    """Let every ready task run."""
    for _ in range(times):
        await asyncio.sleep(0)


def test_small_bodies_use_no_thread():
    async def names() -> list[str]:
        workers, name = BodyWorkers(), lambda: threading.current_thread().name
        asked = ((10, False), (2**14, False), (2**14 + 1, False), (2**11, True), (2**16 + 1, False))
        return [await workers.run(name, tenant="a", size=size, slow=slow) for size, slow in asked]

    here, also_here, small, slow, large = asyncio.run(names())
    assert here == also_here == threading.current_thread().name
    assert small.startswith("inlay-small-bodies")
    assert slow.startswith("inlay-small-bodies")
    assert large.startswith("inlay-large-bodies")


def test_memory_is_trimmed_twice_after_large_bodies():
    """The second time is for the parsed objects, which may live long after the body."""
    given: list[str] = []
    twice = threading.Event()

    def give_back() -> None:
        given.append(threading.current_thread().name)
        if len(given) == 2:
            twice.set()

    async def run() -> None:
        workers = BodyWorkers(trimmer=MemoryTrimmer(after_s=0.01, again_s=0.02, give_back=give_back))
        await workers.run(lambda: None, tenant="a", size=LARGE // 2)
        await workers.run(lambda: None, tenant="a", size=LARGE // 2)
        assert await asyncio.to_thread(twice.wait, S)
        await asyncio.sleep(0.1)

    asyncio.run(run())
    assert len(given) == 2
    assert all(name.startswith("inlay-trim") for name in given)


def test_memory_is_trimmed_after_small_bodies():
    """A grammar takes hundreds of times the bytes of its text."""
    given = threading.Event()

    async def run() -> None:
        await BodyWorkers(trimmer=MemoryTrimmer(again_s=0.01, give_back=given.set)).run(
            lambda: None, tenant="a", size=2**17
        )
        assert await asyncio.to_thread(given.wait, S)

    asyncio.run(run())


def test_memory_is_trimmed_under_steady_traffic():
    """Each would put it off a little more: after hours of steady traffic a tenth of all memory was free, and kept."""
    given: list[float] = []

    async def run() -> None:
        trimmer = MemoryTrimmer(again_s=10.0, latest_s=0.2, give_back=lambda: given.append(time.monotonic()))
        began = time.monotonic()
        while len(given) < 2 and time.monotonic() < began + S:
            trimmer.ended(100)
            await asyncio.sleep(0.01)
        assert len(given) == 2
        assert given[1] - given[0] > 0.1, "and not at each of them"

    asyncio.run(run())


@pytest.mark.parametrize("leaves", [False, True])
def test_memory_is_trimmed_after_large_answers_to_small_bodies(monkeypatch, site: Site, leaves: bool):
    """Twenty alternatives a token take a kilobyte each, also when the client has left."""
    given = threading.Event()
    monkeypatch.setattr(site.service, "trimmer", MemoryTrimmer(again_s=0.01, give_back=given.set))
    body = {"prompt": "The ferry", "n": 4, "max_tokens": 40, "logprobs": 20, "ignore_eos": True, "stream": leaves}
    with closing(site.open()) as connection:
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if leaves:
            response.read(100)
        else:
            response.read()
    assert given.wait(5)


_ARENAS_OF_THREADS = """
import ctypes, os, sys, tempfile, threading
if len(sys.argv) > 1:
    from inlay.server.threads import set_up_process
    set_up_process()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.fclose.argtypes = (ctypes.c_void_p,)
libc.malloc_info.argtypes = (ctypes.c_int, ctypes.c_void_p)
together = threading.Barrier(8)
def work():
    together.wait()
    kept = [bytes(4096) for _ in range(100)]
    together.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
with tempfile.NamedTemporaryFile() as told:
    stream = libc.fopen(told.name.encode(), b"w")
    libc.malloc_info(0, stream), libc.fclose(stream)
    print(sys.getswitchinterval(), told.read().decode())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="arenas are glibc's")
def test_server_limits_malloc_arenas_and_the_switch_interval():
    def measured(*arguments: str) -> tuple[float, int]:
        command = [sys.executable, "-c", _ARENAS_OF_THREADS, *arguments]
        interval, info = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
        return float(interval), len(re.findall("<heap nr=", info))

    assert measured() == (0.005, 9)
    assert measured("set up") == (pytest.approx(1e-4), 2)


def test_threads_end_with_their_workers():
    async def run() -> None:
        before = set(threading.enumerate())
        workers = BodyWorkers()
        await workers.run(lambda: None, tenant="a", size=LARGE)
        (thread,) = set(threading.enumerate()) - before
        del workers
        gc.collect()
        await asyncio.to_thread(thread.join, S)
        assert not thread.is_alive()

    asyncio.run(run())


def test_tenants_alternate(gates: list[Gate]):
    """A tenant's large bodies go one after the other; those of others, and small ones, do not wait for them."""

    async def run() -> None:
        workers, (first, second, other, small) = BodyWorkers(), gates

        def ask(gate: Gate, tenant: str, size: int = LARGE) -> asyncio.Task[str]:
            return asyncio.create_task(workers.run(gate.work, tenant=tenant, size=size))

        tasks = [ask(first, "a"), ask(second, "a"), ask(other, "b"), ask(small, "a", 2**15)]
        for gate in (first, other, small):
            await begun(gate)
        assert not second.begun.is_set()
        first.open.set()
        await begun(second)
        for gate in gates:
            gate.open.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_abandoned_work_keeps_its_turn(gates: list[Gate]):
    async def run() -> None:
        workers, (first, second, never, _) = BodyWorkers(), gates
        tasks = [asyncio.create_task(workers.run(g.work, tenant="a", size=LARGE)) for g in (first, never, second)]
        await begun(first)
        tasks[0].cancel()  # its client has left
        tasks[1].cancel()  # and this one, before it began
        await turns()
        assert not second.begun.is_set()
        first.open.set()
        await begun(second)
        second.open.set()
        assert (await tasks[2]).startswith("inlay-large-bodies")
        assert not never.begun.is_set()

    asyncio.run(run())


def test_waiting_bytes_of_one_tenant_are_bounded(gates: list[Gate]):
    async def run() -> None:
        workers = BodyWorkers(max_bytes=3 * LARGE)
        tasks = [asyncio.create_task(workers.run(g.work, tenant="a", size=LARGE)) for g in gates[:3]]
        await begun(gates[0])
        with pytest.raises(BodyError) as caught:
            await workers.run(int, tenant="a", size=LARGE)
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "too_many_bodies", 1.0)
        assert await workers.run(int, tenant="b", size=LARGE) == 0
        for gate in gates:
            gate.open.set()
        await asyncio.gather(*tasks)
        await turns()
        assert await workers.run(int, tenant="a", size=LARGE) == 0

    asyncio.run(run())


def test_slow_body_delays_the_next_one_while_the_engine_is_busy():
    """Its tenant's alone."""
    busy = threading.Event()
    busy.set()

    class Slow(Pacer):
        def rest_s(self, worked_s: float, owners: int = 1) -> float:
            return 60.0 if super().rest_s(worked_s, owners) else 0.0

    async def run() -> None:
        workers = BodyWorkers(pacer=Slow(busy.is_set))
        await workers.run(burn, tenant="a", size=LARGE)
        await turns()
        later = asyncio.create_task(workers.run(int, tenant="a", size=LARGE))
        await workers.run(int, tenant="b", size=LARGE)
        await asyncio.sleep(0.2)
        assert not later.done()
        busy.clear()
        await asyncio.wait_for(later, 20)

    asyncio.run(run())


def test_errors_are_returned():
    def wrong() -> None:
        raise BodyError("no")

    with pytest.raises(BodyError, match=r"^no$"):
        asyncio.run(BodyWorkers().run(wrong, tenant="a", size=LARGE))


@pytest.mark.parametrize("step", ["parse", "read"])
def test_other_requests_are_answered_while_a_large_body_is_parsed(
    site: Site, gates: list[Gate], monkeypatch: pytest.MonkeyPatch, step: str
):
    gate = gates[0]
    module, name = (guard, "parse_json") if step == "parse" else (OpenAI, "read")
    original = getattr(module, name)

    def held(value: Any, *more: Any) -> Any:
        large = len(value) > LARGE if step == "parse" else len(str(value)) > LARGE
        if large:
            gate.work()
        return original(value, *more)

    monkeypatch.setattr(module, name, staticmethod(held))
    body = {"prompt": ["", *[1] * LARGE]}
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(site.refusal, COMPLETIONS, body)
        assert gate.begun.wait(S)
        assert site.call("GET", "/health")[0] == 200
        site.post(COMPLETIONS, prompt="a", max_tokens=1)
        assert not answer.done()
        gate.open.set()
        status, error = answer.result(S)
    assert status == 400
    assert len(error["message"]) < 10_000


class Parsed(dict[str, Any]):
    """A body that can be asked whether it is still there."""


def test_body_is_freed_while_its_request_is_answered(site: Site, monkeypatch: pytest.MonkeyPatch):
    seen: list[weakref.ref[Parsed]] = []
    original = guard.parse_json

    def parsed(*arguments: Any) -> Parsed:
        made = Parsed(original(*arguments))
        seen.append(weakref.ref(made))
        return made

    def generating(*arguments: Any, **named: Any) -> Any:
        """The arguments of the engine's call. A thread may still be returning from the body."""
        gc.collect()
        end = time.monotonic() + S / 3
        while seen[-1]() is not None and time.monotonic() < end:
            time.sleep(0.001)
        gone.append(seen[-1]() is None)
        return generate(*arguments, **named)

    gone: list[bool] = []
    generate = site.service.llm.generate
    monkeypatch.setattr(guard, "parse_json", parsed)
    monkeypatch.setattr(site.service.llm, "generate", generating)
    for size in (10, 100_000):  # in both places where it is made
        site.post(CHAT, messages=[{"role": "user", "content": "a"}], metadata=["a" * size], max_tokens=1)
    assert gone == [True, True]


@pytest.mark.parametrize("size", [1, LARGE])
def test_rejected_body_is_freed_at_once(size: int):
    class Body(bytearray):
        """One that says when it is gone."""

    def refuse(body: Body) -> None:
        raise BodyError(f"{len(body)} bytes are wrong")

    async def refused() -> None:
        body = Body(size)
        gone = weakref.ref(body)
        with pytest.raises(BodyError):
            await BodyWorkers().run(partial(refuse, body), tenant="ann", size=size)
        del body
        await turns()
        assert gone() is None

    gc.disable()
    try:
        asyncio.run(refused())
    finally:
        gc.enable()
