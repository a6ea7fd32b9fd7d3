"""EngineHost: an engine behind calls with plain data, for transports to other processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from inlay.client.async_llm import AsyncLLM
from inlay.cluster.transport import Description, Status
from inlay.errors import InlayError
from inlay.events import EncodeEvent, Event, Fault, TokenEvent, events_to_bytes
from inlay.kv.changes import ChangeLog, short_key
from inlay.prompt.request import EncodeRequest, EngineRequest

_BELOW_EVERY_S = 30.0  # interval of scans of the tiers below the pool
_MOST_WAIT_S = 10.0


class EngineHost:
    """One engine that serves several ingresses on one event loop. All arguments and results are plain data.

    Args:
        llm: The owner of the engine. Its prompts and schemas are not used; ingresses have their own.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._client = llm.local
        self._keys = self._client.model.keys
        self._log = ChangeLog(self._keys)
        self._streams: dict[str, _Stream] = {}
        self._looked_below = float("-inf")
        self._client.call(lambda: self._client.store.listen(self._log))

    def describe(self) -> dict[str, Any]:
        """Return a ``transport.Description`` as plain data."""
        llm = self._llm
        note, model = llm.loaded.note, self._client.model
        return Description(llm.model_name, note, model, llm.sampling_defaults, llm.adapters).to_dict()

    def check_health(self) -> None:
        """Raise InlayError with the reason if the engine no longer works."""
        self._client.check_health()

    async def status(self, epoch: int, number: int) -> dict[str, Any]:
        """Return a ``transport.Status`` as plain data.

        Args:
            epoch, number: the last change that the caller knows; see ``ChangeLog.since``.
        """
        await self._look_below()
        return Status(self._client.stats(), self._log.since(epoch, number)).to_dict()

    async def answer(self, data: bytes, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        """Answer a request. Yields new events in bytes until it has ended. Closing the generator cancels the request.

        Args:
            data: The request, from ``EngineRequest.to_bytes``.
            remaining_s: Seconds until the deadline, because clocks differ between machines. None for no deadline.
        """
        request: EngineRequest | None = None
        try:
            deadline = None if remaining_s is None else time.perf_counter() + remaining_s
            request, prepared = await self._prepare(data, deadline)
            answers = request.params.n
            stream = _Stream(answers)
            with self._streaming(request.request_id, stream):
                self._client.submit(prepared, stream.tell)
                async for events in stream.events():
                    yield events_to_bytes(events)
        except InlayError as error:
            if request is None:
                raise  # the sender knows the request's name
            failed = [TokenEvent(request.request_id, at, error=Fault.of(error)) for at in range(request.params.n)]
            yield events_to_bytes(failed)

    async def encode(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """Encode the segments of an EncodeRequest. Yields the progress as events in bytes."""
        request = await self._llm.pools.prompts.run(EncodeRequest.from_bytes, data, self._keys, owner=None)
        stream = _Stream(1)
        with self._streaming(request.request_id, stream):
            self._client.encode(request, stream.tell)
            async for events in stream.events():
                yield events_to_bytes(events[-1:])
        if len(request.specs) > 1 and stream.complete:
            self._client.profile(request.specs)

    def finish(self, request_id: str, index: int) -> None:
        """See Engine.finish."""
        self._client.finish(request_id, index)
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.end(index)

    def abort(self, request_id: str) -> None:
        self._client.cancel(request_id, report=True)

    async def stored(self, data: bytes) -> list[bytes]:
        """Return the keys of the stored segments among those of an EncodeRequest."""
        request = await self._llm.pools.prompts.run(EncodeRequest.from_bytes, data, self._keys, owner=None)
        keys: frozenset[bytes] = await asyncio.wrap_future(self._client.stored(request))
        return list(keys)

    async def forget(self, data: bytes | None) -> int:
        """Evict the segments of an EncodeRequest, or all that no request reads. Returns the number of tokens."""
        if data is None:
            return await asyncio.wrap_future(self._client.forget())
        request = await self._llm.pools.prompts.run(EncodeRequest.from_bytes, data, self._keys, owner=None)
        return await asyncio.wrap_future(self._client.forget(request))

    async def _prepare(self, data: bytes, deadline: float | None) -> tuple[EngineRequest, Any]:
        pools = self._llm.pools
        read = partial(EngineRequest.from_bytes, data, self._keys)
        request = replace(await pools.prompts.run(read, deadline=deadline), deadline=deadline)
        owner, grammar = request.salt or None, None
        if request.params.structured_outputs is not None:
            compiled = self._client.compile_grammar
            grammar = await pools.grammars.run(compiled, request.params, request.salt, owner=owner, deadline=deadline)
        return request, await pools.prompts.run(self._client.prepare, request, grammar, owner=owner, deadline=deadline)

    def _streaming(self, request_id: str, stream: _Stream) -> _Streaming:
        return _Streaming(self._streams, request_id, stream, partial(self._client.cancel, request_id))

    async def _look_below(self) -> None:
        """Report the keys in the tiers below the pool, at most every 30 seconds."""
        tiers, now = self._client.residency.tiers, time.monotonic()
        if not tiers or now < self._looked_below + _BELOW_EVERY_S:
            return
        self._looked_below = now

        def look() -> None:
            self._log.set_below({short_key(entry.key) for tier in tiers for entry in tier.iterate()})

        await asyncio.get_running_loop().run_in_executor(None, look)


class _Stream:
    """Carries events of one request from the engine's thread to the event loop, until all its answers have ended."""

    def __init__(self, answers: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._open = set(range(answers))
        self._new: list[Event] = []
        self._arrived = asyncio.Event()
        self.complete = False

    @property
    def over(self) -> bool:
        return not self._open

    def tell(self, events: Sequence[Event]) -> None:
        """Add events. Called on the engine's thread."""
        with suppress(RuntimeError):  # the loop may have been closed
            self._loop.call_soon_threadsafe(self._take, list(events))

    def end(self, index: int) -> None:
        """Mark an answer as ended."""
        self._open.discard(index)
        self._arrived.set()

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Yield new events in batches. A slow reader gets larger batches."""
        while self._new or self._open:
            await self._arrived.wait()
            self._arrived.clear()
            new, self._new = self._new, []
            if new:
                yield new

    def _take(self, events: list[Event]) -> None:
        self._new += events
        for event in events:
            if isinstance(event, EncodeEvent):
                if event.finished or event.error is not None:
                    self.complete = event.error is None
                    self._open.clear()
            elif event.finish_reason is not None or event.error is not None:
                self._open.discard(event.index)
        self._arrived.set()


class _Streaming:
    """Context of a stream that is read. A stream that is left early is cancelled."""

    def __init__(self, streams: dict[str, _Stream], name: str, stream: _Stream, cancel: Callable[[], None]) -> None:
        self._streams, self._name, self._stream, self._cancel = streams, name, stream, cancel

    def __enter__(self) -> None:
        self._streams[self._name] = self._stream

    def __exit__(self, *_: object) -> None:
        if self._streams.get(self._name) is self._stream:
            del self._streams[self._name]
        if not self._stream.over:
            with suppress(InlayError):  # the engine may have been shut down
                self._cancel()
