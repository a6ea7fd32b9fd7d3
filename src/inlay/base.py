"""What LLM and AsyncLLM are made of: a model, an engine with its client, and those who prepare prompts for it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inlay.client import InProcessClient
from inlay.config import EngineConfig
from inlay.engine.forward import StepObserver
from inlay.engine.request import Request
from inlay.engine.structured import Guide
from inlay.engine.workpool import WorkPools
from inlay.errors import ParameterError
from inlay.kv.identity import SegmentSpec
from inlay.models.generation import sampling_defaults
from inlay.models.load import LoadedModel, load_model
from inlay.pml import Prompt, PromptBuilder
from inlay.policy import ReusePolicy
from inlay.prompt.inputs import as_prompt, check_template
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.placement import PromptLayout
from inlay.prompt.processor import PromptProcessor
from inlay.prompt.splice import Cached, open_end, splice_parts
from inlay.prompt.tokens import TextEncoder
from inlay.schemas import SchemaManager
from inlay.types import EngineStats, SamplingParams


class Base:
    """A model with its schemas, its cache and its engine. Arguments: see LLM."""

    _own_thread = False  # see EngineThread

    def __init__(
        self,
        model: str | LoadedModel = "demo",
        *,
        dtype: str = "auto",
        seed: int | None = None,
        weights: str | None = None,
        quantization: str | None = None,
        chat_template: str | None = None,
        **settings: Any,
    ) -> None:
        self.config = _engine_config(settings)
        if chat_template is not None:
            check_template(chat_template)
        loaded = _loaded(model, dtype, seed or 0, weights, quantization)
        self.loaded = loaded = _changed(loaded, chat_template, self.config.max_model_len)
        #: What requests get that do not say otherwise: fields of SamplingParams.
        self.sampling_defaults = sampling_defaults(loaded) if self.config.generation_config == "auto" else {}
        self.tokenizer = loaded.tokenizer
        self.client = InProcessClient(loaded, self.config, own_thread=self._own_thread, seed=seed)
        self.store = self.client.store
        self.storage = self.client.storage
        self.processor = PromptProcessor(loaded.tokenizer, self.client.model, self.config.placeholders)
        self.policy()  # a default that the model cannot follow is an error now, not at the first request
        self.schemas = SchemaManager(self.processor, self.client)
        self._end = weakref.finalize(self, self.client.shutdown)
        self.pools = WorkPools(self.config.max_waiting)  # what an event loop must not wait for; threads when needed
        weakref.finalize(self, self.pools.close)

    @property
    def encoder(self) -> TextEncoder:
        """How runs of text become token ids."""
        return self.processor.encoder

    @property
    def model_name(self) -> str:
        return self.loaded.name

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self.loaded.spec.vocab_size

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that brings no ``sampling_params``: the model's own defaults."""
        return SamplingParams(**self.sampling_defaults)

    def policy(self, reuse: str | None = None, positions: str | None = None) -> ReusePolicy:
        """The policy that a request gets that asks for this; None for the engine's defaults. Raises ParameterError."""
        asked = ReusePolicy.parse(reuse or self.config.reuse, self.config.positions if positions is None else positions)
        return asked.settled(self.client.model.why_not_shift)

    def positions_for(self, reuse: str, positions: str | None = None) -> str:
        """The position policy that a request with this reuse gets. Raises ParameterError."""
        return str(self.policy(reuse, positions).positions)

    def schema(self, name: str, *, cache_salt: str | None = None) -> SchemaLayout | None:
        """The schema of that name as requests with this salt see it: their own, else the public one."""
        return self.processor.schema(name, cache_salt or "")

    def remove_schema(self, name: str, *, cache_salt: str | None = None) -> bool:
        """Forget a schema; returns whether there was one. Requests under way go on; its encoding ends.

        Its segments stay until the room is needed, as everything does.
        """
        return self.schemas.remove(name, cache_salt or "")

    def stats(self) -> EngineStats:
        """What the engine is doing, and how full its pool is. Cheap, from any thread."""
        return self.client.stats()

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Tell an observer of every step of the engine from now on, on the thread that takes it.

        Returns what ends that.
        """
        return self.client.observe(observer)

    def lay_out(
        self,
        prompt: Any,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
    ) -> PromptLayout:
        """A prompt as token ids and positions, without running it. Arguments as in ``LLM.generate``."""
        return self.processor.lay_out(prompt, self.policy(reuse, positions), check_salt(cache_salt))

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
        guide: Guide | None = None,
        **of_job: Any,
    ) -> Request:
        """A prompt as a request. guide: where it is known already. of_job: see PromptProcessor.process."""
        return self.client.prepare(self.processor.process(prompt, params, policy, salt=salt, **of_job), guide)

    def _segments_of(self, prompt: Prompt | PromptBuilder, policy: ReusePolicy, salt: str) -> list[SegmentSpec]:
        """The module segments that a prompt reads."""
        parts = self.processor.parts(self.processor.lay_out(as_prompt(prompt), policy, salt), policy, salt)
        return [part.spec for part in open_end(splice_parts(parts)) if isinstance(part, Cached)]


def check_salt(cache_salt: str | None) -> str:
    """Whose a request is; "" for nobody's. Raises ParameterError."""
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise ParameterError("cache_salt is empty or no text; give a text that others cannot guess, or None")
    return cache_salt or ""


def _engine_config(settings: dict[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    for name in settings:
        if name not in known:
            names = ", ".join(("weights", "quantization", "chat_template", *sorted(known)))
            raise ParameterError(f"LLM has no setting '{name}'; settings are model, dtype, seed, {names}")
    return EngineConfig(**settings)


def _changed(loaded: LoadedModel, chat_template: str | None, max_model_len: int | None) -> LoadedModel:
    """The model with another chat template, or a shorter context. Raises ParameterError."""
    if chat_template is not None:
        tokenizer = copy.copy(loaded.tokenizer)  # a model that is loaded already is its caller's
        tokenizer.chat_template = chat_template
        loaded = replace(loaded, tokenizer=tokenizer)
    longest = loaded.spec.max_positions
    if max_model_len is not None and max_model_len > longest:
        raise ParameterError(
            f"max_model_len is {max_model_len}, and the model has {longest} positions; give at most that"
        )
    if max_model_len is not None:
        loaded = replace(loaded, spec=replace(loaded.spec, max_positions=max_model_len))
    return loaded


def _loaded(
    model: str | LoadedModel, dtype: str, seed: int, weights: str | None, quantization: str | None
) -> LoadedModel:
    if isinstance(model, str):
        return load_model(model, dtype=dtype, seed=seed, weights=weights or "packed", quantization=quantization)
    for name, value in (("weights", weights), ("quantization", quantization)):
        if value is not None:
            raise ParameterError(f"{name} is for a model given by name; this one is loaded: give it to load_model")
    return model
