"""Threads beside the event loop for the server's own long work: request bodies and large answers.

Bodies are parsed, checked and translated before they reach the engine. The event loop handles small bodies itself,
because a thread switch would take longer. Larger ones run on the threads of a lane, one per tenant at a time, so that
tenants take turns. While the engine is busy, a tenant's next body waits for a while after a slow one (workpool.py). If
the client has left, running work keeps its thread until it ends, and queued work does not start.

A Python thread holds the interpreter during one call into C, and the event loop waits for it. So large JSON is encoded
in many small pieces, and the loop can run between them.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inlay.api.failures import BodyError
from inlay.server.errors import JSONBytes
from inlay.workpool import Pacer, WorkPool

Result = TypeVar("Result")

_INLINE_BYTES = 2**14
_SMALL_BYTES = 2**16
_THREADS = 2  # per lane: more threads would only share the interpreter's lock
_MIB = 2**20
_RETRY_S = 1.0
_TRIMMED_BYTES = _MIB  # bytes of bodies and answers after which returning memory is worth some milliseconds


def give_memory_back() -> None:
    """Return freed memory to the system. glibc keeps freed memory below any block that is still in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack it
    if trim is not None:
        trim(0)


class MemoryTrimmer:
    """Returns freed memory to the system soon after large bodies and answers. Use it from one event loop.

    Args:
        after_s: seconds from the end of a large body to the first return.
        again_s: seconds from there to the second, for objects made from bodies: grammars, prompts.
        latest_s: most seconds from the first of many small bodies to a return.
        give_back: returns the memory.
    """

    def __init__(
        self,
        after_s: float = 1.0,
        again_s: float = 8.0,
        latest_s: float = 60.0,
        give_back: Callable[[], object] = give_memory_back,
    ) -> None:
        self._after_s, self._again_s, self._latest_s = after_s, again_s, latest_s
        self._give_back = give_back
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inlay-trim")
        self._ended = 0  # bytes since memory was last returned
        self._timer: asyncio.TimerHandle | None = None
        self._latest = 0.0  # the latest time to return memory, while the timer runs
        self._soon = False

    def ended(self, size: int) -> None:
        """Record the end of a body or response of about this many bytes."""
        self._ended += size
        if self._soon:
            return
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._latest = loop.time() + self._latest_s
        else:
            self._timer.cancel()
        self._soon = self._ended >= _TRIMMED_BYTES
        # Never at once, because the request still uses the parsed objects. Small bodies count too: their objects may
        # take hundreds of times their size.
        delay = self._after_s if self._soon else self._again_s
        self._timer = loop.call_at(min(loop.time() + delay, self._latest), self._trim)

    def _trim(self) -> None:
        again = self._soon
        self._soon, self._ended = False, 0
        loop = asyncio.get_running_loop()
        self._latest = loop.time() + self._latest_s
        self._timer = loop.call_later(self._again_s, self._trim) if again else None
        self._thread.submit(self._give_back)


