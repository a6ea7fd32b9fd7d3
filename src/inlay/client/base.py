"""The common base of LLM and AsyncLLM: an engine's client, the prompt processor and the output processor.

The calls of LLM and AsyncLLM are the same coroutines (schema_calls.py). AsyncLLM awaits them. LLM runs them with
``finish``: its ``Stepping`` steps the engine instead of suspending them.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, Unpack

from transformers import PreTrainedTokenizerBase

from inlay.attention.storage import KVStorage
from inlay.client.engine import Engine, Prepared, SteppedEngine
from inlay.client.local import InProcessClient
from inlay.client.options import OwnedPromptOptions, scope_of
from inlay.client.schemas import SchemaManager
from inlay.config import EngineConfig, ModelSettings
from inlay.distribution import other_project
from inlay.engine.background.divergence import DivergenceLog
from inlay.engine.forward import StepObserver
from inlay.errors import AbortedError, ModelError, ParameterError
from inlay.events import TokenEvent
from inlay.kv.store import SegmentStore
from inlay.measured import AutoReuse
from inlay.models.load import GivenModel, LoadedModel, adjusted, as_loaded
from inlay.models.lora import AdapterInfo, load_adapters
from inlay.output import OutputProcessor, RequestState
from inlay.pml import Prompt, PromptBuilder, Schema
from inlay.policy import PolicyFields, ReusePolicy, check_positions, default_policy
from inlay.prompt.contexts import check_modules, in_encoding_order
from inlay.prompt.inputs import check_order, check_salt, check_template, has_modules, in_any_order
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.placement import PromptLayout
from inlay.prompt.processor import PromptProcessor
from inlay.prompt.request import EncodeRequest, RequestFields
from inlay.prompt.tokens import TextEncoder
from inlay.sampling.params import SamplingParams
from inlay.settings import settings_of
from inlay.tolerance import Measured
from inlay.types import EVERYONE, DivergenceStats, EngineStats, RequestOutput, Scope
from inlay.workpool import Pacer, WorkPool, WorkPools

T = TypeVar("T")


class Mailbox(Protocol[T]):
    """Carries items from an engine's thread to a caller."""

    def put(self, item: T) -> None:
        """Send an item. Thread-safe; does not block."""
        ...

    async def get(self) -> T:
        """Wait for an item."""
        ...


class Waiting(Protocol):
    """How the calls of one LLM wait."""

    async def work(self, pool: WorkPool, call: Callable[[], T], owner: str | None, deadline: float | None = None) -> T:
        """Return the result of blocking work. Arguments and errors as of WorkPool.run."""
        ...

    async def result(self, future: Future[T]) -> T:
        """Return the result of a call of the engine."""
        ...

    def mailbox(self) -> Mailbox[Any]: ...


class Looping:
    """Calls await. Blocking work runs on other threads."""

    async def work(self, pool: WorkPool, call: Callable[[], T], owner: str | None, deadline: float | None = None) -> T:
        return await pool.run(call, owner=owner, deadline=deadline)

    async def result(self, future: Future[T]) -> T:
        return await asyncio.wrap_future(future)

    def mailbox(self) -> Mailbox[Any]:
        return _LatestItem(asyncio.get_running_loop())


class Stepping:
    """Calls never suspend. Work runs on the caller's thread, which steps the engine while it waits.

    Args:
        step: takes one step of the engine. Returns False if no request is under way.
    """

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step

    async def work(self, pool: WorkPool, call: Callable[[], T], owner: str | None, deadline: float | None = None) -> T:
        return call()

    async def result(self, future: Future[T]) -> T:
        return future.result()

    def mailbox(self) -> Mailbox[Any]:
        return _SteppedItems(self._step)


def finish(call: Coroutine[Any, Any, T]) -> T:
    """Run a call that waits by ``Stepping``, and return its result."""
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    call.close()
    raise AssertionError("a call that steps the engine has suspended")


