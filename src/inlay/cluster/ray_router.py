"""ModuleAffinityRouter: Ray Serve's request router. It asks ``Routing`` for the replica of each request.

Ray calls ``choose_replicas`` on the event loop of its routers. It never waits, because residency is already known.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from inlay.cluster import (
    ray_transport as links,  # as a module, because Ray copies this one with its globals into each process
)
from inlay.cluster.ray_transport import ASK, PIN, DeploymentName, IngressLink

Ranks = list[list[RunningReplica]]


class ModuleAffinityRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica with most of its modules, unless others have less load. Pinned calls go to their
    replica.

    In a process without an ingress there is no Link. It then takes the less busy of two replicas, like Ray's own
    router.
    """

    def initialize_state(self, **_: Any) -> None:
        """Called by Ray once."""
        self._turns = itertools.count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Ranks:
        """Return ranks of replicas. The best one is alone in the first rank and is used unless it is full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        said = {} if pending_request is None else pending_request.kwargs
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        if PIN in said:
            return [[by_name[said[PIN]]]] if said[PIN] in by_name else []
        link = self._link
        if link is None or ASK not in said or link.kind == "power-of-two":
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        if link.kind == "round-robin":
            first = next(self._turns) % len(candidate_replicas)
            return [[replica] for replica in (*candidate_replicas[first:], *candidate_replicas[:first])]
        chosen = link.routing.choose(said[ASK], by_name.keys())
        if chosen is None:
            return [candidate_replicas]
        rest = [replica for name, replica in by_name.items() if name != chosen]
        return [[by_name[chosen]], rest] if rest else [[by_name[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray after a request was sent."""
        link, request_id = self._link, pending_request.kwargs.get(ASK)
        if link is not None and request_id is not None:
            link.routing.routed(request_id, _name(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray with the present replicas."""
        super().update_replicas(replicas)
        links.LINKS.tell(self._deployment, [_name(replica.replica_id) for replica in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray before the matching ``update_replicas``."""
        super().on_replica_actor_died(replica_id)
        if (link := self._link) is not None:
            link.routing.lost(_name(replica_id))

    @property
    def _link(self) -> IngressLink | None:
        return links.LINKS.get(self._deployment)

    @property
    def _deployment(self) -> DeploymentName:
        return self._deployment_id.app_name, self._deployment_id.name


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)
