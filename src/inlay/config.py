"""The settings of an engine."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from inlay.errors import CapacityError, ParameterError, PolicyError
from inlay.kv.identity import ROUNDED
from inlay.kv.offload.codecs import CODECS
from inlay.kv.offload.link import check_address
from inlay.kv.offload.tier import Kept
from inlay.kv.policies import DEFAULT_EVICTION, POLICIES
from inlay.policy import PolicyFields, ReusePolicy, check_positions
from inlay.tolerance import DEFAULT, Tolerance
from inlay.wording import show

PLACEHOLDERS = ("none", "unk")
GENERATION_CONFIGS = ("auto", "off")
PROFILES = ("auto", "off")
MEASURES = ("auto", "off")
PREFETCHES = ("waiting", "likely")
KV_CACHE_DTYPES = ("auto", *ROUNDED)

#: The default threshold of shadow sampling, in nats a token.
DEFAULT_THRESHOLD = 0.1

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, validated here. Raises ParameterError.

    reuse, recompute, promote, across_adapters: the default reuse policy, see PolicyFields. None for
        ``policy.default_policy``.
    tolerance: for "auto" without one. It is the largest divergence from full prefill in nats per token. A text like
        "answers:0.98" is the least share of equal answers (docs/guides/check-prompts.md).
    positions: the default position policy. None for "packed" if the model allows shifts, else "schema".
    kv_memory: the size of the KV pool, in bytes or like "4GiB". None for a quarter of the free memory, at most 4 GiB.
        On a GPU, None takes nine tenths of the memory that the weights leave.
    state_memory: for models with recurrent layers, the part of ``kv_memory`` for their states, in bytes or like "1GiB".
        It holds the states of running requests and the stored ones. None for half, at most 1,024 states. Other models
        have no states and refuse it.
    host_memory: the size of the host tier, in bytes or like "16GiB". It holds modules that do not fit in a GPU's pool.
        0 for none. None for 4 GiB, at most a quarter of the host's free memory. A pool in host memory ignores it.
    kv_cache_dtype: the type of stored keys and values. "auto" for the model's dtype; "int8" or "fp8" (GPU) for one
        byte per number. Rounded types have a scale per token and head, and the engine computes over rounded values.
    chunk_size: tokens per chunk of the pool.
    max_num_seqs: the most requests that run at the same time.
    max_num_batched_tokens: the most tokens in one forward pass.
    max_waiting: the most queued requests. None for no limit.
    prefill_chunk: the most prompt tokens in a pass in which other requests decode. It bounds their delay.
    max_pass_s: the target for the longest pass, in seconds. Deadlines, cancellations and shutdown wait for a pass.
        The engine measures how many prompt tokens fit, 32 at least. None for no target.
    eviction: the order of eviction in a full pool or store, one of "hybrid", "lru", "lru2", "lfu" and "cost".
        "hybrid" evicts request text first (least recently used), then modules (least frequently used). See
        docs/guides/cache-tiers.md.
    device: the device of the model, the pool and the attention: "cpu", "cuda", "cuda:1" or "auto". "auto" keeps
        the device of a loaded model. A model that is given by name goes to a GPU if there is one.
    attention_backend: "triton" (GPUs), "cpu" (the compiled kernel), "torch" or "reference". "auto" takes the first
        one that the device and the installation have.
    compile: if True, the model runs through ``torch.compile``. Startup takes longer. It requires stock weights, as on
        a GPU, and no adapters.
    placeholders: the filling of a parameter's hole while a module is encoded, "none" or "unk".
    cache_salt: text that separates this engine's segments from those of other engines.
    max_model_len: the most tokens of a prompt with its answer. None for the model's positions.
    profile: "auto" measures the deviation profiles of a schema's modules in idle time, for recompute="profiled:…".
        "off" makes none, and the first tokens of modules are recomputed.
    promotion_memory: the share of the pool, 0 to 1, for prompt prefixes that are promoted. These are prefixes under
        ``modular`` that are requested again and encoded exactly in idle time. 0 for none.
    pin_memory: the share of the pool, 0 to 1, that all pins together may take. See ``LLM.pin``.
    shadow: the share of answers from approximate reuse, 0 to 1, that are recomputed in full in idle time. 0 for none
        (docs/guides/reuse-policies.md).
    shadow_threshold: the largest divergence from full prefill of answers to a schema, in nats per token. Above it,
        its requests get a safer policy. None for no limit.
    measure: "auto" compares recomputations on live requests in idle time, until ``reuse="auto"`` can choose by the
        result (docs/guides/reuse-policies.md). "off" compares none.
    generation_config: "auto" takes sampling defaults from the model's generation configuration. "off" takes those of
        SamplingParams.
    prefetch: the segments that are loaded from lower tiers ahead of time. "waiting" for those of queued requests.
        "likely" adds siblings of the union members in a prompt, and the modules that followed its own last time.
    store: a folder in which schemas' segments outlive the process, or "off". None for INLAY_STORE in the environment,
        and "off" if it is unset.
    store_bytes: the most that the folder may hold, in bytes or like "16GiB".
    store_private: if True, marked parts of messages and private schemas are stored too. False stores none of them. None
        stores marked parts of requests without a ``cache_salt`` in a folder, with files that only this user may read.
        With ``store_shared``, None stores none of them.
    store_timeout_s: after this many seconds, a segment is computed instead of read from the store.
    store_codec: the form of stored segments. "none" for lossless; "int8" or "fp8" for about half the bytes (of bf16).
        Requests under ``exact`` never read these approximations.
    store_shared: the address of a Valkey or Redis server that shares segments among engines, like
        "redis://host:6379/0". None for none. It works with the folder or without one.
    """

    reuse: str | ReusePolicy | None = None
    recompute: str | None = None
    promote: bool | None = None
    across_adapters: bool | None = None
    tolerance: float | str = str(DEFAULT)
    positions: str | None = None
    kv_memory: int | str | None = None
    state_memory: int | str | None = None
    host_memory: int | str | None = None
    kv_cache_dtype: str = "auto"
    chunk_size: int = 64
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    max_waiting: int | None = None
    prefill_chunk: int = 512
    max_pass_s: float | None = 0.25
    eviction: str = DEFAULT_EVICTION
    device: str = "auto"
    attention_backend: str = "auto"
    compile: bool = False
    placeholders: str = "none"
    cache_salt: str = ""
    max_model_len: int | None = None
    generation_config: str = "auto"
    profile: str = "auto"
    promotion_memory: float = 0.1
    pin_memory: float = 0.25
    prefetch: str = "waiting"
    shadow: float = 0.0
    shadow_threshold: float | None = DEFAULT_THRESHOLD
    measure: str = "off"
    store: str | os.PathLike[str] | None = None
    store_bytes: int | str = "16GiB"
    store_private: bool | None = None
    store_timeout_s: float = 10.0
    store_codec: str = "none"
    store_shared: str | None = field(default=None, repr=False)  # may contain a password

    def __post_init__(self) -> None:
        check_positions(self.positions)
        Tolerance.parse(self.tolerance)
        own = None if self.policy is None else self.policy.tolerance
        if own is not None and own.given and str(self.tolerance) != str(DEFAULT):
            wrong = f"reuse={show(str(self.reuse))} and tolerance={show(self.tolerance)} both set tolerance"
            message = f"{wrong}. Write reuse='auto', tolerance={show(self.tolerance)}."
            raise PolicyError(message, field="tolerance", code="policy.conflict")
        check_choice("placeholders", self.placeholders, PLACEHOLDERS)
        check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        check_choice("profile", self.profile, PROFILES)
        check_choice("measure", self.measure, MEASURES)
        check_choice("eviction", self.eviction, tuple(POLICIES))
        check_device(self.device)
        for name in ("chunk_size", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParameterError(
                    f"{name} is {value!r}; it must be a whole number of at least 1", code="parameter.out_of_range"
                )
        check_seconds("max_pass_s", self.max_pass_s)
        for name, least in (("max_waiting", 1), ("max_model_len", 2)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ParameterError(
                    f"{name} is {value!r}; it must be None or a whole number of at least {least}",
                    code="parameter.out_of_range",
                )
        check_share("promotion_memory", self.promotion_memory)
        check_share("pin_memory", self.pin_memory)
        check_choice("prefetch", self.prefetch, PREFETCHES)
        check_share("shadow", self.shadow)
        check_nats("shadow_threshold", self.shadow_threshold)
        if not self.shadow and self.shadow_threshold != DEFAULT_THRESHOLD:
            raise ParameterError(
                f"shadow_threshold is {self.shadow_threshold!r}, and shadow is 0, so that no answer is compared with "
                "anything; give shadow a share, like 0.01, or leave shadow_threshold out",
                code="parameter.conflict",
            )
        self.kv_bytes()
        self.state_bytes()
        self.host_bytes()
        self.store_folder()
        parse_bytes("store_bytes", self.store_bytes)
        if not isinstance(self.compile, bool):
            raise ParameterError(f"compile is {self.compile!r}; it must be True or False", code="parameter.wrong_type")
        if not (self.store_private is None or isinstance(self.store_private, bool)):
            raise ParameterError(
                f"store_private is {self.store_private!r}; it must be True, False or None", code="parameter.wrong_type"
            )
        if check_seconds("store_timeout_s", self.store_timeout_s) is None:
            raise ParameterError(
                "store_timeout_s is None; it must be a number of seconds above 0", code="parameter.out_of_range"
            )
        check_choice("store_codec", self.store_codec, tuple(CODECS))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.kv_cache_dtype != "auto" and self.store_codec != "none":
            raise ParameterError(
                f"store_codec is '{self.store_codec}', and keys and values are {self.kv_cache_dtype} already, as "
                "kv_cache_dtype says; leave store_codec out",
                code="parameter.conflict",
            )
        if self.store_shared is not None:
            check_address("store_shared", self.store_shared)

    @cached_property
    def policy(self) -> ReusePolicy | None:
        """The policy of requests without one. None for that of ``policy.default_policy``."""
        return PolicyFields(self.reuse, self.recompute, self.promote, self.across_adapters).policy(self.positions)

    def store_folder(self) -> Path | None:
        """Return the folder of the store on disk, or None. Raises ParameterError."""
        said = os.environ.get("INLAY_STORE") if self.store is None else self.store
        if (said is not None and not isinstance(said, str | os.PathLike)) or self.store == "":
            raise ParameterError(
                f"store is {said!r}; give a folder, or 'off' for none", code="parameter.invalid_folder"
            )
        return None if not said or said == "off" else Path(said)

    @property
    def kept(self) -> Kept:
        """Which segments the store may hold."""
        if self.store_private is None:
            return Kept.UNSALTED if self.store_shared is None else Kept.SCHEMAS
        return Kept.ALL if self.store_private else Kept.SCHEMAS

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Return the config of LLM's settings without those of its model. Raises ParameterError."""
        known = cls.__dataclass_fields__
        for name in settings:
            if name not in known:
                names = ", ".join(("weights", "quantization", "chat_template", "adapters", *sorted(known)))
                raise ParameterError(
                    f"LLM has no setting '{name}'; settings are model, dtype, seed, {names}", code="parameter.unknown"
                )
        return cls(**settings)

    def kv_bytes(self, scratch: int = 0, on_device: int | None = None) -> int:
        """Return the size of the KV pool in bytes.

        Args:
            scratch: bytes of free memory that attention needs beside the pool.
            on_device: free bytes of the pool's device. None for the host.
        """
        if self.kv_memory is not None:
            return parse_bytes("kv_memory", self.kv_memory)
        if on_device is not None:
            return max(on_device - scratch, 0) * 9 // 10
        return int(min(4 * 2**30, max(psutil.virtual_memory().available - scratch, 0) // 4))

    def state_bytes(self) -> int | None:
        """Return the bytes for the states of recurrent layers; None for the default."""
        return None if self.state_memory is None else parse_bytes("state_memory", self.state_memory)

    def host_bytes(self) -> int:
        """Return the size of the host tier below a device's pool, in bytes; 0 for none."""
        if self.host_memory is None:
            return min(4 * 2**30, psutil.virtual_memory().available // 4)
        none = str(self.host_memory) == "0"  # False equals 0, but is no size
        return 0 if none else parse_bytes("host_memory", self.host_memory)


def parse_bytes(name: str, value: object) -> int:
    """Parse a size in bytes, a number or like '4GiB'. Raises ParameterError."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(value))
    size = float(match[1]) * _UNITS[match[2]] if match is not None else 0.0
    if not 1 <= size < math.inf:
        raise ParameterError(
            f"{name} is {show(value)}; write a number of bytes, or for example '4GiB'", code="parameter.invalid_size"
        )
    return int(size)


def in_gib(size: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / 2**30:,.1f} GiB"


@contextmanager
def allocating(name: str, size: int, given: object, total: int, whose: str) -> Iterator[None]:
    """Raise a clear error if the block cannot allocate the memory that a setting asks for.

    Args:
        name: the setting.
        size: the bytes that it asks for.
        given: the value of the setting. None if it was left out.
        total: the bytes of memory in the machine or device.
        whose: the owner of the memory in the message, like "this machine".

    Raises:
        CapacityError: if the memory is not available.
    """
    value = f"{name} is {show(given)}" if given is not None else f"{name} was not given and is {in_gib(size)}"
    remedy = f"set {name} to less"
    if size > total:
        raise CapacityError(f"{value}, and {whose} has {in_gib(total)} of memory; {remedy}", code="engine.no_memory")
    try:
        yield
    except (MemoryError, OverflowError, OSError, RuntimeError) as error:  # torch reports full memory as a RuntimeError
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise CapacityError(
            f"{value}, and {whose} does not give so much memory ({in_gib(size)}); {remedy}", code="engine.no_memory"
        ) from error


def check_seconds(name: str, value: object) -> float | None:
    """Return a duration in seconds, or None. Raises ParameterError."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise ParameterError(
        f"{name} is {value!r}; it must be a number of seconds above 0, or None", code="parameter.out_of_range"
    )


def check_nats(name: str, value: object) -> float | None:
    """Return a divergence in nats a token, or None. Raises ParameterError."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise ParameterError(
        f"{name} is {value!r}; it must be a number of nats above 0, like 0.1, or None", code="parameter.out_of_range"
    )


def check_device(value: object) -> str:
    """Return the name of a device, which need not exist. Raises ParameterError."""
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise ParameterError(
            f"device is {show(value)}; use auto, cpu, cuda, or cuda:1 for the second GPU",
            code="parameter.unknown_choice",
        )
    return value


def check_share(name: str, value: object) -> float:
    """Return a share from 0 to 1. Raises ParameterError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ParameterError(
        f"{name} is {value!r}; it must be a share between 0 and 1, like 0.1", code="parameter.out_of_range"
    )


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return one of the allowed words. Raises ParameterError."""
    if value not in allowed:
        raise ParameterError(
            f"{name} is {show(value)}; use one of {', '.join(allowed)}", code="parameter.unknown_choice"
        )
    return str(value)
