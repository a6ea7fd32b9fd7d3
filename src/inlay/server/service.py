"""The shared state of a server's routes, its running requests, and its start and stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import cast

from starlette.types import ASGIApp, Receive, Scope, Send

from inlay.api.call import Call, system_fingerprint
from inlay.api.embeddings import is_embedding
from inlay.api.failures import BodyError
from inlay.api.reasoning import model_reasoning
from inlay.api.tools.formats import model_tools
from inlay.client.async_llm import AsyncLLM
from inlay.errors import ModelError
from inlay.models.embedding import EmbeddingModel, EmbeddingPooling
from inlay.models.lora import check_names
from inlay.pml import Schema
from inlay.policy import ReusePolicy
from inlay.sampling.params import SamplingParams
from inlay.server.cache_view import CacheView
from inlay.server.embedding import EmbeddingService
from inlay.server.errors import refuse
from inlay.server.limits import Meter
from inlay.server.live_requests import LiveRequests
from inlay.server.metrics import Metrics
from inlay.server.routes import route_of
from inlay.server.schema_catalog import SchemaCatalog
from inlay.server.schema_record import SchemaKeeper, SchemaRecord
from inlay.server.settings import ServerSettings
from inlay.server.stored_answers import Bounds, StoredAnswers
from inlay.server.tenants import Tenants
from inlay.server.threads import BodyWorkers, MemoryTrimmer
from inlay.server.traces import Traces

logger = logging.getLogger(__name__)

_STUCK_S = 10.0  # seconds without progress on prompts until the server is not ready
_LAST_WORDS, _LAST_WORD_S = 20, 0.1  # repetitions and seconds per repetition to deliver errors to clients
_RETRY_S = 5.0  # by then another server should have taken over


class RunningRequests:
    """Counts the running requests of one event loop. Probes and other status requests do not count."""

    def __init__(self) -> None:
        self.stopping = False
        self._count = 0
        self._changed = asyncio.Event()  # set when the last request ends, or when the wait is over

    def begin(self) -> None:
        """Count a request. Raises BodyError, status 503, once the server is stopping."""
        if self.stopping:
            raise stopping_error()
        self._count += 1

    def end(self) -> None:
        self._count -= 1
        if not self._count:
            self._changed.set()

    def stop_waiting(self) -> None:
        """End the wait of ``drained``."""
        self._changed.set()

    async def drained(self, seconds: float) -> bool:
        """Wait at most this long for all requests to end. Returns True if they did."""
        self._changed.clear()
        if self._count:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        return not self._count


def stopping_error() -> BodyError:
    """Return the error for requests to a server that is stopping."""
    message = "the server is stopping; send the request again"
    return BodyError(message, code="server_stopping", status=503, retry_after_s=_RETRY_S)


class DrainMiddleware:
    """ASGI middleware: counts running requests, and refuses new ones while the server stops."""

    def __init__(self, app: ASGIApp, in_flight: RunningRequests) -> None:
        self._app = app
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_of(scope["path"]).always_open:
            await self._app(scope, receive, send)
            return
        try:
            self._in_flight.begin()
        except BodyError as error:
            await refuse(error, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight.end()


class Service:
    """A model with its tenants, schemas and metrics: the shared state of all routes.

    Args:
        llm: the model.
        settings: the server's options.
        schemas: public schemas that exist from the start.
        keeper: see SchemaCatalog.

    ``ready`` is True once the first schemas are encoded and the model has answered. ``created`` is in seconds since
    1970.

    Raises:
        ParameterError: an adapter has the name of a model.
        ModelError: the embedding model cannot be loaded.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        settings: ServerSettings,
        schemas: Sequence[Schema] = (),
        keeper: SchemaKeeper | None = None,
    ) -> None:
        self.embedding = _embedding(llm, settings)
        own = () if self.embedding is None else (self.embedding.model.name,)
        check_names(llm.adapters, (*settings.served_names, *own))
        self.llm = llm
        #: No request may ask for more than the model allows.
        self.settings = settings
        if llm.client.model.highest is not None:
            least = ReusePolicy.least(settings.max_reuse, llm.client.model.highest)
            self.settings = replace(settings, max_reuse=str(least))
        self.tenants = Tenants(settings.keys_file, settings.api_keys)
        self.tools = model_tools(llm.tokenizer, settings.tool_parser)
        self.reasoning = model_reasoning(llm.tokenizer, settings.reasoning_parser)
        self.meter = Meter(places=_places(llm) if settings.keys_file is not None else None)
        self.trimmer = MemoryTrimmer()
        self.body_workers = BodyWorkers(16 * settings.body_bytes, self.trimmer, llm.pacer)
        self.stored = StoredAnswers(
            Bounds(
                settings.max_stored_responses,
                settings.max_stored_bytes,
                settings.max_stored_bytes_total,
                settings.stored_response_s,
            )
        )
        self.live = LiveRequests()
        endpoint = settings.otlp_traces_endpoint
        self.traces = None if endpoint is None else Traces(endpoint)
        self.schemas = SchemaCatalog(llm, keeper=keeper)
        self.cache = CacheView(llm, self.schemas)
        self.metrics = Metrics(
            llm, model_name=settings.served_names[0], longest=llm.client.model.max_positions, schemas=self.schemas
        )
        self.in_flight = RunningRequests()
        self.created = int(time.time())
        self.ready = False
        self._first_schemas = schemas
        self._records: list[SchemaRecord] = []
        self._running: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The served names of the model, then its adapters. Answers use the first one."""
        return (*self.settings.served_names, *self.llm.adapters)

    def embedding_for(self, call: Call) -> EmbeddingService | None:
        """Return the embedding model if a call asks for embeddings by its name or without a name, else None."""
        found = self.embedding
        return found if found and is_embedding(call) and call.model in (None, found.model.name) else None

    def fingerprint(self, adapter: str | None) -> str:
        """Return the system fingerprint of an adapter, or of the model alone. See ``system_fingerprint``."""
        return system_fingerprint(self.llm.client.model.fingerprint(adapter))

    async def open(self) -> None:
        """Publish the first schemas, once, before requests arrive. Raises InlayError."""
        await self.schemas.refresh()
        ahead: str | None = str(ReusePolicy.ahead(self.settings.policy, ReusePolicy.parse(self.settings.max_reuse)))
        if self.llm.client.model.highest is not None:
            ahead = None
        for schema in self._first_schemas[len(self._records) :]:
            self._records.append(await self.schemas.publish(schema, reuse=ahead, ttl=self.settings.schema_ttl))

    async def warm_up(self) -> None:
        """Encode the first schemas if requests may use modules, and let the model answer once. Raises InlayError."""
        if ReusePolicy.parse(self.settings.max_reuse).modular:
            for record in self._records:
                await (await self.schemas.prewarm(record)).result()
        async for _ in self.llm.generate([0], SamplingParams(max_tokens=1), reuse="off"):
            pass
        self.ready = True

    def check_moving(self) -> None:
        """Raise BodyError, status 503, if a new request would wait behind prompts that make no progress."""
        stuck_s = self.llm.pools.prompts.stuck_s
        if stuck_s > _STUCK_S:
            message = f"no waiting prompt has started for {stuck_s:.0f} seconds; send requests to another server"
            raise BodyError(message, code="not_ready", status=503, retry_after_s=_STUCK_S)

    @contextmanager
    def running(self, names: Sequence[str]) -> Iterator[None]:
        """Register the engine's request ids as running, until the block ends."""
        self._running.update(names)
        try:
            yield
        finally:
            self._running.difference_update(names)

    async def stop(self) -> None:
        """Refuse new requests and wait for the running ones. Abort them after ``drain_s`` seconds.

        A second call during the wait ends it at once.
        """
        in_flight = self.in_flight
        if in_flight.stopping:
            in_flight.stop_waiting()
            return
        in_flight.stopping = True
        try:
            await self._drain(in_flight)
        finally:
            if self.embedding is not None:
                self.embedding.close()
            if self.traces is not None:
                await asyncio.to_thread(self.traces.close)

    async def _drain(self, in_flight: RunningRequests) -> None:
        if await in_flight.drained(self.settings.drain_s):
            return
        if self.embedding is not None:
            self.embedding.close()
        logger.warning("the server stops; the remaining requests end with an error")
        for _ in range(_LAST_WORDS):  # Repeated, because a request in layout cannot be aborted yet.
            for name in list(self._running):
                self.llm.abort(name)
            if await in_flight.drained(_LAST_WORD_S):
                return


def _embedding(llm: AsyncLLM, settings: ServerSettings) -> EmbeddingService | None:
    """Return the loaded embedding model; None if the served model answers requests for embeddings."""
    if settings.embedding_model is None:
        return None
    try:
        model = EmbeddingModel(settings.embedding_model, cast("EmbeddingPooling | None", settings.embedding_pooling))
    except ModelError as error:
        raise ModelError(f"embedding_model: {error}", code=error.code) from error
    return EmbeddingService(model, llm.pools.prompts, llm.config.max_waiting)


def _places(llm: AsyncLLM) -> int | None:
    """Return the most answers that may run or wait; None for no limit."""
    config = llm.config
    return None if config.max_waiting is None else config.max_num_seqs + config.max_waiting
