"""AsyncLLM: a model for many concurrent callers on an event loop."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeGuard, Unpack

from inlay.client.base import Progress, Served
from inlay.client.options import SchemaOptions, StreamOptions
from inlay.client.waiting import Looping
from inlay.client.warm_plan import PlanCalls, PlanEntry, PlannedText
from inlay.errors import ParameterError
from inlay.models.load import GivenModel
from inlay.output.processor import RequestState
from inlay.pml import Schema
from inlay.policy import PolicyFields, ReusePolicy
from inlay.prompt.inputs import Message, PromptInput, chat_prompts, check_order, check_params, check_salt, in_any_order
from inlay.prompt.layout import SchemaLayout
from inlay.sampling.params import SamplingParams
from inlay.settings import check_seconds
from inlay.types import CachedText, RequestOutput, Scope


class AsyncLLM(PlanCalls):
    """A language model with concurrent requests: each ``generate`` is a stream, and all of them share one batch.

    Arguments and errors as of LLM. One engine thread computes, and the event loop never waits for it.
    """

    _own_thread = True
    _waiting = Looping()

    def __init__(self, model: GivenModel | Served = "demo", **settings: Any) -> None:
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
        find: str | None = None,
        positions: str | None = None,
        order: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        stream_interval: int | None = 1,
        tenant: str = "",
        weight: float = 1.0,
        keep_marked_alone: bool = False,
        diagnostics: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt, yielding the output so far at most once a step. The last output has ``finished`` set.

        A slow reader gets fewer, longer outputs. Leaving the loop cancels the request.

        Args:
            prompt, sampling_params, order, cache_salt, adapter: as in ``LLM.generate``.
            reuse, recompute, promote, across_adapters, tolerance, find, positions: as in ``LLM.generate``.
            request_id: a name for ``abort``, unique among running requests. None for a random one.
            priority: a lower number is served first if not all requests can run.
            timeout_s: seconds until a DeadlineError. The time covers tokenization and grammar compilation.
            arrival: the start of that time, on the clock of ``time.perf_counter``. None for now.
            stream_interval: the number of new tokens between outputs, over all answers. None for the final output only.
                Larger values wake the event loop less often. The first token and the end are never delayed.
            tenant: the tenant of the request. Tenants share passes, slots and the queue (docs/guides/many-requests.md).
            weight: the size of the tenant's share relative to others.
            keep_marked_alone: if True, the text behind the last module or marked part is neither stored nor looked up.
                That is the whole prompt if it has none.
            diagnostics: as in ``LLM.generate``. The last output has them.

        Raises:
            InlayError: for a wrong argument at once; for a full queue and other failures when the request ends.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        _check_arguments(params, request_id, priority, stream_interval)
        timeout_s = None if timeout_s is None else check_seconds("timeout_s", timeout_s)
        prompt = in_any_order(prompt) if check_order(order) else prompt
        scope = Scope(check_salt(cache_salt), tenant, adapter, weight)
        given = PolicyFields(reuse, recompute, promote, across_adapters, tolerance, find).policy()
        policy = self._prompt_policy(prompt, given, positions, scope)
        began = time.perf_counter() if arrival is None else arrival
        name, under_way = self._begin(request_id)
        try:
            asked = await self._ask(
                prompt,
                params,
                policy,
                scope,
                request_id=name,
                priority=priority,
                deadline=None if timeout_s is None else began + timeout_s,
                keep_marked_alone=keep_marked_alone,
                diagnostics=diagnostics,
            )
            outputs = self._listen(asked, stream_interval)
            under_way.state = asked.state  # after submission, because abort needs a submitted request
            if under_way.aborted:
                self.client.cancel(name, report=True)
            finished = False
            while not finished:
                output = await outputs.next()
                finished = output.finished
                yield output
        finally:
            del self._under_way[name]
            if under_way.state is not None:
                self._give_up(under_way.state)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation. Arguments as in ``LLM.chat`` and ``generate``, outputs as in ``generate``."""
        prompts = chat_prompts(
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if len(prompts) != 1:
            raise ParameterError(
                f"there are {len(prompts)} conversations; give one to each call", code="parameter.wrong_count"
            )
        return self.generate(prompts[0], sampling_params, **options)

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

    def abort(self, request_id: str) -> bool:
        """Abort a request; its stream ends with an error. Returns False if there is none of that name."""
        under_way = self._under_way.get(request_id)
        if under_way is None:
            return False
        under_way.aborted = True
        if under_way.state is not None:
            self.client.cancel(request_id, report=True)
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
        progress: Progress | None = None,
        ttl: str | None = None,
        tolerance: float | str | None = None,
        tenant: str = "",
        weight: float = 1.0,
        **options: Unpack[SchemaOptions],
    ) -> SchemaLayout:
        """Add a schema; see LLM.add_schema. Its modules are computed in the same passes as running requests.

        Args:
            progress: called on the event loop with the encoded and the total tokens of the schema. A slow event loop
                gets fewer calls.
            tenant, weight: as in ``generate``.
        """
        return await self._add_schema(
            schema,
            encode=encode,
            replace=replace,
            ttl=ttl,
            progress=progress,
            tolerance=tolerance,
            tenant=tenant,
            weight=weight,
            **options,
        )

    async def warm(self, prompt: Any, *, progress: Progress | None = None, **options: Unpack[SchemaOptions]) -> None:
        """Encode the modules that a prompt will read: those of its schema, or marked parts of messages."""
        await self._warm(prompt, progress, **options)

    async def warm_plan(
        self,
        plan: Sequence[PlanEntry],
        budget: int | str,
        *,
        reuse: str | ReusePolicy | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        ttl: str | None = None,
        progress: Progress | None = None,
    ) -> list[PlannedText]:
        """See ``LLM.warm_plan``. Segments are encoded one after another, in the same passes as running requests."""
        return await self._warm_plan(plan, budget, reuse, Scope(check_salt(cache_salt), adapter=adapter), ttl, progress)

    async def score_cached(
        self,
        texts: Sequence[str] = (),
        *,
        hashes: Sequence[str] = (),
        messages: Sequence[Any] = (),
        reuse: str | ReusePolicy | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        alone: bool = False,
    ) -> list[CachedText]:
        """See ``LLM.score_cached``."""
        scope = Scope(check_salt(cache_salt), adapter=adapter)
        policy = self.policy(reuse, modules=True, adapter=adapter)
        return await self._score_cached(texts, hashes, messages, policy, scope, alone=alone)

    async def pin(
        self,
        name: str,
        *,
        modules: Sequence[str] = (),
        max_bytes: int | None = None,
        tenant: str = "",
        weight: float = 1.0,
        **options: Unpack[SchemaOptions],
    ) -> int:
        """Pin a schema; see LLM.pin. With a tenant, the pins belong to the tenant under any salt.

        For tenant and weight see ``generate``.
        """
        return await self._pin(name, modules, max_bytes, tenant=tenant, weight=weight, **options)

    async def unpin(self, name: str, *, cache_salt: str | None = None, tenant: str = "") -> bool:
        """Unpin a schema; see LLM.unpin. ``tenant`` as in ``pin``."""
        return await self._unpin(name, cache_salt=cache_salt, tenant=tenant)

    async def evict(self, name: str, *, modules: Sequence[str] = (), **options: Unpack[SchemaOptions]) -> int:
        """Evict a schema's segments; see LLM.evict."""
        return await self._evict(name, modules, **options)

    async def stored(self, name: str, **options: Unpack[SchemaOptions]) -> dict[str, tuple[int, int]]:
        """Return module → its tokens, and its stored tokens; "" stands for text outside modules.

        Empty under a policy without modules. Raises ParameterError for an unknown schema.
        """
        return await self._stored(name, **options)

    async def reset_prefix_cache(self) -> None:
        """Evict all stored segments that no request reads."""
        await self._waiting.result(self.client.forget())


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
