"""A cluster in this process: hosts of tiny engines, and a transport whose calls can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from inlay import AsyncLLM
from inlay.cluster.affinity import RouterSettings
from inlay.cluster.host import EngineHost
from inlay.cluster.remote_client import ClusterLLM, RemoteClient
from inlay.cluster.routing import Routing
from inlay.cluster.transport import Description, ReplicaLostError
from tests.conftest import tiny


@dataclass
class LocalTransport:
    """gone: replicas whose calls fail. cut_after: the number of items after which answer streams break."""

    hosts: dict[str, EngineHost]
    routing: Routing
    gone: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    cut_after: dict[str, int] = field(default_factory=dict)
    answered: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)

    async def answer(self, request_id: str, data: bytes, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        name = self.routing.choose(request_id, [name for name in self.hosts if name not in self.gone])
        if name is None:
            raise ReplicaLostError("there is none")
        self.answered.append(name)
        if name in self.silent:
            await asyncio.Event().wait()  # it has not even taken the request
        self.routing.routed(request_id, name)
        async for item in self._items(name, self.hosts[name].answer(data, remaining_s)):
            yield item

    async def encode(self, replica: str, data: bytes) -> AsyncGenerator[bytes, None]:
        self.calls.append((replica, "encode"))
        if replica in self.silent:
            await asyncio.Event().wait()
        async for item in self._items(replica, self.hosts[replica].encode(data)):
            yield item

    async def call(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        if replica in self.gone or replica in self.silent:
            raise ReplicaLostError("it is gone")
        self.calls.append((replica, method))
        said = getattr(self.hosts[replica], method)(*args)
        return await said if asyncio.iscoroutine(said) else said

    async def _items(self, name: str, items: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        left = self.cut_after.pop(name, None)
        async with aclosing(items) as read:
            async for item in read:
                if left == 0:
                    self.routing.lost(name)
                    raise ReplicaLostError("it was killed")
                left = None if left is None else left - 1
                yield item


@dataclass
class Cluster:
    llm: ClusterLLM
    client: RemoteClient
    transport: LocalTransport
    routing: Routing
    engines: dict[str, AsyncLLM]

    async def follow(self) -> None:
        """Receive all pending events of all replicas now."""
        from inlay.cluster.transport import Status

        for name in self.routing.replicas:
            said = await self.transport.call(name, "status", *self.routing.heard(name), timeout_s=1)
            status = Status.from_dict(said)
            self.routing.update(name, status.stats, status.changes)


@asynccontextmanager
async def cluster(
    replicas: int = 2, model: str = "llama", adapters: Mapping[str, Path] = MappingProxyType({}), **settings: Any
) -> AsyncIterator[Cluster]:
    """A cluster of tiny engines. adapters: folders by name. settings: of RouterSettings."""
    engines = {
        f"r{number}": AsyncLLM(
            tiny(model), kv_memory="4MiB", chunk_size=8, seed=0, max_waiting=50, adapters=dict(adapters)
        )
        for number in range(replicas)
    }
    routing = Routing(RouterSettings(**settings))
    transport = LocalTransport({name: EngineHost(llm) for name, llm in engines.items()}, routing)
    said = Description.from_dict(transport.hosts["r0"].describe())
    client = RemoteClient(said.info, transport, routing)
    client.set_replicas(list(engines))
    llm = ClusterLLM(client, said, tiny(model).tokenizer, {"max_waiting": 50})
    try:
        yield Cluster(llm, client, transport, routing, engines)
    finally:
        llm.shutdown()
        await asyncio.sleep(0)
        for engine in engines.values():
            await asyncio.to_thread(engine.shutdown)