class _LatestItem(Generic[T]):
    """The latest item for a reader on an event loop. Older ones are dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived = asyncio.Event()
        self._items: list[T] = []

    def put(self, item: T) -> None:
        with suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._set, item)

    async def get(self) -> T:
        await self._arrived.wait()
        self._arrived.clear()
        return self._items[0]

    def _set(self, item: T) -> None:
        self._items[:] = [item]
        self._arrived.set()


class _SteppedItems(Generic[T]):
    """All items for a reader that steps the engine. Another thread may step it too and receive items meanwhile."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._items: SimpleQueue[T] = SimpleQueue()

    def put(self, item: T) -> None:
        self._items.put(item)

    async def get(self) -> T:
        while self._items.empty():
            if not self._step() and self._items.empty():
                raise AbortedError("the engine has lost this request in an interrupted step; send it again")
        return self._items.get()


logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class PreparedRequest(NamedTuple):
    """A request that is ready to be queued, and the state that collects its events."""

    prepared: Prepared
    state: RequestState


@dataclass(frozen=True, slots=True)
class Served:
    """A running engine, with the description of its model.

    Args:
        name: of the model.
        sampling_defaults: the model's defaults of SamplingParams fields.
        adapters: the adapters that requests may name, without their weights.
    """

    client: Engine
    name: str
    tokenizer: PreTrainedTokenizerBase
    sampling_defaults: dict[str, Any]
    adapters: Mapping[str, AdapterInfo]


