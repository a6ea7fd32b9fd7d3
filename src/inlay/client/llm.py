"""LLM: a model with its schemas and cache, behind vLLM's offline API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from inlay.client.base import Asked
from inlay.client.llm_schemas import SchemaCalls
from inlay.errors import InlayError, ParameterError
from inlay.events import TokenEvent
from inlay.models.load import GivenModel
from inlay.output.processor import RequestState
from inlay.policy import PolicyFields, ReusePolicy
from inlay.prompt.inputs import (
    Message,
    PromptInput,
    as_conversations,
    check_ids,
    check_order,
    check_params,
    check_salt,
    in_any_order,
    is_several,
)
from inlay.sampling.params import SamplingParams
from inlay.types import RequestOutput


class LLM(SchemaCalls):
    """A language model that computes the attention states of every piece of text once.

    Args:
        model: a local directory, a hub name, ``random:<shape>``, ``demo``, a LoadedModel, or a transformers model.
        tokenizer: only for a transformers model.
        dtype: "auto", "float32" or "bfloat16".
        seed: of random weights, and of requests without a seed. None draws the latter at random.
        weights, quantization: the storage of a named model's weights, as in ``load_model``. None for the defaults,
            packed and not quantized. A LoadedModel is not changed.
        chat_template: a Jinja template. None for the model's own.
        adapters: name → folder of a LoRA adapter in PEFT's format (docs/guides/adapters.md).
        settings: see EngineConfig.

    Raises:
        ModelError, ParameterError, CapacityError: if the model cannot be loaded or served with these settings.
    """

    def __init__(self, model: GivenModel = "demo", **settings: Any) -> None:
        super().__init__(model, **settings)
        self._numbers = count()  # of requests

    def promote(self) -> int:
        """Promote now: encode combinations of modules exactly that were requested again under ``modular``.

        An engine with its own thread does so in idle time, which this one does not have. Returns the number of tokens
        computed.
        """
        before = self.stats().promoted_tokens
        self.client.promote()
        return self.stats().promoted_tokens - before

    def measure_divergence(self) -> int:
        """Compare the answers chosen by ``shadow`` with full prefill now.

        An engine with its own thread does so in idle time. Returns the number of answers compared.
        """
        before = self._compared()
        self.client.measure_divergence()
        return self._compared() - before

    def _compared(self) -> int:
        shadow = self.stats().shadow
        return 0 if shadow is None else shadow.samples

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        reuse: str | ReusePolicy | None = None,
        recompute: str | None = None,
        promote: bool | None = None,
        across_adapters: bool | None = None,
        tolerance: float | str | None = None,
        positions: str | None = None,
        order: str | None = None,
        cache_salt: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, as one batch.

        Args:
            prompts: text, token ids, a Prompt (PML), ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, a list of
                chat
                messages, ``{"messages": messages, "tools": tools}`` with further arguments of ``chat``, or a list of
                any of
                these.
            sampling_params: for all prompts, or one for each. None for ``get_default_sampling_params()``.
            use_tqdm: if True, show a progress bar of finished prompts.
            reuse, recompute, promote, across_adapters, tolerance, positions: the policy of these requests, see
                docs/reference/policies.md. None for the engine's defaults.
            order: "any" if neighbouring imports, and neighbouring marked parts of messages, may change places, as in a
                ``<set>``. None keeps the written order. ``RequestOutput.order`` has the chosen one.
            cache_salt: shares the requests' cached text only with requests of the same salt. None shares it with all.
            adapter: the name of an adapter for all prompts, or one for each. None for the model alone.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            InlayError: for a wrong prompt, before any runs. If a request fails, after all have ended, with the other
                outputs
                in the error's ``outputs``.
        """
        policy = PolicyFields(reuse, recompute, promote, across_adapters, tolerance).policy()
        if check_order(order):
            prompts = [
                in_any_order(one) for one in (cast(Sequence[Any], prompts) if is_several(prompts) else [prompts])
            ]
        asked = self._asked(prompts, sampling_params, policy, positions, check_salt(cache_salt), adapter=adapter)
        with tqdm(total=len(asked), disable=not use_tqdm, desc="prompts") as bar:
            for _ in self._run(asked):
                bar.update()
        return [state.output() for _, state in asked]

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        reuse: str | ReusePolicy | None = None,
        recompute: str | None = None,
        promote: bool | None = None,
        across_adapters: bool | None = None,
        tolerance: float | str | None = None,
        positions: str | None = None,
        order: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding the output so far after every token. Arguments as in ``generate``."""
        policy = PolicyFields(reuse, recompute, promote, across_adapters, tolerance).policy()
        prompt = in_any_order(prompt) if check_order(order) else prompt
        (asked,) = self._asked([prompt], sampling_params, policy, positions, check_salt(cache_salt), adapter=adapter)
        return self._listen(asked)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of ``{"role": …, "content": …}``.

        Args:
            tools: the tools that the model may call.
            chat_template_kwargs: values for variables of the chat template, such as ``{"enable_thinking": False}``.
            documents: for templates that support them.
            add_generation_prompt: True if the prompt opens an answer. None for True unless the last message is
                continued.
            continue_final_message: True if the answer continues the last message, an assistant's.
            sampling_params, use_tqdm, adapter: as in ``generate``.

        Raises:
            ParameterError: for a variable that the template does not know.
        """
        conversations = as_conversations(messages)
        asked = {
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message or None,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        prompts = [{"messages": one, **given} for one in conversations] if given else conversations
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, adapter=adapter)

    def distributions(
        self,
        prompts: Sequence[PromptInput],
        continuations: Sequence[Sequence[int]],
        *,
        reuse: str | ReusePolicy | None = None,
        recompute: str | None = None,
        promote: bool | None = None,
        across_adapters: bool | None = None,
        tolerance: float | str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Tensor]:
        """Return the model's distribution at every token of given continuations (teacher forcing through the engine).

        Nothing is sampled. The steps are those of ``generate`` with exactly these tokens as answer.

        Args:
            prompts: a list of prompts, each as in ``generate``.
            continuations: token ids for each prompt, at least one. End-of-sequence tokens have no special role.
            reuse, recompute, promote, across_adapters, tolerance, positions: the policy of these requests, see
                docs/reference/policies.md. None for the engine's defaults.
            cache_salt, adapter: as in ``generate``.

        Returns:
            For each prompt, natural log-probabilities (tokens, vocabulary), fp32. Row i is for the token behind the
            prompt
            and i tokens of its continuation.

        Raises:
            InlayError: for a wrong argument, before any prompt runs.
        """
        policy = PolicyFields(reuse, recompute, promote, across_adapters, tolerance).policy()
        if not is_several(prompts) or len(prompts) != len(continuations):
            raise ParameterError(
                "distributions takes a list of prompts and a list of continuations, one for each",
                code="parameter.wrong_count",
            )
        if not all(continuations):
            raise ParameterError("a continuation is empty; give at least one token id", code="prompt.empty")
        forced = [check_ids(ids, self.vocab_size, what="a continuation") for ids in continuations]
        params = [SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True) for ids in forced]
        asked = self._asked(prompts, params, policy, positions, check_salt(cache_salt), forced=forced, adapter=adapter)
        for _ in self._run(asked):
            pass
        return [_as_tensor(state.answers[0].distributions) for _, state in asked]

    def _asked(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        reuse: ReusePolicy | None,
        positions: str | None,
        salt: str = "",
        forced: Sequence[Sequence[int]] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Asked]:
        several = list(prompts) if is_several(prompts) else [prompts]
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        each = list(params) if isinstance(params, Sequence) else [params] * len(several)
        for one in each:
            check_params(one)
        if len(each) != len(several):
            raise ParameterError(
                f"there are {len(several)} prompts and {len(each)} sampling_params; give one for each",
                code="parameter.wrong_count",
            )
        adapters = [adapter] * len(several) if isinstance(adapter, str) or adapter is None else list(adapter)
        if len(adapters) != len(several):
            raise ParameterError(
                f"there are {len(several)} prompts and {len(adapters)} adapters; give one for each",
                code="parameter.wrong_count",
            )
        policies = [
            self.policy_for(prompt, reuse, positions, cache_salt=salt or None, adapter=named)
            for prompt, named in zip(several, adapters, strict=True)
        ]
        pairs = zip(several, policies, strict=True)
        if any(self.policy_taken(prompt, policy, salt).profiled for prompt, policy in pairs):
            self.client.finish_profiles()  # callers' threads have no idle time
        return [
            self._request(prompt, p, policy, salt, request_id=str(next(self._numbers)), forced=ids, adapter=named)
            for prompt, p, policy, ids, named in zip(
                several, each, policies, forced or [()] * len(several), adapters, strict=True
            )
        ]

    def _run(self, requests: Sequence[Asked]) -> Iterator[RequestState]:
        """Run requests, yielding each when it has ended. Raises the first failure."""
        ended: SimpleQueue[RequestState] = SimpleQueue()
        states = [state for _, state in requests]
        try:
            for prepared, state in requests:
                self.client.submit(prepared, partial(_heard, state, ended))
            for _ in requests:
                while ended.empty():
                    self.client.pump()
                yield ended.get()
        finally:  # also if the caller stops iterating
            self._give_up(states)
        failures = [state.failure for state in states]
        first = next((error for error in failures if error is not None), None)
        if isinstance(first, InlayError):
            pairs = zip(states, failures, strict=True)
            first.outputs = [None if error is not None else state.output() for state, error in pairs]
        if first is not None:
            raise first

    def _listen(self, asked: Asked) -> Iterator[RequestOutput]:
        """Yield the output of a request after every token."""
        state, said = asked.state, SimpleQueue[RequestOutput | BaseException]()

        def heard(events: Sequence[TokenEvent]) -> None:
            state.add(events)
            said.put(state.failure or state.output())

        try:
            self.client.submit(asked.prepared, heard)
            finished = False
            while not finished:
                while said.empty():
                    self.client.pump()
                output = said.get()
                if isinstance(output, BaseException):
                    raise output
                finished = output.finished
                yield output
        finally:
            self._give_up([state])

    def _give_up(self, states: Sequence[RequestState]) -> None:
        """Cancel unfinished requests. Must not block, because the garbage collector may call it on any thread."""
        for state in states:
            if not state.answered:
                self.client.cancel(state.id)


def _heard(state: RequestState, ended: SimpleQueue[RequestState], events: Sequence[TokenEvent]) -> None:
    state.add(events)
    if state.answered:
        ended.put(state)


def _as_tensor(rows: Sequence[bytes]) -> Tensor:
    """Stack the rows of events to (tokens, vocabulary), fp32."""
    return torch.from_numpy(np.stack([np.frombuffer(row, "<f4") for row in rows]))
