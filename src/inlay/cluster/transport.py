"""Transport: carries calls from an ingress to its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, Protocol

from inlay.errors import InlayError

_LOOK_S = 1.0  # interval of the check in next_item


class ReplicaLostError(InlayError):
    """The replica that a call went to has gone, or cannot be reached."""


class Transport(Protocol):
    """Calls to EngineHosts by the replica's name. Used on one event loop."""

    def answer(self, request_id: str, data: bytes, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        """Call ``EngineHost.answer`` of the replica that ``Routing.choose`` names. ``Routing.routed`` is told.

        Closing the generator cancels the request there. Raises ReplicaLostError.
        """
        ...

    def encode(self, replica: str, data: bytes) -> AsyncGenerator[bytes, None]:
        """Call ``EngineHost.encode`` of one replica. Raises ReplicaLostError."""
        ...

    async def call(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of one replica's EngineHost. Raises ReplicaLostError, also on a timeout."""
        ...


async def next_item(items: AsyncGenerator[bytes, None], check: Callable[[], None]) -> bytes | None:
    """Return the next item of a call, or None at its end.

    Args:
        check: Called every second without an item. It raises to stop the wait.

    Raises:
        ReplicaLostError: If the call was cancelled from outside.
        Exception: Errors of the call and of ``check``.
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
        raise ReplicaLostError("its call was cancelled", code="cluster.call_cancelled")
    return coming.result()
