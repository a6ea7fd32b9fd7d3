"""The client of an engine in this process. For threads and callers see engine/thread.py."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch

from inlay.attention.backend import Backend
from inlay.attention.registry import get_backend
from inlay.attention.storage import NARROW, DeviceStorage, KVStorage, bytes_per_token
from inlay.client.engine import EncodeListener, Prepared, TokenListener
from inlay.config import EngineConfig, allocating
from inlay.engine.background.divergence import DivergenceLog
from inlay.engine.background.forced_runs import ShadowSampler
from inlay.engine.background.idle import IdleWorker
from inlay.engine.background.policy_meter import PolicyMeter
from inlay.engine.background.profiler import KnownProfiles, Profile, Profiler
from inlay.engine.background.promoter import Promoter
from inlay.engine.core import EngineCore
from inlay.engine.encoder import Encoding
from inlay.engine.factory import RequestFactory
from inlay.engine.forward import StepObserver
from inlay.engine.pass_cost import measured_cost, measured_rows
from inlay.engine.probes import check_adapters, check_compiled, probe_states, why_not_shift
from inlay.engine.request import Request
from inlay.engine.runner import Runner
from inlay.engine.speculator import Speculator
from inlay.engine.thread import EngineThread
from inlay.engine.unshared_runner import UnsharedRunner
from inlay.errors import InlayError, ParameterError
from inlay.kv.identity import LOSSLESS, KeyMaker, SegmentSpec
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.host import HostTier
from inlay.kv.offload.residency import Residency
from inlay.kv.offload.shared import SharedTier
from inlay.kv.offload.tier import Tier
from inlay.kv.policies import POLICIES, PassCost
from inlay.kv.pool import KVPool, StatePool
from inlay.kv.store import SegmentStore
from inlay.measured import lacks_measurements
from inlay.models.compiling import check_compilable
from inlay.models.device import CPU, free_bytes, total_bytes
from inlay.models.fingerprint import numerics
from inlay.models.load import LoadedModel
from inlay.models.location import public_name
from inlay.models.lora import Adapter, Adapters
from inlay.models.mixers.states import StateStorage
from inlay.models.spec import dtype_name
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.request import EncodeRequest, EngineRequest
from inlay.sampling.params import SamplingParams
from inlay.sampling.structured import Guide
from inlay.settings import parse_bytes
from inlay.types import EngineStats, SegmentState
from inlay.workpool import ThisProcess

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FLUSH_S = 60.0  # for outstanding writes when an engine ends


class InProcessClient:
    """An engine in this process, with its cache. See Engine.

    Args:
        own_thread: if True, the engine steps on its own thread; else callers ``pump`` it.
        seed: for requests without one. None draws one.
        adapters: the adapters that requests may name.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        own_thread: bool,
        seed: int | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self._process = ThisProcess()
        device = loaded.model.device
        backend = get_backend(config.attention_backend, device)
        self._adapters = Adapters(loaded.model, (adapters or {}).values())
        if config.compile:
            check_compilable(loaded.model, loaded.name, loaded.form, adapters=bool(adapters))
        runner, pool, states, max_requests = _make_runner(loaded, backend, config, self._adapters)
        self.storage = runner.storage
        if config.compile:
            check_compiled(loaded.spec, runner, pool)
        check_adapters(self._adapters, loaded.spec, runner, pool)
        named = {name: adapter.digest for name, adapter in (adapters or {}).items()}
        self._model = _model_info(loaded, config, pool, why_not_shift(loaded.spec, runner, pool), named)
        policy = POLICIES[config.eviction]
        measures = config.eviction == "cost" and loaded.spec.unshared is None
        cost = measured_cost(loaded.spec, runner, pool) if measures else PassCost()
        self.store = SegmentStore(pool, self._model.keys, policy, cost, states)
        movable = self._model.why_not_shift is None
        share = config.promotion_memory if states is None else 0.0  # modules alone are promoted
        self.divergence_log = DivergenceLog(config.shadow_threshold, profiles=config.profile == "auto")
        shadow: ShadowSampler | None = None
        if config.shadow:
            shadow = ShadowSampler(self.store, runner, self.divergence_log, share=config.shadow, seed=seed)
        self.residency = Residency(
            self.store,
            runner.storage,
            tiers_of(config, cost) if loaded.spec.unshared is None else (),  # nothing to store without reuse
            host=host_tier(config, cost, runner.storage) if loaded.spec.unshared is None and states is None else None,
            model=public_name(loaded.name),
            timeout_s=config.store_timeout_s,
            states=runner.states,
            wake=self.wake,
        )
        profiler = Profiler(
            self.store,
            runner,
            KnownProfiles.of(self.residency.profiles()),
            residency=self.residency,
            movable=movable,
            longest=self._model.max_positions,
        )
        speculates = config.speculation == "lookup" and loaded.spec.unshared is None and states is None
        speculator = Speculator(measured_rows(loaded.spec, runner, pool)) if speculates else None
        #: Compares policies in idle time. None if ``measure`` is off, or the model reads no modules.
        self.meter: PolicyMeter | None = None
        if states is None and lacks_measurements(self._model, config):
            self.meter = PolicyMeter(self.store, runner, profiler)
        self.engine = EngineCore(
            self.store,
            runner,
            max_requests=max_requests,
            max_tokens=config.max_num_batched_tokens,
            prefill_chunk=config.prefill_chunk,
            max_waiting=config.max_waiting,
            max_pass_s=config.max_pass_s,
            profiler=profiler if config.profile == "auto" and states is None else None,
            promoter=Promoter(self.store, runner, share=share) if share else None,
            shadow=shadow,
            speculator=speculator,
            meter=self.meter,
            residency=self.residency,
            kept=config.kept,
            pin_share=config.pin_memory,
            state_interval=config.state_interval,
            prefetch_likely=config.prefetch == "likely",
        )
        self.factory = RequestFactory(
            loaded,
            secrets.randbits(64) if seed is None else seed,
            adapters=self._adapters,
            forms=self.residency.forms if self.residency.codecs else None,
        )
        self.thread = EngineThread(self.engine, own=own_thread)

    @property
    def model(self) -> ModelInfo:
        return self._model

    def compile_grammar(self, params: SamplingParams, salt: str = "") -> Guide | None:
        return self.factory.guide(params, salt)

    def prepare(self, request: EngineRequest, grammar: Guide | None = None) -> Request:
        return self.factory.make(request, grammar)

    def submit(self, request: Prepared, listener: TokenListener) -> None:
        assert isinstance(request, Request), "it is what prepare made"
        self.thread.submit(request, listener)

    def finish(self, request_id: str, index: int) -> None:
        self.thread.finish(request_id, index)

    def encode(self, request: EncodeRequest, listener: EncodeListener) -> None:
        encoding = Encoding(
            request.name,
            request.specs,
            request.request_id,
            tenant=request.scope.tenant,
            weight=request.scope.weight,
            ttl_s=request.ttl_s,
        )
        self.thread.submit(encoding, listener)

    def cancel(self, request_id: str, *, report: bool = False) -> None:
        if report:
            self.thread.abort(request_id)
        else:
            self.thread.cancel(request_id)

    def stored(self, request: EncodeRequest) -> Future[frozenset[bytes]]:
        return self.call(lambda: self.engine.kv_manager.stored(request.specs))

    def look(self, request: EncodeRequest, owner: str) -> Future[list[SegmentState | None]]:
        """Return the state of each segment of a request, or of its stored form. None if it is stored nowhere.

        A state shows the pins of ``owner`` (see ``pin``).
        """
        return self.call(lambda: self.engine.kv_manager.retention.look(request.specs, owner))

    def resident(self, request: EncodeRequest) -> Future[list[dict[str, int]]]:
        return self.call(lambda: self.engine.kv_manager.retention.resident(request.specs))

    def modules(self) -> Future[tuple[SegmentSpec, ...]]:
        """Return the module segments in the pool, of all salts."""
        return self.call(self.engine.kv_manager.retention.modules)

    def forget(self, request: EncodeRequest | None = None) -> Future[int]:
        if request is None:
            return self.call(self.engine.forget)
        return self.call(partial(self.engine.evict, request.specs, request.labels))

    def evict_texts(self, salt: str) -> Future[int]:
        """Evict the text of all requests with a salt that is no module. Returns the number of tokens."""
        return self.call(lambda: self.engine.evict_texts(salt))

    def pin(
        self, request: EncodeRequest, owner: str, reason: str, budget: int | None = None, *, instead: str | None = None
    ) -> Future[int]:
        """Pin the segments of a request in the pool, also those that are stored later. Returns the bytes of the owner's
        pins.

        Args:
            request: has the segments.
            owner: the salt or tenant whose pins these are.
            reason: the name of the pin for ``unpin``.
            budget: the most bytes of the owner's pins. None for no bound but ``pin_memory``.
            instead: the reason of an earlier pin that this one replaces. A refusal changes nothing.

        Raises:
            CapacityError: if the pins exceed the budget or the pool's share.
        """
        return self.call(lambda: self.engine.kv_manager.retention.pin(request.specs, owner, reason, budget, instead))

    def unpin(self, request: EncodeRequest, owner: str | None, reason: str) -> Future[int]:
        """Remove the pin of an owner, or of all owners for None, with this reason.

        Returns:
            The bytes of the owner's other pins.
        """
        return self.call(lambda: self.engine.kv_manager.retention.unpin(request.specs, owner, reason))

    def pinned(self, owner: str | None) -> Future[list[SegmentSpec]]:
        """Return the segments that an owner has pinned. For the owner None, return all that are pinned by key."""
        return self.call(lambda: self.engine.kv_manager.retention.pinned(owner))

    def profile(self, specs: Sequence[SegmentSpec]) -> None:
        """Measure the deviation profiles of these segments in idle time, each behind others of them."""
        profiler = self.engine.profiler
        if profiler is not None:
            self.call(lambda: profiler.add(specs))

    def profiles(self, specs: Iterable[SegmentSpec]) -> Future[dict[bytes, Profile]]:
        """Return the known deviation profiles of these segments, by key."""
        known = self.engine.kv_manager.profiles
        return self.call(lambda: {spec.key: known[spec.key] for spec in specs if spec.key in known})

    def finish_profiles(self) -> None:
        """Measure outstanding deviation profiles now, unless requests are running."""
        self._use_time(self.engine.profiler)

    def promote(self) -> None:
        """Promote repeated combinations now, unless requests are running."""
        self._use_time(self.engine.profiler, self.engine.promoter)

    def measure_divergence(self) -> None:
        """Compare waiting answers with full prefill now, unless requests are running."""
        self._use_time(self.engine.shadow)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function between two steps."""
        return self.thread.call(function)

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Call an observer after every step of the engine; returns a function that removes it."""
        self.engine.observers.append(observer)
        return partial(self.engine.observers.remove, observer)

    def pump(self) -> bool:
        return self.thread.pump()

    @property
    def busy(self) -> bool:
        """True if the engine has work. Free and thread-safe."""
        return self.engine.busy

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def check_health(self) -> None:
        self.thread.check_open()

    def shutdown(self) -> None:
        """Stop after the current step, and finish outstanding writes within _FLUSH_S seconds."""
        if self._process.left:  # the engine's threads are in another process, which ends them
            return
        with suppress(InlayError):  # inside a step it could not come further, and closed nothing does
            if not self.residency.settled:
                self.thread.run(self.engine.poll)
                self.residency.flush(_FLUSH_S)
        self.thread.stop()
        self.residency.close()
        self._adapters.remove()

    def _use_time(self, *workers: IdleWorker | None) -> None:
        """Run these workers until they have no more work, if no request is running."""
        while self.thread.run(partial(self.engine.idle_step, whole=True, only=workers)):
            pass

    def wake(self) -> None:
        """Process finished loads and copies between two steps. Thread-safe."""
        with suppress(InlayError):  # the engine has stopped
            self.call(self.engine.poll)


