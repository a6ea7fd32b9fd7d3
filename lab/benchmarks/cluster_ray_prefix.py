"""``inlay`` with the prefix-aware router of Ray Serve LLM instead of ours, for ``benchmarks/cluster.py``.

    python lab/benchmarks/cluster_ray_prefix.py deploy CONFIG.yaml

Ray's router reads the text of a prompt from the arguments of a call. Our calls have token ids. Each becomes a character
for the router, so it finds the same prefixes, to the token.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter

from inlay.cli.main import main
from inlay.cluster import application
from inlay.cluster.ray_router import ModuleAffinityRouter
from inlay.cluster.ray_transport import ASK

_FIRST = 0x10000  # start of a plane of Unicode; lower planes contain surrogates


class RayPrefixRouter(ModuleAffinityRouter, PrefixCacheAffinityRouter):
    """Routes requests by Ray's router with its defaults; calls for one replica go to that replica."""

    def initialize_state(self, **_: Any) -> None:
        ModuleAffinityRouter.initialize_state(self)
        PrefixCacheAffinityRouter.initialize_state(self)

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        asked = pending_request is not None and ASK in pending_request.kwargs
        kind = PrefixCacheAffinityRouter if asked else ModuleAffinityRouter
        return await kind.choose_replicas(self, candidate_replicas, pending_request)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        ModuleAffinityRouter.on_request_routed(self, pending_request, replica_id, result)
        if ASK in pending_request.kwargs:
            PrefixCacheAffinityRouter.on_request_routed(self, pending_request, replica_id, result)

    def _extract_text_from_request(self, pending_request: Any) -> str:
        parts = json.loads(pending_request.args[0])["parts"]  # as EngineRequest.to_bytes writes them, ids first
        return "".join(chr(_FIRST + number) for ids, *_ in parts for number in ids)


if __name__ == "__main__":
    from cluster_ray_prefix import RayPrefixRouter as Router  # by its module name, because Ray's processes import it

    application.ModuleAffinityRouter = Router  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
