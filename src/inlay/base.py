"""What LLM and AsyncLLM share: a model with its schemas, its cache and its engine; prompts become requests here."""

from __future__ import annotations

import math
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from inlay.attention.registry import get_backend
from inlay.attention.storage import bytes_per_token
from inlay.config import REUSE, EngineConfig, check_choice
from inlay.engine.core import Engine
from inlay.engine.encoder import Encoding
from inlay.engine.intake import Intake
from inlay.engine.request import Request
from inlay.engine.runner import Runner, why_not_shift
from inlay.engine.structured import Guide
from inlay.engine.thread import EngineThread
from inlay.engine.workpool import WorkPools
from inlay.errors import AbortedError, InlayError, ModelError, ParameterError
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.kv.pool import KVPool
from inlay.kv.store import SegmentStore
from inlay.models.generation import sampling_defaults
from inlay.models.load import LoadedModel, load_model
from inlay.models.spec import dtype_name
from inlay.pml import Prompt, PromptBuilder, Schema
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.contexts import placeholder_id
from inlay.prompt.inputs import as_prompt, check_ids, check_messages, is_conversation, unwrap
from inlay.prompt.layout import SchemaLayout
from inlay.prompt.placement import POSITIONS, PromptLayout, lay_out_ids
from inlay.prompt.processor import Library, Policy, check_lengths
from inlay.prompt.splice import Cached
from inlay.prompt.tokens import TextEncoder, beyond_vocabulary
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
        #: What requests get that do not say otherwise: fields of SamplingParams.
        self.sampling_defaults = sampling_defaults(loaded) if self.config.generation_config == "auto" else {}
        self.tokenizer = loaded.tokenizer
        size = bytes_per_token(loaded.spec.shapes, loaded.model.dtype)
        backend = get_backend(self.config.attention_backend)
        pool = KVPool(self.config.kv_bytes(backend.scratch_bytes), size, self.config.chunk_size)
        runner = Runner(loaded, backend, pool.slots)
        self.storage = runner.storage
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
        self._thread = EngineThread(self._engine, own=self._own_thread)
        self._lock = threading.Lock()  # of which schemas are known, and which of them are being encoded
        self._encodings: dict[Encoding, tuple[SchemaLayout, str]] = {}  # of which schema, and whose that is
        self._end = weakref.finalize(self, self._thread.stop)
        self.pools = WorkPools(self.config.max_waiting)  # what an event loop must not wait for; threads when needed
        weakref.finalize(self, self.pools.close)

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

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that brings no ``sampling_params``: the model's own defaults."""
        return SamplingParams(**self.sampling_defaults)

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
        """Forget a schema; returns whether there was one. Requests under way go on; its encoding ends.

        Its segments stay until the room is needed, as everything does.
        """
        with self._lock:
            known = self._library.remove(name, cache_salt or "")
            self._end_encodings()
        return known

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
        return self._place(prompt, self._policy(reuse, positions, cache_salt))

    def shutdown(self) -> None:
        """End the engine's thread. Requests under way end with an error; later calls are refused."""
        self.pools.close()
        self._end()

    def _schema(self, schema: Schema, policy: Policy) -> tuple[SchemaLayout, list[SegmentSpec]]:
        """Make a schema known; returns its layout and the segments that can be encoded beforehand."""
        if not isinstance(schema, Schema):
            raise ParameterError(f"add_schema takes an inlay.Schema, not {type(schema).__name__}")
        layout = self._library.lay_out(schema, policy.salt)
        check_lengths(layout, self.loaded.spec.max_positions)
        with self._lock:
            self._library.add(layout, policy.salt)
            self._end_encodings()
        return layout, self._library.all_specs(layout, policy)

    def _encoding(
        self, layout: SchemaLayout, specs: Sequence[SegmentSpec], policy: Policy, tenant: str, weight: float
    ) -> Encoding:
        """The encoding of a schema, which ends when that is removed or replaced. Raises AbortedError if it was."""
        name, longest = layout.schema.name, self.loaded.spec.max_positions
        moves = self._library.why_not_shift is None
        useful = tuple(spec for spec in specs if moves or spec.end <= longest)  # no prompt reads what lies further on
        encoding = Encoding(f"schema '{name}'", useful, tenant=tenant, weight=check_weight(weight))
        with self._lock:
            if not self._knows(layout, policy.salt):
                raise removed(encoding)
            self._encodings[encoding] = layout, policy.salt
        return encoding

    def _end_encodings(self) -> None:
        """Give up the encodings of schemas that are not known any more."""
        for encoding, (layout, salt) in list(self._encodings.items()):
            if not self._knows(layout, salt):
                with suppress(InlayError):  # the engine may have been shut down meanwhile
                    self._thread.abort(encoding)

    def _knows(self, layout: SchemaLayout, salt: str) -> bool:
        """Whether a name still means this schema, laid out now or, by somebody who added it too, at the same time."""
        known = self._library.layout(layout.schema.name, salt)
        return known is not None and known.schema is layout.schema

    def _modules_of(self, name: str, policy: Policy) -> dict[str, list[SegmentSpec]]:
        """The segments of every module of a schema; "" for text outside modules."""
        layout = self._library.layout(name, policy.salt)
        if layout is None:
            raise ParameterError(f"schema '{name}' is not known; add it with add_schema first")
        return self._library.module_specs(layout, policy)

    def _segments_of(self, prompt: Prompt | PromptBuilder, policy: Policy) -> list[SegmentSpec]:
        """The module segments that a prompt reads."""
        splice = self._library.splice(self._library.place(as_prompt(prompt), policy), policy)
        return [part.spec for part in splice if isinstance(part, Cached)]

    def _request(
        self,
        prompt: Any,
        params: SamplingParams,
        policy: Policy,
        *,
        priority: int = 0,
        deadline: float | None = None,
        guide: Guide | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> Request:
        """A prompt as a request.

        deadline: on the clock of ``time.perf_counter``. guide: of ``_guide``, where it is known already.
        """
        check_weight(weight)
        guide = guide or self._guide(params, policy)
        layout = self._place(prompt, policy)
        content = self._library.content(layout, policy)
        wanted = [] if content is None else content.to_find()
        stored = self._thread.run(lambda: self._engine.stored(wanted)) if wanted else frozenset()
        splice = self._library.splice(layout, policy, content, stored)
        request = self._intake.request(layout, splice, params, guide)
        for member in request.family:
            member.priority, member.tenant, member.weight = priority, tenant, weight
            member.deadline = deadline
        return request

    def _guide(self, params: SamplingParams, policy: Policy) -> Guide | None:
        """What an answer has to follow, which may take long: a grammar is compiled. Raises ParameterError."""
        return self._intake.guide(params, policy.salt)

    def _place(self, prompt: Any, policy: Policy) -> PromptLayout:
        if isinstance(prompt, (Prompt, PromptBuilder)):
            return self._library.place(as_prompt(prompt), policy)
        if isinstance(prompt, Mapping):
            prompt = unwrap(prompt)
        if isinstance(prompt, str):
            self.encoder.bound.check([prompt])
            return lay_out_ids(self.tokenizer.encode(prompt), prompt)
        if is_conversation(prompt):
            check_messages(prompt)
            return self._library.chat(prompt, lambda text: self.tokenizer.encode(text, add_special_tokens=False))
        if isinstance(prompt, Sequence):
            return lay_out_ids(check_ids(prompt, self.vocab_size), "")
        raise ParameterError(
            f"a prompt is a {type(prompt).__name__}; give text, token ids, chat messages or an inlay.Prompt"
        )


def check_weight(weight: float) -> float:
    """Raises ParameterError."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ParameterError(f"weight is {weight!r:.100}; it must be a number above 0")
    return weight


def removed(encoding: Encoding) -> AbortedError:
    """What ends the encoding of a schema that is not known any more."""
    return AbortedError(f"{encoding.id} was removed or replaced while it was encoded; what is encoded stays")


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
    encoder = TextEncoder(tokenizer, loaded.spec.max_positions)
    vocabulary = loaded.spec.vocab_size
    placeholder = placeholder_id(config.placeholders, encoder.unk_id)
    if unknown := beyond_vocabulary(() if placeholder is None else (placeholder,), vocabulary, encoder.name):
        raise ModelError(f"placeholders='unk' fills holes with {unknown}")
    return Library(encoder, ChatTemplate(tokenizer), keys, reason, placeholder, vocabulary)
