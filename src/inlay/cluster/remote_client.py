"""RemoteClient: the engine of an ingress, which forwards to replicas in other processes. ClusterLLM: its AsyncLLM."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from inlay.client.async_llm import AsyncLLM
from inlay.client.base import Served
from inlay.client.engine import EncodeListener, Prepared, TokenListener
from inlay.cluster.pieces import Wanted, wanted_by, wanted_to_encode
from inlay.cluster.routing import Routing
from inlay.cluster.transport import Description, ReplicaLostError, Status, Transport, next_item, summed
from inlay.errors import AbortedError, DeadlineError, EngineDeadError, InlayError
from inlay.events import EncodeEvent, Event, Fault, TokenEvent, events_from_bytes
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.models.load import load_tokenizer
from inlay.prompt.inputs import check_template
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.request import EncodeRequest, EngineRequest
from inlay.sampling.params import SamplingParams
from inlay.types import EngineStats
from inlay.wording import fault_in_words


class RemoteRequest:
    """A request that is ready to be sent, and its progress as reported to its listener.

    Args:
        wanted: The pieces that replicas may hold.

    Attributes:
        data: Its bytes.
        sent: True if tokens or an error were reported.
        over: True if all answers have ended.
        said: Tokens of all answers.
        aborted: True if the caller aborted the request, so that no other replica is tried.
    """

    def __init__(self, request: EngineRequest, wanted: Wanted, routing: Routing) -> None:
        self.request = request
        self.wanted = wanted
        self.data = request.to_bytes()
        self.said = 0
        self.sent = False
        self.aborted = False
        self._learned = False
        self._open = set(range(request.params.n))
        self._listener: TokenListener | None = None
        self._routing = routing

    @property
    def id(self) -> str:
        return self.request.request_id

    def begin(self, listener: TokenListener) -> None:
        """Report the progress to a listener from now on."""
        self._listener = listener

    @property
    def over(self) -> bool:
        return not self._open

    def take(self, events: Sequence[Event]) -> None:
        """Pass events to the listener. Raises ReplicaLostError if the engine ended before the first token."""
        told = [event for event in events if isinstance(event, TokenEvent)]
        if not self.sent and any(event.error is not None and event.error.kind == "EngineDeadError" for event in told):
            raise ReplicaLostError("its engine has ended", code="cluster.replica_gone")
        for event in told:
            self.said += len(event.token_ids)
            if event.finish_reason is not None or event.error is not None:
                self._open.discard(event.index)
            if event.token_ids and not self.sent:
                self._routing.first_token(self.id)
            self.sent = self.sent or bool(event.token_ids) or event.error is not None
            if event.usage is not None and not self._learned:
                self._learned = True
                self._routing.learn(self.id, event.usage, event.metrics)
        self._tell(told)

    def finish(self, index: int) -> None:
        """Mark an answer as ended by its listener."""
        self._open.discard(index)

    def fail(self, error: InlayError) -> None:
        """End all open answers with an error."""
        failed = [TokenEvent(self.id, at, error=Fault.of(error)) for at in sorted(self._open)]
        self._open.clear()
        if failed:
            self._tell(failed)

    @property
    def gone(self) -> str:
        """The error message for a lost replica."""
        if self.sent:
            return "the replica that answered has gone in the middle of the answer; send the request again"
        return "replicas that the request was sent to have gone one after the other; send it again in a moment"

    def _tell(self, events: Sequence[TokenEvent]) -> None:
        assert self._listener is not None, "it has begun"
        self._listener(events)


logger = logging.getLogger(__name__)


class HomeEncoding:
    """One encoding, split among replicas. Its listener gets the progress, and once the end."""

    def __init__(
        self, request: EncodeRequest, keys: KeyMaker, routing: Routing, transport: Transport, listener: EncodeListener
    ) -> None:
        self._request = request
        self._keys = keys
        self._routing = routing
        self._transport = transport
        self._listener = listener
        self._done: dict[str, int] = {}  # tokens of each replica's part
        self._over = False

    async def run(self) -> None:
        """Encode. Raises errors that end it early. Report these to the listener with ``fail``."""
        parts: defaultdict[str, list[SegmentSpec]] = defaultdict(list)
        specs = self._request.specs
        homes = self._routing.homes(wanted_to_encode(self._request, self._keys))
        if specs and not homes:
            raise EngineDeadError("no replica of the model answers now; try again in a moment")
        for spec, home in zip(specs, homes, strict=True):
            parts[home].append(spec)
        try:
            async with asyncio.TaskGroup() as group:
                for number, (home, own) in enumerate(parts.items()):
                    part = replace(self._request, request_id=f"{self._request.request_id}-{number}", specs=tuple(own))
                    group.create_task(self._encode(home, part))
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """Report an early end to the listener, unless it has ended."""
        if not self._over:
            self._end(Fault.of(error))

    async def _encode(self, replica: str, part: EncodeRequest) -> None:
        """Encode segments on one replica. If it goes, later requests will encode the rest."""
        try:
            async with aclosing(self._transport.encode(replica, part.to_bytes())) as items:
                while (item := await next_item(items, lambda: self._check(replica))) is not None:
                    for event in events_from_bytes(item):
                        if event.error is not None:
                            raise event.error.exception()
                        assert isinstance(event, EncodeEvent), "it is an encoding"
                        self._report(replica, event.done)
        except ReplicaLostError as error:
            logger.warning("%s: replica %s encodes no more of it: %s", self._request.name, replica, error)
        self._report(replica, part.tokens)

    def _check(self, replica: str) -> None:
        """Raise ReplicaLostError if the replica has gone, or has stalled while there are others."""
        replicas = self._routing.replicas
        if replica not in replicas:
            raise ReplicaLostError("it has gone", code="cluster.replica_gone")
        if len(replicas) > 1 and self._routing.stalled(replica):
            raise ReplicaLostError("it has stalled", code="cluster.replica_stalled")

    def _report(self, replica: str, count: int) -> None:
        self._done[replica] = count
        self._listener([EncodeEvent(self._request.request_id, self._so_far(), self._request.tokens)])

    def _end(self, fault: Fault | None) -> None:
        self._over = True
        total = self._request.tokens
        self._listener([EncodeEvent(self._request.request_id, self._so_far() if fault else total, total, True, fault)])

    def _so_far(self) -> int:
        return min(sum(self._done.values()), self._request.tokens)


_FOLLOW_S = 0.5  # pause between two status calls to a replica
_BUSY_S = 0.1  # pause after a change; longer with more than _MANY replicas
_MANY = 20
_CALL_S = 5.0  # timeout of a small call
_LATE_S = 2.0  # grace time after a deadline for the replica's own error
_ATTEMPTS = 4  # sends of a request if replicas go away


class RemoteClient:
    """See Engine. It belongs to the event loop that it is created on. Its methods are thread-safe.

    Args:
        model: The model information that the replicas published.

    Listeners are called on the loop.
    """

    def __init__(self, model: ModelInfo, transport: Transport, routing: Routing) -> None:
        self._model = model
        self._transport = transport
        self._routing = routing
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of requests and encodings, by id
        self._ending: dict[str, InlayError | None] = {}  # of cancelled ones, the error for their listeners
        self._requests: dict[str, RemoteRequest] = {}  # that replicas answer, by id
        self._others: set[asyncio.Task[Any]] = set()
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def model(self) -> ModelInfo:
        return self._model

    def compile_grammar(self, params: SamplingParams, salt: str = "") -> None:
        """Do nothing: replicas compile grammars, because compiled ones cannot be sent."""

    def prepare(self, request: EngineRequest, grammar: Any = None) -> RemoteRequest:
        return RemoteRequest(request, wanted_by(request, self._model.keys), self._routing)

    def submit(self, request: Prepared, listener: TokenListener) -> None:
        assert isinstance(request, RemoteRequest), "it is what prepare made"
        self.check_health()
        request.begin(listener)
        self._begin(request.id, lambda: self._answer(request), request.fail)

    def finish(self, request_id: str, index: int) -> None:
        if (request := self._requests.get(request_id)) is not None:
            request.finish(index)
        self._tell(request_id, "finish", request_id, index)

    def encode(self, request: EncodeRequest, listener: EncodeListener) -> None:
        self.check_health()
        encoding = HomeEncoding(request, self._model.keys, self._routing, self._transport, listener)
        self._begin(request.request_id, encoding.run, encoding.fail)

    def cancel(self, request_id: str, *, report: bool = False) -> None:
        self._on_loop(lambda: self._abort(request_id) if report else self._cancel(request_id))

    def stored(self, request: EncodeRequest) -> Future[frozenset[bytes]]:
        data = request.to_bytes()

        async def ask() -> frozenset[bytes]:
            said = await self._ask_all("stored", data)
            return frozenset(key for keys in said for key in keys)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)

    def resident(self, request: EncodeRequest) -> Future[list[dict[str, int]]]:
        """Return "pool" or "below" for each segment that a replica holds, as the router's map has it."""
        found: Future[list[dict[str, int]]] = Future()
        try:
            pieces = wanted_to_encode(request, self._model.keys)
            tiers = self._routing.resident(pieces)
            found.set_result(
                [{} if tier is None else {tier: piece.tokens} for piece, tier in zip(pieces, tiers, strict=True)]
            )
        except Exception as error:  # it belongs to the caller who waits for the future
            found.set_exception(error)
        return found

    def forget(self, request: EncodeRequest | None = None) -> Future[int]:
        data = None if request is None else request.to_bytes()

        async def ask() -> int:
            return sum(await self._ask_all("forget", data))

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)

    def stats(self) -> EngineStats:
        """Return the sums of the last statistics of all replicas."""
        return summed(self._routing.stats())

    def check_health(self) -> None:
        if self._closed:
            raise InlayError("the client has been shut down; make a new one", code="engine.shut_down")
        if not self._routing.replicas:
            raise EngineDeadError("no replica of the model answers now; try again in a moment")

    def shutdown(self) -> None:
        self._closed = True
        self._on_loop(self._end_all)

    def set_replicas(self, names: Sequence[str]) -> None:
        """Follow exactly these replicas. Call on the loop."""
        self._routing.set_replicas(names)
        for name in names:
            if name not in self._followers or self._followers[name].done():
                self._followers[name] = self._loop.create_task(self._follow(name))
        for name in [name for name in self._followers if name not in names]:
            self._followers.pop(name).cancel()

    async def _follow(self, replica: str) -> None:
        """Poll the status of a replica forever."""
        failed = False
        while True:
            pause = _FOLLOW_S
            try:
                epoch, number = self._routing.heard(replica)
                said = await self._transport.call(replica, "status", epoch, number, timeout_s=_CALL_S)
                status = Status.from_dict(said)
                self._routing.update(replica, status.stats, status.changes)
                if status.changes.last != number:
                    pause = min(_FOLLOW_S, _BUSY_S * max(1.0, len(self._followers) / _MANY))
                failed = False
            except ReplicaLostError:
                pass  # it will come back or be removed
            except Exception:  # it may be temporary
                if not failed:
                    logger.exception("replica %s does not say how it is; it is asked again", replica)
                failed = True
            await asyncio.sleep(pause)

    # Requests

    async def _answer(self, request: RemoteRequest) -> None:
        """Send a request, and again to another replica if its replica goes before the first token.

        Raises other errors that end the request. The listener must be told of them.
        """
        self._requests[request.id] = request
        self._routing.ask(request.id, request.wanted)
        try:
            for attempt in range(_ATTEMPTS):
                if attempt:
                    self._routing.again(request.id)
                try:
                    await self._send(request)
                except ReplicaLostError as error:
                    lost = self._routing.waits_at(request.id)
                    logger.warning("request %s lost its replica %s: %s", request.id, lost, error)
                    if request.aborted:
                        raise AbortedError(f"request {request.id} was aborted") from error
                    if request.sent:
                        break
                else:
                    return
            raise EngineDeadError(request.gone)
        finally:
            del self._requests[request.id]
            self._routing.ended(request.id, request.said)

    async def _send(self, request: RemoteRequest) -> None:
        """Send a request once. Raises ReplicaLostError if the replica goes, or stalls before the first token."""
        deadline, remaining = request.request.deadline, None
        if deadline is not None:
            remaining = deadline - time.perf_counter()
            if remaining <= 0:
                raise DeadlineError(f"request {request.id}: its deadline has passed before a replica answered")
        async with aclosing(self._transport.answer(request.id, request.data, remaining)) as items:
            while not request.over:
                item = await next_item(items, lambda: self._check(request))
                if item is None:
                    raise ReplicaLostError("its stream ended before the answer", code="cluster.replica_gone")
                request.take(events_from_bytes(item))

    def _check(self, request: RemoteRequest) -> None:
        """Raise if the replica stalls before the first token, or is far beyond the deadline."""
        deadline = request.request.deadline
        if deadline is not None and time.perf_counter() > deadline + _LATE_S:
            raise DeadlineError(f"request {request.id}: its replica has not ended it by its deadline")
        replica = self._routing.waits_at(request.id)
        alone = replica is None or len(self._routing.replicas) == 1
        if not (request.sent or alone) and self._routing.stalled(replica or ""):
            raise ReplicaLostError("it has stalled", code="cluster.replica_stalled")

    # The loop

    def _begin(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], fail: Callable[[InlayError], None]
    ) -> None:
        """Start work as a task. fail: is called with the error if it ends early."""

        def begin() -> None:
            task = self._tasks[name] = self._loop.create_task(work())
            task.add_done_callback(lambda ended: self._ended(name, ended, fail))

        self._on_loop(begin)

    def _ended(self, name: str, task: asyncio.Task[None], fail: Callable[[InlayError], None]) -> None:
        """Report the end of a task, even if it never started. If the caller cancelled the request, report nothing."""
        why: InlayError | None = EngineDeadError(f"request {name} was cancelled; send it again")
        if self._tasks.get(name) is task:
            del self._tasks[name]
            why = self._ending.pop(name, why)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            if why is not None:
                fail(why)
        elif isinstance(error, InlayError):
            fail(error)
        elif error is not None:
            logger.error("request %s ended by a fault", name, exc_info=error)
            fail(EngineDeadError(f"request {name} ended by a fault, {fault_in_words(error)}; send it again"))

    def _abort(self, name: str) -> None:
        """Abort a request. Ends its task here if no replica has it, if it is an encoding, or if the replica is lost."""

        def end() -> None:
            self._cancel(name, AbortedError(f"request {name} was aborted"))

        if (request := self._requests.get(name)) is not None:
            request.aborted = True
        if self._routing.replica_of(name) is None:
            end()
        else:
            self._tell(name, "abort", name, otherwise=end)

    def _cancel(self, name: str, why: InlayError | None = None) -> None:
        """Cancel a task. why: the error for its listener, None for none."""
        task = self._tasks.get(name)
        if task is not None:
            self._ending.setdefault(name, why)
            task.cancel()

    def _tell(self, request_id: str, method: str, *args: Any, otherwise: Callable[[], None] = lambda: None) -> None:
        """Call the replica that a request is at. otherwise: is called if that fails."""
        replica = self._routing.replica_of(request_id)
        if replica is None:
            return

        async def tell() -> None:
            try:
                await self._transport.call(replica, method, *args, timeout_s=_CALL_S)
            except InlayError:
                otherwise()

        self._on_loop(lambda: self._keep(self._loop.create_task(tell())))

    async def _ask_all(self, method: str, *args: Any) -> list[Any]:
        """Call all replicas and return the results, without those of lost replicas."""
        calls = [self._transport.call(name, method, *args, timeout_s=_CALL_S) for name in self._routing.replicas]
        said = await asyncio.gather(*calls, return_exceptions=True)
        for one in said:
            if isinstance(one, BaseException) and not isinstance(one, ReplicaLostError):
                raise one
        return [one for one in said if not isinstance(one, BaseException)]

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def _on_loop(self, do: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # a closed loop does nothing any more
            self._loop.call_soon_threadsafe(do)

    def _end_all(self) -> None:
        for name in self._tasks:
            self._cancel(name, InlayError("the client was shut down before the request ended", code="engine.shut_down"))
        for task in (*self._others, *self._followers.values()):
            task.cancel()


class ClusterLLM(AsyncLLM):
    """The AsyncLLM of an ingress. It prepares prompts and schemas, and replicas compute.

    Args:
        client: The client of the replicas.
        said: The model description that the replicas published.
        tokenizer: The tokenizer of the model.
        settings: The EngineConfig fields that concern prompts.

    Raises:
        ParameterError: If a setting is invalid.
    """

    def __init__(
        self,
        client: RemoteClient,
        said: Description,
        tokenizer: PreTrainedTokenizerBase,
        settings: dict[str, Any],
    ) -> None:
        super().__init__(Served(client, said.name, tokenizer, said.defaults, said.adapters), **settings)


def tokenizer_of(model: str, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, without its weights. Raises ModelError, ParameterError."""
    tokenizer = load_tokenizer(model)
    if chat_template is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = check_template(chat_template)
    return tokenizer
