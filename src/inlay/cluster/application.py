"""The application on Ray Serve: replicas of the engine, and ingresses with the whole API of ``inlay serve``.

``build`` makes it from a configuration. Ray imports it by name, ``inlay.cluster.application:build``, if a cluster is
deployed from its own configuration file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from inlay.client.async_llm import AsyncLLM
from inlay.cluster.host import EngineHost
from inlay.cluster.loads import HELD, WAITING, QueueAndKVPolicy
from inlay.cluster.ray_router import ModuleAffinityRouter
from inlay.cluster.ray_transport import LINKS, IngressLink, RayTransport
from inlay.cluster.remote_client import ClusterLLM, RemoteClient, tokenizer_of
from inlay.cluster.routing import RouterCollector, Routing
from inlay.cluster.schema_folder import SchemaFolder
from inlay.cluster.settings import ClusterSettings
from inlay.cluster.transport import Description
from inlay.errors import InlayError, ParameterError
from inlay.pml import Schema
from inlay.server.app import build_app
from inlay.server.logs import configure
from inlay.server.schema_catalog import SchemaCatalog
from inlay.server.service import Service
from inlay.settings import parse_bytes

logger = logging.getLogger(__name__)

ENGINE, INGRESS = "engine", "ingress"  # deployments
# Ray's own logging; the ingress writes one line for each request
_LOG = {"log_level": "WARNING", "enable_access_log": False}
_CALLS = frozenset(("describe", "status", "finish", "abort", "stored", "forget"))


class EngineReplica:
    """A replica: one engine. Keyword arguments that name requests or replicas are for the router."""

    def __init__(self, model: str, engine: dict[str, Any]) -> None:
        self._llm = AsyncLLM(model, **engine)
        self._host = EngineHost(self._llm)

    async def answer(self, data: bytes, remaining_s: float | None, *, request_id: str) -> AsyncGenerator[bytes, None]:
        async for item in self._host.answer(data, remaining_s):
            yield item

    async def encode(self, data: bytes, *, replica: str) -> AsyncGenerator[bytes, None]:
        async for item in self._host.encode(data):
            yield item

    async def call(self, method: str, *args: Any, replica: str = "") -> Any:
        if method not in _CALLS:
            raise ParameterError(f"a replica has no call {method!r:.40}", code="cluster.unknown_call")
        said = getattr(self._host, method)(*args)
        return await said if asyncio.iscoroutine(said) else said

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        self._host.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray for its policy; see QueueAndKVPolicy."""
        stats = self._llm.stats()
        return {HELD: stats.held_chunks / stats.chunks, WAITING: float(stats.waiting)}

    def __del__(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.shutdown()


@serve.ingress()
class Ingress:
    """Receives HTTP requests, prepares prompts without weights, and sends them to replicas."""

    def __init__(self, engine: DeploymentHandle[EngineReplica], said: dict[str, Any]) -> None:
        self._engine = engine
        self._settings = ClusterSettings.of(said)
        self._llm: ClusterLLM | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray once. Waits for the first replica."""
        settings, server = self._settings, self._settings.server_settings()
        configure(format=server.log_format, level=server.log_level)
        self._llm, routing = await self._connect()
        keeper = None if settings.schemas.folder is None else SchemaFolder(settings.schemas.folder)
        first = [Schema.from_file(file) for file in settings.schemas.files]
        app = build_app(self._llm, server, first, keeper)
        service = app.state.service
        service.metrics.register(RouterCollector(routing.counts, routing.snapshot))
        app.add_middleware(RefreshMiddleware, schemas=service.schemas)
        await service.open()
        self._warming = asyncio.create_task(_warm_up(service))
        return app

    async def _connect(self) -> tuple[ClusterLLM, Routing]:
        """Connect to the replicas and follow them from now on."""
        settings, loop, early = self._settings, asyncio.get_running_loop(), _Early()
        router = settings.router
        contiguous = router.kind == "prefix"
        routing = Routing(router.settings(), max_bytes=router.max_bytes, contiguous=contiguous)

        def replicas(names: Sequence[str]) -> None:
            loop.call_soon_threadsafe(early, list(names))

        deployment = self._engine.deployment_id
        LINKS.connect((deployment.app_name, deployment.name), IngressLink(routing, replicas, settings.router.kind))
        transport = RayTransport(self._engine)
        said = Description.from_dict(await transport.describe())
        client = RemoteClient(said.info, transport, routing)
        early.become(client)
        tokenizer = await asyncio.to_thread(tokenizer_of, settings.model, settings.engine.get("chat_template"))
        return ClusterLLM(client, said, tokenizer, settings.prompt_settings()), routing

    async def __del__(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()


class RefreshMiddleware:
    """ASGI middleware: reads schema changes of other ingresses before it answers a request."""

    def __init__(self, app: ASGIApp, schemas: SchemaCatalog) -> None:
        self._app = app
        self._schemas = schemas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                await self._schemas.refresh()
            except (InlayError, OSError):
                logger.exception("schemas of other ingresses cannot be read; those that are known stay")
        await self._app(scope, receive, send)


class _Early:
    """Receives the names of replicas, possibly before there is a client."""

    def __init__(self) -> None:
        self._client: RemoteClient | None = None
        self._names: list[str] = []

    def __call__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        if self._client is not None:
            self._client.set_replicas(self._names)

    def become(self, client: RemoteClient) -> None:
        self._client = client
        client.set_replicas(self._names)


async def _warm_up(service: Service) -> None:
    while True:
        try:
            await service.warm_up()
            return
        except InlayError as error:
            logger.warning("the ingress is not ready yet: %s", error)
            await asyncio.sleep(1)


def build(said: dict[str, Any]) -> serve.Application:
    """Build the application from a configuration, given as the mapping of its YAML file. Raises ParameterError."""
    settings = ClusterSettings.of(said)
    replicas, ingress = settings.replicas, settings.ingress
    template = settings.engine.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ParameterError(
            "engine: chat_template is no text; give the template itself", code="cluster.invalid_setting"
        )
    options: dict[str, Any] = {"num_cpus": replicas.cpus, "num_gpus": replicas.gpus}
    if replicas.memory is not None:
        options["memory"] = parse_bytes("memory", replicas.memory)
    if replicas.env:
        options["runtime_env"] = {"env_vars": dict(replicas.env)}
    many: dict[str, Any] = (
        {"num_replicas": replicas.fixed} if replicas.fixed else {"autoscaling_config": _autoscaling(settings)}
    )
    engine = serve.deployment(
        EngineReplica,
        name=ENGINE,
        **many,
        ray_actor_options=options,
        max_ongoing_requests=replicas.max_ongoing_requests,
        graceful_shutdown_timeout_s=replicas.drain_s,
        graceful_shutdown_wait_loop_s=min(2.0, replicas.drain_s),
        logging_config=_LOG,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        request_router_config=RequestRouterConfig(request_router_class=ModuleAffinityRouter),
    )
    front = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=ingress.count,
        ray_actor_options={"num_cpus": ingress.cpus},
        max_ongoing_requests=ingress.max_ongoing_requests,
        logging_config=_LOG,
        graceful_shutdown_timeout_s=ingress.drain_s,
        graceful_shutdown_wait_loop_s=min(2.0, ingress.drain_s),
    )
    return front.bind(engine.bind(settings.model, settings.engine_settings()), settings.to_dict())


def _autoscaling(settings: ClusterSettings) -> AutoscalingConfig:
    replicas = settings.replicas
    return AutoscalingConfig(
        min_replicas=replicas.min or 1,
        max_replicas=replicas.most,
        target_ongoing_requests=replicas.target_ongoing_requests,
        upscale_delay_s=replicas.upscale_delay_s,
        downscale_delay_s=replicas.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function=QueueAndKVPolicy, policy_kwargs={"kv_pressure": replicas.kv_pressure}),
    )
