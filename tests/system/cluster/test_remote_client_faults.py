"""However a call fails, every caller that waits for an answer or an encoding gets the error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from inlay import AbortedError, RequestOutput, SamplingParams
from inlay.errors import InlayError
from tests.raising import raises
from tests.system.cluster.local import Cluster, cluster
from tests.system.cluster.test_remote_client import GREEDY, SCHEMA, last

LONG = SamplingParams(max_tokens=1900, ignore_eos=True)


def with_cluster(test: Callable[[Cluster], Awaitable[None]], replicas: int = 2, **settings: Any) -> None:
    """Run a test in a cluster within 20 seconds, so that a lost reply does not hang it."""

    async def run() -> None:
        async with cluster(replicas, **settings) as made, asyncio.timeout(20):
            await test(made)

    asyncio.run(run())


async def begun(made: Cluster, prompt: str, params: SamplingParams = LONG, **asked: Any) -> asyncio.Task[RequestOutput]:
    """A request that a replica has been asked for."""
    task = asyncio.create_task(last(made.llm, prompt, params, **asked))
    while not made.transport.answered:
        await asyncio.sleep(0.005)
    return task


def test_abort_before_prompt_processing_raises_an_error():
    async def test(made: Cluster) -> None:
        task = asyncio.create_task(last(made.llm, "Once", LONG, request_id="named"))
        await asyncio.sleep(0)
        assert made.llm.abort("named")
        with raises("request.aborted", AbortedError, names="named"):
            await task
        assert not made.transport.answered

    with_cluster(test)


def test_aborted_encoding_reports_an_error():
    async def test(made: Cluster) -> None:
        heard: asyncio.Queue[Any] = asyncio.Queue()
        await made.llm.add_schema(SCHEMA, encode=False)
        segments = made.llm.segments_of("s", (), None, None)
        made.client.encode(segments, lambda events: [heard.put_nowait(event) for event in events])
        made.client.cancel(segments.request_id, report=True)
        event = await heard.get()
        assert event.finished
        assert isinstance(event.error.exception(), AbortedError)
        assert heard.empty()

    with_cluster(test)


@pytest.mark.parametrize("lost", ["silent", "gone"])
def test_undelivered_abort_ends_the_request_locally(lost: str):
    """Nor is it sent to another replica."""

    async def test(made: Cluster) -> None:
        task = await begun(made, "Once", request_id="named")
        while made.routing.replica_of("named") is None:
            await asyncio.sleep(0.005)
        getattr(made.transport, lost).add(made.transport.answered[0])
        assert made.llm.abort("named")
        with raises("request.aborted", AbortedError, names="named"):
            await task
        assert len(made.transport.answered) == 1

    with_cluster(test)


def test_running_calls_end_when_the_client_is_shut_down():
    async def test(made: Cluster) -> None:
        made.transport.silent.update(("r0", "r1"))
        task = await begun(made, "Once")
        encoding = asyncio.create_task(made.llm.add_schema(SCHEMA))
        while "encode" not in {method for _, method in made.transport.calls}:
            await asyncio.sleep(0.005)
        made.client.shutdown()
        for each in (task, encoding):
            with raises("engine.shut_down"):
                await each

    with_cluster(test)


class OddError(Exception):
    """An error of an unknown kind."""


@pytest.mark.parametrize(
    "error", [OddError("odd"), RuntimeError("no loop"), OSError("no file"), asyncio.CancelledError()]
)
@pytest.mark.parametrize("step", ["call", "first", "later", "choose"])
def test_every_kind_of_fault_ends_the_request(step: str, error: BaseException, monkeypatch: pytest.MonkeyPatch):
    async def test(made: Cluster) -> None:
        answer = made.transport.answer

        async def faulty(request_id: str, data: bytes, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
            if step == "first":
                raise error
            async for item in answer(request_id, data, remaining_s):
                yield item
                if step == "later":
                    raise error

        def refused(*_: Any) -> Any:
            raise error

        made.transport.answer = refused if step == "call" else faulty  # type: ignore[method-assign]
        if step == "choose":
            monkeypatch.setattr(made.routing, "choose", refused)
        with pytest.raises(InlayError):
            await last(made.llm, "Once")
        monkeypatch.undo()
        made.transport.answer = answer  # type: ignore[method-assign]
        assert (await last(made.llm, "Once", GREEDY)).finished

    with_cluster(test)


@pytest.mark.parametrize(
    "error", [OddError("odd"), InlayError("a replica failed: OSError: no file"), OSError("no file")]
)
def test_replica_with_temporary_status_errors_is_kept(error: Exception):
    async def test(made: Cluster) -> None:
        call, failed = made.transport.call, 0

        async def faulty(replica: str, method: str, *args: Any, timeout_s: float) -> Any:
            nonlocal failed
            if method == "status" and failed < 3:
                failed += 1
                raise error
            return await call(replica, method, *args, timeout_s=timeout_s)

        made.transport.call = faulty  # type: ignore[method-assign]
        while len(made.routing.stats()) < 2:
            await asyncio.sleep(0.02)
        assert failed == 3

    with_cluster(test)


def test_encoding_does_not_wait_for_a_stalled_or_lost_replica():
    async def test(made: Cluster) -> None:
        made.transport.silent.add("r0")
        await made.llm.add_schema(SCHEMA)
        assert {replica for replica, method in made.transport.calls if method == "encode"} == {"r0", "r1"}
        found = await made.llm.stored("s")
        assert 0 < sum(have for _, have in found.values()) < sum(of for of, _ in found.values())

    async def gone(made: Cluster) -> None:
        made.transport.silent.add("r0")
        task = asyncio.create_task(made.llm.add_schema(SCHEMA))
        while ("r0", "encode") not in made.transport.calls:
            await asyncio.sleep(0.005)
        made.client.set_replicas(["r1"])
        await task

    with_cluster(test, stalled_s=1.0)
    with_cluster(gone)


def test_cancelled_encoding_reports_no_more_events():
    async def test(made: Cluster) -> None:
        heard: list[Any] = []
        await made.llm.add_schema(SCHEMA, encode=False)
        segments = made.llm.segments_of("s", (), None, None)
        made.client.encode(segments, heard.append)
        made.client.cancel(segments.request_id)
        task = await begun(made, "Once")
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        while any(engine.stats().running for engine in made.engines.values()):
            await asyncio.sleep(0.01)
        assert heard == []

    with_cluster(test)
