"""LLM: a model with its schemas and cache, behind vLLM's offline API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from inlay.client.base import Mailbox, PreparedRequest, Progress, Stepping, finish
from inlay.client.engine import SteppedEngine
from inlay.client.options import (
    ChatRequestOptions,
    ModuleOptions,
    OwnerOptions,
    PromptOptions,
    RequestOptions,
    checked_options,
    scope_of,
)
from inlay.client.warm_plan import PlanCalls, PlanEntry, PlannedText
from inlay.errors import InlayError, ParameterError
from inlay.events import TokenEvent
from inlay.models.load import GivenModel
from inlay.output import RequestState
from inlay.pml import Schema
from inlay.policy import ReusePolicy
from inlay.prompt.inputs import Message, PromptInput, chat_prompts, check_ids, check_params, is_several
from inlay.prompt.layout import SchemaLayout
from inlay.sampling.params import SamplingParams
from inlay.types import CachedText, RequestOutput


class LLM(PlanCalls):
    """A language model that computes the attention states of every piece of text once.

    Args:
        model: a local directory, a hub name, ``random:<shape>``, ``demo``, a LoadedModel, or a transformers model.
        tokenizer: only for a transformers model.
        settings: see ModelSettings, for a model that is given by name, and EngineConfig. A LoadedModel keeps its
            dtype and the storage of its weights.

    Raises:
        ModelError, ParameterError, CapacityError: if the model cannot be loaded or served with these settings.
    """

    client: SteppedEngine

    def __init__(self, model: GivenModel = "demo", **settings: Any) -> None:
        super().__init__(model, **settings)
        self._waiting = Stepping(self.client.pump)
        self._numbers = count()  # of requests

    def promote(self) -> int:
        """Encode exactly, now, the combinations of modules that were requested repeatedly under ``modular``.

        ``AsyncLLM`` and the server do so in idle time, which ``LLM`` does not have. Returns the number of computed
        tokens.
        """
        before = self.stats().promoted_tokens
        self.local.promote()
        return self.stats().promoted_tokens - before

    def measure_divergence(self) -> int:
        """Compare the answers chosen by ``shadow`` with full prefill, now.

        ``AsyncLLM`` and the server do so in idle time. Returns the number of compared answers.
        """
        before = self._compared()
        self.local.measure_divergence()
        return self._compared() - before

    def _compared(self) -> int:
        shadow = self.stats().shadow
        return 0 if shadow is None else shadow.samples

    @checked_options(RequestOptions)
    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Answer one prompt or several, as one batch.

        Args:
            prompts: text, token ids, a Prompt (PML), ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, a list of
                chat messages, ``{"messages": messages, "tools": tools}`` with further arguments of ``chat``, or a list
                of any of these.
            sampling_params: for all prompts, or one for each. None for ``get_default_sampling_params()``.
            use_tqdm: if True, show a progress bar of finished prompts.
            adapter: the name of an adapter for all prompts, or one for each. None for the model alone.
            options: reuse and the other fields of a policy, positions, order, cache_salt and diagnostics, see
                RequestOptions.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            InlayError: for a wrong prompt, before any runs. If a request fails, after all have ended, with the other
                outputs in the error's ``outputs``.
        """
        asked = self._asked(prompts, sampling_params, adapter, **options)
        with tqdm(total=len(asked), disable=not use_tqdm, desc="prompts") as bar:
            for _ in self._run(asked):
                bar.update()
        return [state.output() for _, state in asked]

    @checked_options(RequestOptions)
    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding the output so far after every token. Arguments as in ``generate``."""
        (asked,) = self._asked([prompt], sampling_params, adapter, **options)
        return self._outputs(asked)

    @checked_options(ChatRequestOptions)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        adapter: str | Sequence[str | None] | None = None,
        **options: Unpack[ChatRequestOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of ``{"role": …, "content": …}``.

        Args:
            options: tools, chat_template_kwargs, documents, add_generation_prompt and continue_final_message, see
                TemplateOptions, and those of ``generate``.
            sampling_params, use_tqdm, adapter: as in ``generate``.

        Raises:
            ParameterError: for a variable that the template does not know.
        """
        prompts, others = chat_prompts(messages, options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, adapter=adapter, **others)

    @checked_options(PromptOptions)
    def distributions(
        self,
        prompts: Sequence[PromptInput],
        continuations: Sequence[Sequence[int]],
        *,
        adapter: str | Sequence[str | None] | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[Tensor]:
        """Return the model's distribution at every token of given continuations (teacher forcing through the engine).

        Nothing is sampled. The steps are those of ``generate`` with exactly these tokens as answer.

        Args:
            prompts: a list of prompts, each as in ``generate``.
            continuations: token ids for each prompt, at least one. End-of-sequence tokens have no special role.
            adapter, options: as in ``generate``.

        Returns:
            For each prompt, natural log-probabilities (tokens, vocabulary), fp32. Row i is for the token behind the
            prompt and i tokens of its continuation.

        Raises:
            InlayError: for a wrong argument, before any prompt runs.
        """
        if not is_several(prompts) or len(prompts) != len(continuations):
            raise ParameterError(
                "distributions takes a list of prompts and a list of continuations, one for each",
                code="parameter.wrong_count",
            )
        if not all(continuations):
            raise ParameterError("a continuation is empty; give at least one token id", code="prompt.empty")
        forced = [check_ids(ids, self.vocab_size, what="a continuation") for ids in continuations]
        params = [SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True) for ids in forced]
        asked = self._asked(prompts, params, adapter, forced, **options)
        for _ in self._run(asked):
            pass
        return [_as_tensor(state.answers[0].distributions) for _, state in asked]

    @checked_options(ModuleOptions)
    def add_schema(
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
        """Register a schema under its name, and encode its modules in packed passes.

        Args:
            encode: False leaves each segment to the first prompt that needs it.
            replace: if True, another schema of this name may be replaced; else it is a ParameterError.
            progress: called with the encoded and the total tokens of the schema.
            ttl: the lifetime of encoded segments since encoding or the last read, like "5m", "1h" or "inf". None for no
                limit. The schema itself stays.
            tolerance: of ``reuse="auto"``. Other fields of a request's policy are refused.
            options: reuse, positions, cache_salt and adapter, see ModuleOptions. ``cache_salt`` makes the schema
                private to requests with this salt. It hides a public one of the same name.

        Raises:
            PMLError, ParameterError, CapacityError: if the schema cannot be used or encoded.
            AbortedError: if the schema is removed or replaced during encoding.
        """
        return finish(
            self._add_schema(
                schema, encode=encode, replace=replace, ttl=ttl, progress=progress, tolerance=tolerance, **options
            )
        )

    @checked_options(ModuleOptions)
    def warm(self, prompt: Any, *, progress: Progress | None = None, **options: Unpack[ModuleOptions]) -> None:
        """Encode the modules that a prompt will read: those of its schema, or marked parts of messages."""
        finish(self._warm(prompt, progress, **options))

    @checked_options(ModuleOptions)
    def warm_plan(
        self,
        plan: Sequence[PlanEntry],
        budget: int | str,
        *,
        ttl: str | None = None,
        progress: Progress | None = None,
        **options: Unpack[ModuleOptions],
    ) -> list[PlannedText]:
        """Encode the modules and documents of a plan that save most seconds per byte. The choice is greedy.

        Args:
            plan: at most 10,000 entries. Their schemas must be known.
            budget: the most KV bytes to encode, as a number or like "2GiB". Stored segments cost nothing.
            ttl: as in ``add_schema``.
            progress: called with the encoded tokens and those to encode.
            options: see ModuleOptions. ``reuse`` reads modules.

        Returns:
            The outcome for each entry, in the order of the plan.

        Raises:
            ParameterError: for a wrong plan or budget, or a policy without modules. Nothing is encoded then.
            CapacityError: if an entry does not fit into the pool.
        """
        return finish(self._warm_plan(plan, budget, ttl, progress, **options))

    @checked_options(ModuleOptions)
    def score_cached(
        self,
        texts: Sequence[str] = (),
        *,
        hashes: Sequence[str] = (),
        messages: Sequence[Any] = (),
        alone: bool = False,
        **options: Unpack[ModuleOptions],
    ) -> list[CachedText]:
        """Return how much of each text a message with this marked part would find in the cache, in the order given.

        Only texts of ``cache_salt`` and public texts count. Nothing is computed or loaded.

        Args:
            texts: candidates, such as retrieved documents. At most 1,000, with 4,000,000 characters. Messages of more
                than 16,000 characters allow fewer.
            hashes: in place of texts, the sha256 of their UTF-8 bytes in hexadecimal digits. A text is known if a
                marked part or an earlier score of ``cache_salt`` had it. Else its score has the form "unknown".
            messages: the messages in front of them, usually the system message. Parts are stored behind it.
            alone: True if each text will be the only marked part of its message, which ``modular`` stores in another
                form. False for one of several.
            options: see ModuleOptions. ``reuse`` reads modules.

        Raises:
            ParameterError: for wrong or too many texts or hashes, or a policy without modules.
        """
        return finish(self._score_cached(texts, hashes, messages, alone=alone, **options))

    @checked_options(ModuleOptions)
    def pin(
        self,
        name: str,
        *,
        modules: Sequence[str] = (),
        max_bytes: int | str | None = None,
        **options: Unpack[ModuleOptions],
    ) -> int:
        """Pin a schema's segments in the pool, and encode missing ones.

        The pins end with the process, and when the schema is removed or replaced. A later pin of the same schema
        replaces an earlier one.

        Args:
            name: of the schema.
            modules: the paths of modules to pin. Empty for all, with the text outside modules.
            max_bytes: the most bytes of all pins under this salt, as a number or like "64MiB". None for no bound but
                ``pin_memory``, a share of the pool for all pins.
            options: reuse, positions, cache_salt and adapter, see ModuleOptions.

        Returns:
            The bytes of all pins under this salt, counted in whole chunks for every segment.

        Raises:
            ParameterError: for an unknown schema or module.
            PinError: if the budget is too small; earlier pins stay. If encoding fails, nothing of the schema stays
                pinned.
        """
        return finish(self._pin(name, modules, max_bytes, **options))

    def unpin(self, name: str, *, cache_salt: str | None = None) -> bool:
        """Remove the pin of a schema under this salt; returns False if there was none."""
        return finish(self._unpin(name, cache_salt=cache_salt))

    @checked_options(ModuleOptions)
    def evict(self, name: str, *, modules: Sequence[str] = (), **options: Unpack[ModuleOptions]) -> int:
        """Evict a schema's segments from the pool and the store, with the text stored behind them. The schema stays.

        Covers all policies, pinned modules, and earlier schemas of this name and owner: replaced ones, those with an
        earlier date, and files of earlier processes. A removed schema can be evicted by its name. With a
        ``cache_salt``, a public schema is never evicted. Segments in use go when their requests end. Arguments as in
        ``pin``.

        Returns:
            The number of evicted tokens.

        Raises:
            ParameterError: for an unknown schema of which nothing is stored, or an unknown module.
        """
        return finish(self._evict(name, modules, **options))

    @checked_options(ModuleOptions)
    def stored(self, name: str, **options: Unpack[ModuleOptions]) -> dict[str, tuple[int, int]]:
        """Return by module the number of its tokens and of its stored tokens. "" stands for text outside modules.

        Tokens in any tier count, in a shared one as far as this process knows it. Empty under a policy without modules.
        Raises ParameterError for an unknown schema.
        """
        return finish(self._stored(name, **options))

    def reset_prefix_cache(self) -> None:
        """Evict all stored segments that no request reads."""
        finish(self._waiting.result(self.client.forget()))

    @checked_options(OwnerOptions)
    def deviations(
        self,
        name: str,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        **owner: Unpack[OwnerOptions],
    ) -> dict[str, float]:
        """Return the deviation of each module of a schema behind other text; "" stands for text outside modules.

        The deviation is relative to the size of the tokens' values, as a mean over them: 0 for none. Modules without
        encoded segments are left out. Raises ParameterError.
        """
        scope = scope_of(**owner)
        modules = self.processor.schemas.module_specs(name, self._schema_policy(name, reuse, positions, scope), scope)
        self.local.finish_profiles()
        known = self.local.profiles(spec for specs in modules.values() for spec in specs).result()
        found = {module: [known[spec.key] for spec in specs if spec.key in known] for module, specs in modules.items()}
        return {
            module: float(np.concatenate(parts).astype(np.float32).mean()) for module, parts in found.items() if parts
        }

    def _asked(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        forced: Sequence[Sequence[int]] | None = None,
        *,
        diagnostics: bool = False,
        **options: Unpack[PromptOptions],
    ) -> list[PreparedRequest]:
        """Prepare all prompts, before any of them runs. Raises InlayError."""
        several = list(prompts) if is_several(prompts) else [prompts]
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        each = list(params) if isinstance(params, Sequence) else [params] * len(several)
        for one in each:
            check_params(one)
        adapters = [adapter] * len(several) if isinstance(adapter, str) or adapter is None else list(adapter)
        for what, given in (("sampling_params", each), ("adapters", adapters)):
            if len(given) != len(several):
                raise ParameterError(
                    f"there are {len(several)} prompts and {len(given)} {what}; give one for each",
                    code="parameter.wrong_count",
                )
        placed = self._placed(several, adapters, **options)
        taken = [self.policy_taken(prompt, policy, scope.cache_salt) for prompt, policy, scope in placed]
        if any(policy.profiled or policy.finds for policy in taken):
            self.local.finish_profiles()  # callers' threads have no idle time
        return [
            finish(
                self._ask(
                    prompt,
                    chosen,
                    policy,
                    scope,
                    request_id=str(next(self._numbers)),
                    forced=ids,
                    diagnostics=diagnostics,
                )
            )
            for (prompt, policy, scope), chosen, ids in zip(placed, each, forced or [()] * len(placed), strict=True)
        ]

    def _run(self, requests: Sequence[PreparedRequest]) -> Iterator[RequestState]:
        """Run requests, yielding each when it has ended. Raises the first failure."""
        ended: Mailbox[RequestState] = self._waiting.mailbox()
        states = [state for _, state in requests]
        try:
            for prepared, state in requests:
                self.client.submit(prepared, partial(_collect, state, ended))
            for _ in requests:
                yield finish(ended.get())
        finally:  # also if the caller stops iterating
            self._give_up(*states)
        failures = [state.failure for state in states]
        first = next((error for error in failures if error is not None), None)
        if isinstance(first, InlayError):
            pairs = zip(states, failures, strict=True)
            first.outputs = [None if error is not None else state.output() for state, error in pairs]
        if first is not None:
            raise first

    def _outputs(self, asked: PreparedRequest) -> Iterator[RequestOutput]:
        """Run a request, yielding its output after every token."""
        try:
            outputs, finished = self._listen(asked), False
            while not finished:
                output = finish(outputs.next())
                finished = output.finished
                yield output
        finally:
            self._give_up(asked.state)


def _collect(state: RequestState, ended: Mailbox[RequestState], events: Sequence[TokenEvent]) -> None:
    state.add(events)
    if state.answered:
        ended.put(state)


def _as_tensor(rows: Sequence[bytes]) -> Tensor:
    """Stack the rows of events to (tokens, vocabulary), fp32."""
    return torch.from_numpy(np.stack([np.frombuffer(row, "<f4") for row in rows]))
