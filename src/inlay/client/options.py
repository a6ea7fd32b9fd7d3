"""Keyword arguments that several calls of LLM and AsyncLLM share. Each is described here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypedDict, TypeVar

from inlay.errors import ParameterError
from inlay.policy import ReusePolicy, check_schema_fields
from inlay.prompt.inputs import check_salt
from inlay.sampling.params import SamplingParams
from inlay.types import Scope
from inlay.wording import clip, show

P = ParamSpec("P")
R = TypeVar("R")

_SAMPLING = tuple(each.name for each in fields(SamplingParams))


class PolicyOptions(TypedDict, total=False):
    """The reuse policy of a request (docs/reference/policies.md). None and a missing name stand for the default."""

    reuse: str | ReusePolicy | None
    recompute: str | None
    promote: bool | None
    across_adapters: bool | None
    tolerance: float | str | None
    find: str | None


class PromptOptions(PolicyOptions, total=False):
    """The policy of a prompt, and the cache that it reads.

    Attributes:
        positions: a part of the policy, too. None for the engine's default.
        order: "any" if neighbouring imports, and neighbouring marked parts of messages, may change places, as in a
            ``<set>``. None keeps the written order. ``RequestOutput.order`` has the chosen order.
        cache_salt: shares the request's cached text only with requests of the same salt. None shares it with all.
    """

    positions: str | None
    order: str | None
    cache_salt: str | None


class RequestOptions(PromptOptions, total=False):
    """The options of a request to LLM, beside its adapter.

    Attributes:
        diagnostics: if True, ``RequestOutput.diagnostics`` says why prompt tokens were computed. Of a stream, the last
            output has them.
    """

    diagnostics: bool


class OwnerOptions(TypedDict, total=False):
    """The owner of a request or of cached text. See ``Scope``.

    Attributes:
        cache_salt: the salt of the requests that read the text. None for all requests.
        adapter: the name of an adapter that computes it. None for the model alone.
        tenant: tenants share passes, slots and the queue (docs/guides/many-requests.md).
        weight: the size of the tenant's share relative to others.
    """

    cache_salt: str | None
    adapter: str | None
    tenant: str
    weight: float


class OwnedPromptOptions(PromptOptions, OwnerOptions, total=False):
    """The policy, the cache and the owner of a request to AsyncLLM."""


class AsyncRequestOptions(OwnedPromptOptions, RequestOptions, total=False):
    """The options of a request to AsyncLLM.

    Attributes:
        request_id: a name for ``abort``, unique among running requests. None for a random one.
        priority: a lower number is served first if not all requests can run.
        timeout_s: seconds until a DeadlineError. The time covers tokenization and grammar compilation.
        arrival: the start of that time, on the clock of ``time.perf_counter``. None for now.
        stream_interval: the number of new tokens between outputs, over all answers. None for the final output only.
            Larger values wake the event loop less often. The first token and the end are never delayed.
        keep_marked_alone: if True, the text behind the last module or marked part is neither stored nor looked up. In a
            prompt without modules and marked parts, this is all text.
    """

    request_id: str | None
    priority: int
    timeout_s: float | None
    arrival: float | None
    stream_interval: int | None
    keep_marked_alone: bool


class TemplateOptions(TypedDict, total=False):
    """What a chat template shows beside the messages.

    Attributes:
        tools: the tools that the model may call.
        chat_template_kwargs: values for variables of the chat template, such as ``{"enable_thinking": False}``.
        documents: objects such as ``{"title": …, "text": …}``, for templates that support documents.
        add_generation_prompt: True if the prompt opens an answer. None for True unless the last message is continued.
        continue_final_message: True if the answer continues the last message, an assistant's.
    """

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    documents: Sequence[Mapping[str, str]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool


class ChatRequestOptions(RequestOptions, TemplateOptions, total=False):
    """The options of ``LLM.chat``."""


class AsyncChatOptions(AsyncRequestOptions, TemplateOptions, total=False):
    """The options of ``AsyncLLM.chat``."""


class ModuleOptions(OwnerOptions, total=False):
    """The policy and the owner of encoded modules, for calls about a schema or a prompt's modules.

    Attributes:
        reuse, positions: the policy that the modules are encoded for. None for the engine's defaults.
    """

    reuse: str | ReusePolicy | None
    positions: str | None


def checked_options(options: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method with ``**_: Unpack[options]``: it then refuses unknown options with ParameterError."""

    def checked(method: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(method).parameters.values()
        named = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - {"self"}
        known = frozenset(named | options.__annotations__.keys())

        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.keys() <= known:
                raise _unknown(method.__qualname__, known, kwargs)
            return method(*args, **kwargs)

        return call

    return checked


def _unknown(method: str, known: frozenset[str], given: Mapping[str, object]) -> ParameterError:
    """Return the error for the first unknown option. Raises PolicyError for a field that only requests have."""
    samples = "sampling_params" in known
    name = next(name for name in given if name not in known)
    if not samples:
        check_schema_fields([name], method)
    near = get_close_matches(clip(name), [*known, *(_SAMPLING if samples else ())], 1)
    meant = name if samples and name in _SAMPLING else near[0] if near else None
    if meant is None:
        remedy = f"options are {', '.join(sorted(known))}"
    elif meant in known:
        remedy = f"did you mean {meant}?"
    else:
        remedy = f"give it as SamplingParams({meant}={show(given[name])})"
    return ParameterError(f"{method} has no option '{clip(name)}'; {remedy}", code="parameter.unknown")


def scope_of(cache_salt: str | None = None, adapter: str | None = None, tenant: str = "", weight: float = 1.0) -> Scope:
    """Return the owner that these options name. Raises ParameterError for a wrong salt."""
    return Scope(check_salt(cache_salt), tenant, adapter, weight)
