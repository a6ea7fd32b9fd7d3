"""AsyncLLM: a model for many concurrent callers on an event loop."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Unpack

from inlay.client.base import Looping, Progress, Served
from inlay.client.options import AsyncChatOptions, AsyncRequestOptions, ModuleOptions, checked_options
from inlay.client.warm_plan import PlanCalls, PlanEntry, PlannedText
from inlay.errors import ParameterError
from inlay.models.load import GivenModel
from inlay.output import RequestState
from inlay.pml import Schema
from inlay.prompt.inputs import Message, PromptInput, chat_prompts, check_params
from inlay.prompt.layout import SchemaLayout
from inlay.sampling.params import SamplingParams
from inlay.settings import check_seconds, is_whole
from inlay.types import CachedText, RequestOutput


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

    @checked_options(AsyncRequestOptions)
    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[AsyncRequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt, yielding the output so far at most once a step. The last output has ``finished`` set.

        A slow reader gets fewer, longer outputs. Leaving the loop cancels the request.

        Args:
            prompt, sampling_params: as in ``LLM.generate``.
            options: see AsyncRequestOptions. ``stream_interval`` is 1 by default.

        Raises:
            InlayError: for a wrong argument at once; for a full queue and other failures when the request ends.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        given: dict[str, Any] = dict(options)
        request_id, interval = given.pop("request_id", None), given.pop("stream_interval", 1)
        timeout_s, arrival = given.pop("timeout_s", None), given.pop("arrival", None)
        fields = {name: given.pop(name) for name in ("priority", "keep_marked_alone", "diagnostics") if name in given}
        _check_arguments(params, request_id, fields.get("priority", 0), interval)
        timeout_s = None if timeout_s is None else check_seconds("timeout_s", timeout_s)
        ((prompt, policy, scope),) = self._placed([prompt], [given.pop("adapter", None)], **given)
        began = time.perf_counter() if arrival is None else arrival
        deadline = None if timeout_s is None else began + timeout_s
        name, under_way = self._begin(request_id)
        try:
            asked = await self._ask(prompt, params, policy, scope, request_id=name, deadline=deadline, **fields)
            outputs = self._listen(asked, interval)
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

    @checked_options(AsyncChatOptions)
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[AsyncChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation. Arguments as in ``LLM.chat`` and ``generate``, outputs as in ``generate``."""
        prompts, others = chat_prompts(messages, options)
        if len(prompts) != 1:
            raise ParameterError(
                f"there are {len(prompts)} conversations; give one to each call", code="parameter.wrong_count"
            )
        return self.generate(prompts[0], sampling_params, **others)

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

    @checked_options(ModuleOptions)
    async def add_schema(
        self,
        schema: Schema,
        *,
        encode: bool = True,
        replace: bool = False,
        progress: Progress | None = None,
        ttl: str | None = None,
        tolerance: float | str | None = None,
        **options: Unpack[ModuleOptions],
    ) -> SchemaLayout:
        """See ``LLM.add_schema``. The modules are computed in the same passes as running requests.

        ``progress`` is called on the event loop. A slow event loop gets fewer calls.
        """
        return await self._add_schema(
            schema, encode=encode, replace=replace, ttl=ttl, progress=progress, tolerance=tolerance, **options
        )

    @checked_options(ModuleOptions)
    async def warm(self, prompt: Any, *, progress: Progress | None = None, **options: Unpack[ModuleOptions]) -> None:
        """See ``LLM.warm``."""
        await self._warm(prompt, progress, **options)

    @checked_options(ModuleOptions)
    async def warm_plan(
        self,
        plan: Sequence[PlanEntry],
        budget: int | str,
        *,
        ttl: str | None = None,
        progress: Progress | None = None,
        **options: Unpack[ModuleOptions],
    ) -> list[PlannedText]:
        """See ``LLM.warm_plan``. Segments are encoded one after another, in the same passes as running requests."""
        return await self._warm_plan(plan, budget, ttl, progress, **options)

    @checked_options(ModuleOptions)
    async def score_cached(
        self,
        texts: Sequence[str] = (),
        *,
        hashes: Sequence[str] = (),
        messages: Sequence[Any] = (),
        alone: bool = False,
        **options: Unpack[ModuleOptions],
    ) -> list[CachedText]:
        """See ``LLM.score_cached``."""
        return await self._score_cached(texts, hashes, messages, alone=alone, **options)

    @checked_options(ModuleOptions)
    async def pin(
        self,
        name: str,
        *,
        modules: Sequence[str] = (),
        max_bytes: int | str | None = None,
        **options: Unpack[ModuleOptions],
    ) -> int:
        """See ``LLM.pin``. With a tenant, the pins belong to the tenant under any salt."""
        return await self._pin(name, modules, max_bytes, **options)

    async def unpin(self, name: str, *, cache_salt: str | None = None, tenant: str = "") -> bool:
        """See ``LLM.unpin``. ``tenant`` as in ``pin``."""
        return await self._unpin(name, cache_salt=cache_salt, tenant=tenant)

    @checked_options(ModuleOptions)
    async def evict(self, name: str, *, modules: Sequence[str] = (), **options: Unpack[ModuleOptions]) -> int:
        """See ``LLM.evict``."""
        return await self._evict(name, modules, **options)

    @checked_options(ModuleOptions)
    async def stored(self, name: str, **options: Unpack[ModuleOptions]) -> dict[str, tuple[int, int]]:
        """See ``LLM.stored``."""
        return await self._stored(name, **options)

    async def reset_prefix_cache(self) -> None:
        """See ``LLM.reset_prefix_cache``."""
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
    if not is_whole(priority):
        raise ParameterError(
            f"priority is {priority!r:.100}; it must be a whole number, and a lower one goes first",
            code="parameter.out_of_range",
        )
    if stream_interval is not None and not (is_whole(stream_interval) and stream_interval >= 1):
        kind = "at least 1" if is_whole(stream_interval) else "a whole number"
        raise ParameterError(
            f"stream_interval is {stream_interval!r:.100}; it must be {kind}, or None", code="parameter.out_of_range"
        )