class Base:
    """A model with its schemas, its cache and its engine. For arguments see LLM."""

    _own_thread = False  # see EngineThread
    _waiting: Waiting

    def __init__(
        self,
        model: GivenModel | Served = "demo",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **settings: Any,
    ) -> None:
        if wrong := other_project():
            logger.warning("%s", wrong)
        chosen = ModelSettings(**{name: settings.pop(name) for name in settings_of(ModelSettings) if name in settings})
        self.config = EngineConfig.of(settings)
        if chosen.chat_template is not None:
            check_template(chosen.chat_template)
        if isinstance(model, Served):
            self._attach(model)
            return
        seed = chosen.seed or 0
        loaded = as_loaded(
            model, chosen.dtype, seed, chosen.weights, chosen.quantization, tokenizer, self.config.device
        )
        self.loaded = loaded = adjusted(loaded, chosen.chat_template, self.config.max_model_len)
        defaults = sampling_defaults(loaded) if self.config.generation_config == "auto" else {}
        self._read_adapters = load_adapters(loaded.model, loaded.name, chosen.adapters or {})
        known = {name: adapter.info for name, adapter in self._read_adapters.items()}
        client = self.connect(chosen.seed)
        self._read_adapters = {}  # the engine holds their weights in another form
        self._attach(Served(client, loaded.name, loaded.tokenizer, defaults, known))

    def _attach(self, served: Served) -> None:
        """Build the parts above an engine. ``config`` must be set."""
        client, tokenizer, name = served.client, served.tokenizer, served.name
        local = client if isinstance(client, InProcessClient) else None
        self.model_name = name
        self.tokenizer = tokenizer
        #: The model's defaults of SamplingParams fields.
        self.sampling_defaults = served.sampling_defaults
        #: Adapters that requests may name, without their weights.
        self.adapters = served.adapters
        #: The engine with its weights and store: requests in, events out.
        self.client = client
        #: Counts divergence and chooses fallback policies. Engines of other processes measure none.
        self.divergence_log = DivergenceLog(None, profiles=False) if local is None else local.divergence_log
        #: Turns prompts into requests.
        self.processor = PromptProcessor(
            tokenizer,
            client.model,
            self.config.placeholders,
            self.config.template_date,
            likely=self.config.prefetch == "likely",
        )
        #: Resolves ``auto`` by the measurements of this model.
        self.auto = AutoReuse(name, client.model, self.config, None if local is None else local.meter)
        self.policy()  # fail now if the model does not support the default
        #: Turns events into outputs.
        self.outputs = OutputProcessor(tokenizer, client.finish)
        #: Adds and removes schemas with their encodings.
        self.schemas = SchemaManager(self.processor, client, local)
        #: Limits the CPU time of work beside the engine.
        self.pacer = Pacer() if local is None else Pacer(lambda: local.busy)
        #: Runs blocking work off the event loop, on threads started when needed.
        self.pools = WorkPools(self.config.max_waiting, self.pacer)
        self._end = weakref.finalize(self, client.shutdown)
        weakref.finalize(self, self.pools.close)

    def connect(self, seed: int | None) -> SteppedEngine:
        """Create the engine's client. ``seed`` is for requests without one; None draws one."""
        adapters = self._read_adapters
        return InProcessClient(self.loaded, self.config, own_thread=self._own_thread, seed=seed, adapters=adapters)

    @property
    def local(self) -> InProcessClient:
        """The client of an engine in this process. Raises ParameterError for an engine elsewhere."""
        if not isinstance(self.client, InProcessClient):
            raise ParameterError(
                "the engines are elsewhere, on replicas of a cluster; ask a server of one engine",
                code="cluster.not_available",
            )
        return self.client

    @property
    def store(self) -> SegmentStore:
        return self.local.store

    @property
    def storage(self) -> KVStorage:
        return self.local.storage

    @property
    def encoder(self) -> TextEncoder:
        """The encoder of text into token ids."""
        return self.processor.encoder

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows."""
        return self.client.model.vocab_size

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's default sampling parameters."""
        return SamplingParams(**self.sampling_defaults)

    def policy(
        self,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        *,
        modules: bool = True,
        schema: Schema | None = None,
        adapter: str | None = None,
        new: bool = False,
    ) -> ReusePolicy:
        """Return the resolved policy of a request. None stands for the engine's defaults.

        Args:
            reuse: a policy or its key (``str(policy)``).
            modules: True if the request has modules; the default policy depends on it.
            schema: the prompt's schema, for ``auto``.
            adapter: the adapter that answers, for ``auto``.
            new: see AutoReuse.resolve.

        Raises:
            ParameterError: for an unknown policy or one that the model does not support.
        """
        model = self.client.model
        asked = self._default(modules, schema, adapter) if reuse is None else _policy(reuse)
        placed = check_positions(positions) or asked.positions or check_positions(self.config.positions)
        asked = replace(default_policy(modules=False) if asked.auto and not modules else asked, positions=placed)
        resolved = asked if model.why_unshared else self.auto.resolve(asked, schema, adapter, new=new)
        settled = resolved.settled(model.why_not_shift).check_allowed(model.highest, model.why_limited)
        return settled.with_states(model.first_tokens) if model.recurrent else settled

    def _default(self, modules: bool, schema: Schema | None, adapter: str | None) -> ReusePolicy:
        """Return the policy of a request without one."""
        if self.config.policy is not None:
            return self.config.policy
        measured = modules and bool(self.auto.rows(schema, adapter))
        return default_policy(modules=modules, highest=self.client.model.highest, measured=measured)

    def policy_for(
        self,
        prompt: Any,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> ReusePolicy:
        """Return the resolved policy of a prompt in any form. Arguments and errors as of ``generate``."""
        return self._prompt_policy(prompt, reuse, positions, Scope(check_salt(cache_salt), adapter=adapter))

    def _prompt_policy(
        self, prompt: Any, reuse: str | ReusePolicy | None, positions: str | None, scope: Scope
    ) -> ReusePolicy:
        schema = self._schema_of(prompt, scope.cache_salt)
        return self.policy(reuse, positions, modules=has_modules(prompt), schema=schema, adapter=scope.adapter)

    def _schema_policy(
        self, name: str, reuse: str | ReusePolicy | None, positions: str | None, scope: Scope
    ) -> ReusePolicy:
        """Return the resolved policy for the segments of a registered schema."""
        schema = self._known_schema(name, scope.cache_salt)
        return self.policy(reuse, positions, schema=schema, adapter=scope.adapter)

    def measured(
        self, prompt: Any, *, cache_salt: str | None = None, adapter: str | None = None
    ) -> tuple[Measured, ...]:
        """Return the results of ``inlay check`` for prompts like this one; empty if it was not run."""
        return self.auto.rows(self._schema_of(prompt, check_salt(cache_salt)), adapter)

    def _schema_of(self, prompt: Any, salt: str) -> Schema | None:
        return self._known_schema(prompt.schema, salt) if isinstance(prompt, Prompt | PromptBuilder) else None

    def _known_schema(self, name: str, salt: str) -> Schema | None:
        layout = self.processor.schemas.layout(name, salt)
        return None if layout is None else layout.schema

    def _policy_of(
        self, schema: object, reuse: str | ReusePolicy | None, positions: str | None, adapter: str | None
    ) -> ReusePolicy:
        """Return the policy that a new schema is encoded for."""
        of = schema if isinstance(schema, Schema) else None
        return self.policy(reuse, positions, schema=of, adapter=adapter, new=True)

    def policy_taken(self, prompt: Any, policy: ReusePolicy, cache_salt: str | None = None) -> ReusePolicy:
        """Return the policy under which a prompt that requests ``policy`` is answered.

        If shadow sampling has found too large a divergence for the schema, policy and salt, this is a safer policy
        (docs/guides/reuse-policies.md).
        """
        if not (self.config.shadow and policy.modular):
            return policy
        salt = cache_salt or ""
        return self.divergence_log.taken(policy, salt, *self.processor.schemas.schema_of(prompt, salt))

    def divergence(self, *, cache_salt: str | None = None) -> tuple[DivergenceStats, ...]:
        """Return the divergence from full prefill of this salt's answers, by schema and policy."""
        return self.divergence_log.of(check_salt(cache_salt))

    def drift(self, *, cache_salt: str | None = None) -> tuple[DivergenceStats, ...]:
        """Return ``divergence()``. Deprecated."""
        warnings.warn("drift() is deprecated. Call divergence().", DeprecationWarning, stacklevel=2)
        return self.divergence(cache_salt=cache_salt)

    def lift_fallback(self, schema: str | None = None, *, cache_salt: str | None = None) -> int:
        """Remove the fallback policies of this salt (see ``policy_taken``) and the statistics of its answers.

        Args:
            schema: a schema's name, "" for messages in parts, None for all.

        Returns:
            The number of policies that had been replaced.
        """
        return self.divergence_log.lift(check_salt(cache_salt), schema)

    def positions_for(self, reuse: str | ReusePolicy, positions: str | None = None) -> str:
        """Return the position policy of a request with this reuse. Raises ParameterError."""
        return str(self.policy(reuse, positions).positions)

    def schema(self, name: str, *, cache_salt: str | None = None) -> SchemaLayout | None:
        """Return the schema of that name for requests with this salt: their own, else the public one."""
        return self.processor.schemas.layout(name, cache_salt or "")

    def remove_schema(self, name: str, *, cache_salt: str | None = None) -> bool:
        """Remove a schema; returns False if there was none. Running requests continue, and its encoding ends.

        Its segments stay until they are evicted.
        """
        return self.schemas.remove(name, cache_salt or "")

    def segments_of(
        self,
        name: str,
        modules: Sequence[str],
        reuse: str | ReusePolicy | None,
        positions: str | None,
        scope: Scope = EVERYONE,
    ) -> EncodeRequest:
        """Return the request that encodes some modules of a schema, or all, with their contexts.

        Raises ParameterError.
        """
        policy = self._schema_policy(name, reuse, positions, scope)
        by_module = self.processor.schemas.module_specs(name, policy, scope)
        if not by_module and self.client.model.why_limited is not None:
            raise ParameterError(
                f"nothing is encoded ahead: {self.client.model.why_limited}", code="cache.nothing_encoded"
            )
        if not by_module:
            raise ParameterError(
                "a policy without modules encodes nothing ahead; give reuse='modular' or 'isolated'",
                code="cache.nothing_encoded",
            )
        layout = self.processor.schemas.layout(name, scope.cache_salt)
        if layout is not None:
            check_modules(layout, modules)
        specs = [spec for module, found in by_module.items() if not modules or module in modules for spec in found]
        useful = in_encoding_order(specs) if modules else specs
        return self.processor.encoding(f"schema '{name}'", useful, scope)

    def stats(self) -> EngineStats:
        """Return the state of the engine and its pool. Cheap and thread-safe."""
        return self.client.stats()

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Call an observer after every step of the engine, on the stepping thread.

        Returns:
            A function that removes the observer.
        """
        return self.local.observe(observer)

    def lay_out(
        self,
        prompt: Any,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
    ) -> PromptLayout:
        """Return a prompt's token ids and positions without running it. Arguments as of ``LLM.generate``."""
        policy = self.policy_for(prompt, reuse, positions, cache_salt=cache_salt)
        return self.processor.lay_out(prompt, policy, check_salt(cache_salt))

    def shutdown(self) -> None:
        """Stop the engine's thread. Running requests fail, and later calls are refused."""
        self.pools.close()
        self._end()

    def _placed(
        self, prompts: Sequence[Any], adapters: Sequence[str | None], **options: Unpack[OwnedPromptOptions]
    ) -> list[tuple[Any, ReusePolicy, Scope]]:
        """Return prompts in a free order if the options say so, each with its resolved policy and its owner.

        Args:
            adapters: one for each prompt.
            options: without ``adapter``.

        Raises:
            ParameterError: for a wrong option.
        """
        fields: dict[str, Any] = dict(options)
        order, positions = fields.pop("order", None), fields.pop("positions", None)
        owner = {name: fields.pop(name) for name in ("cache_salt", "tenant", "weight") if name in fields}
        reuse = PolicyFields(**fields).policy()
        free = check_order(order)
        made = []
        for prompt, adapter in zip(prompts, adapters, strict=True):
            ordered, scope = in_any_order(prompt) if free else prompt, scope_of(adapter=adapter, **owner)
            made.append((ordered, self._prompt_policy(ordered, reuse, positions, scope), scope))
        return made

    async def _ask(
        self,
        prompt: Any,
        params: SamplingParams,
        policy: ReusePolicy,
        scope: Scope = EVERYONE,
        **fields: Unpack[RequestFields],
    ) -> PreparedRequest:
        """Turn a prompt into a request. Arguments and errors as of PromptProcessor.process_noted.

        Raises:
            DeadlineError: at the deadline.
        """
        work, owner, grammar = self._waiting.work, scope.cache_salt or None, None
        deadline = fields.get("deadline")
        if params.structured_outputs is not None:
            compiled = partial(self.client.compile_grammar, params, scope.cache_salt)
            grammar = await work(self.pools.grammars, compiled, owner, deadline)

        def made() -> PreparedRequest:
            taken = policy if fields.get("forced") else self.policy_taken(prompt, policy, scope.cache_salt)
            request, noted = self.processor.process_noted(prompt, params, taken, scope, **fields)
            state = self.outputs.begin(request, None if taken == policy else str(policy), noted)
            return PreparedRequest(self.client.prepare(request, grammar), state)

        return await work(self.pools.prompts, made, owner, deadline)

    def _listen(self, asked: PreparedRequest, interval: int | None = 1) -> Listening:
        """Submit a request.

        Args:
            interval: the number of new tokens between outputs, over all answers. None for the final output only.
        """
        listening = Listening(asked.state, self._waiting.mailbox(), interval)
        self.client.submit(asked.prepared, listening.tell)
        return listening

    def _give_up(self, *states: RequestState) -> None:
        """Cancel unfinished requests. Must not block, because the garbage collector may call it on any thread."""
        for state in states:
            if not state.answered:
                self.client.cancel(state.id)


class Listening:
    """Passes the outputs of one request from the engine's thread to its caller."""

    def __init__(
        self, state: RequestState, mailbox: Mailbox[RequestOutput | BaseException], interval: int | None
    ) -> None:
        self._state = state
        self._mailbox = mailbox
        self._interval = interval
        self._told = 0  # tokens in the outputs sent so far

    def tell(self, events: Sequence[TokenEvent]) -> None:
        """Process events on the engine's thread."""
        self._state.add(events)
        if self._is_due():
            self._mailbox.put(self._state.failure or self._state.output())

    def _is_due(self) -> bool:
        if self._state.answered or self._state.failure is not None:
            return True
        tokens = self._state.tokens
        if self._interval is None or (self._told and tokens - self._told < self._interval):
            return False
        self._told = tokens
        return True

    async def next(self) -> RequestOutput:
        """Wait for the next output. Raises the request's failure."""
        output = await self._mailbox.get()
        if isinstance(output, BaseException):
            raise output
        return output


def _policy(reuse: str | ReusePolicy) -> ReusePolicy:
    return reuse if isinstance(reuse, ReusePolicy) else ReusePolicy.parse(reuse)


#: Its names → ours. ``do_sample`` is left out: ``temperature=0`` asks for the most probable token.
_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(loaded: LoadedModel) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that the model's generation configuration sets. Raises ModelError."""
    generation = getattr(loaded.model, "generation_config", None)
    said = {ours: getattr(generation, name, None) for name, ours in _FIELDS.items()}
    defaults = {name: value for name, value in said.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except ParameterError as error:
        remedy = "correct that, or leave it out with generation_config='off'"
        raise ModelError(
            f"{loaded.name}: in its generation configuration {str(error).rstrip('.')}; {remedy}",
            code="model.invalid_generation_config",
        ) from None
    return defaults
