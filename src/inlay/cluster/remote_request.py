"""Requests and encodings at replicas, with their progress for the listener and for the router."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from inlay.client.engine import EncodeListener, TokenListener
from inlay.cluster.pieces import Wanted, wanted_to_encode
from inlay.cluster.routing import Routing
from inlay.cluster.transport import ReplicaLostError, Transport, next_item
from inlay.errors import EngineDeadError, InlayError
from inlay.events import EncodeEvent, Event, Fault, TokenEvent, events_from_bytes
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.prompt.request import EncodeRequest, EngineRequest


class RemoteRequest:
    """A request that is ready to be sent, and its progress as reported to its listener.

    Args:
        wanted: The pieces that replicas may hold.

    Attributes:
        data: Its bytes.
        sent: True if tokens or an error were reported.
        over: True if all answers have ended.
        said: Tokens of all answers.
        aborted: True if the caller aborted the request, so that no other replica is tried.
    """

    def __init__(self, request: EngineRequest, wanted: Wanted, routing: Routing) -> None:
        self.request = request
        self.wanted = wanted
        self.data = request.to_bytes()
        self.said = 0
        self.sent = False
        self.aborted = False
        self._learned = False
        self._open = set(range(request.params.n))
        self._listener: TokenListener | None = None
        self._routing = routing

    @property
    def id(self) -> str:
        return self.request.request_id

    def begin(self, listener: TokenListener) -> None:
        """Report the progress to a listener from now on."""
        self._listener = listener

    @property
    def over(self) -> bool:
        return not self._open

    def take(self, events: Sequence[Event]) -> None:
        """Pass events to the listener. Raises ReplicaLostError if the engine ended before the first token."""
        told = [event for event in events if isinstance(event, TokenEvent)]
        if not self.sent and any(event.error is not None and event.error.kind == "EngineDeadError" for event in told):
            raise ReplicaLostError("its engine has ended", code="cluster.replica_gone")
        for event in told:
            self.said += len(event.token_ids)
            if event.finish_reason is not None or event.error is not None:
                self._open.discard(event.index)
            if event.token_ids and not self.sent:
                self._routing.first_token(self.id)
            self.sent = self.sent or bool(event.token_ids) or event.error is not None
            if event.usage is not None and not self._learned:
                self._learned = True
                self._routing.learn(self.id, event.usage, event.metrics)
        self._tell(told)

    def finish(self, index: int) -> None:
        """Mark an answer as ended by its listener."""
        self._open.discard(index)

    def fail(self, error: InlayError) -> None:
        """End all open answers with an error."""
        failed = [TokenEvent(self.id, at, error=Fault.of(error)) for at in sorted(self._open)]
        self._open.clear()
        if failed:
            self._tell(failed)

    @property
    def gone(self) -> str:
        """The error message for a lost replica."""
        if self.sent:
            return "the replica that answered has gone in the middle of the answer; send the request again"
        return "replicas that the request was sent to have gone one after the other; send it again in a moment"

    def _tell(self, events: Sequence[TokenEvent]) -> None:
        assert self._listener is not None, "it has begun"
        self._listener(events)


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
