"""The decode benchmark: inlay, stock transformers and llama.cpp answer the same prompt greedily, in turns.

Timing begins at the first generated token, so it excludes the prefill. In separate runs, timers around the engine's
calls divide inlay's decode step into kinds of work. These runs call the kernel twice a layer, so that attention can be
timed. Where the timed runs have one call for all layers, they have less of "rest".
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from inlay.attention.registry import get_backend
from inlay.client.llm import LLM
from inlay.engine import core as engine
from inlay.engine import forward
from inlay.engine.unshared_runner import with_cache
from inlay.errors import ContextError
from inlay.models.few_rows import FewRows, FewRowsPass
from inlay.models.interface import attention_implementation
from inlay.models.linear import FrozenLinear
from inlay.models.spec import dtype_name
from inlay.sampling.params import SamplingParams
from inlay.sampling.sampler import PendingTokens
from inlay.settings import check_choice
from inlay_lab.bench.engines.gguf_file import OTHER_WEIGHTS, bytes_read, why_not
from inlay_lab.bench.engines.peer import llama_cpp
from inlay_lab.bench.floor import Floor, Rates
from inlay_lab.bench.machine import GB, Ceilings, Meter, Progress, Timing, describe_machine, in_turns, measure_ceilings
from inlay_lab.bench.stock import another_fits, bytes_read_per_token, is_quantized_file, load_stock
from inlay_lab.bench.throughput.steps import Cost
from inlay_lab.options import check_least

_WARM_UP = 2  # tokens; a large model's first run may be its only timed one


def stream(llm: LLM, prompt: list[int], tokens: int) -> tuple[float, tuple[int, ...]]:
    """Seconds from the first generated token over ``tokens`` more, and the ids of all of them."""
    params = SamplingParams(max_tokens=tokens + 1, temperature=0, ignore_eos=True)
    started, answer = 0.0, tuple[int, ...]()
    for output in llm.stream(prompt, params):
        started = started or time.perf_counter()
        answer = output.outputs[0].token_ids
    return time.perf_counter() - started, answer


@contextmanager
def stock_answers(name: str, dtype: str, prompt: list[int], tokens: int) -> Iterator[Meter]:
    """A meter of stock transformers: sdpa, a DynamicCache and a plain loop, which is faster than ``generate``."""
    model = load_stock(name, dtype)
    stock_loop(model, prompt, _WARM_UP)
    yield lambda: stock_loop(model, prompt, tokens)[0]


@torch.inference_mode()
def stock_loop(model: PreTrainedModel, prompt: list[int], tokens: int) -> tuple[float, tuple[int, ...]]:
    """As ``stream``, for a stock model."""
    cache = with_cache(model, DynamicCache(config=model.config))
    with attention_implementation(model, "sdpa"):
        chosen = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1, **cache)
        last = chosen.logits[:, -1:].argmax(-1)
        answer = [int(last)]
        started = time.perf_counter()
        for _ in range(tokens):
            last = model(last, use_cache=True, **cache).logits.argmax(-1)
            answer.append(int(last))
        return time.perf_counter() - started, tuple(answer)


@contextmanager
def llama_answers(
    config: PretrainedConfig, prompt: list[int], tokens: int, quantization: str | None
) -> Iterator[Meter]:
    """A meter of llama.cpp on a random model of the same shape. Raises ModelError."""
    longest, remedy = len(prompt) + 1 + tokens, "leave it out with --baselines transformers"
    with llama_cpp(config, longest, remedy, quantization=quantization) as peer:

        def meter() -> float:
            served = peer.serve([prompt], 1 + tokens, at=[0.0])
            assert served is not None, "it has no time limit"
            seconds = served["seconds"][0]
            return seconds[-1] - seconds[0]

        yield meter


SHARES = ("plan", "attention", "linear", "sampling", "rest")


class Stopwatch:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(SHARES, 0.0)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with its time added under ``name``."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return timed


def step_shares(llm: LLM, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Milliseconds a token by kind of work. Their sum includes the cost of the timers.

    Where the kernel fuses them with the products, ``linear`` includes norms, rotation, activations and sums. Otherwise
    ``rest`` includes these. ``rest`` is all untimed work: transformers' Python and ours too.
    """
    watch = Stopwatch()
    params = SamplingParams(max_tokens=tokens + 1, temperature=0, ignore_eos=True)
    with _timers(llm, watch):
        answer = llm.stream(prompt, params)
        next(answer)
        watch.seconds = dict.fromkeys(SHARES, 0.0)
        started = time.perf_counter()
        for _ in answer:
            pass
        total = time.perf_counter() - started
    watch.seconds["rest"] = total - sum(watch.seconds.values())
    per_token = {name: round(seconds / tokens * 1000, 4) for name, seconds in watch.seconds.items()}
    return {
        "how": "timers around calls, two a layer",
        "ms_per_token": round(total / tokens * 1000, 3),
        "ms": per_token,
        "share": {name: round(seconds / total, 4) for name, seconds in watch.seconds.items()},
    }


@contextmanager
def _timers(llm: LLM, watch: Stopwatch) -> Iterator[None]:
    backend = type(get_backend(llm.config.attention_backend))
    calls = (
        (forward, "build_plan", "plan"),
        (forward, "advance", "plan"),
        (engine, "begin", "sampling"),
        (PendingTokens, "wait", "sampling"),
    )
    with ExitStack() as stack:
        stack.enter_context(_replaced(FewRowsPass, "fits", lambda *_: False))  # so that attention is a separate call
        beside = ((backend, "attend", "attention"), (FewRows, "before", "linear"), (FewRows, "behind", "linear"))
        for owner, attribute, name in (*calls, *beside):
            stack.enter_context(_replaced(owner, attribute, watch.around(name, getattr(owner, attribute))))
        for module in llm.loaded.model.modules():
            if isinstance(module, (nn.Linear, FrozenLinear)):
                stack.enter_context(_replaced(module, "forward", watch.around("linear", module.forward)))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object or class within a block, then restore it."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


