"""How a call waits for an engine: on an event loop, or by stepping the engine on the caller's thread.

The calls of LLM and AsyncLLM are the same coroutines (base.py, schema_calls.py). AsyncLLM awaits them. LLM runs them
with ``finish``: its ``Stepping`` steps the engine instead of suspending them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from inlay.workpool import WorkPool

T = TypeVar("T")


class Mailbox(Protocol[T]):
    """Carries items from an engine's thread to a caller."""

    def put(self, item: T) -> None:
        """Send an item. Thread-safe; does not block."""
        ...

    async def get(self) -> T:
        """Wait for an item."""
        ...


class Waiting(Protocol):
    """How the calls of one LLM wait."""

    async def work(self, pool: WorkPool, call: Callable[[], T], owner: str | None, deadline: float | None = None) -> T:
        """Return the result of blocking work. Arguments and errors as of WorkPool.run."""
        ...

    async def result(self, future: Future[T]) -> T:
        """Return the result of a call of the engine."""
        ...

    def mailbox(self) -> Mailbox[Any]: ...


class Looping:
    """Calls await. Blocking work runs on other threads."""

    async def work(self, pool: WorkPool, call: Callable[[], T], owner: str | None, deadline: float | None = None) -> T:
        return await pool.run(call, owner=owner, deadline=deadline)

    async def result(self, future: Future[T]) -> T:
        return await asyncio.wrap_future(future)

    def mailbox(self) -> Mailbox[Any]:
        return _LatestItem(asyncio.get_running_loop())


class Stepping:
    """Calls never suspend. Work runs on the caller's thread, which steps the engine while it waits.

    Args:
        step: takes one step of the engine.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    async def work(self, pool: WorkPool, call: Callable[[], T], owner: str | None, deadline: float | None = None) -> T:
        return call()

    async def result(self, future: Future[T]) -> T:
        return future.result()

    def mailbox(self) -> Mailbox[Any]:
        return _SteppedItems(self._step)


def finish(call: Coroutine[Any, Any, T]) -> T:
    """Run a call that waits by ``Stepping``, and return its result."""
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    call.close()
    raise AssertionError("a call that steps the engine has suspended")


class _LatestItem(Generic[T]):
    """The latest item for a reader on an event loop. Older ones are dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived = asyncio.Event()
        self._items: list[T] = []

    def put(self, item: T) -> None:
        with suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._set, item)

    async def get(self) -> T:
        await self._arrived.wait()
        self._arrived.clear()
        return self._items[0]

    def _set(self, item: T) -> None:
        self._items[:] = [item]
        self._arrived.set()


class _SteppedItems(Generic[T]):
    """All items for a reader that steps the engine. Another thread may step it too and receive items meanwhile."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._items: SimpleQueue[T] = SimpleQueue()

    def put(self, item: T) -> None:
        self._items.put(item)

    async def get(self) -> T:
        while self._items.empty():
            self._step()
        return self._items.get()
