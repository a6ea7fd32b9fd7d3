"""The answers to several prompts as one stream of news.

What one request for answers came to, for everybody who counts: metrics, the log line, a tenant's limits.

``/v1/chat/completions`` and ``/v1/completions``: an order, the model's news of it, and a response made of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inlay.api.openai import Endpoint, Failure, failure_of, respond
from inlay.api.openai.stream import Chunks
from inlay.errors import AbortedError, InlayError
from inlay.server.connection import ClientGoneError, Connection, EventStream
from inlay.server.costs import answers_of, tokens_of, within_logprobs
from inlay.server.drain import stopped
from inlay.server.limits import Pass
from inlay.server.logs import SURPRISE
from inlay.server.offload import LARGE, json_response, off_loop
from inlay.server.openapi import CHAT, COMPLETIONS
from inlay.server.requests import Order, take_order
from inlay.server.service import Service
from inlay.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from inlay.server.metric_families import Step
    from inlay.server.metrics import Metrics
    from inlay.server.tenants import Tenant


#: What ``AsyncLLM.generate`` gives.
Outputs = AsyncGenerator[RequestOutput, None]
#: The number of a prompt, and what its answers have come to.
News = tuple[int, RequestOutput]


async def follow(streams: Sequence[Outputs]) -> AsyncGenerator[Sequence[News], None]:
    """What has changed since the last time, for each prompt at most once: a reader may be slower than the model.

    streams: of ``AsyncLLM.generate``, one a prompt. Raises what ends any of them; then, and when the reader leaves, the
    others are given up.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield ((0, output),)
        return
    latest: dict[int, RequestOutput] = {}
    news = asyncio.Event()

    async def listen(number: int, stream: Outputs) -> None:
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    latest[number] = output
                    news.set()
        finally:
            news.set()

    listeners = [asyncio.create_task(listen(number, stream)) for number, stream in enumerate(streams)]
    try:
        while latest or not all(listener.done() for listener in listeners):
            await news.wait()
            news.clear()
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


class Tally:
    """Kept while a request is answered; ``end`` comes once."""

    def __init__(self, metrics: Metrics, endpoint: Endpoint, tenant: Tenant) -> None:
        self._metrics = metrics
        self._watch = metrics.begin(endpoint, tenant)
        self._outputs: dict[int, RequestOutput] = {}  # the last of each prompt
        self._said: dict[tuple[int, int], int] = {}  # tokens of each answer, by prompt and choice
        self.said = 0  # tokens of all answers
        self._asked_at = 0.0
        self._took: dict[Step, float] = {}

    @property
    def outputs(self) -> list[RequestOutput]:
        """The last output of each prompt that has one."""
        return [output for _, output in sorted(self._outputs.items())]

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.said + sum(output.usage.prompt_tokens for output in self._outputs.values())

    def asked(self, params: SamplingParams) -> None:
        """The engine is asked now."""
        self._watch.asked(params)
        self._asked_at = time.perf_counter()

    def note(self, changed: Sequence[News]) -> None:
        """The engine has said something."""
        if not self._outputs:
            # What is not the engine's own time: laying the prompt out, and the ways there and back.
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
        self._watch.tokens(sum(more), steps=max(more, default=0))

    def took(self, step: Step, seconds: float) -> None:
        """The server itself took so long for a step; several times are added up."""
        self._took[step] = self._took.get(step, 0.0) + seconds

    def end(self, failure: Failure | None) -> None:
        """It is over. failure: what was answered in place of an answer, or ended it."""
        for step, seconds in self._took.items():
            self._metrics.overhead(step, seconds)
        self._watch.end(self.outputs, failure)


logger = logging.getLogger(__name__)

#: Of so many tokens is heard at once where the client waits for the whole answer: one who leaves is billed to here.
_COUNTED_EVERY = 16

# Of a response, roughly, in bytes: one token's text, and one token among its log-probabilities.
_TOKEN_BYTES = 8
_LOGPROB_BYTES = 64

router = APIRouter(tags=["answers"])


@router.post(Endpoint.CHAT, **CHAT)
async def chat_completions(request: Request) -> Response:
    """The next turn of a conversation, or the answer to a prompt of a schema."""
    return Answer(request.app.state.service, Endpoint.CHAT)


@router.post(Endpoint.COMPLETIONS, **COMPLETIONS)
async def text_completions(request: Request) -> Response:
    """What comes behind a text."""
    return Answer(request.app.state.service, Endpoint.COMPLETIONS)