class BodyWorkers:
    """Runs work on bodies without blocking other requests. Use it from one event loop.

    Args:
        max_bytes: bytes of one tenant's bodies that may wait or run at the same time.
        trimmer: is notified at the end of each body.
        pacer: decides how long a tenant's next body waits after one; None for no wait.
    """

    def __init__(
        self, max_bytes: int = 128 * _MIB, trimmer: MemoryTrimmer | None = None, pacer: Pacer | None = None
    ) -> None:
        trimmer, pacer = trimmer or MemoryTrimmer(), pacer or Pacer()
        self._small = _Lane("small-bodies", max_bytes, trimmer, pacer)
        self._large = _Lane("large-bodies", max_bytes, trimmer, pacer)

    async def run(self, work: Callable[[], Result], *, tenant: str, size: int, slow: bool = False) -> Result:
        """Run work and return its result.

        Args:
            work: the function to run.
            tenant: the tenant's name.
            size: bytes of the body.
            slow: the body takes longer per byte than others.

        Raises:
            BodyError: status 429, too many of the tenant's bytes wait.
            Exception: any exception of the work.
        """
        if size <= (_INLINE_BYTES // 16 if slow else _INLINE_BYTES):
            return work()
        lane = self._small if size <= _SMALL_BYTES else self._large
        return await lane.run(work, tenant, size)


class _Lane:
    """A few threads. No tenant uses more than one of them at a time."""

    def __init__(self, name: str, max_bytes: int, trimmer: MemoryTrimmer, pacer: Pacer) -> None:
        self._pool = WorkPool(name, _THREADS, pacer=pacer)
        weakref.finalize(self, self._pool.close)  # its threads end with it
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()  # by tenant
        self._trimmer = trimmer

    async def run(self, work: Callable[[], Result], tenant: str, size: int) -> Result:
        if self._bytes[tenant] + size > max(self._max_bytes, size):
            raise BodyError(
                "you are sending too many large bodies at the same time; wait for one to end",
                code="too_many_bodies",
                status=429,
                retry_after_s=_RETRY_S,
            )
        self._bytes[tenant] += size
        loop = asyncio.get_running_loop()

        def ended(future: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, tenant, size, future.cancelled())

        future = self._pool.submit(copy_context().run, work, owner=tenant)
        # A running job keeps its thread and its bytes until it ends, even if the caller no longer waits.
        future.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(future)
        finally:
            # Breaks the reference cycle from an error's traceback to this frame, which holds the error and the body.
            del future, work, ended

    def _end(self, tenant: str, size: int, cancelled: bool) -> None:
        self._bytes[tenant] -= size
        if not self._bytes[tenant]:
            del self._bytes[tenant]
        if not cancelled:
            self._trimmer.ended(size)


_SWITCH_S = 1e-4  # seconds that a thread running Python may keep the interpreter after another asks for it
_ARENAS = 2
_M_ARENA_MAX = -8  # of glibc's malloc.h


def set_up_process() -> None:
    """Tune the process for an engine and Python threads. Call it before any thread starts.

    A forward pass releases the interpreter at some hundred calls into C, and takes it back from threads that parse
    bodies. With Python's default of 5 ms each time, a pass of 30 ms takes over a second. glibc gives threads up to
    eight arenas per core. In each of them, remains of large bodies keep memory from the system.
    """
    sys.setswitchinterval(_SWITCH_S)
    limit = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it or ignore the option
    if limit is not None:
        limit(_M_ARENA_MAX, _ARENAS)


#: JSON larger than this is encoded off the loop. In bytes.
LARGE = 2**16

_WRITTEN_AT_ONCE = 2**18  # bytes; the loop can run after each piece
_DEPTH = 6  # reaches the log-probabilities of one token, or one module, in every kind of body

# Two, so that one large answer does not block another. More would only share the same interpreter.
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="inlay-json")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def off_loop(work: Callable[[], Result]) -> Result:
    """Run a function on a thread for large answers. Returns its result and raises its exception."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


async def json_response(
    make: Callable[[], Any], size: int, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON response.

    Args:
        make: returns the value; called on another thread if the response is large.
        size: the approximate size of the response in bytes.
        status: the HTTP status.
        headers: further headers.
    """
    if size <= LARGE:
        return JSONBytes(make(), status, headers)
    return InPieces(await off_loop(lambda: b"".join(json_pieces(make()))), status, headers)


def json_pieces(value: Any, depth: int = _DEPTH) -> Iterator[bytes]:
    """Yield compact JSON in pieces, equal to ``errors.json_bytes``. Lists and objects are split down to a depth."""
    if depth and isinstance(value, dict) and value:
        for number, (key, member) in enumerate(value.items()):
            yield (("," if number else "{") + _encode(key) + ":").encode(errors="backslashreplace")
            yield from json_pieces(member, depth - 1)
        yield b"}"
    elif depth and isinstance(value, list) and value:
        for number, member in enumerate(value):
            yield b"," if number else b"["
            yield from json_pieces(member, depth - 1)
        yield b"]"
    else:
        yield _encode(value).encode(errors="backslashreplace")


class InPieces(Response):
    """A large JSON body that is sent as fast as the client's connection takes it."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), _WRITTEN_AT_ONCE):
            piece, end = bytes(body[start : start + _WRITTEN_AT_ONCE]), start + _WRITTEN_AT_ONCE
            await send({"type": "http.response.body", "body": piece, "more_body": end < len(body)})
            await asyncio.sleep(0)
