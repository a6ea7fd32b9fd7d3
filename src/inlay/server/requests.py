"""A request for answers as the server takes it: read, translated, and held against what its tenant may ask for."""

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
from inlay.api.failures import MAX_NAME, BodyError
from inlay.pml import Prompt
from inlay.policy import ReusePolicy, default_policy
from inlay.prompt.inputs import has_modules
from inlay.server.limits import Tenant
from inlay.server.routes import route_of
from inlay.server.settings import ServerSettings
from inlay.tolerance import Measured
from inlay.wording import clip, listed

if TYPE_CHECKING:
    from inlay.server.service import Service
    from inlay.server.usage import RequestUsage

_TIMEOUT = "X-Request-Timeout"
_MANY_NAMES = 9  # of which a message names the first ones


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """What to answer, for whom, and in which bounds.

    name: what tells its answer from others. created: seconds since 1970. model: what the answer calls the model.
    adapter: the one that answers; None for the model alone.
    reuse: the policy of its prompts. arrival: when all of it had come, on the clock of ``time.perf_counter``.
    timeout_s: how long after that it ends in any case; None for never.
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
        """The engine's name for one of its prompts."""
        return f"{self.name}-{number}"


class TimedCall(NamedTuple):
    """A call, and how many seconds its two steps took."""

    call: Call
    read_s: float
    translate_s: float


async def read_call(
    service: Service, endpoint: str, body: Any, *, tenant: Tenant, size: int, default_max_tokens: int | None = None
) -> TimedCall:
    """The call that a body is, made where that holds up nobody else. size: bytes of the body.

    Raises BodyError, and PMLError for a prompt of a schema that cannot be read.
    """
    work = partial(_call, body, endpoint, service, default_max_tokens)
    return await service.body_workers.run(work, tenant=tenant.name, size=size, slow=_is_slow(body))


def _call(body: Any, endpoint: str, service: Service, default_max_tokens: int | None) -> TimedCall:
    began, dialect = time.perf_counter(), route_of(endpoint).dialect
    checked = dialect.read(body, endpoint)
    read = time.perf_counter()
    call = dialect.translate(
        checked,
        default_max_tokens=default_max_tokens,
        tools=service.tools,
        reasoning=service.reasoning,
        defaults=service.llm.sampling_defaults,
    )
    return TimedCall(call, read - began, time.perf_counter() - read)


def _is_slow(body: Any) -> bool:
    """Whether there is a language in it: PML, or JSON Schemas."""
    return isinstance(body, Mapping) and ("pml" in body or "tools" in body or isinstance(body.get("prompt"), Mapping))


