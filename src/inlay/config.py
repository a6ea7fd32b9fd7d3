"""The settings of a model and of an engine."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from inlay.errors import CapacityError, ParameterError, PolicyError
from inlay.kv.choices import CODEC_NAMES, ROUNDED, Kept, check_address
from inlay.kv.policies import DEFAULT_EVICTION, POLICIES
from inlay.policy import PolicyFields, ReusePolicy, check_positions
from inlay.settings import (
    ANSWERING,
    BATCH,
    CHAT,
    CHECK,
    RUN,
    SERVE,
    WARM,
    always_path,
    check_date,
    check_device,
    check_nats,
    check_settings,
    check_share,
    parse_bytes,
    served,
    setting,
    settings_of,
)
from inlay.tolerance import DEFAULT, Tolerance
from inlay.wording import show

PLACEHOLDERS = ("none", "unk")
GENERATION_CONFIGS = ("auto", "off")
PROFILES = ("auto", "off")
MEASURES = ("auto", "off")
PREFETCHES = ("waiting", "likely")
SPECULATIONS = ("lookup", "off")
KV_CACHE_DTYPES = ("auto", *ROUNDED)

#: The default threshold of shadow sampling, in nats a token.
DEFAULT_THRESHOLD = 0.1


def _size_or_zero(name: str, value: object) -> int:
    return 0 if str(value) == "0" else parse_bytes(name, value)  # False equals 0, but is no size


def _folder(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike) or value == "":
        raise ParameterError(f"{name} is {value!r}; give a folder, or 'off' for none", code="parameter.invalid_folder")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings of ``LLM`` that choose and change its model. Loading validates them."""

    dtype: str = setting(
        "auto", 'The dtype of the weights: "auto", "float32" or "bfloat16".', commands=(*ANSWERING, BATCH, CHECK, WARM)
    )
    weights: str | None = setting(
        None,
        'The storage of the weights: "packed" for speed on the CPU, or "stock" for the modules of transformers. '
        "Default: packed on the CPU, stock on a GPU.",
        commands=(*ANSWERING, BATCH, CHECK, WARM),
        defaults={WARM: "packed"},
    )
    quantization: str | None = setting(
        None,
        'The form of the linear layers\' weights: "int8" or "int4", on the CPU. Default: not quantized.',
        commands=(*ANSWERING, BATCH, CHECK, WARM),
    )
    chat_template: str | None = setting(
        None,
        "A chat template (Jinja) in place of the model's own: its text for LLM, a file for commands.",
        commands=(*ANSWERING, BATCH),
        option_type=Path,
    )
    adapters: Mapping[str, str | os.PathLike[str]] | None = setting(
        None,
        "LoRA adapters by name: folders in the format of PEFT (docs/guides/adapters.md). Repeatable in commands.",
        commands=(*ANSWERING, BATCH),
        option="adapter",
        option_type=list[str],
        metavar="NAME=PATH",
        is_path=always_path,
    )
    seed: int | None = setting(
        None,
        "The seed of random weights, and of requests without a seed. Default: requests draw one.",
        commands=(*ANSWERING, BATCH, CHECK),
        defaults={RUN: 0, CHAT: 0, BATCH: 0, CHECK: 0},
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, validated here. Each field declares one; docs/reference/settings.md lists them.

    Raises:
        ParameterError: for a value that is not allowed, or settings that exclude each other.
    """

    device: str = setting(
        "auto",
        'The device of the model, the KV pool and the attention: "cpu", "cuda", "cuda:1" or "auto". "auto" keeps the '
        "device of a loaded model. A model that is given by name goes to a GPU if there is one.",
        commands=(*ANSWERING, CHECK),
        checked=check_device,
    )
    compile: bool = setting(
        False,
        "Run the model through ``torch.compile``. Startup takes longer. It requires stock weights, as on a GPU, and no "
        "adapters.",
        commands=ANSWERING,
    )
    attention_backend: str = served(
        "auto",
        'The attention backend: "triton" (GPUs), "cpu" (the compiled kernel), "torch" or "reference". "auto" takes the '
        "first one that the device and the installation have.",
    )
    max_model_len: int | None = setting(
        None,
        "The most tokens of a prompt with its answer. Default: the model's positions.",
        commands=(*ANSWERING, BATCH),
        least=2,
    )
    reuse: str | ReusePolicy | None = setting(
        None,
        f"The reuse policy: {PolicyFields.help('reuse')} (docs/reference/policies.md).",
        commands=(*ANSWERING, BATCH),
    )
    recompute: str | None = setting(
        None, f"Of the reuse policy: {PolicyFields.help('recompute')}.", commands=(*ANSWERING, BATCH)
    )
    promote: bool | None = setting(
        None, f"Of the reuse policy: {PolicyFields.help('promote')}.", commands=(*ANSWERING, BATCH)
    )
    across_adapters: bool | None = setting(
        None, f"Of the reuse policy: {PolicyFields.help('across_adapters')}.", commands=(*ANSWERING, BATCH)
    )
    find: str | None = setting(None, f"Of the reuse policy: {PolicyFields.help('find')}.", commands=(*ANSWERING, BATCH))
    tolerance: float | str = setting(
        str(DEFAULT),
        'The tolerance of reuse "auto" without one: the largest divergence from full prefill in nats per token. A text '
        'like "answers:0.98" is the least share of equal answers (docs/guides/check-prompts.md).',
        commands=(*ANSWERING, BATCH),
    )
    positions: str | None = setting(
        None,
        'The position policy: "packed" or "schema". Default: packed if the model allows shifts, else schema.',
        commands=(RUN, CHAT),
    )
    kv_memory: int | str | None = setting(
        None,
        'The size of the KV pool, in bytes or like "4GiB". Default: a quarter of the free memory, at most 4 GiB. On a '
        "GPU it is nine tenths of the memory that the weights leave.",
        commands=(*ANSWERING, BATCH, CHECK),
        checked=parse_bytes,
    )
    state_memory: int | str | None = setting(
        None,
        'For models with recurrent layers, the part of kv_memory for their states, in bytes or like "1GiB". It holds '
        "the states of running requests and the stored ones. Default: half, at most 1,024 states. Other models have no "
        "states and refuse it.",
        commands=(*ANSWERING, BATCH),
        checked=parse_bytes,
    )
    state_interval: int = setting(
        0,
        "For models with recurrent layers, the distance in tokens at which states of every prompt are kept, besides "
        "those at the ends of modules and messages. A prompt that leaves a stored one in between continues there. 0 "
        "keeps none. Such states take at most an eighth of state_memory for each prompt.",
        commands=(*ANSWERING, BATCH),
        least=0,
    )
    host_memory: int | str | None = setting(
        None,
        'The size of the host tier, in bytes or like "16GiB", or 0 for none. It holds modules that do not fit in a '
        "GPU's pool. Default: 4 GiB, at most a quarter of the host's free memory. A pool in host memory ignores it.",
        commands=(*ANSWERING, BATCH),
        checked=_size_or_zero,
    )
    kv_cache_dtype: str = setting(
        "auto",
        'The type of stored keys and values. "auto" for the model\'s dtype; "int8" or "fp8" (GPU) for one byte per '
        "number. Rounded types have a scale per token and head, and the engine computes over rounded values.",
        commands=(*ANSWERING, BATCH, CHECK, WARM),
        choices=KV_CACHE_DTYPES,
    )
    chunk_size: int = served(64, "Tokens per chunk of the KV pool.", least=1)
    max_num_seqs: int = setting(64, "The most requests that run at the same time.", commands=(SERVE, BATCH), least=1)
    max_num_batched_tokens: int = served(4096, "The most tokens in one forward pass.", least=1)
    max_waiting: int | None = served(
        None, "The most queued requests; more are refused. Default of LLM: no limit.", least=1, defaults={SERVE: 1024}
    )
    prefill_chunk: int = served(
        512, "The most prompt tokens in a pass in which other requests decode. It bounds their delay.", least=1
    )
    max_pass_s: float | None = served(
        0.25,
        "The target for the longest pass, in seconds. Deadlines, cancellations and shutdown wait for a pass. The "
        "engine measures how many prompt tokens fit, 32 at least. While a request is alone, its passes may take four "
        "times as long. None (0 for commands) for no target.",
        zero_is_none=True,
    )
    eviction: str = setting(
        DEFAULT_EVICTION,
        'The order of eviction in a full pool or store. "hybrid" evicts request text first (least recently used), then '
        "modules (least frequently used). See docs/guides/cache-tiers.md.",
        commands=ANSWERING,
        choices=tuple(POLICIES),
    )
    placeholders: str = served(
        "none", "The filling of a parameter's hole while a module is encoded.", choices=PLACEHOLDERS
    )
    template_date: str | None = setting(
        None,
        "The date that the chat template writes, as YYYY-MM-DD, for templates that write today's. Default: today's, "
        "so stored text behind it is computed again on the next day (docs/guides/agents.md).",
        commands=(*ANSWERING, BATCH, WARM),
        checked=check_date,
    )
    cache_salt: str = setting("", "Text that separates this engine's segments from those of other engines.")
    generation_config: str = setting(
        "auto",
        '"auto" takes sampling defaults from the model\'s generation configuration. "off" takes those of '
        "SamplingParams.",
        commands=(*ANSWERING, BATCH),
        choices=GENERATION_CONFIGS,
    )
    profile: str = setting(
        "auto",
        '"auto" measures the deviation profiles of a schema\'s modules in idle time, for recompute="profiled:…". "off" '
        "makes none, and the first tokens of modules are recomputed.",
        commands=ANSWERING,
        choices=PROFILES,
    )
    promotion_memory: float = served(
        0.1,
        "The share of the pool, 0 to 1, for prompt prefixes that are promoted. These are prefixes under ``modular`` "
        "that are requested again and encoded exactly in idle time. 0 for none.",
        checked=check_share,
    )
    pin_memory: float = served(
        0.25, "The share of the pool, 0 to 1, that all pins together may take. See ``LLM.pin``.", checked=check_share
    )
    prefetch: str = served(
        "waiting",
        'The segments that are loaded from lower tiers ahead of time. "waiting" for those of queued requests. "likely" '
        "adds siblings of the union members in a prompt, and the modules that followed its own last time.",
        choices=PREFETCHES,
    )
    shadow: float = served(
        0.0,
        "The share of answers from approximate reuse, 0 to 1, that are recomputed in full in idle time. 0 for none "
        "(docs/guides/reuse-policies.md).",
        checked=check_share,
    )
    shadow_threshold: float | None = served(
        DEFAULT_THRESHOLD,
        "The largest divergence from full prefill of answers to a schema, in nats per token. Above it, its requests "
        "get a safer policy. None (0 for commands) for no limit.",
        checked=check_nats,
        zero_is_none=True,
    )
    store: str | os.PathLike[str] | None = setting(
        None,
        'A folder in which schemas\' segments outlive the process, or "off". Default: INLAY_STORE in the environment. '
        'Without it, commands take the user\'s cache directory ("off" for random models), and LLM takes "off".',
        commands=(*ANSWERING, WARM),
        checked=_folder,
        is_path=lambda text: text != "off",
    )
    store_bytes: int | str = setting(
        "16GiB",
        'The most that the folder may hold, in bytes or like "16GiB".',
        commands=(*ANSWERING, WARM),
        checked=parse_bytes,
    )
    store_private: bool | None = served(
        None,
        "If true, marked parts of messages and private schemas are stored too; if false, none of them. Default: a "
        "folder stores marked parts of requests without a ``cache_salt``, in files that only this user may read. A "
        "server with keys keeps none of them, and neither does a shared store.",
    )
    store_timeout_s: float = served(
        10.0, "After this many seconds, a segment is computed instead of read from the store."
    )
    store_codec: str = setting(
        "none",
        'The form of stored segments. "none" for lossless; "int8" or "fp8" for about half the bytes (of bf16). '
        "Requests under ``exact`` never read these approximations.",
        commands=(*ANSWERING, WARM),
        choices=CODEC_NAMES,
    )
    measure: str = served(
        "off",
        '"auto" compares recomputations on live requests in idle time, until ``reuse="auto"`` can choose by the result '
        '(docs/guides/reuse-policies.md). "off" compares none.',
        choices=MEASURES,
        defaults={SERVE: "auto"},
    )
    speculation: str = setting(
        "lookup",
        '"lookup" drafts the next tokens of an answer from its prompt, from itself and from earlier answers under its '
        "salt. Several tokens are then computed in one pass if they are likely to be accepted. Answers stay the same "
        '(docs/guides/speculation.md). "off" drafts none. Recurrent models draft none.',
        commands=(*ANSWERING, BATCH),
        choices=SPECULATIONS,
    )
    store_shared: str | None = setting(
        None,
        "The address of a Valkey or Redis server that shares segments among engines, like "
        '"redis://host:6379/0". It works with the folder or without one. Others can read command lines; with a '
        "password, use the environment.",
        commands=ANSWERING,
        checked=check_address,
        secret=True,  # may contain a password
    )

    def __post_init__(self) -> None:
        check_positions(self.positions)
        Tolerance.parse(self.tolerance)
        own = None if self.policy is None else self.policy.tolerance
        if own is not None and own.given and str(self.tolerance) != str(DEFAULT):
            wrong = f"reuse={show(str(self.reuse))} and tolerance={show(self.tolerance)} both set tolerance"
            message = f"{wrong}. Write reuse='auto', tolerance={show(self.tolerance)}."
            raise PolicyError(message, field="tolerance", code="policy.conflict")
        check_settings(self)
        if not self.shadow and self.shadow_threshold != DEFAULT_THRESHOLD:
            raise ParameterError(
                f"shadow_threshold is {self.shadow_threshold!r}, and shadow is 0, so that no answer is compared with "
                "anything; give shadow a share, like 0.01, or leave shadow_threshold out",
                code="parameter.conflict",
            )
        if self.kv_cache_dtype != "auto" and self.store_codec != "none":
            raise ParameterError(
                f"store_codec is '{self.store_codec}', and keys and values are {self.kv_cache_dtype} already, as "
                "kv_cache_dtype says; leave store_codec out",
                code="parameter.conflict",
            )

    @cached_property
    def policy(self) -> ReusePolicy | None:
        """The policy of requests without one. None for that of ``policy.default_policy``."""
        given = PolicyFields(self.reuse, self.recompute, self.promote, self.across_adapters, find=self.find)
        return given.policy(self.positions)

    def store_folder(self) -> Path | None:
        """Return the folder of the store on disk, or None."""
        given = os.environ.get("INLAY_STORE") if self.store is None else self.store
        return None if not given or given == "off" else Path(given)

    @property
    def kept(self) -> Kept:
        """Which segments the store may hold."""
        if self.store_private is None:
            return Kept.UNSALTED if self.store_shared is None else Kept.SCHEMAS
        return Kept.ALL if self.store_private else Kept.SCHEMAS

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Return the config of LLM's settings without those of its model. Raises ParameterError."""
        known = settings_of(cls)
        for name in settings:
            if name not in known:
                names = ", ".join(sorted((*settings_of(ModelSettings), *known)))
                raise ParameterError(
                    f"LLM has no setting '{name}'; settings are model, {names}", code="parameter.unknown"
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
        return _size_or_zero("host_memory", self.host_memory)


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
