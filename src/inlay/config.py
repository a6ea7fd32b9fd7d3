"""The settings of an engine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from inlay.errors import ParameterError
from inlay.kv.codecs import CODECS
from inlay.kv.identity import ROUNDED
from inlay.kv.policies import DEFAULT_EVICTION, POLICIES
from inlay.kv.tiers.link import check_address
from inlay.policy import BEST, ReusePolicy
from inlay.tolerance import DEFAULT, Tolerance
from inlay.wording import show

PLACEHOLDERS = ("none", "unk")
GENERATION_CONFIGS = ("auto", "off")
PROFILES = ("auto", "off")
PREFETCHES = ("waiting", "likely")
KV_CACHE_DTYPES = ("auto", *ROUNDED)

#: The default threshold of shadow sampling, in nats a token.
DEFAULT_THRESHOLD = 0.1

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, validated here. Raises ParameterError.

    Args:
        reuse: the default reuse policy of requests. None for ``policy.default_policy``.
        tolerance: the tolerance of "auto" if written without one: the largest divergence from full prefill in nats a
            token, or like "answers:0.98" the smallest share of equal answers. See docs/check.md.
        positions: the default position policy. None for "packed" if the model allows shifts, else "schema".
        kv_memory: bytes of the KV pool, as a number or like "4GiB". None for a quarter of the free memory, at most
            4 GiB; on a GPU, for nine tenths of the memory that the weights leave.
        host_memory: bytes of the host tier, for modules evicted from a device's pool: a number or like "16GiB", 0 for
            none. None for 4 GiB, at most a quarter of the host's free memory. Without effect if the pool is in host
            memory.
        kv_cache_dtype: the dtype of KV in the pool: "auto" for the model's, "int8", or on a GPU "fp8". The narrow ones
            take one byte a number, with a scale for each token and head. The engine computes over the rounded values.
        chunk_size: tokens of one chunk of the pool.
        max_num_seqs: the most requests that run at the same time.
        max_num_batched_tokens: the most tokens in one forward pass.
        max_waiting: the most requests in the queue. None for no bound.
        prefill_chunk: the most prompt tokens in a pass with running answers, which limits their delay.
        max_pass_s: the approximate time limit of one forward pass in seconds. Deadlines, cancellations and a shutdown
            wait for a pass. The number of prompt tokens in that time is measured, at least 32. None for no limit.
        eviction: the eviction order of the pool and the store: "hybrid" (requests' text by least recent use, then
            modules by least frequent use), "lru", "lru2", "lfu" or "cost". See docs/store.md.
        device: the device of the model, the KV pool and the attention: "cpu", "cuda", "cuda:1" or "auto". "auto" keeps
            a
            loaded model where it is, and loads a named one to a GPU if there is one.
        attention_backend: "triton" (GPUs), "cpu" (the compiled kernel), "torch", "reference". "auto" takes the first
            that the device and the installation support.
        compile: if True, run the model through ``torch.compile``, with a slow start. Needs stock weights, as on a GPU,
            and no adapters.
        placeholders: the filling of a parameter's hole while a module is encoded: "none" or "unk".
        cache_salt: text that separates this engine's segments from other engines'.
        max_model_len: the most tokens of a prompt with its answer. None for the model's maximum.
        profile: "auto" measures deviation profiles of modules in idle time, for ``profiled`` recomputation. "off" does
            not, and such requests recompute the first tokens of modules.
        promotion_memory: the share of the pool, 0 to 1, for prompt prefixes that are requested again under ``modular``
            and
            encoded exactly in idle time; 0 for no promotion.
        pin_memory: the share of the pool, 0 to 1, for all pins. See ``LLM.pin``.
        shadow: the share of approximate answers, 0 to 1, that is recomputed in full in idle time; 0 for none
            (docs/reuse.md).
        shadow_threshold: the divergence in nats a token at which a schema's requests get a safer policy. None for
            never.
        generation_config: "auto" takes sampling defaults from the model's generation configuration. "off" takes those
            of SamplingParams.
        prefetch: the segments to load early from lower tiers. "waiting": those of queued requests. "likely": also the
            siblings of a prompt's union members, and the modules that followed its own the last time.
        store: a folder in which schemas' segments outlive the process, or "off". None for the environment variable
            INLAY_STORE, and off without it.
        store_bytes: the most bytes of the folder, as a number or like "16GiB".
        store_private: if True, modules from requests' text and from private schemas may be stored there, too.
        store_timeout_s: the timeout of reads from there in seconds, after which a segment is computed.
        store_codec: the stored form of segments: "none", or "int8" or "fp8" in about half the bytes (of bf16). The
            lossy
            forms are approximations that requests under ``exact`` never read.
        store_shared: the address of a Valkey or Redis server for sharing segments with other engines, like
            "redis://host:6379/0". None for none. It works with the folder or alone.
    """

    reuse: str | None = None
    tolerance: float | str = str(DEFAULT)
    positions: str | None = None
    kv_memory: int | str | None = None
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
    store: str | os.PathLike[str] | None = None
    store_bytes: int | str = "16GiB"
    store_private: bool = False
    store_timeout_s: float = 10.0
    store_codec: str = "none"
    store_shared: str | None = field(default=None, repr=False)  # may contain a password

    def __post_init__(self) -> None:
        ReusePolicy.parse(str(BEST) if self.reuse is None else self.reuse, self.positions)
        Tolerance.parse(self.tolerance)
        check_choice("placeholders", self.placeholders, PLACEHOLDERS)
        check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        check_choice("profile", self.profile, PROFILES)
        check_choice("eviction", self.eviction, tuple(POLICIES))
        check_device(self.device)
        for name in ("chunk_size", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"{name} is {value!r}; it must be a whole number of at least 1")
        check_seconds("max_pass_s", self.max_pass_s)
        for name, least in (("max_waiting", 1), ("max_model_len", 2)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ParameterError(f"{name} is {value!r}; it must be None or a whole number of at least {least}")
        check_share("promotion_memory", self.promotion_memory)
        check_share("pin_memory", self.pin_memory)
        check_choice("prefetch", self.prefetch, PREFETCHES)
        check_share("shadow", self.shadow)
        check_nats("shadow_threshold", self.shadow_threshold)
        if not self.shadow and self.shadow_threshold != DEFAULT_THRESHOLD:
            raise ParameterError(
                f"shadow_threshold is {self.shadow_threshold!r}, and shadow is 0, so that no answer is compared with "
                "anything; give shadow a share, like 0.01, or leave shadow_threshold out"
            )
        self.kv_bytes()
        self.host_bytes()
        self.store_folder()
        parse_bytes("store_bytes", self.store_bytes)
        for name in ("store_private", "compile"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ParameterError(f"{name} is {value!r}; it must be True or False")
        if check_seconds("store_timeout_s", self.store_timeout_s) is None:
            raise ParameterError("store_timeout_s is None; it must be a number of seconds above 0")
        check_choice("store_codec", self.store_codec, tuple(CODECS))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.kv_cache_dtype != "auto" and self.store_codec != "none":
            raise ParameterError(
                f"store_codec is '{self.store_codec}', and keys and values are {self.kv_cache_dtype} already, as "
                "kv_cache_dtype says; leave store_codec out"
            )
        if self.store_shared is not None:
            check_address("store_shared", self.store_shared)

    def store_folder(self) -> Path | None:
        """Return the folder of the store on disk, or None. Raises ParameterError."""
        said = os.environ.get("INLAY_STORE") if self.store is None else self.store
        if said is not None and not isinstance(said, str | os.PathLike):
            raise ParameterError(f"store is {said!r}; give a folder, or 'off' for none")
        return None if not said or said == "off" else Path(said)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Return the config of LLM's settings without those of its model. Raises ParameterError."""
        known = cls.__dataclass_fields__
        for name in settings:
            if name not in known:
                names = ", ".join(("weights", "quantization", "chat_template", "adapters", *sorted(known)))
                raise ParameterError(f"LLM has no setting '{name}'; settings are model, dtype, seed, {names}")
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

    def host_bytes(self) -> int:
        """Return the size of the host tier below a device's pool, in bytes; 0 for none."""
        if self.host_memory is None:
            return min(4 * 2**30, psutil.virtual_memory().available // 4)
        none = str(self.host_memory) == "0"  # not equal to 0, which False is
        return 0 if none else parse_bytes("host_memory", self.host_memory)


def parse_bytes(name: str, value: object) -> int:
    """Parse a size in bytes, a number or like '4GiB'. Raises ParameterError."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(value))
    if match is None or float(match[1]) <= 0:
        raise ParameterError(f"{name} is {value!r}; write a number of bytes, or for example '4GiB'")
    return int(float(match[1]) * _UNITS[match[2]])


def check_seconds(name: str, value: object) -> float | None:
    """Return a duration in seconds, or None. Raises ParameterError."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise ParameterError(f"{name} is {value!r}; it must be a number of seconds above 0, or None")


def check_nats(name: str, value: object) -> float | None:
    """Return a divergence in nats a token, or None. Raises ParameterError."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise ParameterError(f"{name} is {value!r}; it must be a number of nats above 0, like 0.1, or None")


def check_device(value: object) -> str:
    """Return the name of a device, which need not exist. Raises ParameterError."""
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise ParameterError(f"device is {show(value)}; use auto, cpu, cuda, or cuda:1 for the second GPU")
    return value


def check_share(name: str, value: object) -> float:
    """Return a share from 0 to 1. Raises ParameterError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ParameterError(f"{name} is {value!r}; it must be a share between 0 and 1, like 0.1")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return one of the allowed words. Raises ParameterError."""
    if value not in allowed:
        raise ParameterError(f"{name} is {show(value)}; use one of {', '.join(allowed)}")
    return str(value)
