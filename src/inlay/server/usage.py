"""Estimates the tokens and log-probabilities of a request before it runs, and counts its usage."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inlay.api.call import Call
from inlay.api.failures import BodyError, Failure
from inlay.pml import Import, ImportSet, Prompt, PromptTurn, Text
from inlay.pml.scopes import names_of, path_of
from inlay.sampling.params import SamplingParams
from inlay.types import RequestOutput

if TYPE_CHECKING:
    from inlay.client.async_llm import AsyncLLM
    from inlay.prompt.layout import SchemaLayout
    from inlay.server.limits import Tenant
    from inlay.server.metric_families import Step
    from inlay.server.metrics import Metrics

#: The number of a prompt, and the latest output for it.
Update = tuple[int, RequestOutput]

#: Per request, alternatives included. Each takes about 60 bytes of a response, and several times that before it is
#: sent.
MAX_LOGPROBS = 2**18

_BYTES_A_TOKEN = 4  # a rough estimate for UTF-8; the exact number is known after layout


def within_logprobs(call: Call, longest: int) -> Call:
    """Return the call with max_tokens lowered to fit MAX_LOGPROBS, if the request does not set max_tokens.

    Args:
        call: the request.
        longest: tokens of the model's context.

    Raises:
        BodyError: the request asks for more log-probabilities.
    """
    params = call.params
    if params.logprobs is None:
        return call
    wide = call.answers * (1 + params.logprobs)
    most = max(1, MAX_LOGPROBS // wide)
    wanted = _longest_answer(params, longest)
    if wanted <= most:
        return call
    if call.said_max_tokens:
        raise BodyError(
            f"the request asks for {wide * wanted:,} log-probabilities (answers × tokens × alternatives), and one may "
            f"have {MAX_LOGPROBS:,}; ask for at most {most:,} tokens, or for fewer answers or alternatives",
            param="logprobs",
        )
    return replace(call, params=replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most)))


def check_prompt_logprobs(call: Call, llm: AsyncLLM, tenant: Tenant) -> None:
    """Raise BodyError if a call asks for more prompt log-probabilities than MAX_LOGPROBS, by a rough estimate."""
    scored = call.params.prompt_logprobs
    if scored is None:
        return
    tokens, wide = _prompts_tokens(call, llm, tenant), (1 + scored) * (call.params.n if call.echo else 1)
    if tokens * wide > MAX_LOGPROBS:
        raise BodyError(
            f"the request asks for about {tokens * wide:,} log-probabilities of its prompts (tokens × alternatives), "
            f"and one may have {MAX_LOGPROBS:,}; split it into several requests, or ask for fewer alternatives",
            param="prompt_logprobs" if call.scores is not None else "logprobs",
        )


def tokens_of(call: Call, llm: AsyncLLM, tenant: Tenant) -> int:
    """Estimate the tokens that a call may use: its prompts, by their text, and answers of the greatest length."""
    longest = llm.client.model.max_positions
    answers = call.answers * _longest_answer(call.params, longest)
    return answers + _prompts_tokens(call, llm, tenant)


def _prompts_tokens(call: Call, llm: AsyncLLM, tenant: Tenant) -> int:
    longest = llm.client.model.max_positions
    return sum(min(longest, _prompt_tokens(prompt, llm, tenant)) for prompt in call.prompts)


def text_tokens(text: str) -> int:
    """Estimate the tokens of a text."""
    return -(-len(text.encode(errors="replace")) // _BYTES_A_TOKEN)


def _longest_answer(params: SamplingParams, longest: int) -> int:
    return longest if params.max_tokens is None else min(params.max_tokens, longest)


def _prompt_tokens(prompt: Any, llm: AsyncLLM, tenant: Tenant) -> int:
    if isinstance(prompt, Prompt):
        layout = llm.schema(prompt.schema, cache_salt=tenant.salt)
        always = 0 if layout is None else sum(len(run.ids) for run in layout.runs if not run.owner)
        return always + _nodes_tokens(prompt.children, layout, ())
    if isinstance(prompt, str):
        return text_tokens(prompt)
    if isinstance(prompt, Mapping):
        return sum(_prompt_tokens(value, llm, tenant) for value in prompt.values())
    if isinstance(prompt, Sequence):
        ids = bool(prompt) and isinstance(prompt[0], int)
        return len(prompt) if ids else sum(_prompt_tokens(one, llm, tenant) for one in prompt)
    return 1


def _nodes_tokens(
    nodes: Sequence[Text | Import | ImportSet | PromptTurn], layout: SchemaLayout | None, around: tuple[str, ...]
) -> int:
    """Estimate the tokens of a prompt's texts and imports. Unknown names count nothing and are refused later.

    Args:
        nodes: the nodes of the prompt.
        layout: the schema's layout; None if the schema is unknown.
        around: the names of the modules around these nodes.
    """
    total = 0
    for node in nodes:
        if isinstance(node, Text):
            total += text_tokens(node.text)
            continue
        if isinstance(node, ImportSet):
            total += _nodes_tokens(node.imports, layout, around)
            continue
        inside = around
        if isinstance(node, Import):
            inside = (*around, *names_of(node.name))
            total += sum(text_tokens(one.value) for one in node.arguments)
            for depth in range(len(around) + 1, len(inside) + 1):  # a path also imports the modules around it
                extent = None if layout is None else layout.extents.get(path_of(inside[:depth]))
                total += 0 if extent is None else extent.tokens
        total += _nodes_tokens(node.children, layout, inside)
    return total


class RequestUsage:
    """The usage of one request so far, for the metrics, the log line and the tenant's limits.

    It exists while the request is answered. Call ``end`` once.
    """

    def __init__(self, metrics: Metrics, endpoint: str, tenant: Tenant) -> None:
        self._metrics = metrics
        self._observer = metrics.begin(endpoint, tenant)
        self._outputs: dict[int, RequestOutput] = {}  # the latest output of each prompt
        self._said: dict[tuple[int, int], int] = {}  # tokens of each answer, by prompt and choice
        self.said = 0  # tokens of all answers
        self._asked_at = 0.0
        self._took: dict[Step, float] = {}

    @property
    def outputs(self) -> list[RequestOutput]:
        """The latest output of each prompt that has one."""
        return [output for _, output in sorted(self._outputs.items())]

    @property
    def tokens(self) -> int:
        """The tokens of prompts and answers."""
        return self.said + sum(output.usage.prompt_tokens for output in self._outputs.values())

    def asked(self, params: SamplingParams) -> None:
        """The request is sent to the engine now."""
        self._observer.asked(params)
        self._asked_at = time.perf_counter()

    def note(self, changed: Sequence[Update]) -> None:
        """Count new updates of the engine."""
        if not self._outputs:
            # The rest of the time is not the engine's: layout, and the transfer in both directions.
            ttft_s = changed[0][1].metrics.ttft_s or 0.0
            self.took("lay_out", max(0.0, time.perf_counter() - self._asked_at - ttft_s))
        self._outputs.update(changed)
        more = []
        for number, output in changed:
            for answer in output.outputs:
                at, tokens = (number, answer.index), len(answer.token_ids)
                more.append(tokens - self._said.get(at, 0))
                self._said[at] = tokens
        self.said += sum(more)
        self._observer.tokens(sum(more), steps=max(more, default=0))

    def took(self, step: Step, seconds: float) -> None:
        """Add the seconds that the server itself took for a step."""
        self._took[step] = self._took.get(step, 0.0) + seconds

    def end(self, failure: Failure | None) -> None:
        """Record the end of the request. ``failure`` is the error that replaced or ended the answer."""
        for step, seconds in self._took.items():
            self._metrics.overhead(step, seconds)
        self._observer.end(self.outputs, failure)
