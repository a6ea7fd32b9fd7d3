"""What a request for answers may come to, told before it runs: how many answers, tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inlay.api.openai import BodyError, Call
from inlay.pml import Import, Prompt, PromptTurn, Text
from inlay.types import SamplingParams

if TYPE_CHECKING:
    from inlay.prompt.layout import SchemaLayout
    from inlay.server.service import Service
    from inlay.server.tenants import Tenant

#: Of one request, alternatives included. Each takes about 60 bytes of a response, and several times that until then.
MAX_LOGPROBS = 2**18

_BYTES_A_TOKEN = 4  # of UTF-8, roughly; what a prompt comes to is known when it is laid out


def answers_of(call: Call) -> int:
    """How many answers a call asks for: every prompt gets ``n``."""
    return len(call.prompts) * call.params.n


def within_logprobs(call: Call, longest: int) -> Call:
    """The call with answers no longer than MAX_LOGPROBS allows, where it does not say how long they may be.

    longest: tokens of the model's context. Raises BodyError for a call that asks for more.
    """
    params = call.params
    if params.logprobs is None:
        return call
    wide = answers_of(call) * (1 + params.logprobs)
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


def tokens_of(call: Call, service: Service, tenant: Tenant) -> int:
    """How many tokens a call may use: of its prompts, estimated from their text, and of the longest answers."""
    longest = service.llm.loaded.spec.max_positions
    answers = answers_of(call) * _longest_answer(call.params, longest)
    return answers + sum(min(longest, _prompt_tokens(prompt, service, tenant)) for prompt in call.prompts)


def text_tokens(text: str) -> int:
    """About how many tokens a text has."""
    return -(-len(text.encode(errors="replace")) // _BYTES_A_TOKEN)


def _longest_answer(params: SamplingParams, longest: int) -> int:
    return longest if params.max_tokens is None else min(params.max_tokens, longest)


def _prompt_tokens(prompt: Any, service: Service, tenant: Tenant) -> int:
    if isinstance(prompt, Prompt):
        layout = service.llm.schema(prompt.schema, cache_salt=tenant.salt)
        always = 0 if layout is None else sum(len(run.ids) for run in layout.runs if not run.owner)
        return always + _nodes_tokens(prompt.children, layout)
    if isinstance(prompt, str):
        return text_tokens(prompt)
    if isinstance(prompt, Mapping):
        return sum(_prompt_tokens(value, service, tenant) for value in prompt.values())
    if isinstance(prompt, Sequence):
        ids = bool(prompt) and isinstance(prompt[0], int)
        return len(prompt) if ids else sum(_prompt_tokens(one, service, tenant) for one in prompt)
    return 1


def _nodes_tokens(nodes: Sequence[Text | Import | PromptTurn], layout: SchemaLayout | None) -> int:
    """Of what a prompt of a schema says and imports. Names that its schema does not have are refused later."""
    total = 0
    for node in nodes:
        if isinstance(node, Text):
            total += text_tokens(node.text)
            continue
        if isinstance(node, Import):
            extent = None if layout is None else layout.extents.get(node.name)
            total += (0 if extent is None else extent.tokens) + sum(text_tokens(one.value) for one in node.arguments)
        total += _nodes_tokens(node.children, layout)
    return total
