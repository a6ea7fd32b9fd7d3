"""EngineClient: what LLM, AsyncLLM, the server and batches need of an engine; and the one for one in this process.

Requests go in as plain data (prompt/request.py), and whoever sent one hears of every step that has news of it. Which
thread steps the engine, and who may be called from where: engine/thread.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from inlay.attention.registry import get_backend
from inlay.attention.storage import bytes_per_token
from inlay.config import EngineConfig, parse_bytes
from inlay.engine.core import Engine
from inlay.engine.encoder import Task
from inlay.engine.factory import RequestFactory
from inlay.engine.forward import StepObserver
from inlay.engine.request import Request
from inlay.engine.runner import Runner, why_not_shift
from inlay.engine.structured import Guide
from inlay.engine.thread import EngineThread, Listener
from inlay.errors import InlayError
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.kv.pool import KVPool
from inlay.kv.residency import Residency
from inlay.kv.store import SegmentStore
from inlay.kv.tiers.disk import DiskTier
from inlay.kv.tiers.tier import Tier
from inlay.models.fingerprint import numerics
from inlay.models.load import LoadedModel
from inlay.models.spec import dtype_name
from inlay.prompt.processor import ModelInfo
from inlay.prompt.request import EngineRequest
from inlay.types import EngineStats, SamplingParams

T = TypeVar("T")

_FLUSH_S = 60.0  # for what is still to be written when an engine ends


class EngineClient(Protocol):
    """An engine as those who ask it for answers see it.

    model: what it publishes of its model, for those who prepare requests.
    """

    @property
    def model(self) -> ModelInfo: ...

    def guide(self, params: SamplingParams, salt: str = "") -> Guide | None:
        """What an answer has to follow, which may take long: a grammar is compiled. Raises ParameterError."""
        ...

    def prepare(self, request: EngineRequest, guide: Guide | None = None) -> Request:
        """A request with the state of its answers, not queued yet. guide: where it is known. Raises ParameterError."""
        ...

    def submit(self, task: Task, listener: Listener) -> None:
        """Queue a request or an encoding. listener: called after each step that has news of it, and when it ends."""
        ...

    def cancel(self, task: Task) -> None:
        """Give it up, wherever it stands; its listener hears no more of it."""
        ...

    def abort(self, task: Task) -> None:
        """Give it up, and tell its listener so."""
        ...

    def stored(self, specs: Iterable[SegmentSpec]) -> Future[frozenset[bytes]]:
        """The keys of those segments that are stored, as of the end of the step under way."""
        ...

    def pump(self) -> None:
        """Take one step, where callers' threads step the engine. Raises InlayError inside a step."""
        ...

    def stats(self) -> EngineStats:
        """What it is doing, and how full its pool is. Cheap, from any thread."""
        ...

    def check_open(self) -> None:
        """Raises InlayError, with the reason, where nothing is done any more."""
        ...

    def shutdown(self) -> None:
        """End it behind its current step; requests under way end with an error."""
        ...


class InProcessClient:
    """An engine of this process.

    own_thread: whether it is stepped on a thread of its own; else callers ``pump`` it.
    seed: of requests that bring none; None draws one.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, own_thread: bool, seed: int | None = None) -> None:
        backend = get_backend(config.attention_backend)
        size = bytes_per_token(loaded.spec.shapes, loaded.model.dtype)
        pool = KVPool(config.kv_bytes(backend.scratch_bytes), size, config.chunk_size)
        runner = Runner(loaded, backend, pool.slots)
        self.storage = runner.storage
        self._model = _model_info(loaded, config, why_not_shift(loaded.spec, runner, pool))
        self.store = SegmentStore(pool, self._model.keys)
        self.residency = Residency(
            self.store,
            runner.storage,
            tiers_of(config),
            model=loaded.name,
            timeout_s=config.store_timeout_s,
        )
        self.engine = Engine(
            self.store,
            runner,
            max_requests=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            prefill_chunk=config.prefill_chunk,
            max_waiting=config.max_waiting,
            max_pass_s=config.max_pass_s,
            residency=self.residency,
            keep_private=config.store_private,
        )
        self.factory = RequestFactory(loaded, secrets.randbits(64) if seed is None else seed)
        self.thread = EngineThread(self.engine, own=own_thread)
        self.residency.wake = self._wake

    @property
    def model(self) -> ModelInfo:
        return self._model

    def guide(self, params: SamplingParams, salt: str = "") -> Guide | None:
        return self.factory.guide(params, salt)

    def prepare(self, request: EngineRequest, guide: Guide | None = None) -> Request:
        return self.factory.make(request, guide)

    def submit(self, task: Task, listener: Listener) -> None:
        self.thread.submit(task, listener)

    def cancel(self, task: Task) -> None:
        self.thread.cancel(task)

    def abort(self, task: Task) -> None:
        self.thread.abort(task)

    def stored(self, specs: Iterable[SegmentSpec]) -> Future[frozenset[bytes]]:
        return self.call(lambda: self.engine.stored(specs))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called between two steps."""
        return self.thread.call(function)

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Tell an observer of every step of the engine from now on; returns what ends that."""
        self.engine.observers.append(observer)
        return partial(self.engine.observers.remove, observer)

    def pump(self) -> None:
        self.thread.pump()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def check_open(self) -> None:
        self.thread.check_open()

    def shutdown(self) -> None:
        """What is to be written is, where that takes no longer than _FLUSH_S."""
        with suppress(InlayError):  # inside a step it could not come further, and closed nothing does
            if not self.residency.settled:
                self.thread.run(self.residency.poll)
                self.residency.flush(_FLUSH_S)
        self.thread.stop()
        self.residency.close()

    def _wake(self) -> None:
        """Have the engine see to what came up, or was copied, between two steps. On any thread."""
        with suppress(InlayError):  # nothing is done any more
            self.call(self.residency.poll)


def tiers_of(config: EngineConfig) -> tuple[Tier, ...]:
    """The tiers below the pool. Raises ParameterError where the folder cannot be used."""
    folder = config.store_folder()
    return () if folder is None else (DiskTier(folder, parse_bytes("store_bytes", config.store_bytes)),)


def _model_info(loaded: LoadedModel, config: EngineConfig, reason: str | None) -> ModelInfo:
    """What is published of a model. reason: why its segments cannot be read at a shift, or None."""
    keys = KeyMaker(
        fingerprint=loaded.fingerprint,
        kv_dtype=dtype_name(loaded.model.dtype),
        codec="none",
        salt=config.cache_salt.encode(),
        positioned=reason is not None,
        numerics=numerics(),
    )
    return ModelInfo(loaded.spec.vocab_size, loaded.spec.max_positions, keys, reason)
