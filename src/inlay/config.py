"""What an engine is told once, at the start."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from inlay.errors import ParameterError
from inlay.policy import BEST, ReusePolicy
from inlay.wording import show

PLACEHOLDERS = ("none", "unk")
GENERATION_CONFIGS = ("auto", "off")
PROFILES = ("auto", "off")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine; checked once, here. Raises ParameterError.

    reuse: the reuse policy of requests that bring none; None for that of ``policy.default_policy``.
    positions: the default position policy; None for "packed" where the model allows shifts, else "schema".
    kv_memory: bytes of the KV pool, as a number or like "4GiB"; None for a quarter of the free memory, at most 4 GiB.
    chunk_size: tokens of one chunk of the pool.
    max_num_seqs: the most requests that run at the same time.
    max_num_batched_tokens: the most tokens in one forward pass.
    max_waiting: the most requests that wait for a place; None for no bound.
    prefill_chunk: the most prompt tokens in a pass in which other requests answer, so that none waits long for one.
    max_pass_s: about the most seconds of one forward pass, for which deadlines, cancellations and a shutdown wait: how
        many prompt tokens that allows is measured, 32 at least. None for passes of any time.
    attention_backend: "cpu" (the compiled kernel), "torch", "reference"; "auto" takes the first that is there.
    placeholders: what fills a parameter's hole while a module is encoded: "none" or "unk".
    cache_salt: text that keeps this engine's segments apart from others'.
    max_model_len: tokens of a prompt and its answer together, at most what the model has positions for; None for that.
    profile: "auto": how much each token of a schema's modules moves behind other text is found out in idle time, for
        repairs that are ``profiled``; "off": it is not, and these repair the beginnings of modules.
    generation_config: "auto": what the model's generation configuration says of sampling is for requests that say
        nothing; "off": the defaults of SamplingParams are.
    """

    reuse: str | None = None
    positions: str | None = None
    kv_memory: int | str | None = None
    chunk_size: int = 64
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    max_waiting: int | None = None
    prefill_chunk: int = 512
    max_pass_s: float | None = 0.25
    attention_backend: str = "auto"
    placeholders: str = "none"
    cache_salt: str = ""
    max_model_len: int | None = None
    generation_config: str = "auto"
    profile: str = "auto"

    def __post_init__(self) -> None:
        ReusePolicy.parse(self.reuse or str(BEST), self.positions)
        check_choice("placeholders", self.placeholders, PLACEHOLDERS)
        check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        check_choice("profile", self.profile, PROFILES)
        for name in ("chunk_size", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"{name} is {value!r}; it must be a whole number of at least 1")
        check_seconds("max_pass_s", self.max_pass_s)
        for name, least in (("max_waiting", 1), ("max_model_len", 2)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ParameterError(f"{name} is {value!r}; it must be None or a whole number of at least {least}")
        self.kv_bytes()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """The settings that LLM was given beside those of its model. Raises ParameterError."""
        known = cls.__dataclass_fields__
        for name in settings:
            if name not in known:
                names = ", ".join(("weights", "quantization", "chat_template", *sorted(known)))
                raise ParameterError(f"LLM has no setting '{name}'; settings are model, dtype, seed, {names}")
        return cls(**settings)

    def kv_bytes(self, scratch: int = 0) -> int:
        """The size of the KV pool in bytes. scratch: bytes of free memory that attention works in beside the pool."""
        if self.kv_memory is None:
            return int(min(4 * 2**30, max(psutil.virtual_memory().available - scratch, 0) // 4))
        if isinstance(self.kv_memory, int) and not isinstance(self.kv_memory, bool) and self.kv_memory > 0:
            return self.kv_memory
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(self.kv_memory))
        if match is None or float(match[1]) <= 0:
            raise ParameterError(f"kv_memory is {self.kv_memory!r}; write a number of bytes, or for example '4GiB'")
        return int(float(match[1]) * _UNITS[match[2]])


def check_seconds(name: str, value: object) -> float | None:
    """Return a setting that is a length of time in seconds, or None. Raises ParameterError."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    raise ParameterError(f"{name} is {value!r}; it must be a number of seconds above 0, or None")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return a setting that is one of the allowed words. Raises ParameterError."""
    if value not in allowed:
        raise ParameterError(f"{name} is {show(value)}; use one of {', '.join(allowed)}")
    return str(value)
