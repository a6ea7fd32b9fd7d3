"""A request at a replica: its bytes, and its progress for the listener and for the router."""

from __future__ import annotations

from collections.abc import Sequence

from inlay.client.engine import TokenListener
from inlay.cluster.pieces import Wanted
from inlay.cluster.routing import Routing
from inlay.cluster.transport import ReplicaLostError
from inlay.errors import InlayError
from inlay.events import Event, Fault, TokenEvent
from inlay.prompt.request import EngineRequest


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
