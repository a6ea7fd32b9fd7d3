"""The interface of an engine.

Requests go in as plain data (prompt/request.py), and events come out as plain data (events.py). The engine may be in
another process. The engine of this process is in local.py, the engines of a cluster in cluster/remote_client.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from inlay.events import EncodeEvent, TokenEvent
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.request import EncodeRequest, EngineRequest
from inlay.sampling.params import SamplingParams
from inlay.types import EngineStats


class Prepared(Protocol):
    """A request that is ready to be queued, opaque outside its engine."""

    @property
    def id(self) -> str: ...


TokenListener = Callable[[Sequence[TokenEvent]], None]
EncodeListener = Callable[[Sequence[EncodeEvent]], None]


class Engine(Protocol):
    """An engine as its callers see it.

    Listeners get new events in order, at most once a step, on a thread of the engine. They must be quick and must not
    raise. ``model`` holds the facts for preparing requests.
    """

    @property
    def model(self) -> ModelInfo: ...

    def compile_grammar(self, params: SamplingParams, salt: str = "") -> Any:
        """Compile the grammar of an answer for ``prepare``; None for none. It may be slow. Raises ParameterError."""
        ...

    def prepare(self, request: EngineRequest, grammar: Any = None) -> Prepared:
        """Do the slow work before a request can be queued, on the caller's thread.

        Args:
            grammar: the result of ``compile_grammar``. None compiles it here.

        Raises:
            ParameterError: for parameters that the model does not support.
        """
        ...

    def submit(self, request: Prepared, listener: TokenListener) -> None:
        """Queue a request. The listener gets the events of each step, and the end."""
        ...

    def finish(self, request_id: str, index: int) -> None:
        """End one answer of a request that its listener found complete. Does not block."""
        ...

    def encode(self, request: EncodeRequest, listener: EncodeListener) -> None:
        """Queue an encoding. The listener gets its progress."""
        ...

    def cancel(self, request_id: str, *, report: bool = False) -> None:
        """Cancel a request or an encoding in any state. Does not block.

        Args:
            report: if True, its listener gets an AbortedError. If False, its listener gets no further events.
        """
        ...

    def stored(self, request: EncodeRequest) -> Future[frozenset[bytes]]:
        """Return the keys of the request's segments that are stored at the end of the current step."""
        ...

    def resident(self, request: EncodeRequest) -> Future[list[dict[str, int]]]:
        """Return the stored tokens of each segment of a request by tier. A token counts in its nearest tier only."""
        ...

    def forget(self, request: EncodeRequest | None = None) -> Future[int]:
        """Evict the segments of an encoding and of its labels, even pinned ones, and the text stored behind them.

        Args:
            request: None for all segments that no request reads.

        Returns:
            The number of evicted tokens. The sum over several engines may count a segment several times.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the state of the engine and its pool. Cheap and thread-safe."""
        ...

    def check_health(self) -> None:
        """Raise InlayError with the reason if the engine has stopped."""
        ...

    def shutdown(self) -> None:
        """Stop after the current step; running requests fail."""
        ...


class SteppedEngine(Engine, Protocol):
    """An engine that its callers' threads step."""

    def pump(self) -> bool:
        """Take one step. Returns False if no request is under way. Raises InlayError inside a step."""
        ...
