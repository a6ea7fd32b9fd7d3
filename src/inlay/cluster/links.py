"""Connects an ingress with the router that Ray creates in the same process. They find each other by deployment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inlay.cluster.routing import Routing

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
        """Register an ingress. It is told of the present replicas, then of every change."""
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
