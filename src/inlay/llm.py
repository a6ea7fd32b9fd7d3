"""LLM: a model, its schemas and its cache behind the calls that vLLM users know."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from inlay.attention.dispatch import get_backend
from inlay.cache.contexts import placeholder_id
from inlay.cache.pool import KVPool, LayerShape
from inlay.cache.segment import KeyMaker
from inlay.cache.splice import Cached
from inlay.cache.store import SegmentStore
from inlay.chat import ChatTemplate
from inlay.config import REUSE, EngineConfig, check_choice
from inlay.engine.encoder import Progress
from inlay.engine.engine import Engine
from inlay.engine.intake import Intake
from inlay.engine.probe import why_not_shift
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.errors import ParameterError
from inlay.inputs import (
    Message,
    PromptInput,
    as_prompt,
    check_ids,
    check_messages,
    is_conversation,
    is_several,
    unwrap,
)
from inlay.layout import SchemaLayout
from inlay.library import Library, Policy
from inlay.models.adapter import dtype_name
from inlay.models.load import LoadedModel, load_model
from inlay.placement import POSITIONS, PromptLayout, lay_out_ids
from inlay.pml import Prompt, PromptBuilder, Schema
from inlay.tokens import TextEncoder
from inlay.types import RequestOutput, SamplingParams


class LLM:
    """A language model that computes the attention states of every piece of text once.

    model: a local directory, a hub name, ``random:<shape>``, ``demo``, or a LoadedModel.
    dtype: "auto", "float32" or "bfloat16".
    seed: of random weights, and of requests that bring no seed of their own; None draws the latter afresh.
    weights, quantization: how a model that is given by name keeps its weights, as in ``load_model``; None for its
        defaults, packed and not quantized. A LoadedModel is used as it is.
    Further settings: see EngineConfig. Raises ModelError, ParameterError, CapacityError.
    """

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
        self.store = SegmentStore(pool)
        self._engine = Engine(
            self.store,
            runner,
            max_requests=self.config.max_num_seqs,
            max_tokens=self.config.max_num_batched_tokens,
        )
        self._library = _library(loaded, self.config, why_not_shift(loaded.spec, runner, pool))
        self._policy()  # a default that the model cannot follow is an error now, not at the first request
        self._intake = Intake(loaded, secrets.randbits(64) if seed is None else seed)

    @property
    def encoder(self) -> TextEncoder:
        """How runs of text become token ids."""
        return self._library.encoder

    @property
    def model_name(self) -> str:
        return self.loaded.name

    def add_schema(
        self,
        schema: Schema,
        *,
        encode: bool = True,
        reuse: str | None = None,
        positions: str | None = None,
        progress: Progress | None = None,
    ) -> SchemaLayout:
        """Make a schema known under its name, and encode its modules, packed, so that prompts find them.

        encode: False leaves each segment to the first prompt that needs it.
        reuse, positions: the policy to encode for; None for the engine's defaults.
        progress: called with the number of tokens encoded and to encode.
        Raises PMLError, ParameterError, CapacityError.
        """
        if not isinstance(schema, Schema):
            raise ParameterError(f"add_schema takes an inlay.Schema, not {type(schema).__name__}")
        policy = self._policy(reuse, positions)
        layout = self._library.add(schema)
        if encode:
            self._engine.encode(self._library.all_specs(layout, policy), progress)
        return layout

    def warm(
        self,
        prompt: Prompt | PromptBuilder,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Encode the segments that a prompt will read, and no others."""
        policy = self._policy(reuse, positions)
        splice = self._library.splice(self._library.place(as_prompt(prompt), policy), policy)
        self._engine.encode([part.spec for part in splice if isinstance(part, Cached)], progress)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        reuse: str | None = None,
        positions: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, as one batch.

        prompts: text, token ids, a Prompt (PML), ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, a list of chat
            messages, or a list of any of these.
        sampling_params: for all prompts, or one for each; None for the defaults.
        use_tqdm: whether to show a progress bar of finished prompts.
        reuse, positions: the policy of these requests; None for the engine's defaults.
        Returns outputs in the order of the prompts. Raises InlayError, before anything runs, for a wrong prompt.
        """
        requests = self._requests_of(prompts, sampling_params, self._policy(reuse, positions))
        with tqdm(total=len(requests), disable=not use_tqdm, desc="prompts") as bar:
            for request in self._run(requests):
                bar.update(request.answered)
        return [request.output() for request in requests]

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        reuse: str | None = None,
        positions: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding what there is so far after every token. Arguments as in ``generate``."""
        requests = self._requests_of([prompt], sampling_params, self._policy(reuse, positions))
        return (request.output() for request in self._run(requests))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of ``{"role": …, "content": …}``."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate(list(conversations), sampling_params, use_tqdm=use_tqdm)  # type: ignore[arg-type]

    def distributions(
        self,
        prompts: Sequence[PromptInput],
        continuations: Sequence[Sequence[int]],
        *,
        reuse: str | None = None,
        positions: str | None = None,
    ) -> list[Tensor]:
        """What the model expects at every token of given continuations: teacher forcing, through the engine.

        Nothing is sampled: the steps are those of ``generate`` in the case that it said just these tokens.

        prompts: a list of prompts, each as in ``generate``.
        continuations: token ids for each prompt, at least one; end-of-sequence tokens are tokens like others.
        reuse, positions: the policy of these requests; None for the engine's defaults.
        Returns natural log-probabilities (tokens, vocabulary), fp32, for each prompt: row i is of the token behind
        the prompt and i tokens of its continuation. Raises InlayError, before anything runs, for a wrong argument.
        """
        if not is_several(prompts) or len(prompts) != len(continuations):
            raise ParameterError("distributions takes a list of prompts and a list of continuations, one for each")
        if not all(continuations):
            raise ParameterError("a continuation is empty; give at least one token id")
        forced = [check_ids(ids, self.vocab_size, what="a continuation") for ids in continuations]
        params = [SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True) for ids in forced]
        requests = self._requests_of(prompts, params, self._policy(reuse, positions))
        for request, ids in zip(requests, forced, strict=True):
            request.force(ids)
        for _ in self._run(requests):
            pass
        return [torch.stack(request.distributions) for request in requests]

    def positions_for(self, reuse: str, positions: str | None = None) -> str:
        """The position policy that a request with this reuse gets. Raises ParameterError."""
        return self._policy(reuse, positions).positions

    def _policy(self, reuse: str | None = None, positions: str | None = None) -> Policy:
        reuse = check_choice("reuse", reuse or self.config.reuse, REUSE)
        if positions is not None:
            check_choice("positions", positions, POSITIONS)
        return self._library.policy(reuse, positions or self.config.positions)

    def _requests_of(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None, policy: Policy
    ) -> list[Request]:
        several = list(prompts) if is_several(prompts) else [prompts]
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(several) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(several):
            raise ParameterError(f"there are {len(several)} prompts and {len(each)} sampling_params; give one for each")
        return [self._request(prompt, p, policy) for prompt, p in zip(several, each, strict=True)]

    def _request(self, prompt: Any, params: SamplingParams, policy: Policy) -> Request:
        layout = self._place(prompt, policy)
        return self._intake.request(layout, self._library.splice(layout, policy), params)

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

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self.loaded.spec.vocab_size

    def _run(self, requests: list[Request]) -> Iterator[Request]:
        """Run requests to their end; yields each whenever it has new tokens.

        Other calls on this engine may be under way, half listened to: their steps carry these requests on, and these
        steps theirs.
        """
        told = dict.fromkeys(requests, 0)
        for request in requests:
            self._engine.add(request)
        try:
            while not all(request.answered for request in requests):
                self._engine.step()
                for request in requests:
                    if request.said > told[request]:
                        told[request] = request.said
                        yield request
            for request in requests:
                for member in request.family:
                    if member.error is not None:
                        raise member.error
                if request.said > told[request]:
                    yield request
        finally:  # also when the caller stops listening, or a step fails
            for request in requests:
                for member in request.family:
                    if not member.finished:
                        self._engine.release(member)


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
    special = frozenset(token.content for token in tokenizer.added_tokens_decoder.values())
    return Library(encoder, ChatTemplate(tokenizer), keys, reason, placeholder, special)