class Answer(Response):
    """The response to one request. It is made while it is sent, in the request's own task."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, tenant = self._service, scope["state"]["tenant"]
        tally = Tally(service.metrics, self._endpoint, tenant)
        failure: Failure | None = None
        try:
            async with service.meter.request(tenant) as bill:
                try:
                    order = await take_order(service, self._endpoint, scope, tally)
                    order = await self._hold(order, bill)
                    async with Connection(scope, receive, send, service.settings.slow_client_s) as connection:
                        failure = await self._answer(order, tally, bill, connection)
                finally:
                    bill.used(tally.tokens)
        except ClientGoneError:
            pass
        except Exception as error:
            reason = self._reason(error)
            failure = _failure(reason)
            raise reason from error.__cause__
        finally:
            tally.end(failure)

    async def _hold(self, order: Order, bill: Pass) -> Order:
        """Take what the order needs of its tenant's limits, now that it is known. Raises BodyError."""
        service, tenant = self._service, order.tenant
        call = within_logprobs(order.call, service.llm.loaded.spec.max_positions)
        tokens = 0
        if tenant.limits.tokens_per_minute is not None:  # a prompt may have a hundred thousand parts
            tokens = await off_loop(lambda: tokens_of(call, service, tenant))
        bill.hold(answers=answers_of(call), tokens=tokens)
        return replace(order, call=call)

    async def _answer(self, order: Order, tally: Tally, bill: Pass, connection: Connection) -> Failure | None:
        """Answer, whole or piece by piece; returns what ended a stream behind its first byte."""
        names = [order.request_id(number) for number in range(len(order.call.prompts))]
        tally.asked(order.call.params)
        with self._service.running(names):
            async with aclosing(follow(self._ask(order, names))) as news:
                if order.call.stream:
                    return await self._stream(order, news, tally, bill, connection)
                async for changed in news:
                    tally.note(changed)
                    bill.used(tally.tokens)
        await self._whole(order, tally, connection)
        return None

    async def _whole(self, order: Order, tally: Tally, connection: Connection) -> None:
        began = time.perf_counter()
        named = {"name": order.name, "model": order.model, "fingerprint": self._service.fingerprint}
        outputs = tally.outputs
        response = await json_response(
            lambda: respond(order.call, outputs, created=order.created, **named), _size(order, tally.said)
        )
        made = time.perf_counter()
        tally.took("respond", made - began)
        await connection.respond(response)
        tally.took("write", time.perf_counter() - made)

    async def _stream(
        self,
        order: Order,
        news: AsyncGenerator[Sequence[News], None],
        tally: Tally,
        bill: Pass,
        connection: Connection,
    ) -> Failure | None:
        named = {"name": order.name, "model": order.model, "fingerprint": self._service.fingerprint}
        chunks = Chunks(order.call, created=order.created, **named)
        events = EventStream(connection.send, self._service.settings.keep_alive_s)
        try:
            async with events.kept_alive():
                async for changed in news:
                    before = tally.said
                    tally.note(changed)
                    bill.used(tally.tokens)
                    began = time.perf_counter()
                    documents = await _documents(chunks, changed, _size(order, tally.said - before))
                    made = time.perf_counter()
                    await events.write(documents)
                    tally.took("respond", made - began)
                    tally.took("write", time.perf_counter() - made)
            await events.end([chunks.usage()] if order.call.include_usage else [])
        except Exception as error:
            if not events.begun:
                raise  # it can still have a status of its own
            failure = _failure(self._reason(error))
            if failure is SURPRISE:
                logger.exception("an exception that nobody expected ended a stream")
            await events.fail(failure)
            return failure
        return None

    def _reason(self, error: Exception) -> Exception:
        """Why a request ended: where the server gave it up, that it stops."""
        stops = isinstance(error, AbortedError) and self._service.flights.stopping
        return stopped() if stops else error

    def _ask(self, order: Order, names: Sequence[str]) -> list[Outputs]:
        call = order.call
        return [
            self._service.llm.generate(
                prompt,
                call.params,
                request_id=name,
                priority=call.priority,
                timeout_s=order.timeout_s,
                arrival=order.arrival,
                reuse=order.reuse,
                positions=call.positions,
                cache_salt=order.tenant.salt,
                tenant=order.tenant.name,
                stream_interval=self._service.settings.stream_interval if call.stream else _COUNTED_EVERY,
            )
            for name, prompt in zip(names, call.prompts, strict=True)
        ]


async def _documents(chunks: Chunks, changed: Sequence[News], size: int) -> Iterable[str]:
    """The chunks of what is new; a client that slept may have much to hear."""

    def made() -> list[str]:
        return [document for number, output in changed for document in chunks.news(number, output)]

    return made() if size <= LARGE else await off_loop(made)


def _size(order: Order, tokens: int) -> int:
    """About how many bytes of a response so many tokens make."""
    logprobs = order.call.params.logprobs
    return tokens * (_TOKEN_BYTES + (0 if logprobs is None else (1 + logprobs) * _LOGPROB_BYTES))


def _failure(error: Exception) -> Failure:
    return failure_of(error) if isinstance(error, InlayError) else SURPRISE
