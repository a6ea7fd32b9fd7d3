"""Encodes the segments of a schema, each on its home replica, and reports them as one encoding."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import aclosing
from dataclasses import replace

from inlay.client.engine import EncodeListener
from inlay.cluster.pieces import wanted_to_encode
from inlay.cluster.routing import Routing
from inlay.cluster.transport import ReplicaLostError, Transport, next_item
from inlay.errors import EngineDeadError
from inlay.events import EncodeEvent, Fault, events_from_bytes
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.prompt.request import EncodeRequest

logger = logging.getLogger(__name__)


class HomeEncoding:
    """One encoding, split among replicas. Its listener gets the progress, and once the end."""

    def __init__(
        self, request: EncodeRequest, keys: KeyMaker, routing: Routing, transport: Transport, listener: EncodeListener
    ) -> None:
        self._request = request
        self._keys = keys
        self._routing = routing
        self._transport = transport
        self._listener = listener
        self._done: dict[str, int] = {}  # tokens of each replica's part
        self._over = False

    async def run(self) -> None:
        """Encode. Raises errors that end it early. Report these to the listener with ``fail``."""
        parts: defaultdict[str, list[SegmentSpec]] = defaultdict(list)
        specs = self._request.specs
        homes = self._routing.homes(wanted_to_encode(self._request, self._keys))
        if specs and not homes:
            raise EngineDeadError("no replica of the model answers now; try again in a moment")
        for spec, home in zip(specs, homes, strict=True):
            parts[home].append(spec)
        try:
            async with asyncio.TaskGroup() as group:
                for number, (home, own) in enumerate(parts.items()):
                    part = replace(self._request, request_id=f"{self._request.request_id}-{number}", specs=tuple(own))
                    group.create_task(self._encode(home, part))
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """Report an early end to the listener, unless it has ended."""
        if not self._over:
            self._end(Fault.of(error))

    async def _encode(self, replica: str, part: EncodeRequest) -> None:
        """Encode segments on one replica. If it goes, later requests will encode the rest."""
        try:
            async with aclosing(self._transport.encode(replica, part.to_bytes())) as items:
                while (item := await next_item(items, lambda: self._check(replica))) is not None:
                    for event in events_from_bytes(item):
                        if event.error is not None:
                            raise event.error.exception()
                        assert isinstance(event, EncodeEvent), "it is an encoding"
                        self._report(replica, event.done)
        except ReplicaLostError as error:
            logger.warning("%s: replica %s encodes no more of it: %s", self._request.name, replica, error)
        self._report(replica, part.tokens)

    def _check(self, replica: str) -> None:
        """Raise ReplicaLostError if the replica has gone, or has stalled while there are others."""
        replicas = self._routing.replicas
        if replica not in replicas:
            raise ReplicaLostError("it has gone", code="cluster.replica_gone")
        if len(replicas) > 1 and self._routing.stalled(replica):
            raise ReplicaLostError("it has stalled", code="cluster.replica_stalled")

    def _report(self, replica: str, count: int) -> None:
        self._done[replica] = count
        self._listener([EncodeEvent(self._request.request_id, self._so_far(), self._request.tokens)])

    def _end(self, fault: Fault | None) -> None:
        self._over = True
        total = self._request.tokens
        self._listener([EncodeEvent(self._request.request_id, self._so_far() if fault else total, total, True, fault)])

    def _so_far(self) -> int:
        return min(sum(self._done.values()), self._request.tokens)