def _make_runner(
    loaded: LoadedModel, backend: Backend, config: EngineConfig, adapters: Adapters
) -> tuple[Runner, KVPool, StatePool | None, int]:
    """Return the runner of a model's passes, the KV pool, the state pool, and the most requests at the same time.

    The state pool is None for a model without recurrent layers.
    """
    device = loaded.model.device
    budget = config.kv_bytes(backend.scratch_bytes, free_bytes(device))
    with allocating("kv_memory", budget, config.kv_memory, total_bytes(device), _owner(device)):
        _check_states(loaded, config)
        if loaded.spec.unshared is not None:
            _check_unshared(loaded.spec.unshared, config, adapters)
            unshared = UnsharedRunner(loaded, backend)
            requests, tokens = unshared.probe().room(budget, config.max_num_seqs, loaded.spec.max_positions)
            size = max(1, unshared.shape.bytes_per_token)
            return unshared, KVPool(tokens * size, size, config.chunk_size), None, requests
        kv_dtype = NARROW.get(config.kv_cache_dtype, loaded.model.dtype)
        if loaded.spec.recurrent:
            return _make_recurrent(loaded, backend, config, adapters, budget, kv_dtype)
        pool = KVPool(budget, bytes_per_token(loaded.spec.shapes, kv_dtype), config.chunk_size)
        runner = Runner(loaded, backend, pool.slots, adapters=adapters, kv_dtype=kv_dtype, compile=config.compile)
    return runner, pool, None, config.max_num_seqs


