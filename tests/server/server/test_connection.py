"""A connection whose client hangs up, sleeps, or gets every event in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Message

from inlay.server.body import ClientGoneError, Connection

LAST = {"type": "http.response.body", "body": b"", "more_body": False}
MORE = {"type": "http.response.body", "body": b"x", "more_body": True}


class Wire:
    """The callables that a server gives an application. block: sending never ends. leave: when set, the client hangs
    up.
    """

    def __init__(self, *, block: bool = False) -> None:
        self.block = block
        self.leave = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.block:
            await asyncio.Event().wait()
        self.sent.append(message)
        if not message.get("more_body"):
            self.leave.set()  # as Uvicorn says so when the response is complete

    def connection(self, slow_s: float = 10.0) -> Connection:
        return Connection({"type": "http"}, self.receive, self.send, slow_s)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 5))


def test_disconnect_ends_the_running_handler():
    async def test() -> None:
        wire, cleaned = Wire(), []

        async def answer() -> None:
            async with wire.connection():
                try:
                    await asyncio.sleep(5)
                finally:
                    cleaned.append(True)

        asyncio.get_running_loop().call_later(0.01, wire.leave.set)
        with pytest.raises(ClientGoneError):
            await answer()
        assert cleaned
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        await asyncio.sleep(0)  # nothing is left of it

    run(test)


def test_end_of_an_answer_is_not_a_disconnect():
    async def test() -> None:
        wire = Wire()
        async with wire.connection() as connection:
            await connection.send(MORE)
            await connection.send(LAST)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert wire.sent == [MORE, LAST]

    run(test)


def test_client_that_reads_nothing_is_disconnected(caplog):
    async def test() -> None:
        wire = Wire(block=True)
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def answer() -> None:
            async with wire.connection(slow_s=0.1) as connection:
                await asyncio.sleep(0.15)  # an engine that takes its time is no client that does
                await connection.send(MORE)

        with pytest.raises(ClientGoneError):
            await answer()
        assert 0.25 <= loop.time() - began < 20
        assert "the client has read nothing for 0.1 seconds" in caplog.text

    run(test)


def test_slow_but_steady_client_stays_connected():
    async def test() -> None:
        wire = Wire()
        async with wire.connection(slow_s=0.02) as connection:
            for _ in range(20):
                await connection.send(MORE)
                await asyncio.sleep(0.005)
            await connection.send(LAST)

    run(test)


def test_errors_and_cancellation_pass_through():
    async def test() -> None:
        wire = Wire()
        with pytest.raises(KeyError):
            async with wire.connection():
                raise KeyError
        task = asyncio.create_task(_sleep(wire))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def _sleep(wire: Wire) -> None:
        async with wire.connection():
            await asyncio.sleep(5)

    run(test)
