"""Soak test with faults: clients of all kinds run while any engine step may fail. Every request ends and frees its
memory.

Clients stream, leave streams in reference cycles, abort, set deadlines and priorities, and add and remove schemas.
The pool holds a few requests. Faults are raised before and after every step of the engine's loop.
Each complete answer is compared with the answer to its prompt alone, as in test_soak.py. Every few seconds all clients
pause. Then no chunk has a reference, no request is alive, and no memory has leaked.

INLAY_SOAK_S: duration of the long form in seconds, 3600 by default.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from inlay import LLM, AsyncLLM, InlayError, SamplingParams, Schema
from inlay.client.base import Base
from inlay.engine import core, forward, kv_manager, lookup
from inlay.engine.allocation import SequenceAllocation
from inlay.engine.encoder import Encoding
from inlay.engine.request import Request
from inlay.output import AnswerState, RequestState
from tests.conftest import tiny
from tests.model.engine.driving import placed_requests
from tests.raising import PanicException
from tests.unit.kv.accounting import audit

LONG_S = float(os.environ.get("INLAY_SOAK_S", "3600"))
PAUSE_EVERY_S = 5.0
PATIENCE_S = 60.0  # with a request that would never end
CLIENTS = 12
THREADS = 3
RATES = (0.01, 0.0, 0.002)  # of faults, for the seconds between two pauses
NEAR_TIE = 1e-3
MOST_GROWTH = 32 * 2**20  # bytes of memory between the second pause and the last
SCHEMA = Schema.from_string(
    '<schema name="s">Front. <module name="a">First one.</module><module name="b">Another.</module></schema>'
)
TRUNKS = ["The ferry goes to the town.", "Once upon a time there was"]


class InjectedError(RuntimeError):
    """A fault that is thrown on purpose."""


class Faults:
    """Thrown before and after functions, at random. rate: how often; kinds: which."""

    def __init__(self, patch: pytest.MonkeyPatch, randomly: random.Random, kinds: tuple[type[BaseException], ...]):
        self._patch, self._randomly, self._kinds = patch, randomly, kinds
        self.rate = 0.0
        self.thrown: Counter[str] = Counter()

    def around(self, owner: Any, *names: str) -> None:
        for name in names:
            self._patch.setattr(owner, name, self._wrapped(name, getattr(owner, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **how: Any) -> Any:
            self._throw(f"before {name}")
            result = real(*args, **how)
            self._throw(f"after {name}")
            return result

        return faulty

    def _throw(self, where: str) -> None:
        if self._randomly.random() < self.rate:
            self.thrown[where] += 1
            raise self._randomly.choice(self._kinds)(where)


def everywhere(llm: Base, faults: Faults) -> None:
    """Raise faults around every step of the loop: admission, plan, forward pass, storing, sampling, listeners."""
    engine = llm.local.engine
    faults.around(engine.scheduler, "step")
    faults.around(engine.kv_manager, "stored", "grow", "computed")
    faults.around(engine.kv_manager.pending, "add", "computing")
    faults.around(kv_manager, "in_encoding_order", "wanted_runs", "tail_tokens", "allocation_of")
    faults.around(lookup, "in_encoding_order", "readable_tokens")
    faults.around(SequenceAllocation, "take")
    faults.around(Encoding, "batch", "computed")
    faults.around(engine.scheduler, "requeue")
    faults.around(engine.runner, "run")
    faults.around(core, "begin")
    faults.around(forward, "build_plan", "advance")
    faults.around(Request, "compose_now", "count", "accept", "events", "heard", "decode_work", "decoded")
    faults.around(AnswerState, "add")
    faults.around(RequestState, "output")


class Soak:
    """The state and the observations of one run."""

    def __init__(self, llm: Base, faults: Faults, seed: int) -> None:
        self.llm, self.faults, self.randomly = llm, faults, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.elsewhere = placed_requests()
        self.memory: list[int] = []
        self.prompts = [
            self.randomly.choice(TRUNKS)[: self.randomly.randrange(1, 25)] + f" {number}?" for number in range(12)
        ]
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
        self.alone = LLM(llm.loaded, kv_memory="16MiB", chunk_size=4, max_pass_s=None).generate(self.prompts, greedy)

    def params(self) -> SamplingParams:
        drawn = {"temperature": 0.9, "n": self.randomly.choice([1, 3])} if self.randomly.random() < 0.3 else {}
        return SamplingParams(
            **{"temperature": 0, "max_tokens": self.randomly.choice([1, 4, 24]), **drawn, "ignore_eos": True}
        )

    def check(self, number: int, params: SamplingParams, output: Any) -> None:
        """A complete answer equals that of the prompt alone, or differs first at a token where two logits were
        close.
        """
        self.seen["answers"] += 1
        assert output.finished
        for said in output.outputs:
            assert len(said.token_ids) == params.max_tokens
        if not params.greedy:
            return
        (alone,) = self.alone[number].outputs
        for step, (token, expected) in enumerate(zip(output.outputs[0].token_ids, alone.token_ids, strict=False)):
            if token != expected:
                first, second = sorted((one.logprob for one in alone.logprobs[step].values()), reverse=True)[:2]
                assert first - second < NEAR_TIE, (self.prompts[number], step)
                self.seen["close calls"] += 1
                return
        self.seen["equal"] += 1

    def ended(self, error: BaseException) -> None:
        """With its error: its deadline's, the engine's, or one that was thrown."""
        told = isinstance(error, InlayError | InjectedError) or "PanicException" in str(error)
        assert told, repr(error)
        self.seen[type(error).__name__] += 1

    def settle(self) -> None:
        """Check the accounting while no request runs, on any thread that may touch the engine."""
        engine = self.llm.local.engine
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
        audit(engine.store)
        engine.store.clear()
        assert engine.store.pool.free_chunks == engine.store.pool.chunks
        assert not engine.kv_manager.pending
        assert engine.kv_manager.encoding is None
        assert not self.llm.client.thread.listeners
        assert not placed_requests(self.elsewhere)
        self.memory.append(resident())


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def engine_settings(llm: Any) -> dict[str, Any]:
    """A pool of some 160 tokens."""
    per_token = sum(2 * layer.kv_heads * layer.head_dim * 4 for layer in llm.spec.layers)
    return {"kv_memory": 160 * per_token, "chunk_size": 4, "max_num_seqs": 6, "prefill_chunk": 16, "max_waiting": 64}


class AsyncSoak(Soak):
    """Many clients on an event loop, the engine on a thread of its own."""

    async def run(self, seconds: float) -> None:
        until, rates = time.monotonic() + seconds, cycle(RATES)
        while time.monotonic() < until:
            self.faults.rate = next(rates)
            pause = min(until, time.monotonic() + PAUSE_EVERY_S)
            await asyncio.gather(*(self._client(pause) for _ in range(CLIENTS)))
            self.faults.rate = 0.0
            gc.collect()  # streams in circles
            await self._quiet()
            await asyncio.wrap_future(self.llm.client.call(self.settle))

    async def _quiet(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.llm.client.thread.listeners or self.llm.stats().running or self.llm.stats().waiting:
                await asyncio.sleep(0.01)

    async def _client(self, until: float) -> None:
        while time.monotonic() < until:
            act = self.randomly.choices([self._ask, self._leave, self._abort, self._schema], [60, 20, 10, 10])[0]
            try:
                async with asyncio.timeout(PATIENCE_S) as patience:
                    await act()
            except TimeoutError as error:
                raise AssertionError(f"{act.__name__} did not end ({patience.expired()}): {dict(self.seen)}") from error
            except (Exception, PanicException) as error:
                if isinstance(error, AssertionError):
                    raise
                self.ended(error)

    def _asked(self, **how: Any) -> tuple[int, SamplingParams, Any]:
        number, params = self.randomly.randrange(len(self.prompts)), self.params()
        deadline = {"timeout_s": self.randomly.uniform(0.001, 0.2)} if self.randomly.random() < 0.2 else {}
        priority = self.randomly.choice([0, 0, 1, -1])
        reuse = self.randomly.choice(["exact", "exact", "off"])
        return (
            number,
            params,
            self.llm.generate(self.prompts[number], params, priority=priority, reuse=reuse, **deadline, **how),
        )

    async def _ask(self) -> None:
        number, params, stream = self._asked()
        async for output in stream:
            last = output
        self.check(number, params, last)

    async def _leave(self) -> None:
        """Begin a stream, and leave it in a circle."""
        _, _, stream = self._asked()
        await anext(stream)
        circle: list[Any] = [stream]
        circle.append(circle)
        self.seen["left"] += 1

    async def _abort(self) -> None:
        name = f"mine {self.randomly.random()}"
        number, params, stream = self._asked(request_id=name)
        async for output in stream:
            last = output
            self.llm.abort(name)
        self.check(number, params, last)

    async def _schema(self) -> None:
        """Make a schema, perhaps ask, and perhaps remove it before that is done."""
        salt = self.randomly.choice("xyz")
        adding = asyncio.create_task(self.llm.add_schema(SCHEMA, cache_salt=salt, reuse="anchored"))
        if self.randomly.random() < 0.5:
            await asyncio.sleep(self.randomly.uniform(0, 0.01))
            self.llm.remove_schema("s", cache_salt=salt)
        try:
            await adding
        finally:
            self.seen["schemas"] += 1
        prompt = SCHEMA.prompt().use(self.randomly.choice("ab")).text("What?")
        async for output in self.llm.generate(prompt, self.params(), reuse="anchored", cache_salt=salt):
            assert output.outputs


class CallersSoak(Soak):
    """A few threads that step the engine themselves, and leave streams to the garbage collector in the middle."""

    def run(self, seconds: float) -> None:
        until, rates = time.monotonic() + seconds, cycle(RATES)
        while time.monotonic() < until:
            self.faults.rate = next(rates)
            pause = min(until, time.monotonic() + PAUSE_EVERY_S)
            with ThreadPoolExecutor(THREADS) as threads:
                for client in [threads.submit(self._client, pause) for _ in range(THREADS)]:
                    client.result(PAUSE_EVERY_S + PATIENCE_S)
            self.faults.rate = 0.0
            gc.collect()
            self.llm.client.thread.run(self.settle)

    def _client(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                self.randomly.choices([self._ask, self._leave, self._schema], [60, 30, 10])[0]()
            except (InjectedError, InlayError) as error:
                self.ended(error)

    def _ask(self) -> None:
        numbers = self.randomly.sample(range(len(self.prompts)), self.randomly.randrange(1, 4))
        params = self.params()
        outputs = self.llm.generate([self.prompts[number] for number in numbers], params)
        for number, output in zip(numbers, outputs, strict=True):
            self.check(number, params, output)

    def _leave(self) -> None:
        """Begin a stream, and leave it in a circle."""
        stream = self.llm.stream(self.randomly.choice(self.prompts), self.params())
        next(stream)
        circle: list[Any] = [stream]
        circle.append(circle)
        self.seen["left"] += 1

    def _schema(self) -> None:
        salt = self.randomly.choice("xyz")
        self.llm.add_schema(SCHEMA, cache_salt=salt, reuse="anchored")
        prompt = SCHEMA.prompt().use(self.randomly.choice("ab")).text("What?")
        self.llm.generate(prompt, self.params(), reuse="anchored", cache_salt=salt)
        self.llm.remove_schema("s", cache_salt=salt)
        self.seen["schemas"] += 1


def keep_no_log(patch: pytest.MonkeyPatch) -> None:
    """pytest would keep each record of each fault, with its frames, and that would be the growth we measure."""
    log = logging.getLogger("inlay")
    patch.setattr(log, "propagate", False)
    patch.setattr(log, "handlers", [logging.NullHandler()])


def soak_async(seconds: float, patch: pytest.MonkeyPatch, seed: int) -> Soak:
    keep_no_log(patch)
    loaded = tiny("llama")
    llm = AsyncLLM(loaded, seed=0, **engine_settings(loaded))
    soak = AsyncSoak(llm, Faults(patch, random.Random(seed), (InjectedError, PanicException)), seed)
    everywhere(llm, soak.faults)
    asyncio.run(soak.run(seconds))
    llm.shutdown()
    return soak


def soak_callers(seconds: float, patch: pytest.MonkeyPatch, seed: int) -> Soak:
    keep_no_log(patch)
    loaded = tiny("llama")
    llm = LLM(loaded, seed=0, **engine_settings(loaded))
    soak = CallersSoak(llm, Faults(patch, random.Random(seed), (InjectedError,)), seed)  # a panic stops its caller
    everywhere(llm, soak.faults)
    soak.run(seconds)
    llm.shutdown()
    return soak


def check_seen(soak: Soak, *kinds: str) -> None:
    print(dict(soak.seen), dict(soak.faults.thrown), [size >> 20 for size in soak.memory])
    assert soak.seen["equal"] > 0
    assert soak.seen["close calls"] <= 1 + soak.seen["equal"] // 200
    assert min(soak.seen[kind] for kind in ("left", "schemas", "InjectedError", *kinds)) > 0
    if len(soak.memory) > 2:
        assert soak.memory[-1] - soak.memory[1] < MOST_GROWTH, soak.memory


@pytest.mark.long
def test_short_fault_soak_with_threads(monkeypatch: pytest.MonkeyPatch):
    check_seen(soak_callers(5, monkeypatch, seed=3))


@pytest.mark.long
def test_short_fault_soak_with_an_event_loop(monkeypatch: pytest.MonkeyPatch):
    check_seen(soak_async(3, monkeypatch, seed=4), "AbortedError", "DeadlineError")


@pytest.mark.slow
def test_fault_soak_with_threads(monkeypatch: pytest.MonkeyPatch):
    check_seen(soak_callers(LONG_S / 4, monkeypatch, seed=1))


@pytest.mark.slow
def test_fault_soak_with_an_event_loop(monkeypatch: pytest.MonkeyPatch):
    check_seen(soak_async(LONG_S * 3 / 4, monkeypatch, seed=2), "AbortedError", "DeadlineError")
