"""Transport: what carries calls from an ingress to its replicas, whatever that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, Protocol

from inlay.errors import InlayError

_LOOK_S = 1.0  # how often somebody who waits looks whether there is anything to wait for


class ReplicaLostError(InlayError):
    """The replica that a call went to has gone, or cannot be reached."""


class Transport(Protocol):
    """Calls to EngineHosts, each under its replica's name. Used on one event loop."""

    def answer(self, request_id: str, data: bytes, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        """``EngineHost.answer`` of the replica that ``Routing.choose`` names, told by ``Routing.routed``.

        Raises ReplicaLostError; leaving it gives the request up there.
        """
        ...

    def encode(self, replica: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """``EngineHost.encode`` of one replica. Raises ReplicaLostError."""
        ...

    async def call(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        """A method of one replica's EngineHost. Raises ReplicaLostError, also where there is no answer in time."""
        ...


async def next_item(items: AsyncGenerator[bytes, None], check: Callable[[], None]) -> bytes | None:
    """The next item of a call; None where there are no more.

    check: is called every second that nothing comes, and raises where nothing more is waited for.
    Raises ReplicaLostError for a call that somebody else has cancelled, and what the call raises.
    """
    coming = asyncio.ensure_future(anext(items, None))
    try:
        while not coming.done():
            await asyncio.wait((coming,), timeout=_LOOK_S)
            if not coming.done():
                check()
    finally:
        if not coming.done():
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming
    if coming.cancelled():
        raise ReplicaLostError("its call was cancelled")
    return coming.result()
