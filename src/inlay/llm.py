"""LLM: a model, its schemas and its cache behind the calls that vLLM users know."""

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

from inlay.base import Asked
from inlay.errors import InlayError, ParameterError
from inlay.events import TokenEvent
from inlay.llm_schemas import SchemaCalls
from inlay.models.load import GivenModel
from inlay.output.processor import RequestState
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
from inlay.sampling_params import SamplingParams
from inlay.types import RequestOutput


class LLM(SchemaCalls):
    """A language model that computes the attention states of every piece of text once.

    model: a local directory, a hub name, ``random:<shape>``, ``demo``, a LoadedModel, or a model of transformers.
    tokenizer: that of a model of transformers; others bring theirs.
    dtype: "auto", "float32" or "bfloat16".
    seed: of random weights, and of requests that bring no seed of their own; None draws the latter afresh.
    weights, quantization: how a model that is given by name keeps its weights, as in ``load_model``; None for its
        defaults, packed and not quantized. A LoadedModel is used as it is.
    chat_template: Jinja, in place of the model's own; None for that.
    adapters: LoRA adapters, folders as PEFT writes them, by the names that requests call them (docs/adapters.md).
    Further settings: see EngineConfig. Raises ModelError, ParameterError, CapacityError.
    """

    def __init__(self, model: GivenModel = "demo", **settings: Any) -> None:
        super().__init__(model, **settings)
        self._numbers = count()  # of requests

    def promote(self) -> int:
        """Encode exactly, now, those combinations of modules that were asked for again under ``modular``.

        An engine with a thread of its own does so in idle time; here no time is idle but what somebody waits in.
        Returns how many tokens were computed.
        """
        before = self.stats().promoted_tokens
        self.client.promote()
        return self.stats().promoted_tokens - before

    def measure_drift(self) -> int:
        """Compare with full prefill, now, those answers that were chosen for it (``shadow``).

        An engine with a thread of its own does so in idle time. Returns how many were compared.
        """
        before = self._compared()
        self.client.measure_drift()
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
        reuse: str | None = None,
        positions: str | None = None,
        order: str | None = None,
        cache_salt: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, as one batch.

        prompts: text, token ids, a Prompt (PML), ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, a list of chat
            messages, ``{"messages": messages, "tools": tools}``, with the further arguments of ``chat`` where there
            are some, or a list of any of these.
        sampling_params: for all prompts, or one for each; None for ``get_default_sampling_params()``, the model's own.
        use_tqdm: whether to show a progress bar of finished prompts.
        reuse, positions: the policy of these requests; None for the engine's defaults.
        order: "any" where imports that are neighbours may change places, and marked parts of messages that are, as if
            they stood in a ``<set>``; None for the order in which the prompts have them. ``RequestOutput.order`` is
            the one that was taken.
        cache_salt: keeps what these requests leave in the cache for requests with the same salt; None for everybody.
        adapter: the name of the one that answers all prompts, or one for each; None for the model alone.
        Returns outputs in the order of the prompts. Raises InlayError, before anything runs, for a wrong prompt; and
        when all have ended for one that failed, with the others' outputs in the error's ``outputs``.
        """
        if check_order(order):
            prompts = [
                in_any_order(one) for one in (cast(Sequence[Any], prompts) if is_several(prompts) else [prompts])
            ]
        asked = self._asked(prompts, sampling_params, reuse, positions, check_salt(cache_salt), adapter=adapter)
        with tqdm(total=len(asked), disable=not use_tqdm, desc="prompts") as bar:
            for _ in self._run(asked):
                bar.update()
        return [state.output() for _, state in asked]

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        order: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding what there is so far after every token. Arguments as in ``generate``."""
        prompt = in_any_order(prompt) if check_order(order) else prompt
        (asked,) = self._asked([prompt], sampling_params, reuse, positions, check_salt(cache_salt), adapter=adapter)
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

        tools: what the model may call. chat_template_kwargs: values for variables of the chat template, such as
            ``{"enable_thinking": False}``. documents: for templates that have a place for them.
        add_generation_prompt: whether the prompt opens an answer; None does unless the last message is continued.
        continue_final_message: whether the answer goes on with the last message, one of the assistant's.
        The rest is as in ``generate``. Raises ParameterError for what the template does not know.
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
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Tensor]:
        """What the model expects at every token of given continuations: teacher forcing, through the engine.

        Nothing is sampled: the steps are those of ``generate`` in the case that it said just these tokens.

        prompts: a list of prompts, each as in ``generate``.
        continuations: token ids for each prompt, at least one; end-of-sequence tokens are tokens like others.
        reuse, positions: the policy of these requests; None for the engine's defaults.
        cache_salt, adapter: as in ``generate``.
        Returns natural log-probabilities (tokens, vocabulary), fp32, for each prompt: row i is of the token behind
        the prompt and i tokens of its continuation. Raises InlayError, before anything runs, for a wrong argument.
        """
        if not is_several(prompts) or len(prompts) != len(continuations):
            raise ParameterError("distributions takes a list of prompts and a list of continuations, one for each")
        if not all(continuations):
            raise ParameterError("a continuation is empty; give at least one token id")
        forced = [check_ids(ids, self.vocab_size, what="a continuation") for ids in continuations]
        params = [SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True) for ids in forced]
        asked = self._asked(prompts, params, reuse, positions, check_salt(cache_salt), forced=forced, adapter=adapter)
        for _ in self._run(asked):
            pass
        return [_as_tensor(state.answers[0].distributions) for _, state in asked]

    def _asked(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        reuse: str | None,
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
            raise ParameterError(f"there are {len(several)} prompts and {len(each)} sampling_params; give one for each")
        adapters = [adapter] * len(several) if isinstance(adapter, str) or adapter is None else list(adapter)
        if len(adapters) != len(several):
            raise ParameterError(f"there are {len(several)} prompts and {len(adapters)} adapters; give one for each")
        policies = [
            self.policy_for(prompt, reuse, positions, cache_salt=salt or None, adapter=named)
            for prompt, named in zip(several, adapters, strict=True)
        ]
        pairs = zip(several, policies, strict=True)
        if any(self.policy_taken(prompt, policy, salt).profiled for prompt, policy in pairs):
            self.client.finish_profiles()  # on this thread no time is idle but what somebody waits in
        return [
            self._request(prompt, p, policy, salt, request_id=str(next(self._numbers)), forced=ids, adapter=named)
            for prompt, p, policy, ids, named in zip(
                several, each, policies, forced or [()] * len(several), adapters, strict=True
            )
        ]

    def _run(self, requests: Sequence[Asked]) -> Iterator[RequestState]:
        """Run requests to their end; yields each when it has ended. Raises what ended one of them before its time."""
        ended: SimpleQueue[RequestState] = SimpleQueue()
        states = [state for _, state in requests]
        try:
            for prepared, state in requests:
                self.client.submit(prepared, partial(_heard, state, ended))
            for _ in requests:
                while ended.empty():
                    self.client.pump()
                yield ended.get()
        finally:  # also when the caller stops listening
            self._give_up(states)
        failures = [state.failure for state in states]
        first = next((error for error in failures if error is not None), None)
        if isinstance(first, InlayError):
            pairs = zip(states, failures, strict=True)
            first.outputs = [None if error is not None else state.output() for state, error in pairs]
        if first is not None:
            raise first

    def _listen(self, asked: Asked) -> Iterator[RequestOutput]:
        """What a request has come to after every token."""
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
        """Waits for nobody: of an abandoned generator it is called by the garbage collector, wherever that runs."""
        for state in states:
            if not state.answered:
                self.client.cancel(state.id)


def _heard(state: RequestState, ended: SimpleQueue[RequestState], events: Sequence[TokenEvent]) -> None:
    state.add(events)
    if state.answered:
        ended.put(state)


def _as_tensor(rows: Sequence[bytes]) -> Tensor:
    """Distributions as events have them → (tokens, vocabulary)."""
    return torch.from_numpy(np.stack([np.frombuffer(row, "<f4") for row in rows]))
