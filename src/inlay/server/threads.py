"""Threads beside the event loop, for the server's own long work: what bodies ask for, and large answers.

Bodies are parsed, checked and translated before the engine knows of them. The event loop does this itself for small
ones, which takes it less than a change of threads. All others wait for a thread of a lane, a tenant's one after the
other, so that tenants take turns; while the engine is busy, a tenant's next one waits for a while behind what took long
(engine/pacing.py). A lane's threads are its own: work that a client no longer waits for keeps its thread until it ends,
and no more of it begins.

A thread of Python holds the interpreter for as long as one call into C takes, and the event loop waits with everybody
else. So large JSON is made of many small pieces, between which the loop gets its turn.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inlay.api.failures import BodyError
from inlay.engine.background.pacing import Pacer
from inlay.server.errors import JSONBytes

Result = TypeVar("Result")

_INLINE_BYTES = 2**14
_SMALL_BYTES = 2**16
_THREADS = 2  # of a lane: more would only share the interpreter's lock
_MIB = 2**20
_RETRY_S = 1.0
_LOOK_S = 0.05  # how often those that rest look whether the engine is still busy
_TRIMMED_BYTES = _MIB  # of bodies and answers, behind which it is worth some milliseconds to give their memory back
TRIM_AFTER_S = 1.0
TRIM_AGAIN_S = 8.0  # behind that, for what was made of bodies: grammars, prompts
TRIM_LATEST_S = 60.0  # behind the first of small ones that do not end


class MemoryTrimmer:
    """Has freed memory given back to the system soon after large bodies and answers; one event loop's."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inlay-trim")
        self._ended = 0  # bytes since memory was given back
        self._timer: asyncio.TimerHandle | None = None
        self._latest = 0.0  # when it is given back at the latest, while the timer runs
        self._soon = False

    def ended(self, size: int) -> None:
        """What took about so many bytes, in a body or a response, is over."""
        self._ended += size
        if self._soon:
            return
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._latest = loop.time() + TRIM_LATEST_S
        else:
            self._timer.cancel()
        self._soon = self._ended >= _TRIMMED_BYTES
        # Never at once: the request goes on with what was made. And behind the last few of many, too: what is made of
        # a small one may be hundreds of times its size.
        delay = TRIM_AFTER_S if self._soon else TRIM_AGAIN_S
        self._timer = loop.call_at(min(loop.time() + delay, self._latest), self._give_back)

    def _give_back(self) -> None:
        again = self._soon
        self._soon, self._ended = False, 0
        loop = asyncio.get_running_loop()
        self._latest = loop.time() + TRIM_LATEST_S
        self._timer = loop.call_later(TRIM_AGAIN_S, self._give_back) if again else None
        self._thread.submit(give_memory_back)


