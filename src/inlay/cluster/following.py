"""How far a request is that a replica answers: what of it its listener has heard, and what the router learns of it."""

from __future__ import annotations

from collections.abc import Sequence

from inlay.client import TokenListener
from inlay.cluster.routing import Routing
from inlay.cluster.transport import ReplicaLostError
from inlay.errors import InlayError
from inlay.events import Event, Fault, TokenEvent
from inlay.prompt.request import EngineRequest


class Following:
    """How far a request is, as its listener has heard.

    sent: whether it has heard of tokens. over: whether all its answers have ended. said: tokens of all of them.
    aborted: whether its caller has given it up, so that no other replica is asked.
    """

    def __init__(self, request: EngineRequest, listener: TokenListener, routing: Routing) -> None:
        self.said = 0
        self.sent = False
        self.aborted = False
        self._learned = False
        self._id = request.request_id
        self._open = set(range(request.params.n))
        self._listener = listener
        self._routing = routing

    @property
    def over(self) -> bool:
        return not self._open

    def take(self, events: Sequence[Event]) -> None:
        """Tell the listener. Raises ReplicaLostError for the end of an engine before it has said anything."""
        told = [event for event in events if isinstance(event, TokenEvent)]
        if not self.sent and any(event.error is not None and event.error.kind == "EngineDeadError" for event in told):
            raise ReplicaLostError("its engine has ended")
        for event in told:
            self.said += len(event.token_ids)
            if event.finish_reason is not None or event.error is not None:
                self._open.discard(event.index)
            if event.token_ids and not self.sent:
                self._routing.first_token(self._id)
            self.sent = self.sent or bool(event.token_ids) or event.error is not None
            if event.usage is not None and not self._learned:
                self._learned = True
                self._routing.learn(self._id, event.usage, event.metrics)
        self._listener(told)

    def finish(self, index: int) -> None:
        """Its listener has found that an answer is whole."""
        self._open.discard(index)

    def fail(self, error: InlayError) -> None:
        """End all its answers that are open."""
        failed = [TokenEvent(self._id, at, error=Fault.of(error)) for at in sorted(self._open)]
        self._open.clear()
        if failed:
            self._listener(failed)

    @property
    def gone(self) -> str:
        """What is said where its replica has gone for good."""
        if self.sent:
            return "the replica that answered has gone in the middle of the answer; send the request again"
        return "replicas that the request was sent to have gone one after the other; send it again in a moment"
