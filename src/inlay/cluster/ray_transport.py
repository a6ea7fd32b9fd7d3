"""RayTransport: calls from an ingress to its replicas through a handle of Ray Serve.

An ingress and the router that Ray creates in the same process find each other by deployment (``Links``).
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from inlay.cluster.routing import Routing
from inlay.cluster.transport import ReplicaLostError
from inlay.errors import InlayError

T = TypeVar("T")


#: Keyword arguments of calls: the id of the request, and the replica that a call is bound to.
ASK, PIN = "request_id", "replica"

DeploymentName = tuple[str, str]
"""Names of the application, and of the deployment in it."""


@dataclass(frozen=True, slots=True)
class IngressLink:
    """One ingress.

    Args:
        replicas: Called with the names of the present replicas, on any thread.
        kind: One of ROUTERS.
    """

    routing: Routing
    replicas: Callable[[Sequence[str]], None]
    kind: str


class Links:
    """The links of one process, by the deployment of the replicas. Thread-safe.

    Ray creates routers itself and at its own time, so they get no arguments from inlay. A router may know its replicas
    before there is an ingress.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[DeploymentName, IngressLink] = {}
        self._replicas: dict[DeploymentName, Sequence[str]] = {}

    def get(self, deployment: DeploymentName) -> IngressLink | None:
        return self._links.get(deployment)

    def connect(self, deployment: DeploymentName, link: IngressLink) -> None:
        """Register an ingress. Its ``link`` gets the present replicas, then every change of them."""
        with self._lock:
            self._links[deployment] = link
            link.replicas(self._replicas.get(deployment, ()))

    def tell(self, deployment: DeploymentName, replicas: Sequence[str]) -> None:
        """Pass on the replicas that a router knows."""
        with self._lock:
            self._replicas[deployment] = replicas
            if (link := self._links.get(deployment)) is not None:
                link.replicas(replicas)


LINKS = Links()


class RayTransport:
    """See Transport. handle: a handle to the deployment of EngineReplica."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def answer(self, request_id: str, data: bytes, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        call = self._streaming.answer
        async for item in _items(_apart(lambda: call.remote(data, remaining_s, **{ASK: request_id}))):
            yield item

    async def encode(self, replica: str, data: bytes) -> AsyncGenerator[bytes, None]:
        call = self._streaming.encode
        async for item in _items(_apart(lambda: call.remote(data, **{PIN: replica}))):
            yield item

    async def call(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        response = _apart(lambda: self._handle.call.remote(method, *args, **{PIN: replica}))
        try:
            async with asyncio.timeout(timeout_s):
                return await response
        except TimeoutError:
            response.cancel()
            raise ReplicaLostError(
                f"it has not answered within {timeout_s:g} seconds", code="cluster.replica_timeout"
            ) from None
        except (RayError, RayServeException) as error:
            raise _told(error) from error

    async def describe(self) -> dict[str, Any]:
        """Return the model description of any replica. Waits until there is one."""
        try:
            said: dict[str, Any] = await _apart(lambda: self._handle.call.remote("describe"))
        except (RayError, RayServeException) as error:
            raise _told(error) from error
        return said


async def _items(response: Any) -> AsyncGenerator[bytes, None]:
    over = False
    try:
        async for item in response:
            yield item
        over = True
    except (RayError, RayServeException) as error:
        over = True
        raise _told(error) from error
    finally:
        if not over:
            with suppress(Exception):
                response.cancel()


def _apart(call: Callable[[], T]) -> T:
    """Make a call outside the context of the current HTTP request.

    Ray gives all calls of one HTTP request the same id, and its router then finds only one of them. A request with
    several prompts makes several calls at the same time.
    """
    return contextvars.Context().run(call)


def _told(error: Exception) -> InlayError:
    """Convert Ray's error to the original InlayError or to ReplicaLostError."""
    if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, InlayError):
            return cause
        if not isinstance(cause, RayError):
            return InlayError(f"a replica failed: {type(cause).__name__}: {cause}", code="cluster.replica_failed")
    return ReplicaLostError(
        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'it is gone'}",
        code="cluster.replica_gone",
    )