def _make_recurrent(
    loaded: LoadedModel,
    backend: Backend,
    config: EngineConfig,
    adapters: Adapters,
    budget: int,
    kv_dtype: torch.dtype,
) -> tuple[Runner, KVPool, StatePool, int]:
    """See ``_make_runner``. The budget holds KV and states."""
    sizes = probe_states(loaded, backend, kv_dtype)
    slots, left = sizes.share(budget, config.state_bytes())
    pool = KVPool(left, sizes.token_bytes, config.chunk_size)
    states = StatePool(slots, sizes.slot_bytes)
    storage = StateStorage(slots, backend.device, sizes.shapes)
    runner = Runner(loaded, backend, pool.slots, adapters=adapters, kv_dtype=kv_dtype, states=storage)
    # A request owns a slot and may read another one; slot 0 belongs to no request.
    return runner, pool, states, min(config.max_num_seqs, slots - 2)


def _owner(device: torch.device) -> str:
    """Return the name of a device for messages about its memory."""
    return "this machine" if device.type == "cpu" else f"the GPU {device}"


def _check_states(loaded: LoadedModel, config: EngineConfig) -> None:
    """Raise ParameterError for settings that do not fit a model with, or without, recurrent layers."""
    spec = loaded.spec
    for name, value in (("state_memory", config.state_memory), ("state_interval", config.state_interval)):
        if not spec.recurrent and value not in (None, 0):
            raise ParameterError(
                f"{name} is {value!r}, and {loaded.name} has no recurrent layers; leave it out",
                code="parameter.conflict",
            )
    asked = {
        "compile is set": config.compile,
        f"shadow is {config.shadow:g}": bool(config.shadow),
        f"store_codec is '{config.store_codec}'": config.store_codec != LOSSLESS,  # exact reuse reads no lossy form
    }
    why = spec.whole or f"models of type '{spec.family}' have recurrent layers, whose states it does not know"
    for what, so in asked.items():
        if spec.recurrent and so:
            raise ParameterError(f"{what}, and {why}; leave that out", code="model.no_reuse")