async def read_request(service: Service, endpoint: str, scope: Scope, usage: RequestUsage) -> ServerRequest:
    """A request as the server takes it. Raises BodyError, and PMLError for a prompt of a schema that cannot be read.

    Takes the body out of the request's state: what is kept of it while the request is answered is the call.
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
    check_name(call.model, service)
    _check_answers(call, service)
    _check_priority(call, tenant)
    check_schemas(call, service, tenant)
    return ServerRequest(
        call=_bounded(call, tenant),
        tenant=tenant,
        name=secrets.token_hex(12),
        created=int(time.time()),
        model=call.model or settings.served_names[0],
        adapter=call.model if call.model in service.llm.adapters else None,
        reuse=policy_of(call, tenant, service),
        arrival=state.get("arrival", began),
        timeout_s=_timeout(Headers(scope=scope).get(_TIMEOUT), settings),
    )


def check_name(name: str | None, service: Service) -> None:
    """Raises BodyError, status 404, for a model that is not served here."""
    known = service.names
    if name is not None and name not in known:
        there = " or ".join(map(repr, known)) if len(known) < _MANY_NAMES else listed(map(repr, known))
        message = f"there is no model {clip(name, MAX_NAME)!r}; this server has {there}"
        raise BodyError(message, param="model", code="model_not_found", status=404)


def _check_answers(call: Call, service: Service) -> None:
    """More answers than may ever wait in line would be told to try again for ever."""
    answers, most = call.answers, service.llm.config.max_waiting
    if most is not None and answers > most:
        message = f"the request asks for {answers:,} answers, and at most {most:,} may wait here; make several of it"
        raise BodyError(message, param="n" if len(call.prompts) == 1 else "prompt")


def _check_priority(call: Call, tenant: Tenant) -> None:
    """A tenant may let others go first, and only an admin may pass them."""
    if call.priority < 0 and not tenant.admin:
        message = f"priority is {call.priority}, and your key may not pass others; write 0 or more, or leave it out"
        raise BodyError(message, param="priority", code="priority_not_allowed", status=403)


def check_schemas(call: Call, service: Service, tenant: Tenant) -> None:
    """Raises BodyError, status 404, for a schema that the tenant cannot see."""
    for prompt in call.prompts:
        if isinstance(prompt, Prompt) and service.llm.schema(prompt.schema, cache_salt=tenant.salt) is None:
            message = f"there is no schema {clip(prompt.schema, MAX_NAME)!r}; create it with POST /v1/schemas"
            raise BodyError(message, param="prompt", code="schema_not_found", status=404)


def _bounded(call: Call, tenant: Tenant) -> Call:
    """The call with no more tokens than the tenant may ask for, where it does not say how many it wants."""
    most, wanted = tenant.limits.max_tokens, call.params.max_tokens
    if most is None or (wanted is not None and wanted <= most):
        return call
    if call.said_max_tokens:
        message = f"max_tokens is {wanted:,} and your key allows {most:,}; ask for fewer"
        raise BodyError(message, param="max_tokens", code="max_tokens_not_allowed", status=403)
    return replace(call, params=replace(call.params, max_tokens=most))


def policy_of(call: Call, tenant: Tenant, service: Service) -> str:
    """The policy of a request; one that does not say gets the server's default, or less where less is allowed.

    Under a ceiling of ``auto`` that is what was measured to be within the server's tolerance, for all its prompts and
    where its modules stand. Raises BodyError for more, status 403, and ParameterError for what is no policy.
    """
    settings, auto = service.settings, service.llm.auto
    words = ReusePolicy.least(settings.max_reuse, tenant.limits.max_reuse)
    ceiling = auto.tolerating(words)
    asked = None if call.reuse is None else auto.tolerating(_placed(call.reuse, call, service))
    default = auto.tolerating(_placed(str(_default(call, service)), call, service))
    measured = _measured(call, tenant, service) if ceiling.auto else [()]
    found = {ReusePolicy.bounded(asked, default, ceiling, rows) for rows in measured}
    if None not in found:
        return str(found.pop() if len(found) == 1 else ceiling)
    whose = "this server" if words == ReusePolicy.parse(settings.max_reuse) else "your key"
    where = "" if call.positions is None else f" with positions {call.positions!r:.100}"
    asks = f"reuse is {call.reuse!r:.100}{where} and {whose} allows no more than '{ceiling}'"
    why = service.llm.client.model.why_unshared
    asks += "" if why is None else f", as {why}"
    raise BodyError(f"{asks}; ask for that, or leave it out", param="reuse", code="reuse_not_allowed", status=403)


def _placed(reuse: str, call: Call, service: Service) -> ReusePolicy:
    """The policy that is written so, at the positions that the request is answered at."""
    llm = service.llm
    policy = ReusePolicy.parse(reuse, llm.config.positions if call.positions is None else call.positions)
    # What cannot be done at positions that are given is told where that is tried: it may be no more than a default.
    return policy if policy.auto or policy.positions is not None else policy.settled(llm.client.model.why_not_shift)


def _measured(call: Call, tenant: Tenant, service: Service) -> list[tuple[Measured, ...]]:
    """What is known of each of a call's prompts: by its schema, where it has one, and by the adapter that answers."""
    adapter = call.model if call.model in service.llm.adapters else None
    return [service.llm.measured(prompt, cache_salt=tenant.salt, adapter=adapter) for prompt in call.prompts]


def _default(call: Call, service: Service) -> ReusePolicy:
    if service.settings.policy is not None:
        return service.settings.policy
    shared = service.llm.client.model.why_unshared is None
    return default_policy(modules=any(map(has_modules, call.prompts)), shared=shared)


def _timeout(given: str | None, settings: ServerSettings) -> float | None:
    """Seconds, of the header or the server's own."""
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
