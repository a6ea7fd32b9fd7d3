"""Reads a request for answers, translates it, and checks it against the limits of its tenant."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

from inlay.api.call import Call
from inlay.api.embeddings import Endpoint as Embeddings
from inlay.api.failures import MAX_NAME, BodyError, naming_text_model
from inlay.pml import Prompt
from inlay.policy import ReusePolicy, default_policy
from inlay.prompt.inputs import has_modules
from inlay.server.limits import Tenant
from inlay.server.routes import route_of
from inlay.server.settings import ServerSettings
from inlay.tolerance import Measured
from inlay.wording import clip, listed

if TYPE_CHECKING:
    from inlay.server.metrics import RequestUsage
    from inlay.server.service import Service

_TIMEOUT = "X-Request-Timeout"
#: Path → the field of its prompts. It is ``prompt`` for the others.
_PROMPTS: dict[str, str] = {Embeddings.EMBEDDINGS: "input", Embeddings.RERANK: "documents"}
_MANY_NAMES = 9  # a message with this many names lists only the first ones


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """A checked request, with its tenant and its deadline.

    Args:
        call: the request, translated from its dialect.
        tenant: the caller.
        name: the unique id of its answer.
        created: seconds since 1970.
        model: the model name to write in the answer.
        adapter: the adapter to use; None for the model alone.
        reuse: the reuse policy of its prompts.
        arrival: when the whole body had arrived, on the clock of ``time.perf_counter``.
        timeout_s: seconds after arrival until the request is aborted; None for no deadline.
    """

    call: Call
    tenant: Tenant
    name: str
    created: int
    model: str
    adapter: str | None
    reuse: str
    arrival: float
    timeout_s: float | None

    def request_id(self, number: int) -> str:
        """Return the engine's request id of one prompt."""
        return f"{self.name}-{number}"


class TimedCall(NamedTuple):
    """A call, with the seconds that reading and translating it took."""

    call: Call
    read_s: float
    translate_s: float


async def read_call(
    service: Service, endpoint: str, body: Any, *, tenant: Tenant, size: int, default_max_tokens: int | None = None
) -> TimedCall:
    """Return the call that a body asks for. Large and slow bodies are read off the event loop.

    Args:
        service: the server's shared state.
        endpoint: the path of the route.
        body: the parsed body.
        tenant: the caller.
        size: bytes of the body. Those of a stored answer that it continues are added.
        default_max_tokens: see ``api.dialect.Dialect.translate``.

    Raises:
        BodyError: the body is invalid.
        PMLError: a prompt of a schema cannot be parsed.
    """
    if isinstance(body, Mapping):
        size += service.stored.size(tenant.owner, body.get("previous_response_id"))
    work = partial(_call, body, endpoint, service, tenant, default_max_tokens)
    return await service.body_workers.run(work, tenant=tenant.name, size=size, slow=_is_slow(body))


def _call(body: Any, endpoint: str, service: Service, tenant: Tenant, default_max_tokens: int | None) -> TimedCall:
    began, dialect = time.perf_counter(), route_of(endpoint).dialect
    with naming_text_model(service.llm.client.model.text_model):
        checked = dialect.read(body, endpoint)
    read = time.perf_counter()
    call = dialect.translate(
        checked,
        default_max_tokens=default_max_tokens,
        tools=service.tools,
        reasoning=service.reasoning,
        defaults=service.llm.sampling_defaults,
        stored=service.stored.of(tenant.owner),
    )
    return TimedCall(call, read - began, time.perf_counter() - read)


def _is_slow(body: Any) -> bool:
    """True if the body holds PML or JSON Schemas, which are slow to parse."""
    return isinstance(body, Mapping) and ("pml" in body or "tools" in body or isinstance(body.get("prompt"), Mapping))


async def read_request(service: Service, endpoint: str, scope: Scope, usage: RequestUsage) -> ServerRequest:
    """Return a checked request.

    It takes the body out of the request's state. Only the call is kept while the request is answered.

    Raises:
        BodyError: the body is invalid, or asks for more than the tenant may use.
        PMLError: a prompt of a schema cannot be parsed.
    """
    began = time.perf_counter()
    settings, state = service.settings, scope["state"]
    tenant: Tenant = state["tenant"]
    call, read_s, translate_s = await read_call(
        service,
        endpoint,
        state.pop("body"),
        tenant=tenant,
        size=state.pop("body_bytes"),
        default_max_tokens=settings.default_max_tokens,
    )
    usage.took("read", read_s)
    usage.took("translate", translate_s)
    embedding = service.embedding_for(call)
    if embedding is None:
        check_name(call.model, service)
    elif call.priority:
        call = replace(call, ignored=(*call.ignored, "priority"))  # passes have no order of priority
    _check_answers(call, service)
    _check_priority(call, tenant)
    check_schemas(call, service, tenant)
    return ServerRequest(
        call=_bounded(call, tenant),
        tenant=tenant,
        name=secrets.token_hex(12),
        created=int(time.time()),
        model=call.model or (settings.served_names[0] if embedding is None else embedding.model.name),
        adapter=call.model if call.model in service.llm.adapters else None,
        reuse=policy_of(call, tenant, service) if embedding is None else "off",
        arrival=state.get("arrival", began),
        timeout_s=_timeout(Headers(scope=scope).get(_TIMEOUT), settings),
    )


