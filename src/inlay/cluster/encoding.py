"""A schema's segments, each encoded on the replica where it is at home, told of as one encoding."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import replace

from inlay.client import EncodeListener
from inlay.cluster.pieces import wanted_to_encode
from inlay.cluster.routing import Routing
from inlay.cluster.transport import ReplicaLostError, Transport
from inlay.errors import AbortedError, InlayError
from inlay.events import EncodeEvent, Fault, events_from_bytes
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.prompt.request import EncodeRequest


async def encode_at_home(
    request: EncodeRequest,
    keys: KeyMaker,
    routing: Routing,
    transport: Transport,
    listener: EncodeListener,
    check_health: Callable[[], None],
) -> None:
    """Encode, and tell the listener how far it is, and how it ended; raises nothing but where it is cancelled.

    check_health: raises InlayError, with the reason, where there is no replica to ask.
    """
    parts: defaultdict[str, list[SegmentSpec]] = defaultdict(list)
    for spec, home in zip(request.specs, routing.homes(wanted_to_encode(request, keys)), strict=False):
        parts[home].append(spec)
    done: dict[str, int] = dict.fromkeys(parts, 0)
    name, total = request.request_id, request.tokens

    def report(replica: str, count: int) -> None:
        done[replica] = count
        listener([EncodeEvent(name, min(sum(done.values()), total), total)])

    def fail(error: BaseException) -> None:
        listener([EncodeEvent(name, min(sum(done.values()), total), total, True, Fault.of(error))])

    try:
        if request.specs and not parts:
            check_health()
        async with asyncio.TaskGroup() as group:
            for number, (home, specs) in enumerate(parts.items()):
                part = replace(request, request_id=f"{name}-{number}", specs=tuple(specs))
                group.create_task(_encode_part(transport, home, part, report))
        listener([EncodeEvent(name, total, total, finished=True)])
    except BaseExceptionGroup as group_error:
        fail(group_error.exceptions[0])
    except InlayError as error:
        fail(error)
    except asyncio.CancelledError as error:
        if error.args:
            fail(AbortedError(f"request {name} was aborted"))
        raise


async def _encode_part(
    transport: Transport, replica: str, part: EncodeRequest, report: Callable[[str, int], None]
) -> None:
    """Encode segments on one replica; one that goes meanwhile leaves them to the requests that will want them."""
    with suppress(ReplicaLostError):
        async with aclosing(transport.encode(replica, part.to_bytes())) as items:
            async for item in items:
                for event in events_from_bytes(item):
                    if event.error is not None:
                        raise event.error.exception()
                    assert isinstance(event, EncodeEvent), "it is an encoding"
                    report(replica, event.done)
    report(replica, part.tokens)
