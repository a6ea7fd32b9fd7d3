"""LLM: a model, its schemas and its cache behind the calls that vLLM users know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from inlay.base import Base, check_salt
from inlay.engine.encoder import Encoding, Progress
from inlay.engine.request import Request
from inlay.errors import AbortedError, InlayError, ParameterError
from inlay.pml import Prompt, PromptBuilder, Schema
from inlay.policy import ReusePolicy
from inlay.prompt.inputs import Message, PromptInput, check_ids, check_params, is_several
from inlay.prompt.layout import SchemaLayout
from inlay.schemas import removed
from inlay.types import RequestOutput, SamplingParams


class LLM(Base):
    """A language model that computes the attention states of every piece of text once.

    model: a local directory, a hub name, ``random:<shape>``, ``demo``, or a LoadedModel.
    dtype: "auto", "float32" or "bfloat16".
    seed: of random weights, and of requests that bring no seed of their own; None draws the latter afresh.
    weights, quantization: how a model that is given by name keeps its weights, as in ``load_model``; None for its
        defaults, packed and not quantized. A LoadedModel is used as it is.
    chat_template: Jinja, in place of the model's own; None for that.
    Further settings: see EngineConfig. Raises ModelError, ParameterError, CapacityError.
    """

    def add_schema(
        self,
        schema: Schema,
        *,
        encode: bool = True,
        reuse: str | None = None,
        positions: str | None = None,
        progress: Progress | None = None,
        cache_salt: str | None = None,
    ) -> SchemaLayout:
        """Make a schema known under its name, and encode its modules, packed, so that prompts find them.

        encode: False leaves each segment to the first prompt that needs it.
        reuse, positions: the policy to encode for; None for the engine's defaults.
        progress: called with how many of the schema's tokens are encoded, and how many there are.
        cache_salt: makes it private: only requests with this salt know it, and theirs goes before a public one of the
            same name. None for everybody's.
        Raises PMLError, ParameterError, CapacityError, and AbortedError where it is removed or replaced meanwhile.
        """
        policy, salt = self.policy(reuse, positions), check_salt(cache_salt)
        layout, specs = self.schemas.add(schema, policy, salt)
        if encode:
            self._encode(self.schemas.encoding(layout, specs, salt=salt), progress)
        return layout

    def warm(
        self,
        prompt: Prompt | PromptBuilder,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        progress: Progress | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Encode the segments that a prompt will read, and no others."""
        specs = self._segments_of(prompt, self.policy(reuse, positions), check_salt(cache_salt))
        self._encode(Encoding("the prompt", tuple(specs)), progress)

    def sensitivity(
        self,
        name: str,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, float]:
        """How much each module of a schema depends on what other text stands before it; "" for text outside modules.

        A share of how large the values of its tokens are, the mean over them: 0 for none. Modules of which nothing is
        encoded are left out. reuse, positions, cache_salt: as in ``add_schema``. Raises ParameterError.
        """
        policy, salt = self.policy(reuse, positions), check_salt(cache_salt)
        modules = self.processor.module_specs(name, policy, salt)
        self.client.finish_profiles()
        known = self.client.profiles(spec for specs in modules.values() for spec in specs).result()
        found = {module: [known[spec.key] for spec in specs if spec.key in known] for module, specs in modules.items()}
        return {
            module: float(np.concatenate(parts).astype(np.float32).mean()) for module, parts in found.items() if parts
        }

    def _encode(self, encoding: Encoding, progress: Progress | None) -> None:
        seen = -1
        try:
            self.client.submit(encoding, lambda _: None)
            while not encoding.finished:
                self.client.pump()
                if progress is not None and encoding.done > seen:
                    seen = encoding.done
                    progress(seen, encoding.total)
        finally:
            if not encoding.finished:
                self.client.cancel(encoding)
            self.schemas.ended(encoding)
        if isinstance(encoding.error, AbortedError):
            raise removed(encoding)
        if encoding.error is not None:
            raise encoding.error

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, as one batch.

        prompts: text, token ids, a Prompt (PML), ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, a list of chat
            messages, ``{"messages": messages, "tools": tools}``, with the further arguments of ``chat`` where there
            are some, or a list of any of these.
        sampling_params: for all prompts, or one for each; None for ``get_default_sampling_params()``, the model's own.
        use_tqdm: whether to show a progress bar of finished prompts.
        reuse, positions: the policy of these requests; None for the engine's defaults.
        cache_salt: keeps what these requests leave in the cache for requests with the same salt; None for everybody.
        Returns outputs in the order of the prompts. Raises InlayError, before anything runs, for a wrong prompt; and
        when all have ended for one that failed, with the others' outputs in the error's ``outputs``.
        """
        requests = self._requests_of(prompts, sampling_params, self.policy(reuse, positions), check_salt(cache_salt))
        with tqdm(total=len(requests), disable=not use_tqdm, desc="prompts") as bar:
            for _ in self._run(requests):
                bar.update()
        return [request.output() for request in requests]

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        reuse: str | None = None,
        positions: str | None = None,
        cache_salt: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding what there is so far after every token. Arguments as in ``generate``."""
        (request,) = self._requests_of([prompt], sampling_params, self.policy(reuse, positions), check_salt(cache_salt))
        return self._listen(request)

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
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of ``{"role": …, "content": …}``.

        tools: what the model may call. chat_template_kwargs: values for variables of the chat template, such as
            ``{"enable_thinking": False}``. documents: for templates that have a place for them.
        add_generation_prompt: whether the prompt opens an answer; None does unless the last message is continued.
        continue_final_message: whether the answer goes on with the last message, one of the assistant's.
        The rest is as in ``generate``. Raises ParameterError for what the template does not know.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        asked = {
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message or None,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        prompts = [{"messages": one, **given} for one in conversations] if given else list(conversations)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)  # type: ignore[arg-type]

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
        requests = self._requests_of(prompts, params, self.policy(reuse, positions))
        for request, ids in zip(requests, forced, strict=True):
            request.force(ids)
        for _ in self._run(requests):
            pass
        return [torch.stack(request.distributions) for request in requests]

    def _requests_of(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        policy: ReusePolicy,
        salt: str = "",
    ) -> list[Request]:
        several = list(prompts) if is_several(prompts) else [prompts]
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        each = list(params) if isinstance(params, Sequence) else [params] * len(several)
        if policy.profiled:
            self.client.finish_profiles()  # on this thread no time is idle but what somebody waits in
        for one in each:
            check_params(one)
        if len(each) != len(several):
            raise ParameterError(f"there are {len(several)} prompts and {len(each)} sampling_params; give one for each")
        return [self._request(prompt, p, policy, salt) for prompt, p in zip(several, each, strict=True)]

    def _run(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Run requests to their end; yields each when it has ended. Raises what ended one of them before its time."""
        ended: SimpleQueue[Request] = SimpleQueue()

        def heard(request: Request) -> None:
            if request.answered:
                ended.put(request)

        try:
            for request in requests:
                self.client.submit(request, heard)
            for _ in requests:
                while ended.empty():
                    self.client.pump()
                yield ended.get()
        finally:  # also when the caller stops listening
            self._give_up(requests)
        failures = [request.failure for request in requests]
        first = next((error for error in failures if error is not None), None)
        if isinstance(first, InlayError):
            pairs = zip(requests, failures, strict=True)
            first.outputs = [None if error is not None else request.output() for request, error in pairs]
        if first is not None:
            raise first

    def _listen(self, request: Request) -> Iterator[RequestOutput]:
        """What a request has come to after every token."""
        said: SimpleQueue[RequestOutput | BaseException] = SimpleQueue()
        try:
            self.client.submit(request, lambda request: said.put(request.failure or request.output()))
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
            self._give_up([request])

    def _give_up(self, requests: Sequence[Request]) -> None:
        """Waits for nobody: of an abandoned generator it is called by the garbage collector, wherever that runs."""
        for request in requests:
            if not request.answered:
                self.client.cancel(request)
