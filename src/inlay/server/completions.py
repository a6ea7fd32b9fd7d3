"""Answers a request: reads it, merges the model's updates for its prompts, and writes the response or the stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inlay.api.call import StoredAnswer
from inlay.api.dialect import DIALECTS, AnswerStream
from inlay.api.failures import INTERNAL_ERROR, Failure, failure_of
from inlay.api.tools.schema import structure_failure
from inlay.errors import AbortedError, InlayError, StructureError
from inlay.policy import ReusePolicy
from inlay.server.body import ClientGoneError, Connection, EventStream
from inlay.server.limits import AdmittedRequest
from inlay.server.metrics import RequestUsage, Update, check_prompt_logprobs, tokens_of, within_logprobs
from inlay.server.requests import ServerRequest, read_request
from inlay.server.routes import of_answers, route_of
from inlay.server.service import Service, stopping_error
from inlay.server.threads import LARGE, json_response, off_loop
from inlay.types import RequestOutput

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
