"""What LLM and AsyncLLM share: a model with its schemas, its cache and its engine; prompts become requests here."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.attention.dispatch import get_backend
from inlay.cache.contexts import placeholder_id
from inlay.cache.pool import KVPool, LayerShape
from inlay.cache.segment import KeyMaker, SegmentSpec
from inlay.cache.splice import Cached
from inlay.cache.store import SegmentStore
from inlay.chat import ChatTemplate
from inlay.config import REUSE, EngineConfig, check_choice
from inlay.engine.engine import Engine
from inlay.engine.intake import Intake
from inlay.engine.probe import why_not_shift
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.engine.thread import EngineThread
from inlay.errors import ParameterError
from inlay.inputs import as_prompt, check_ids, check_messages, is_conversation, unwrap
from inlay.layout import SchemaLayout
from inlay.library import Library, Policy
from inlay.models.adapter import dtype_name
from inlay.models.load import LoadedModel, load_model
from inlay.placement import POSITIONS, PromptLayout, lay_out_ids
from inlay.pml import Prompt, PromptBuilder, Schema
from inlay.tokens import TextEncoder
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
        **settings: Any,
    ) -> None:
        self.config = _engine_config(settings)
        loaded = _loaded(model, dtype, seed or 0, weights, quantization)
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        shapes = [LayerShape(layer.kv_heads, layer.head_dim) for layer in loaded.spec.layers]
        pool = KVPool(shapes, loaded.model.dtype, self.config.kv_bytes(), self.config.chunk_size)
        runner = Runner(loaded, pool, get_backend(self.config.attention_backend))
        reason = why_not_shift(loaded.spec, runner, pool)
        self._library = _library(loaded, self.config, reason)
        self.store = SegmentStore(pool, self._library.keys)
        self._engine = Engine(
            self.store,
            runner,
            max_requests=self.config.max_num_seqs,
            max_tokens=self.config.max_num_batched_tokens,
            prefill_chunk=self.config.prefill_chunk,
            max_waiting=self.config.max_waiting,
            max_pass_s=self.config.max_pass_s,
        )
        self._policy()  # a default that the model cannot follow is an error now, not at the first request
        self._intake = Intake(loaded, secrets.randbits(64) if seed is None else seed)
        self._lock = threading.Lock()  # of what turns prompts into requests; the engine has a thread of its own
        self._thread = EngineThread(self._engine, own=self._own_thread)
        self._end = weakref.finalize(self, self._thread.stop)

    @property
    def encoder(self) -> TextEncoder:
        """How runs of text become token ids."""
        return self._library.encoder

    @property
    def model_name(self) -> str:
        return self.loaded.name

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self.loaded.spec.vocab_size

    def positions_for(self, reuse: str, positions: str | None = None) -> str:
        """The position policy that a request with this reuse gets. Raises ParameterError."""
        return self._policy(reuse, positions).positions

    def _policy(self, reuse: str | None = None, positions: str | None = None, cache_salt: str | None = None) -> Policy:
        reuse = check_choice("reuse", reuse or self.config.reuse, REUSE)
        if positions is not None:
            check_choice("positions", positions, POSITIONS)
        if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
            raise ParameterError("cache_salt is empty or no text; give a text that others cannot guess, or None")
        return self._library.policy(reuse, positions or self.config.positions, cache_salt or "")

    def schema(self, name: str, *, cache_salt: str | None = None) -> SchemaLayout | None:
        """The schema of that name as requests with this salt see it: their own, else the public one."""
        return self._library.layout(name, cache_salt or "")

    def remove_schema(self, name: str, *, cache_salt: str | None = None) -> bool:
        """Forget a schema; returns whether there was one. Requests under way go on.

        Its segments stay until the room is needed, as everything does.
        """
        with self._lock:
            return self._library.remove(name, cache_salt or "")

    def stats(self) -> EngineStats:
        """What the engine is doing, and how full its pool is. Cheap, from any thread."""
        return self._engine.stats()

    def lay_out(
        self,
        prompt: Any,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
    ) -> PromptLayout:
        """A prompt as token ids and positions, without running it. Arguments as in ``LLM.generate``."""
        policy = self._policy(reuse, positions, cache_salt)
        with self._lock:
            return self._place(prompt, policy)

    def shutdown(self) -> None:
        """End the engine's thread. Requests under way end with an error; later calls are refused."""
        self._end()

    def _schema(self, schema: Schema, policy: Policy) -> tuple[SchemaLayout, list[SegmentSpec]]:
        """Make a schema known; returns its layout and the segments that can be encoded beforehand."""
        if not isinstance(schema, Schema):
            raise ParameterError(f"add_schema takes an inlay.Schema, not {type(schema).__name__}")
        layout = self._library.lay_out(schema, policy.salt)  # a large one takes seconds, for which nobody else waits
        with self._lock:
            self._library.add(layout, policy.salt)
            return layout, self._library.all_specs(layout, policy)

    def _modules_of(self, name: str, policy: Policy) -> dict[str, list[SegmentSpec]]:
        """The segments of every module of a schema; "" for text outside modules."""
        with self._lock:
            layout = self._library.layout(name, policy.salt)
            if layout is None:
                raise ParameterError(f"schema '{name}' is not known; add it with add_schema first")
            return self._library.module_specs(layout, policy)

    def _segments_of(self, prompt: Prompt | PromptBuilder, policy: Policy) -> list[SegmentSpec]:
        """The module segments that a prompt reads."""
        with self._lock:
            splice = self._library.splice(self._library.place(as_prompt(prompt), policy), policy)
        return [part.spec for part in splice if isinstance(part, Cached)]

    def _request(
        self,
        prompt: Any,
        params: SamplingParams,
        policy: Policy,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Request:
        self._intake.prepare(params)  # nobody else waits for that
        with self._lock:
            layout = self._place(prompt, policy)
        content = self._library.content(layout, policy)
        wanted = [] if content is None else content.to_find()
        stored = self._thread.run(lambda: self._engine.stored(wanted)) if wanted else frozenset()
        with self._lock:
            splice = self._library.splice(layout, policy, content, stored)
            request = self._intake.request(layout, splice, params)
        for member in request.family:
            member.priority = priority
            member.deadline = None if timeout_s is None else time.perf_counter() + timeout_s
        return request

    def _place(self, prompt: Any, policy: Policy) -> PromptLayout:
        if isinstance(prompt, (Prompt, PromptBuilder)):
            return self._library.place(as_prompt(prompt), policy)
        if isinstance(prompt, Mapping):
            prompt = unwrap(prompt)
        if isinstance(prompt, str):
            return lay_out_ids(check_ids(self.tokenizer.encode(prompt), self.vocab_size), prompt)
        if is_conversation(prompt):
            check_messages(prompt)
            return self._library.chat(prompt, lambda text: self.tokenizer.encode(text, add_special_tokens=False))
        if isinstance(prompt, Sequence):
            return lay_out_ids(check_ids(prompt, self.vocab_size), "")
        raise ParameterError(
            f"a prompt is a {type(prompt).__name__}; give text, token ids, chat messages or an inlay.Prompt"
        )


def _engine_config(settings: dict[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    for name in settings:
        if name not in known:
            names = ", ".join(("weights", "quantization", *sorted(known)))
            raise ParameterError(f"LLM has no setting '{name}'; settings are model, dtype, seed, {names}")
    return EngineConfig(**settings)


def _loaded(
    model: str | LoadedModel, dtype: str, seed: int, weights: str | None, quantization: str | None
) -> LoadedModel:
    if isinstance(model, str):
        return load_model(model, dtype=dtype, seed=seed, weights=weights or "packed", quantization=quantization)
    for name, value in (("weights", weights), ("quantization", quantization)):
        if value is not None:
            raise ParameterError(f"{name} is for a model given by name; this one is loaded: give it to load_model")
    return model


def _library(loaded: LoadedModel, config: EngineConfig, reason: str | None) -> Library:
    keys = KeyMaker(
        fingerprint=loaded.fingerprint,
        kv_dtype=dtype_name(loaded.model.dtype),
        codec="none",
        salt=config.cache_salt.encode(),
        positioned=reason is not None,
    )
    tokenizer = loaded.tokenizer
    encoder = TextEncoder(tokenizer)
    placeholder = placeholder_id(config.placeholders, encoder.unk_id)
    return Library(encoder, ChatTemplate(tokenizer), keys, reason, placeholder)