def check_name(name: str | None, service: Service) -> None:
    """Raise BodyError, status 404, if the server has no model of this name that generates text."""
    known = service.names
    if name is not None and name not in known:
        wrong = f"there is no model {clip(name, MAX_NAME)!r}"
        if service.embedding is not None and name == service.embedding.model.name:
            wrong = f"the model {clip(name, MAX_NAME)!r} answers /v1/embeddings and /v1/rerank only"
        elif service.embedding is not None:
            known = (*known, service.embedding.model.name)
        there = " or ".join(map(repr, known)) if len(known) < _MANY_NAMES else listed(map(repr, known))
        message = f"{wrong}; this server has {there}"
        raise BodyError(message, param="model", code="model_not_found", status=404)


def _check_answers(call: Call, service: Service) -> None:
    """Refuse a request for more answers than the queue can ever hold, because trying again would never help."""
    answers, most = call.answers, service.llm.config.max_waiting
    if most is not None and answers > most:
        message = (
            f"the request asks for {answers:,} answers, but the queue holds {most:,}; split it into several requests"
        )
        raise BodyError(message, param="n" if len(call.prompts) == 1 else _PROMPTS.get(call.endpoint, "prompt"))


def _check_priority(call: Call, tenant: Tenant) -> None:
    """Refuse a negative priority, which only an admin may use to pass other requests."""
    if call.priority < 0 and not tenant.admin:
        message = (
            f"priority is {call.priority}, but only an admin may use a negative one; write 0 or more, or leave it out"
        )
        raise BodyError(message, param="priority", code="priority_not_allowed", status=403)


def check_schemas(call: Call, service: Service, tenant: Tenant) -> None:
    """Raise BodyError, status 404, if the tenant can see no schema of this name."""
    for prompt in call.prompts:
        if isinstance(prompt, Prompt) and service.llm.schema(prompt.schema, cache_salt=tenant.salt) is None:
            message = f"there is no schema {clip(prompt.schema, MAX_NAME)!r}; create it with POST /v1/schemas"
            raise BodyError(message, param="prompt", code="schema_not_found", status=404)


def _bounded(call: Call, tenant: Tenant) -> Call:
    """Return the call with max_tokens lowered to the tenant's limit, if the request does not set max_tokens."""
    most, wanted = tenant.limits.max_tokens, call.params.max_tokens
    if most is None or (wanted is not None and wanted <= most):
        return call
    if call.said_max_tokens:
        message = f"max_tokens is {wanted:,}, but your key allows {most:,}; ask for fewer"
        raise BodyError(message, param="max_tokens", code="max_tokens_not_allowed", status=403)
    return replace(call, params=replace(call.params, max_tokens=most))


def policy_of(call: Call, tenant: Tenant, service: Service) -> str:
    """Return the reuse policy of a request.

    A request without a policy gets the server's default, or a lower policy if the limits demand it. If the limit is
    ``auto``, measured divergence decides: the policy must be within the server's tolerance for all prompts of the
    request, at the positions of its modules.

    Raises:
        BodyError: status 403, the request asks for more than its limit.
        ParameterError: the policy is invalid.
    """
    settings, auto = service.settings, service.llm.auto
    words = ReusePolicy.least(settings.max_reuse, tenant.limits.max_reuse)
    ceiling = auto.tolerating(words)
    asked = None if call.reuse is None else auto.tolerating(_placed(call.reuse, call, service))
    rows = _measured(call, tenant, service)
    default = auto.tolerating(_placed(str(_default(call, service, measured=all(rows))), call, service))
    measured = rows if ceiling.auto else [()]
    found = {ReusePolicy.bounded(asked, default, ceiling, rows) for rows in measured}
    if None not in found:
        return str(found.pop() if len(found) == 1 else ceiling)
    whose = "this server" if words == ReusePolicy.parse(settings.max_reuse) else "your key"
    where = "" if call.positions is None else f" with positions {call.positions!r:.100}"
    asks = f"reuse is {call.reuse!r:.100}{where} and {whose} allows no more than '{ceiling}'"
    why = service.llm.client.model.why_limited
    asks += "" if why is None else f", as {why}"
    raise BodyError(f"{asks}; ask for that, or leave it out", param="reuse", code="reuse_not_allowed", status=403)


def _placed(reuse: str, call: Call, service: Service) -> ReusePolicy:
    """Return the policy that this text names, at the request's positions."""
    llm = service.llm
    policy = ReusePolicy.parse(reuse, llm.config.positions if call.positions is None else call.positions)
    # Given positions may come from a default, so an unsupported combination is reported when it is used.
    return policy if policy.auto or policy.positions is not None else policy.settled(llm.client.model.why_not_shift)


def _measured(call: Call, tenant: Tenant, service: Service) -> list[tuple[Measured, ...]]:
    """Return the measured divergence for each prompt of a call, by its schema and the request's adapter."""
    adapter = call.model if call.model in service.llm.adapters else None
    return [service.llm.measured(prompt, cache_salt=tenant.salt, adapter=adapter) for prompt in call.prompts]


def _default(call: Call, service: Service, *, measured: bool) -> ReusePolicy:
    """Return the policy of a request without one. ``measured``: all of its prompts have measurements."""
    if service.settings.policy is not None:
        return service.settings.policy
    highest = service.llm.client.model.highest
    return default_policy(modules=any(map(has_modules, call.prompts)), highest=highest, measured=measured)


def _timeout(given: str | None, settings: ServerSettings) -> float | None:
    """Return the seconds of the header, or the server's own timeout."""
    if given is None:
        return settings.timeout_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    longest = settings.longest_s
    if not 0 < seconds < math.inf or (longest is not None and seconds > longest):
        bound = "" if longest is None else f" and at most {longest:g}"
        message = f"{_TIMEOUT} is {given[:40]!r}; it must be a number of seconds above 0{bound}"
        raise BodyError(message, param=_TIMEOUT)
    return seconds
