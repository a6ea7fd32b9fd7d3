"""Answers a request: reads it, translates it, checks it against the limits of its tenant, merges the model's updates
for its prompts, and writes the response or the stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inlay.api.call import Call, StoredAnswer
from inlay.api.dialect import DIALECTS, AnswerStream
from inlay.api.embeddings import Endpoint as Embeddings
from inlay.api.failures import INTERNAL_ERROR, MAX_NAME, BodyError, Failure, failure_of, naming_text_model
from inlay.api.tools.offer import structure_failure
from inlay.errors import AbortedError, InlayError, StructureError
from inlay.pml import Prompt
from inlay.policy import ReusePolicy, default_policy
from inlay.prompt.inputs import has_modules
from inlay.server.body import ClientGoneError, Connection, EventStream
from inlay.server.limits import AdmittedRequest, Tenant
from inlay.server.metrics import RequestUsage, Update, check_prompt_logprobs, tokens_of, within_logprobs
from inlay.server.routes import of_answers, route_of
from inlay.server.service import Service, stopping_error
from inlay.server.settings import ServerSettings
from inlay.server.threads import LARGE, json_response, off_loop
from inlay.tolerance import Measured
from inlay.types import RequestOutput
from inlay.wording import clip, listed

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
        size: bytes of the body. The bytes of a stored answer that the body continues are added.
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


logger = logging.getLogger(__name__)

#: The updates of one prompt, from ``AsyncLLM.generate``.
Outputs = AsyncGenerator[RequestOutput, None]

#: Without streaming, an update arrives after this many tokens. A client that disconnects pays up to the last update.
_COUNTED_EVERY = 16

#: The response header that names the ignored fields of the request.
IGNORED_FIELDS = "X-Inlay-Ignored-Fields"

# Rough sizes in a response, in bytes: the text of one token, and one token among its log-probabilities.
_TOKEN_BYTES = 8
_LOGPROB_BYTES = 64
_NUMBER_BYTES = 20  # of one number of an embedding


class AnswerResponse(Response):
    """The response to one request. It is produced while it is sent, in the request's own task."""

    def __init__(self, service: Service, endpoint: str) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint
        self._dialect = route_of(endpoint).dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, tenant = self._service, scope["state"]["tenant"]
        usage = RequestUsage(service.metrics, self._endpoint, tenant)
        live = service.live.begin(self._endpoint, tenant, usage)
        failure: Failure | None = None
        try:
            async with service.meter.request(tenant) as admission:
                try:
                    request = await read_request(service, self._endpoint, scope, usage)
                    live.request = request = await self._hold(request, admission)
                    async with Connection(scope, receive, send, service.settings.slow_client_s) as connection:
                        failure = await self._answer(request, usage, admission, connection)
                finally:
                    admission.used(usage.tokens)
        except ClientGoneError:
            pass
        except Exception as error:
            reason = self._reason(error)
            failure = _failure(reason)
            raise reason from error.__cause__
        finally:
            usage.end(failure)
            row = service.live.end(live, failure)
            if service.traces is not None:
                began = time.perf_counter()
                service.traces.record(live, row, failure, Headers(scope=scope))
                service.metrics.overhead("trace", time.perf_counter() - began)

    async def _hold(self, request: ServerRequest, admission: AdmittedRequest) -> ServerRequest:
        """Reserve the answers and tokens of the request in its tenant's limits. Raises BodyError."""
        service, tenant = self._service, request.tenant
        call = within_logprobs(request.call, service.llm.client.model.max_positions)
        if call.params.prompt_logprobs is not None:
            await off_loop(lambda: check_prompt_logprobs(call, service.llm, tenant))
        tokens = 0
        # counted off the event loop, because a prompt may have 100,000 parts
        if tenant.limits.tokens_per_minute is not None:
            tokens = await off_loop(lambda: tokens_of(call, service.llm, tenant))
        admission.hold(answers=call.answers, tokens=tokens)
        return replace(request, call=call)

    async def _answer(
        self, request: ServerRequest, usage: RequestUsage, admission: AdmittedRequest, connection: Connection
    ) -> Failure | None:
        """Answer the whole request or stream it. Returns the failure that ended a stream after its first byte."""
        names = [request.request_id(number) for number in range(len(request.call.prompts))]
        usage.asked(request.call.params)
        try:
            with self._service.running(names):
                async with aclosing(self._updates(request, names)) as updates:
                    if request.call.stream:
                        return await self._stream(request, updates, usage, admission, connection)
                    async for changed in updates:
                        usage.note(changed)
                        admission.used(usage.tokens)
            await self._whole(request, usage, connection)
            return None
        except StructureError as error:
            raise structure_failure(request.call, error) from error
        finally:
            self._service.trimmer.ended(_response_size(request, usage))

    async def _whole(self, request: ServerRequest, usage: RequestUsage, connection: Connection) -> None:
        began = time.perf_counter()
        make = partial(self._document, request, usage.outputs)
        # a stored conversation may be much larger than the answer
        stored = None if request.call.store is None else await off_loop(make)
        response = await json_response(
            lambda: stored or make(), _response_size(request, usage), headers=_warnings(request)
        )
        made = time.perf_counter()
        usage.took("respond", made - began)
        await connection.respond(response)
        usage.took("write", time.perf_counter() - made)

    async def _stream(
        self,
        request: ServerRequest,
        updates: AsyncGenerator[Sequence[Update], None],
        usage: RequestUsage,
        admission: AdmittedRequest,
        connection: Connection,
    ) -> Failure | None:
        stream = self._dialect.stream(request.call, **self._named(request))
        events = EventStream(connection.send, self._service.settings.keep_alive_s, _warnings(request))
        try:
            async with events.kept_alive():
                async for changed in updates:
                    before = usage.said
                    usage.note(changed)
                    admission.used(usage.tokens)
                    began = time.perf_counter()
                    size = _size(request, usage.said - before)
                    size += 0 if before else _prompts_size(request, [output for _, output in changed])
                    new = await _events(stream, changed, size)
                    made = time.perf_counter()
                    await events.write(new)
                    usage.took("respond", made - began)
                    usage.took("write", time.perf_counter() - made)
            if request.call.store is not None:  # before the last event, because a client may continue it at once
                await off_loop(lambda: self._document(request, usage.outputs))
            await events.end(stream.end())
        except Exception as error:
            if not events.begun:
                raise  # the failure can still have its own status
            failure = _failure(self._reason(error))
            if failure is INTERNAL_ERROR:
                logger.exception("an unexpected exception ended a stream")
            await events.end(stream.fail(replace(failure, request_id=connection.request_id)))
            return failure
        return None

    def _document(self, request: ServerRequest, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of a complete response. It is stored if the request asks for that."""
        document = self._dialect.respond(request.call, outputs, **self._named(request))
        if request.call.store is not None:
            answer = StoredAnswer(document, request.call.store)
            self._service.stored.keep(request.tenant.owner, document["id"], answer)
        return document

    def _named(self, request: ServerRequest) -> dict[str, Any]:
        """Return the fields that identify an answer."""
        return {
            "name": request.name,
            "created": request.created,
            "model": request.model,
            "fingerprint": self._service.fingerprint(request.adapter),
        }

    def _reason(self, error: Exception) -> Exception:
        """Return the error of a request. A stopping server replaces its own abort with the stopping error."""
        ends = isinstance(error, AbortedError) or (isinstance(error, InlayError) and error.code == "engine.shut_down")
        return stopping_error() if ends and self._service.in_flight.stopping else error

    def _updates(self, request: ServerRequest, names: Sequence[str]) -> AsyncGenerator[Sequence[Update], None]:
        """Return the updates of all prompts, from the engine or the embedding model."""
        embedding = self._service.embedding_for(request.call)
        if embedding is None:
            return merge_streams(self._ask(request, names))
        return embedding.answer(
            request.call, names, owner=request.tenant.salt, arrival=request.arrival, timeout_s=request.timeout_s
        )

    def _ask(self, request: ServerRequest, names: Sequence[str]) -> list[Outputs]:
        call = request.call
        return [
            self._service.llm.generate(
                prompt,
                call.params,
                request_id=name,
                priority=call.priority,
                timeout_s=request.timeout_s,
                arrival=request.arrival,
                reuse=ReusePolicy.parse(request.reuse),
                positions=call.positions,
                order=call.order,
                cache_salt=request.tenant.salt,
                adapter=request.adapter,
                keep_marked_alone=request.call.keep_marked_alone,
                diagnostics=call.diagnostics,
                tenant=request.tenant.name,
                stream_interval=self._service.settings.stream_interval if call.stream else _COUNTED_EVERY,
            )
            for name, prompt in zip(names, call.prompts, strict=True)
        ]


def _warnings(request: ServerRequest) -> dict[str, str]:
    """Return the header that names the ignored fields of a request."""
    ignored = request.call.ignored
    return {IGNORED_FIELDS: ", ".join(ignored)} if ignored else {}


def _route(path: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a route that answers requests."""

    async def answer(request: Request) -> Response:
        return AnswerResponse(request.app.state.service, path)

    return answer


router = APIRouter(tags=["answers"])
for _dialect in DIALECTS:
    for _one in _dialect.routes:
        router.add_api_route(_one.path, _route(_one.path), methods=["POST"], **of_answers(_one))


async def _events(stream: AnswerStream, changed: Sequence[Update], size: int) -> Iterable[str]:
    """Return the events of new updates. Many updates are formatted off the event loop."""

    def made() -> list[str]:
        return [event for number, output in changed for event in stream.update(number, output)]

    return made() if size <= LARGE else await off_loop(made)


def _response_size(request: ServerRequest, usage: RequestUsage) -> int:
    """The approximate bytes of a response with all tokens generated so far."""
    numbers = sum(len(output.embedding) for output in usage.outputs if output.embedding is not None)
    return _size(request, usage.said) + _prompts_size(request, usage.outputs) + numbers * _NUMBER_BYTES


def _size(request: ServerRequest, tokens: int) -> int:
    """The approximate bytes of a response with this many tokens."""
    logprobs = request.call.params.logprobs
    return tokens * (_TOKEN_BYTES + (0 if logprobs is None else (1 + logprobs) * _LOGPROB_BYTES))


def _prompts_size(request: ServerRequest, outputs: Sequence[RequestOutput]) -> int:
    """The approximate bytes of echoed prompts and prompt log-probabilities in a response."""
    call, told = request.call, request.call.params.prompt_logprobs
    times = call.params.n if call.echo else 1
    each = (_TOKEN_BYTES if call.echo else 0) + (0 if told is None else (1 + told) * _LOGPROB_BYTES)
    return times * each * sum(len(output.prompt_token_ids) for output in outputs)


def _failure(error: Exception) -> Failure:
    return failure_of(error) if isinstance(error, InlayError) else INTERNAL_ERROR


async def merge_streams(streams: Sequence[Outputs]) -> AsyncGenerator[Sequence[Update], None]:
    """Merge the updates of several prompts, with at most the latest update of each prompt in one batch.

    A reader may be slower than the model, so it can skip updates. An exception in one stream ends all of them. The
    other streams are closed then, and also when the reader leaves.

    Args:
        streams: the generators of ``AsyncLLM.generate``, one per prompt.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield ((0, output),)
        return
    latest: dict[int, RequestOutput] = {}
    changed = asyncio.Event()

    async def listen(number: int, stream: Outputs) -> None:
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    latest[number] = output
                    changed.set()
        finally:
            changed.set()

    listeners = [asyncio.create_task(listen(number, stream)) for number, stream in enumerate(streams)]
    try:
        while latest or not all(listener.done() for listener in listeners):
            await changed.wait()
            changed.clear()
            for listener in listeners:
                if listener.done():
                    listener.result()
            if latest:
                taken, latest = latest, {}
                yield tuple(taken.items())
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
