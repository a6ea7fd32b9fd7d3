"""The common base of LLM and AsyncLLM: an engine's client, the prompt processor and the output processor."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from inlay.attention.storage import KVStorage
from inlay.client.engine_client import EngineClient, Prepared
from inlay.client.local import InProcessClient
from inlay.client.schemas import SchemaManager
from inlay.config import EngineConfig
from inlay.distribution import other_project
from inlay.engine.background.pacing import Pacer
from inlay.engine.forward import StepObserver
from inlay.engine.workpool import WorkPools
from inlay.errors import ParameterError
from inlay.kv.store import SegmentStore
from inlay.measured import AutoReuse
from inlay.models.generation import sampling_defaults
from inlay.models.load import GivenModel, adjusted, as_loaded
from inlay.models.lora import AdapterInfo, load_adapters
from inlay.output.processor import OutputProcessor, RequestState
from inlay.pml import Prompt, PromptBuilder, Schema
from inlay.policy import ReusePolicy, check_positions, default_policy
from inlay.prompt.contexts import in_encoding_order
from inlay.prompt.inputs import check_salt, check_template, has_modules
from inlay.prompt.known_schemas import check_modules
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.placed import PromptLayout
from inlay.prompt.processor import PromptProcessor
from inlay.prompt.request import EncodeRequest
from inlay.prompt.tokens import TextEncoder
from inlay.sampling.params import SamplingParams
from inlay.tolerance import Measured
from inlay.types import DivergenceStats, EngineStats

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class Asked(NamedTuple):
    """A request that is ready to be queued, and the state that collects its events."""

    prepared: Prepared
    state: RequestState


class Base:
    """A model with its schemas, its cache and its engine. For arguments see LLM."""

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
        self._read_adapters = {}  # the engine holds their weights in another form
        self._attach(loaded.name, loaded.tokenizer, defaults, client, known)

    def _attach(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        defaults: dict[str, Any],
        client: EngineClient,
        adapters: Mapping[str, AdapterInfo] = MappingProxyType({}),
    ) -> None:
        """Build the parts above a client. ``config`` must be set."""
        self.model_name = name
        self.tokenizer = tokenizer
        #: The model's defaults of SamplingParams fields.
        self.sampling_defaults = defaults
        #: Adapters that requests may name, without their weights.
        self.adapters = adapters
        #: The engine with its weights and store: requests in, events out.
        self.client = client
        #: Turns prompts into requests.
        self.processor = PromptProcessor(
            tokenizer, client.model, self.config.placeholders, likely=self.config.prefetch == "likely"
        )
        #: Resolves ``auto`` by the measurements of this model.
        self.auto = AutoReuse(name, client.model, self.config)
        self.policy()  # fail now if the model does not support the default
        #: Turns events into outputs.
        self.outputs = OutputProcessor(tokenizer, client.finish)
        #: Adds and removes schemas with their encodings.
        self.schemas = SchemaManager(self.processor, client)
        #: Limits the CPU time of work beside the engine.
        self.pacer = Pacer(lambda: client.busy)
        #: Runs blocking work off the event loop, on threads started when needed.
        self.pools = WorkPools(self.config.max_waiting, self.pacer)
        self._end = weakref.finalize(self, client.shutdown)
        weakref.finalize(self, self.pools.close)

    def connect(self, seed: int | None) -> EngineClient:
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
        usual = default_policy(modules=modules, highest=model.highest)
        asked = (self.config.policy or usual) if reuse is None else _policy(reuse)
        placed = check_positions(positions) or asked.positions or check_positions(self.config.positions)
        asked = replace(default_policy(modules=False) if asked.auto and not modules else asked, positions=placed)
        resolved = asked if model.why_unshared else self.auto.resolve(asked, schema, adapter, new=new)
        return resolved.settled(model.why_not_shift).check_allowed(model.highest, model.why_limited)

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
        schema = self._schema_of(prompt, check_salt(cache_salt))
        return self.policy(reuse, positions, modules=has_modules(prompt), schema=schema, adapter=adapter)

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
        """Return the policy that this prompt is answered under if it requests this one.

        It is a safer policy if shadow sampling found too large a divergence for the schema, policy and salt
        (docs/reuse.md).
        """
        if not (self.config.shadow and policy.modular):
            return policy
        salt = cache_salt or ""
        return self.client.policy_taken(policy, salt, *self.processor.schemas.schema_of(prompt, salt))

    def divergence(self, *, cache_salt: str | None = None) -> tuple[DivergenceStats, ...]:
        """Return the divergence from full prefill of this salt's answers, by schema and policy."""
        return self.client.divergence(check_salt(cache_salt))

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
        return self.client.lift_fallback(check_salt(cache_salt), schema)

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
        salt: str,
        adapter: str | None,
        **of_job: Any,
    ) -> EncodeRequest:
        """Return the encoding of a schema's modules, or of all, with their contexts.

        ``of_job`` holds tenant and weight. Raises ParameterError.
        """
        policy = self.policy(reuse, positions, schema=self._known_schema(name, salt), adapter=adapter)
        by_module = self.processor.schemas.module_specs(name, policy, salt, adapter)
        if not by_module and self.client.model.why_limited is not None:
            raise ParameterError(
                f"nothing is encoded ahead: {self.client.model.why_limited}", code="cache.nothing_encoded"
            )
        if not by_module:
            raise ParameterError(
                "a policy without modules encodes nothing ahead; give reuse='anchored' or 'isolated'",
                code="cache.nothing_encoded",
            )
        layout = self.processor.schemas.layout(name, salt)
        if layout is not None:
            check_modules(layout, modules)
        specs = [spec for module, found in by_module.items() if not modules or module in modules for spec in found]
        useful = in_encoding_order(specs) if modules else specs
        return self.processor.encoding(f"schema '{name}'", useful, salt, adapter=adapter, **of_job)

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
        """Turn a prompt into a request.

        Args:
            grammar: see EngineClient.prepare.
            of_job: see PromptProcessor.process.
        """
        taken = policy if of_job.get("forced") else self.policy_taken(prompt, policy, salt)
        request = self.processor.process(prompt, params, taken, salt=salt, **of_job)
        asked = None if taken == policy else str(policy)
        return Asked(self.client.prepare(request, grammar), self.outputs.begin(request, asked))


def _policy(reuse: str | ReusePolicy) -> ReusePolicy:
    return reuse if isinstance(reuse, ReusePolicy) else ReusePolicy.parse(reuse)
