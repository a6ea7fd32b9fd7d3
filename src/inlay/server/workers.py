"""Threads for what a body asks for before the engine knows of it: to be parsed, checked and translated.

The event loop does this itself for small bodies, which takes it less than a change of threads. All others wait for a
thread of a lane, a tenant's one after the other, so that tenants take turns. A lane's threads are its own: work that a
client no longer waits for keeps its thread until it ends, and no more of it begins.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from inlay.api.failures import BodyError

Result = TypeVar("Result")

_INLINE_BYTES = 2**14
_SMALL_BYTES = 2**16
_THREADS = 2  # of a lane: more would only share the interpreter's lock
_MIB = 2**20
_RETRY_S = 1.0
_TRIMMED_BYTES = _MIB  # of bodies, behind which it is worth some milliseconds to give their memory back
_TRIM_AFTER_S = 1.0


class BodyWorkers:
    """Runs work on bodies where it holds up nobody else; one event loop's.

    max_bytes: of one tenant's bodies that wait for a thread or have one, at the same time.
    """

    def __init__(self, max_bytes: int = 128 * _MIB) -> None:
        self._small = _Lane("small-bodies", max_bytes)
        self._large = _Lane("large-bodies", max_bytes)

    async def run(self, work: Callable[[], Result], *, tenant: str, size: int, slow: bool = False) -> Result:
        """What the work returns or raises; and BodyError, status 429, where too much of its tenant's waits.

        size: bytes of the body. slow: whether so many bytes take longer here than those of others.
        """
        if size <= (_INLINE_BYTES // 16 if slow else _INLINE_BYTES):
            return work()
        lane = self._small if size <= _SMALL_BYTES else self._large
        return await lane.run(work, tenant, size)


class _Lane:
    """A few threads, of which no tenant has more than one at a time."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"inlay-{name}")
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()  # by tenant
        self._turns: dict[str, asyncio.Lock] = {}
        self._ended = 0  # bytes of bodies since memory was given back
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], Result], tenant: str, size: int) -> Result:
        if self._bytes[tenant] + size > max(self._max_bytes, size):
            raise BodyError(
                "you are sending as many large bodies at the same time as may be; wait for one to end",
                code="too_many_bodies",
                status=429,
                retry_after_s=_RETRY_S,
            )
        self._bytes[tenant] += size
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            await turn.acquire()
        except asyncio.CancelledError:
            self._left(tenant, size)
            raise
        loop = asyncio.get_running_loop()

        def ended(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, tenant, size)

        future = self._threads.submit(copy_context().run, work)
        future.add_done_callback(ended)  # not when nobody waits any more: the thread is taken until then
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future, work  # an error's traceback leads here, and from here to the error and the body: a circle

    def _end(self, tenant: str, size: int) -> None:
        self._turns[tenant].release()
        self._left(tenant, size)
        self._ended += size
        if self._ended >= _TRIMMED_BYTES and self._trim is None:  # later: the request goes on with what was made of it
            self._trim = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._trim, self._ended = None, 0
        self._threads.submit(give_memory_back)

    def _left(self, tenant: str, size: int) -> None:
        self._bytes[tenant] -= size
        if not self._bytes[tenant]:
            del self._bytes[tenant], self._turns[tenant]


def give_memory_back() -> None:
    """Return to the system what was freed: glibc keeps it wherever anything that is still in use lies behind it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)