BASELINES = ("transformers", "llama.cpp")

Openers = dict[str, Callable[[], AbstractContextManager[Meter]]]


@dataclass(frozen=True, kw_only=True)
class DecodeSetting:
    """Options of the decode benchmark. Raises ParameterError.

    Attributes:
        context: Tokens of the prompt.
        tokens: Timed tokens of the answer, behind its first one.
    """

    model: str
    context: int = 64
    tokens: int = 32
    dtype: str = "auto"
    weights: str | None = "packed"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    baselines: tuple[str, ...] = BASELINES
    runs: int = 5
    quick: bool = False

    def __post_init__(self) -> None:
        check_least(1, context=self.context, tokens=self.tokens, runs=self.runs)
        for word in self.baselines:
            check_choice("baseline", word, BASELINES)


def measure_decode(setting: DecodeSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Milliseconds a token; returns ``{"columns": {…}, "step": {…}, …}``. Raises InlayError."""
    llm = _load(setting)
    config, dtype = llm.loaded.model.config, llm.loaded.model.dtype
    ceilings = measure_ceilings([dtype_name(dtype)], quick=setting.quick)
    prompt = random.Random(0).choices(range(min(256, llm.vocab_size)), k=setting.context)
    rates = Rates.measured(dtype_name(dtype), quick=setting.quick)
    floor = _floor(llm, setting, rates)
    shares = step_shares(llm, prompt, setting.tokens)
    own_form = is_quantized_file(llm.loaded)
    others, left_out = _baselines(setting, config, dtype_name(dtype), prompt, own_form=own_form)
    together = another_fits(config, dtype, len(others))
    ours: dict[str, Meter] = {"inlay": lambda: stream(llm, prompt, setting.tokens)[0]}
    if together:
        timed = _side_by_side(ours, others, setting.runs, progress)
    else:
        timed = in_turns(ours, setting.runs, progress)
        del llm  # makes room for the next model
        gc.collect()
        timed |= _one_by_one(others, setting.runs, progress)
    read: dict[str, int | None] = {
        "inlay": None if own_form else bytes_read_per_token(config, dtype, setting.quantization)
    }
    if "transformers" in timed:
        read["transformers"] = bytes_read_per_token(config, dtype)
    if "llama.cpp" in timed:
        read["llama.cpp"] = bytes_read(config, setting.quantization)
    cells = {name: _cell(timing, setting.tokens, read[name], ceilings, floor) for name, timing in timed.items()}
    return {
        "model": setting.model,
        "dtype": dtype_name(dtype),
        "weights": setting.weights,
        "quantization": setting.quantization,
        "kv_cache_dtype": setting.kv_cache_dtype,
        "context": setting.context,
        "tokens": setting.tokens,
        "weight_bytes_per_token": read,  # of each column
        "in_turns": together,
        "columns": cells | left_out,
        "step": shares,
        "floor": None if floor is None else {"ms": round(floor.seconds * 1000, 3), **floor.report(), **rates.at(1)},
        "quick": setting.quick,
        "ceilings": ceilings.report(),
        "machine": describe_machine(),
    }


def _floor(llm: LLM, setting: DecodeSetting, rates: Rates) -> Floor | None:
    """The floor of the middle timed step. None if some layers do not read all keys."""
    cost = Cost.of(llm, setting.context + setting.tokens + 1)
    return None if cost is None else cost.floor_of(1, 1, setting.context + setting.tokens // 2 + 1, rates)


def _load(setting: DecodeSetting) -> LLM:
    llm = LLM(
        setting.model,
        dtype=setting.dtype,
        weights=setting.weights,
        quantization=setting.quantization,
        kv_cache_dtype=setting.kv_cache_dtype,
        speculation="off",  # drafts give several tokens a step
        seed=0,
        device="cpu",
    )
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
    setting: DecodeSetting, config: PretrainedConfig, dtype: str, prompt: list[int], *, own_form: bool
) -> tuple[Openers, dict[str, Any]]:
    """The baselines that can be measured, and for each other one a column with the reason.

    Args:
        own_form: True for a quantized file, see is_quantized_file.
    """
    openers: Openers = {}
    left_out: dict[str, Any] = {}
    if "transformers" in setting.baselines:
        openers["transformers"] = partial(stock_answers, setting.model, dtype, prompt, setting.tokens)
    if "llama.cpp" in setting.baselines:
        if reason := OTHER_WEIGHTS if own_form else why_not(config, dtype, setting.quantization):
            left_out["llama.cpp"] = {"ms_per_token": None, "skipped": reason}
        else:
            openers["llama.cpp"] = partial(llama_answers, config, prompt, setting.tokens, setting.quantization)
    return openers, left_out


def _cell(timing: Timing, tokens: int, read: int | None, ceilings: Ceilings, floor: Floor | None) -> dict[str, Any]:
    seconds = timing.seconds / tokens
    gb_s = None if read is None else read / seconds / GB
    return {
        "ms_per_token": round(seconds * 1000, 3),
        "tokens_s": round(1 / seconds, 2),
        "gb_s": None if gb_s is None else round(gb_s, 2),
        "of_copy": None if gb_s is None else round(gb_s / ceilings.copy_gb_s, 4),
        "of_floor": None if floor is None else round(floor.seconds / seconds, 4),
        "runs": timing.runs,
    }