def _check_unshared(why: str, config: EngineConfig, adapters: Adapters) -> None:
    """Raise ParameterError for settings that a model without reuse does not support. ``why`` is the reason."""
    asked = {
        "adapters were given": bool(adapters),
        "compile is set": config.compile,
        f"kv_cache_dtype is '{config.kv_cache_dtype}'": config.kv_cache_dtype != "auto",
        f"attention_backend is '{config.attention_backend}'": config.attention_backend != "auto",
    }
    for what, so in asked.items():
        if so:
            raise ParameterError(f"{what}, and {why}; leave that out", code="model.no_reuse")


def host_tier(config: EngineConfig, cost: PassCost, storage: KVStorage) -> HostTier | None:
    """Return the host tier below a device's pool; None if the pool is in host memory or the tier is off."""
    if isinstance(storage, DeviceStorage):
        size = config.host_bytes()
        if not size:
            return None
        with allocating("host_memory", size, config.host_memory, total_bytes(CPU), _owner(CPU)):
            return HostTier(size, POLICIES[config.eviction], cost, lock=storage.lock)
    if config.host_memory is not None and config.host_bytes():
        logger.warning(
            "host_memory is %s, and the KV pool is in the memory of the host: device and host are one tier here, "
            "called device, and nothing is copied between them",
            config.host_memory,
        )
    return None


def tiers_of(config: EngineConfig, cost: PassCost) -> tuple[Tier, ...]:
    """Return the tiers below the pool and host memory, nearest first. Raises ParameterError if one cannot be used."""
    tiers: list[Tier] = []
    folder = config.store_folder()
    if folder is not None:
        quota = parse_bytes("store_bytes", config.store_bytes)
        tiers.append(DiskTier(folder, quota, config.store_codec, POLICIES[config.eviction], cost))
    if config.store_shared is not None:
        tiers.append(SharedTier(config.store_shared, config.store_codec, timeout_s=config.store_timeout_s))
    return tuple(tiers)


def _model_info(
    loaded: LoadedModel,
    config: EngineConfig,
    pool: KVPool,
    reason: str | None,
    adapters: Mapping[str, bytes],
) -> ModelInfo:
    """Return the description of a model for the preparation of prompts.

    Args:
        pool: the KV pool.
        reason: see ModelInfo.why_not_shift.
    """
    kv_dtype = config.kv_cache_dtype if config.kv_cache_dtype in NARROW else dtype_name(loaded.model.dtype)
    keys = KeyMaker(
        fingerprint=loaded.fingerprint,
        kv_dtype=kv_dtype,
        codec=LOSSLESS,
        salt=config.cache_salt.encode(),
        positioned=reason is not None,
        numerics=numerics(),
    )
    spec = loaded.spec
    return ModelInfo(
        spec.vocab_size,
        spec.max_positions,
        pool.bytes_per_token,
        keys,
        reason,
        adapters,
        spec.unshared,
        limit=spec.limit,
        text_model=loaded.text_model,
        why_exact=spec.whole,
        recurrent=spec.recurrent,
        first_tokens=spec.first_tokens,
        pool_tokens=pool.slots,
    )
