"""The decode benchmark: everybody answers the same prompt, in turns, and inlay's step is taken apart."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from inlay.bench.decode.columns import stock_answers, stream
from inlay.bench.decode.llama import llama_answers, why_not
from inlay.bench.decode.shares import step_shares
from inlay.bench.machine import GB, Ceilings, describe_machine, measure_ceilings
from inlay.bench.stock import another_fits, bytes_read_per_token
from inlay.bench.timing import Meter, Progress, Timing, in_turns
from inlay.config import check_choice
from inlay.errors import ContextError, ParameterError
from inlay.llm import LLM
from inlay.models.adapter import dtype_name

BASELINES = ("transformers", "llama.cpp")

Openers = dict[str, Callable[[], AbstractContextManager[Meter]]]


@dataclass(frozen=True, kw_only=True)
class DecodeSetting:
    """context: tokens of the prompt. tokens: of the answer that count, behind its first. Raises ParameterError."""

    model: str
    context: int = 64
    tokens: int = 32
    dtype: str = "auto"
    baselines: tuple[str, ...] = BASELINES
    runs: int = 5
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("context", "tokens", "runs"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for word in self.baselines:
            check_choice("baseline", word, BASELINES)


def measure_decode(setting: DecodeSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Milliseconds a token; returns ``{"columns": {…}, "step": {…}, …}``. Raises InlayError."""
    llm = _load(setting)
    config, dtype = llm.loaded.model.config, llm.loaded.model.dtype
    ceilings = measure_ceilings([dtype_name(dtype)], quick=setting.quick)
    prompt = random.Random(0).choices(range(min(256, llm.vocab_size)), k=setting.context)
    shares = step_shares(llm, prompt, setting.tokens)
    others, left_out = _baselines(setting, config, dtype_name(dtype), prompt)
    together = another_fits(config, dtype, len(others))
    ours: dict[str, Meter] = {"inlay": lambda: stream(llm, prompt, setting.tokens)[0]}
    if together:
        timed = _side_by_side(ours, others, setting.runs, progress)
    else:
        timed = in_turns(ours, setting.runs, progress)
        del llm  # makes room for the next one
        gc.collect()
        timed |= _one_by_one(others, setting.runs, progress)
    read = bytes_read_per_token(config, dtype)
    cells = {name: _cell(timing, setting.tokens, read, ceilings) for name, timing in timed.items()}
    return {
        "model": setting.model,
        "dtype": dtype_name(dtype),
        "context": setting.context,
        "tokens": setting.tokens,
        "weight_bytes_per_token": read,
        "in_turns": together,
        "columns": cells | left_out,
        "step": shares,
        "quick": setting.quick,
        "ceilings": ceilings.report(),
        "machine": describe_machine(),
    }


def _load(setting: DecodeSetting) -> LLM:
    llm = LLM(setting.model, dtype=setting.dtype, seed=0)
    longest = llm.loaded.spec.max_positions
    if setting.context + setting.tokens + 1 >= longest:
        raise ContextError(
            f"{setting.context} + {setting.tokens} tokens do not fit the model's context of {longest}; use fewer"
        )
    return llm


def _side_by_side(ours: dict[str, Meter], others: Openers, runs: int, progress: Progress | None) -> dict[str, Timing]:
    with ExitStack() as stack:
        theirs = {name: stack.enter_context(opener()) for name, opener in others.items()}
        return in_turns(ours | theirs, runs, progress)


def _one_by_one(others: Openers, runs: int, progress: Progress | None) -> dict[str, Timing]:
    timed: dict[str, Timing] = {}
    for name, opener in others.items():
        with opener() as meter:
            timed |= in_turns({name: meter}, runs, progress)
        gc.collect()
    return timed


def _baselines(
    setting: DecodeSetting, config: PretrainedConfig, dtype: str, prompt: list[int]
) -> tuple[Openers, dict[str, Any]]:
    """The baselines that can be measured, and for the others a column that says why not."""
    openers: Openers = {}
    left_out: dict[str, Any] = {}
    if "transformers" in setting.baselines:
        openers["transformers"] = partial(stock_answers, setting.model, dtype, prompt, setting.tokens)
    if "llama.cpp" in setting.baselines:
        if reason := why_not(config, dtype):
            left_out["llama.cpp"] = {"ms_per_token": None, "skipped": reason}
        else:
            openers["llama.cpp"] = partial(llama_answers, config, setting.context, setting.tokens)
    return openers, left_out


def _cell(timing: Timing, tokens: int, read: int, ceilings: Ceilings) -> dict[str, Any]:
    seconds = timing.seconds / tokens
    gb_s = read / seconds / GB
    return {
        "ms_per_token": round(seconds * 1000, 3),
        "tokens_s": round(1 / seconds, 2),
        "gb_s": round(gb_s, 2),
        "of_copy": round(gb_s / ceilings.copy_gb_s, 4),
        "runs": timing.runs,
    }
