"""AsyncLLM: a model for many concurrent callers on an event loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

from inlay.client.base import Asked, Base, Progress
from inlay.client.schemas import removed
from inlay.config import check_seconds
from inlay.errors import AbortedError, InlayError, ParameterError
from inlay.events import EncodeEvent, TokenEvent
from inlay.output.processor import RequestState
from inlay.pml import Schema
from inlay.policy import PolicyFields, ReusePolicy, check_schema_fields
from inlay.prompt.inputs import PromptInput, check_order, check_params, check_salt, in_any_order, parse_ttl
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.request import EncodeRequest
from inlay.sampling.params import SamplingParams
from inlay.types import RequestOutput


class AsyncLLM(Base):
    """A language model with concurrent requests: each ``generate`` is a stream, and all of them share one batch.

    Arguments and errors as of LLM. One engine thread computes, and the event loop never waits for it.
    """

    _own_thread = True

    def __init__(self, model: Any = "demo", **settings: Any) -> None:
        # In a thread that ends, because OpenMP would keep this thread's workers beside the engine's (engine/thread.py).
        with ThreadPoolExecutor(max_workers=1) as loader:
            loader.submit(super().__init__, model, **settings).result()
        self._under_way: dict[str, _UnderWay] = {}  # by request_id

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        arrival: float | None = None,
        reuse: str | ReusePolicy | None = None,
        recompute: str | None = None,
        promote: bool | None = None,
        across_adapters: bool | None = None,
        tolerance: float | str | None = None,
        positions: str | None = None,
        order: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        stream_interval: int | None = 1,
        tenant: str = "",
        weight: float = 1.0,
        keep_marked_alone: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt, yielding the output so far at most once a step. The last output has ``finished`` set.

        A slow reader gets fewer, longer outputs. Leaving the loop cancels the request.

        Args:
            prompt, sampling_params, order, cache_salt, adapter: as in ``LLM.generate``.
            reuse, recompute, promote, across_adapters, tolerance, positions: as in ``LLM.generate``.
            request_id: a name for ``abort``, unique among running requests. None for a random one.
            priority: a lower number is served first if not all requests can run.
            timeout_s: seconds until a DeadlineError. The time covers tokenization and grammar compilation.
            arrival: the start of that time, on the clock of ``time.perf_counter``. None for now.
            stream_interval: the number of new tokens between outputs, over all answers. None for the final output only.
                Larger values wake the event loop less often. The first token and the end are never delayed.
            tenant: the tenant of the request. Tenants share passes, slots and the queue (docs/guides/many-requests.md).
            weight: the size of the tenant's share relative to others.
            keep_marked_alone: if True, the text behind the last module or marked part is neither stored nor looked up.
                That
                is the whole prompt if it has none.

        Raises:
            InlayError: for a wrong argument at once; for a full queue and other failures when the request ends.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        _check_arguments(params, request_id, priority, stream_interval)
        timeout_s = check_seconds("timeout_s", timeout_s)
        prompt = in_any_order(prompt) if check_order(order) else prompt
        salt = check_salt(cache_salt)
        given = PolicyFields(reuse, recompute, promote, across_adapters, tolerance).policy()
        policy = self.policy_for(prompt, given, positions, cache_salt=cache_salt, adapter=adapter)
        began = time.perf_counter() if arrival is None else arrival
        deadline = None if timeout_s is None else began + timeout_s
        name, under_way = self._begin(request_id)
        try:
            of_job: dict[str, Any] = {"request_id": name, "priority": priority, "tenant": tenant, "weight": weight}
            of_job |= {"adapter": adapter, "keep_marked_alone": keep_marked_alone}
            prepared, state = await self._prepared(prompt, params, policy, salt, deadline=deadline, **of_job)
            updates = _Updates(state, asyncio.get_running_loop(), stream_interval)
            self.client.submit(prepared, updates.tell)
            under_way.state = state  # after submission, because abort needs a submitted request
            if under_way.aborted:
                self.client.abort(name)
            finished = False
            while not finished:
                output = await updates.next()
                finished = output.finished
                yield output
        finally:
            del self._under_way[name]
            if under_way.state is not None and not under_way.state.answered:
                self.client.cancel(name)

    def _begin(self, request_id: str | None) -> tuple[str, _UnderWay]:
        """Reserve a name before the first await. Raises ParameterError if it is in use."""
        name = uuid.uuid4().hex if request_id is None else request_id
        if name in self._under_way:
            raise ParameterError(
                f"request_id '{name}' is taken by a request that is under way; give another one",
                code="request.duplicate_id",
            )
        under_way = self._under_way[name] = _UnderWay()
        return name, under_way

    async def _prepared(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        policy: ReusePolicy,
        salt: str,
        *,
        deadline: float | None,
        **of_job: Any,
    ) -> Asked:
        """Turn a prompt into a request on other threads. Raises InlayError, and DeadlineError at the deadline.

        ``of_job`` holds the scheduling arguments of PromptProcessor.process.
        """
        owner = salt or None
        grammar = None
        if params.structured_outputs is not None:
            compiled = self.client.compile_grammar
            grammar = await self.pools.grammars.run(compiled, params, salt, owner=owner, deadline=deadline)
        made = partial(self._request, deadline=deadline, grammar=grammar, **of_job)
        return await self.pools.prompts.run(made, prompt, params, policy, salt, owner=owner, deadline=deadline)

    def abort(self, request_id: str) -> bool:
        """Abort a request; its stream ends with an error. Returns False if there is none of that name."""
        under_way = self._under_way.get(request_id)
        if under_way is None:
            return False
        under_way.aborted = True
        if under_way.state is not None:
            self.client.abort(request_id)
        return True

    async def check_health(self) -> None:
        """Raise EngineDeadError after an internal error, and InlayError after a shutdown."""
        self.client.check_health()

    async def add_schema(
        self,
        schema: Schema,
        *,
        encode: bool = True,
        replace: bool = False,
        reuse: str | ReusePolicy | None = None,
        tolerance: float | str | None = None,
        positions: str | None = None,
        progress: Progress | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        ttl: str | None = None,
        tenant: str = "",
        weight: float = 1.0,
        **of_requests: object,
    ) -> SchemaLayout:
        """Add a schema; see LLM.add_schema. Its modules are computed in the same passes as running requests.

        Args:
            progress: called with the encoded and the total tokens of the schema: once after layout, then on the
                engine's
                thread.
            tenant, weight: as in ``generate``.
        """
        check_schema_fields(of_requests, "add_schema")
        salt = check_salt(cache_salt)
        ttl_s = None if ttl is None else parse_ttl(ttl)
        given = PolicyFields(reuse, tolerance=tolerance).policy()
        policy = self._policy_of(schema, given, positions, adapter)
        add = partial(self.schemas.add, replace=replace, adapter=adapter, ttl_s=ttl_s)
        layout, specs = await self.pools.schemas.run(add, schema, policy, salt, owner=cache_salt)
        if encode:
            of_job: dict[str, Any] = {"adapter": adapter, "tenant": tenant, "weight": weight}
            encoding = self.schemas.encoding(layout, specs, salt=salt, **of_job)
            await self._encode(encoding, progress)
        return layout

    async def warm(
        self,
        prompt: Any,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Encode the modules that a prompt will read: those of its schema, or marked parts of messages."""
        salt = check_salt(cache_salt)
        policy = self.policy_for(prompt, reuse, positions, cache_salt=cache_salt, adapter=adapter)
        segments = self.processor.segments_of
        specs = await self.pools.prompts.run(segments, prompt, policy, salt, adapter, owner=cache_salt)
        await self._encode(self.processor.encoding("the prompt", specs, salt, adapter=adapter), None)

    async def pin(
        self,
        name: str,
        *,
        modules: Sequence[str] = (),
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        max_bytes: int | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> int:
        """Pin a schema; see LLM.pin. With a tenant, the pins belong to the tenant under any salt.

        For tenant and weight see ``generate``.
        """
        salt = check_salt(cache_salt)
        owner = tenant or salt
        find = partial(self.segments_of, tenant=tenant, weight=weight)
        segments = await self.pools.schemas.run(find, name, modules, reuse, positions, salt, adapter, owner=cache_salt)
        try:
            taken = await asyncio.wrap_future(self.schemas.pin(segments, name, salt, owner, max_bytes))
        except asyncio.CancelledError:  # the outcome is unknown, so release both pins
            for pinned in filter(None, (segments, self.schemas.unpinned(name, salt, owner))):
                self.schemas.unpin_segments(pinned, owner)
            raise
        self.schemas.pinned(segments, name, salt, owner)
        try:
            await self._encode(segments, None)
        except BaseException:
            await self.unpin(name, cache_salt=cache_salt, tenant=tenant)
            raise
        return taken

    async def unpin(self, name: str, *, cache_salt: str | None = None, tenant: str = "") -> bool:
        """Unpin a schema; see LLM.unpin. ``tenant`` as in ``pin``."""
        salt = check_salt(cache_salt)
        owner = tenant or salt
        pinned = self.schemas.unpinned(name, salt, owner)
        if pinned is not None:
            await asyncio.wrap_future(self.client.unpin(pinned, owner, pinned.request_id))
        return pinned is not None

    async def evict(
        self,
        name: str,
        *,
        modules: Sequence[str] = (),
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> int:
        """Evict a schema's segments; see LLM.evict."""
        salt = check_salt(cache_salt)
        policy = self.policy(reuse, positions, schema=self._known_schema(name, salt), adapter=adapter)
        find = self.processor.schemas.every_spec
        specs = await self.pools.schemas.run(find, name, policy, salt, adapter, modules, owner=cache_salt)
        segments = self.processor.encoding(f"schema '{name}'", specs, salt, adapter=adapter)
        return await asyncio.wrap_future(self.schemas.evict(segments))

    async def stored(
        self,
        name: str,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> dict[str, tuple[int, int]]:
        """Return module → its tokens, and its stored tokens; "" stands for text outside modules.

        Empty under a policy without modules. Raises ParameterError for an unknown schema.
        """
        salt = check_salt(cache_salt)
        policy = self.policy(reuse, positions, schema=self._known_schema(name, salt), adapter=adapter)
        found = self.processor.schemas.module_specs
        modules = await self.pools.schemas.run(found, name, policy, salt, adapter, owner=cache_salt)
        specs = [spec for module in modules.values() for spec in module]
        encoding = self.processor.encoding(name, specs, salt, adapter=adapter)
        keys = await asyncio.wrap_future(self.client.stored(encoding))
        return {
            module: (sum(len(one.ids) for one in specs), sum(len(one.ids) for one in specs if one.key in keys))
            for module, specs in modules.items()
        }

    async def _encode(self, encoding: EncodeRequest, progress: Progress | None) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        over = complete = False

        def heard(events: Sequence[EncodeEvent]) -> None:
            nonlocal over, complete
            latest = events[-1]
            over, complete = latest.finished, latest.finished and latest.error is None
            error = None if latest.error is None else latest.error.exception()
            try:
                if progress is not None and error is None:
                    progress(latest.done, latest.total)
            except Exception as raised:
                error = raised
            if over or error is not None:
                loop.call_soon_threadsafe(_settle, ended, error)

        try:
            if progress is not None and encoding.specs:
                progress(0, encoding.tokens)
            self.client.encode(encoding, heard)
            await ended
        except AbortedError:
            raise removed(encoding) from None
        finally:
            if not over:
                with suppress(InlayError):  # the engine may have been shut down
                    self.client.cancel(encoding.request_id)
            self.schemas.ended(encoding, complete=complete)


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


@dataclass(eq=False, slots=True)
class _UnderWay:
    """The state of a request_id: a request, or one in preparation, which can already be aborted."""

    state: RequestState | None = None
    aborted: bool = False


def _check_arguments(params: object, request_id: object, priority: object, stream_interval: object) -> None:
    check_params(params)
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        raise ParameterError(
            f"request_id is {request_id!r:.100}; give a text that is not empty, or None", code="request.invalid_id"
        )
    if not _is_whole(priority):
        raise ParameterError(
            f"priority is {priority!r:.100}; it must be a whole number, and a lower one goes first",
            code="parameter.out_of_range",
        )
    if stream_interval is not None and not (_is_whole(stream_interval) and stream_interval >= 1):
        kind = "at least 1" if _is_whole(stream_interval) else "a whole number"
        raise ParameterError(
            f"stream_interval is {stream_interval!r:.100}; it must be {kind}, or None", code="parameter.out_of_range"
        )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


class _Updates:
    """Passes the latest output of one request from the engine's thread to an event loop. Older ones are dropped."""

    def __init__(self, state: RequestState, loop: asyncio.AbstractEventLoop, interval: int | None) -> None:
        self._state = state
        self._loop = loop
        self._interval = interval
        self._told = 0  # tokens in the outputs sent so far
        self._arrived = asyncio.Event()
        self._latest: RequestOutput | BaseException | None = None

    def tell(self, events: Sequence[TokenEvent]) -> None:
        """Process events on the engine's thread. A closed event loop is ignored."""
        state = self._state
        state.add(events)
        if not self._worth_a_step(state):
            return
        news = state.failure or state.output()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set, news)

    def _worth_a_step(self, state: RequestState) -> bool:
        if state.answered or state.failure is not None:
            return True
        said = state.tokens
        if self._interval is None or (self._told and said - self._told < self._interval):
            return False
        self._told = said
        return True

    async def next(self) -> RequestOutput:
        """Wait for the next output. Raises the request's failure."""
        await self._arrived.wait()
        self._arrived.clear()
        latest = self._latest
        assert latest is not None, "an update that has arrived is there"
        if isinstance(latest, BaseException):
            raise latest
        return latest

    def _set(self, latest: RequestOutput | BaseException) -> None:
        self._latest = latest
        self._arrived.set()
