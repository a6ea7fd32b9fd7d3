"""What LLM and AsyncLLM have in common: an engine's client, and who makes requests for it and outputs of its news."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from inlay.attention.storage import KVStorage
from inlay.client import EngineClient, Prepared
from inlay.config import EngineConfig
from inlay.distribution import other_project
from inlay.engine.forward import StepObserver
from inlay.engine.pacing import Pacer
from inlay.engine.workpool import WorkPools
from inlay.errors import ParameterError
from inlay.in_process_client import InProcessClient
from inlay.kv.store import SegmentStore
from inlay.measured import AutoReuse
from inlay.models.generation import sampling_defaults
from inlay.models.load import GivenModel, adjusted, as_loaded
from inlay.models.lora import AdapterInfo, load_adapters
from inlay.output.processor import OutputProcessor, RequestState
from inlay.pml import Prompt, PromptBuilder, Schema
from inlay.policy import ReusePolicy, default_policy
from inlay.prompt.contexts import in_encoding_order
from inlay.prompt.inputs import check_salt, check_template, has_modules
from inlay.prompt.known_schemas import check_modules
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.placed import PromptLayout
from inlay.prompt.processor import PromptProcessor
from inlay.prompt.request import EncodeRequest
from inlay.prompt.tokens import TextEncoder
from inlay.sampling_params import SamplingParams
from inlay.schemas import SchemaManager
from inlay.tolerance import Measured
from inlay.types import DriftStats, EngineStats

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class Asked(NamedTuple):
    """A request that is ready to be queued, and the state that its events are added to."""

    prepared: Prepared
    state: RequestState


class Base:
    """A model with its schemas, its cache and its engine. Arguments: see LLM."""

    _own_thread = False  # see EngineThread

    def __init__(
        self,
        model: GivenModel = "demo",
        *,
        dtype: str = "auto",
        seed: int | None = None,
        weights: str | None = None,
        quantization: str | None = None,
        chat_template: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        **settings: Any,
    ) -> None:
        if wrong := other_project():
            logger.warning("%s", wrong)
        self.config = EngineConfig.of(settings)
        if chat_template is not None:
            check_template(chat_template)
        loaded = as_loaded(model, dtype, seed or 0, weights, quantization, tokenizer, self.config.device)
        self.loaded = loaded = adjusted(loaded, chat_template, self.config.max_model_len)
        defaults = sampling_defaults(loaded) if self.config.generation_config == "auto" else {}
        self._read_adapters = load_adapters(loaded.model, loaded.name, {} if adapters is None else adapters)
        known = {name: adapter.info for name, adapter in self._read_adapters.items()}
        client = self.connect(seed)
        self._read_adapters = {}  # the engine has their weights in a form of its own
        self._attach(loaded.name, loaded.tokenizer, defaults, client, known)

    def _attach(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        defaults: dict[str, Any],
        client: EngineClient,
        adapters: Mapping[str, AdapterInfo] = MappingProxyType({}),
    ) -> None:
        """Put together all that stands above a client, wherever its engine is; ``config`` is there."""
        self.model_name = name
        self.tokenizer = tokenizer
        #: What requests get that do not say otherwise: fields of SamplingParams.
        self.sampling_defaults = defaults
        #: What requests may name, without the weights.
        self.adapters = adapters
        #: The engine with its weights and its store: requests in, events out.
        self.client = client
        #: Prompts and the schemas that they name become requests.
        self.processor = PromptProcessor(
            tokenizer, client.model, self.config.placeholders, likely=self.config.prefetch == "likely"
        )
        #: Which policy ``auto`` is, by what has been measured on this model.
        self.auto = AutoReuse(name, client.model, self.config)
        self.policy()  # a default that the model cannot follow is an error now, not at the first request
        #: Events become outputs.
        self.outputs = OutputProcessor(tokenizer, client.finish)
        #: Schemas come and go, with their encodings.
        self.schemas = SchemaManager(self.processor, client)
        #: Tells what runs beside the engine how much of the time it may take.
        self.pacer = Pacer(lambda: client.busy)
        #: What an event loop must not wait for; threads when needed.
        self.pools = WorkPools(self.config.max_waiting, self.pacer)
        self._end = weakref.finalize(self, client.shutdown)
        weakref.finalize(self, self.pools.close)

    def connect(self, seed: int | None) -> EngineClient:
        """The engine that answers. seed: of requests that bring none; None draws one."""
        adapters = self._read_adapters
        return InProcessClient(self.loaded, self.config, own_thread=self._own_thread, seed=seed, adapters=adapters)

    @property
    def local(self) -> InProcessClient:
        """The client of an engine of this process. Raises ParameterError where it is elsewhere."""
        if not isinstance(self.client, InProcessClient):
            raise ParameterError("the engines are elsewhere, on replicas of a cluster; ask a server of one engine")
        return self.client

    @property
    def store(self) -> SegmentStore:
        return self.local.store

    @property
    def storage(self) -> KVStorage:
        return self.local.storage

    @property
    def encoder(self) -> TextEncoder:
        """How runs of text become token ids."""
        return self.processor.encoder

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self.client.model.vocab_size

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that brings no ``sampling_params``: the model's own defaults."""
        return SamplingParams(**self.sampling_defaults)

    def policy(
        self,
        reuse: str | None = None,
        positions: str | None = None,
        *,
        modules: bool = True,
        schema: Schema | None = None,
        adapter: str | None = None,
        new: bool = False,
    ) -> ReusePolicy:
        """The policy that a request gets that asks for this; None for the engine's defaults. Raises ParameterError.

        modules: whether the request has any, by which the default goes.
        schema: of its prompt, and adapter: the one that answers, by which ``auto`` goes. new: see AutoReuse.resolve.
        """
        model = self.client.model
        usual = default_policy(modules=modules, shared=model.why_unshared is None)
        written = reuse if reuse is not None else self.config.reuse or str(usual)
        asked = ReusePolicy.parse(written, self.config.positions if positions is None else positions)
        if asked.auto and not modules:
            asked = ReusePolicy.parse(str(default_policy(modules=False)), asked.positions)
        resolved = asked if model.why_unshared else self.auto.resolve(asked, schema, adapter, new=new)
        return resolved.settled(model.why_not_shift).check_shared(model.why_unshared)

    def policy_for(
        self,
        prompt: Any,
        reuse: str | None = None,
        positions: str | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> ReusePolicy:
        """The policy that this prompt gets, in whatever form it is; arguments and errors as of ``generate``."""
        schema = self._schema_of(prompt, check_salt(cache_salt))
        return self.policy(reuse, positions, modules=has_modules(prompt), schema=schema, adapter=adapter)

    def measured(
        self, prompt: Any, *, cache_salt: str | None = None, adapter: str | None = None
    ) -> tuple[Measured, ...]:
        """What ``inlay check`` has found of policies for prompts like this one; nothing where it was not run."""
        return self.auto.rows(self._schema_of(prompt, check_salt(cache_salt)), adapter)

    def _schema_of(self, prompt: Any, salt: str) -> Schema | None:
        """The schema that a prompt names, if there is one."""
        return self._known_schema(prompt.schema, salt) if isinstance(prompt, Prompt | PromptBuilder) else None

    def _known_schema(self, name: str, salt: str) -> Schema | None:
        layout = self.processor.schemas.layout(name, salt)
        return None if layout is None else layout.schema

    def _policy_of(self, schema: object, reuse: str | None, positions: str | None, adapter: str | None) -> ReusePolicy:
        """The policy that a schema that is being added is encoded for."""
        of = schema if isinstance(schema, Schema) else None
        return self.policy(reuse, positions, schema=of, adapter=adapter, new=True)

    def policy_taken(self, prompt: Any, policy: ReusePolicy, cache_salt: str | None = None) -> ReusePolicy:
        """The policy that this prompt is answered under where it asks for this one.

        It is a safer one where shadow sampling has found that answers of its schema, under this policy and with this
        salt, go too far from full prefill (docs/reuse.md).
        """
        if not (self.config.shadow and policy.modular):
            return policy
        salt = cache_salt or ""
        return self.client.policy_taken(policy, salt, *self.processor.schemas.schema_of(prompt, salt))

    def drift(self, *, cache_salt: str | None = None) -> tuple[DriftStats, ...]:
        """How far answers to requests with this salt were from full prefill, by schema and policy."""
        return self.client.drift(check_salt(cache_salt))

    def lift_fallback(self, schema: str | None = None, *, cache_salt: str | None = None) -> int:
        """Give requests with this salt what they ask for again, where they got a safer policy (``policy_taken``).

        schema: its name, "" for messages in parts; None for all. What was counted of their answers is forgotten.
        Returns how many policies had been replaced.
        """
        return self.client.lift_fallback(check_salt(cache_salt), schema)

    def positions_for(self, reuse: str, positions: str | None = None) -> str:
        """The position policy that a request with this reuse gets. Raises ParameterError."""
        return str(self.policy(reuse, positions).positions)

    def schema(self, name: str, *, cache_salt: str | None = None) -> SchemaLayout | None:
        """The schema of that name as requests with this salt see it: their own, else the public one."""
        return self.processor.schemas.layout(name, cache_salt or "")

    def remove_schema(self, name: str, *, cache_salt: str | None = None) -> bool:
        """Forget a schema; returns whether there was one. Requests under way go on; its encoding ends.

        Its segments stay until the room is needed, as everything does.
        """
        return self.schemas.remove(name, cache_salt or "")

    def segments_of(
        self,
        name: str,
        modules: Sequence[str],
        reuse: str | None,
        positions: str | None,
        salt: str,
        adapter: str | None,
        **of_job: Any,
    ) -> EncodeRequest:
        """What can be encoded of some modules of a schema, or of all, with what that is encoded behind.

        of_job: tenant and weight. Raises ParameterError.
        """
        policy = self.policy(reuse, positions, schema=self._known_schema(name, salt), adapter=adapter)
        by_module = self.processor.schemas.module_specs(name, policy, salt, adapter)
        if not by_module and self.client.model.why_unshared is not None:
            raise ParameterError(f"nothing is encoded ahead: {self.client.model.why_unshared}")
        if not by_module:
            raise ParameterError("a policy without modules encodes nothing ahead; give reuse='anchored' or 'isolated'")
        layout = self.processor.schemas.layout(name, salt)
        if layout is not None:
            check_modules(layout, modules)
        specs = [spec for module, found in by_module.items() if not modules or module in modules for spec in found]
        useful = in_encoding_order(specs) if modules else specs
        return self.processor.encoding(f"schema '{name}'", useful, salt, adapter=adapter, **of_job)

    def stats(self) -> EngineStats:
        """What the engine is doing, and how full its pool is. Cheap, from any thread."""
        return self.client.stats()

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Tell an observer of every step of the engine from now on, on the thread that takes it.

        Returns what ends that.
        """
        return self.local.observe(observer)

    def lay_out(
        self,
        prompt: Any,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
    ) -> PromptLayout:
        """A prompt as token ids and positions, without running it. Arguments as in ``LLM.generate``."""
        policy = self.policy_for(prompt, reuse, positions, cache_salt=cache_salt)
        return self.processor.lay_out(prompt, policy, check_salt(cache_salt))

    def shutdown(self) -> None:
        """End the engine's thread. Requests under way end with an error; later calls are refused."""
        self.pools.close()
        self._end()

    def _request(
        self,
        prompt: Any,
        params: SamplingParams,
        policy: ReusePolicy,
        salt: str = "",
        *,
        grammar: Any = None,
        **of_job: Any,
    ) -> Asked:
        """A prompt as a request. grammar: see EngineClient.prepare. of_job: see PromptProcessor.process."""
        taken = policy if of_job.get("forced") else self.policy_taken(prompt, policy, salt)
        request = self.processor.process(prompt, params, taken, salt=salt, **of_job)
        asked = None if taken == policy else str(policy)
        return Asked(self.client.prepare(request, grammar), self.outputs.begin(request, asked))
