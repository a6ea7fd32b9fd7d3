"""EngineClient: what LLM, AsyncLLM, the server and batches need of an engine; and the one for one in this process.

Requests go in as plain data (prompt/request.py), and whoever sent one hears of every step that has news of it. Which
thread steps the engine, and who may be called from where: engine/thread.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

from inlay.attention.registry import get_backend
from inlay.attention.storage import bytes_per_token
from inlay.config import EngineConfig
from inlay.engine.core import Engine
from inlay.engine.encoder import Task
from inlay.engine.factory import RequestFactory
from inlay.engine.forward import StepObserver
from inlay.engine.profiler import Profiler
from inlay.engine.profiles import KnownProfiles, Profile
from inlay.engine.request import Request
from inlay.engine.runner import Runner, why_not_shift
from inlay.engine.structured import Guide
from inlay.engine.thread import EngineThread, Listener
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.kv.pool import KVPool
from inlay.kv.store import SegmentStore
from inlay.models.load import LoadedModel
from inlay.models.spec import dtype_name
from inlay.prompt.processor import ModelInfo
from inlay.prompt.request import EngineRequest
from inlay.types import EngineStats, SamplingParams

T = TypeVar("T")


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

    def profile(self, specs: Sequence[SegmentSpec]) -> None:
        """Find out in idle time how much the tokens of these segments move, each behind others of them."""
        ...

    def profiles(self, specs: Iterable[SegmentSpec]) -> Future[dict[bytes, Profile]]:
        """What is known of that, by the keys of those segments of which something is."""
        ...

    def finish_profiles(self) -> None:
        """Do that now, where callers' threads step the engine, as far as it has nothing else to do."""
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
        movable = self._model.why_not_shift is None
        profiler = Profiler(self.store, runner, KnownProfiles(), movable=movable, longest=self._model.max_positions)
        self.engine = Engine(
            self.store,
            runner,
            max_requests=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            prefill_chunk=config.prefill_chunk,
            max_waiting=config.max_waiting,
            max_pass_s=config.max_pass_s,
            profiler=profiler if config.profile == "auto" else None,
        )
        self.factory = RequestFactory(loaded, secrets.randbits(64) if seed is None else seed)
        self.thread = EngineThread(self.engine, own=own_thread)

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

    def profile(self, specs: Sequence[SegmentSpec]) -> None:
        profiler = self.engine.profiler
        if profiler is not None:
            self.call(lambda: profiler.add(specs))

    def profiles(self, specs: Iterable[SegmentSpec]) -> Future[dict[bytes, Profile]]:
        known = self.engine.kv_manager.profiles
        return self.call(lambda: {spec.key: known[spec.key] for spec in specs if spec.key in known})

    def finish_profiles(self) -> None:
        while self.thread.run(partial(self.engine.idle_step, whole=True)):
            pass

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
        self.thread.stop()


def _model_info(loaded: LoadedModel, config: EngineConfig, reason: str | None) -> ModelInfo:
    """What is published of a model. reason: why its segments cannot be read at a shift, or None."""
    keys = KeyMaker(
        fingerprint=loaded.fingerprint,
        kv_dtype=dtype_name(loaded.model.dtype),
        codec="none",
        salt=config.cache_salt.encode(),
        positioned=reason is not None,
    )
    return ModelInfo(loaded.spec.vocab_size, loaded.spec.max_positions, keys, reason)