class BodyWorkers:
    """Runs work on bodies where it holds up nobody else; one event loop's.

    max_bytes: of one tenant's bodies that wait for a thread or have one, at the same time. trimmer: hears of each.
    pacer: how long a tenant's next body waits behind one; None for not at all.
    """

    def __init__(
        self, max_bytes: int = 128 * _MIB, trimmer: MemoryTrimmer | None = None, pacer: Pacer | None = None
    ) -> None:
        trimmer, pacer = trimmer or MemoryTrimmer(), pacer or Pacer()
        self._small = _Lane("small-bodies", max_bytes, trimmer, pacer)
        self._large = _Lane("large-bodies", max_bytes, trimmer, pacer)

    async def run(self, work: Callable[[], Result], *, tenant: str, size: int, slow: bool = False) -> Result:
        """What the work returns or raises; and BodyError, status 429, where too much of its tenant's waits.

        size: bytes of the body. slow: whether so many bytes take longer here than those of others.
        """
        if size <= (_INLINE_BYTES // 16 if slow else _INLINE_BYTES):
            return work()
        lane = self._small if size <= _SMALL_BYTES else self._large
        return await lane.run(work, tenant, size)


class _Timed(Generic[Result]):
    """Work, to be called once, and the processor time that it took."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work: Callable[[], Result] | None = work
        self.seconds = 0.0

    def __call__(self) -> Result:
        work, self._work = self._work, None
        assert work is not None, "it is called once"
        began = time.thread_time()
        try:
            return work()
        finally:
            self.seconds = time.thread_time() - began
            del work


class _Lane:
    """A few threads, of which no tenant has more than one at a time."""

    def __init__(self, name: str, max_bytes: int, trimmer: MemoryTrimmer, pacer: Pacer) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"inlay-{name}")
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()  # by tenant
        self._turns: dict[str, asyncio.Lock] = {}
        self._trimmer = trimmer
        self._pacer = pacer

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
        timed = _Timed(work)

        def ended(_: Future[Any], timed: _Timed[Any] = timed) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, tenant, size, timed.seconds)

        future = self._threads.submit(copy_context().run, timed)
        future.add_done_callback(ended)  # not when nobody waits any more: the thread is taken until then
        try:
            return await asyncio.wrap_future(future)
        finally:
            # An error's traceback leads here, and from here to the error and the body: a circle.
            del future, work, timed, ended

    def _end(self, tenant: str, size: int, worked_s: float) -> None:
        rest_s = self._pacer.rest_s(worked_s, owners=len(self._turns))
        self._bytes[tenant] -= size
        self._trimmer.ended(size)
        self._rest(tenant, asyncio.get_running_loop().time() + rest_s)

    def _rest(self, tenant: str, until: float) -> None:
        """Let a tenant's next body begin then, or as soon as the engine has nothing to do."""
        loop = asyncio.get_running_loop()
        left = until - loop.time()
        if left > 0 and self._pacer.busy:
            loop.call_later(min(left, _LOOK_S), self._rest, tenant, until)
        else:
            self._turns[tenant].release()
            self._forget(tenant)

    def _left(self, tenant: str, size: int) -> None:
        self._bytes[tenant] -= size
        self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        if not self._bytes[tenant] and not self._turns[tenant].locked():
            del self._bytes[tenant], self._turns[tenant]


def give_memory_back() -> None:
    """Return to the system what was freed: glibc keeps it wherever anything that is still in use lies behind it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


_SWITCH_S = 1e-4  # how long a thread that computes in Python keeps the interpreter from one that asks for it
_ARENAS = 2
_M_ARENA_MAX = -8  # of glibc's malloc.h


def set_up_process() -> None:
    """Let an engine and threads of Python live in one process; to be called before there are any.

    A pass gives the interpreter up at some hundred calls into C, and takes it back from whoever parses a body
    meanwhile: with Python's 5 ms each time, a pass of 30 ms takes over a second. And glibc gives up to eight arenas a
    core to threads, in each of which what large bodies leave behind keeps memory from the system.
    """
    sys.setswitchinterval(_SWITCH_S)
    limit = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, or heed nothing of it
    if limit is not None:
        limit(_M_ARENA_MAX, _ARENAS)


#: Where JSON is to become larger than this, it is made off the loop. In bytes.
LARGE = 2**16

_WRITTEN_AT_ONCE = 2**18  # bytes; behind each the loop may do something else
_DEPTH = 6  # down to one token's log-probabilities, or one module, of any body that is sent

# Two, so that one large answer does not hold up another; more would only share the same interpreter.
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="inlay-json")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def off_loop(work: Callable[[], Result]) -> Result:
    """What a function returns, called on a thread that is for nothing else. Raises what it raises."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


async def json_response(
    make: Callable[[], Any], size: int, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of JSON.

    make: gives its value; called on another thread where the response is large.
    size: about how many bytes it will have.
    """
    if size <= LARGE:
        return JSONBytes(make(), status, headers)
    return InPieces(await off_loop(lambda: b"".join(json_pieces(make()))), status, headers)


def json_pieces(value: Any, depth: int = _DEPTH) -> Iterator[bytes]:
    """Compact JSON as ``errors.json_bytes`` writes it, part by part; lists and objects are taken apart to a depth."""
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
    """A large body of JSON, handed over to the client's connection as fast as that takes it."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), _WRITTEN_AT_ONCE):
            piece, end = bytes(body[start : start + _WRITTEN_AT_ONCE]), start + _WRITTEN_AT_ONCE
            await send({"type": "http.response.body", "body": piece, "more_body": end < len(body)})
            await asyncio.sleep(0)
