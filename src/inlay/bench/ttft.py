"""Time to first token with most of the prompt cached, against a full prefill and against its own bound.

The prompt is N tokens of text in eight modules and a short new text behind them. Three things are timed, turn by turn,
so that a slow moment of the machine meets all of them:

- ``ttft_ms``: a request, from the call to the first token: resolving, tokenizing, splicing, the forward pass, sampling.
- ``full_prefill_ms``: the stock transformers model on the same ids (sdpa, same dtype and threads, one row of logits).
- ``bound_ms``: a request of the same new tokens alone through the same engine, with nothing cached: what is left if
  reading the cache cost nothing.
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inlay.errors import ContextError, ParameterError
from inlay.llm import LLM
from inlay.models.adapter import dtype_name
from inlay.models.interface import attention_implementation
from inlay.pml import Prompt, Schema
from inlay.types import SamplingParams

MODULES = 8
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


@dataclass(frozen=True)
class Setting:
    """One row of the table: how many tokens are cached and how many are new."""

    cached: int
    new: int


def measure_ttft(
    model: str,
    settings: list[Setting],
    *,
    dtype: str = "auto",
    reuse: str = "isolated",
    positions: str | None = None,
    runs: int = 7,
    baseline: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure every setting; returns ``{"rows": […], "machine": …}``. Raises InlayError."""
    if runs < 1 or any(s.cached < MODULES or s.new < 1 for s in settings):
        raise ParameterError(f"bench ttft needs runs ≥ 1, at least {MODULES} cached tokens and 1 new token")
    llm = LLM(model, dtype=dtype, reuse=reuse, positions=positions, seed=0)
    longest = llm.loaded.spec.max_positions
    rows = []
    for number, setting in enumerate(settings):
        if setting.cached + setting.new >= longest:
            raise ContextError(f"{setting.cached} + {setting.new} tokens do not fit the model's context of {longest}")
        rows.append(_measure(llm, setting, runs, baseline))
        if progress is not None:
            progress(number + 1, len(settings))
    return {"rows": rows, "machine": describe_machine(), "model": model, "dtype": dtype_name(llm.loaded.model.dtype)}


def describe_machine() -> dict[str, Any]:
    """What ran this."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _measure(llm: LLM, setting: Setting, runs: int, baseline: bool) -> dict[str, Any]:
    name = f"bench-{setting.cached}-{setting.new}"
    schema, prompt = _workload(llm, name, setting)
    llm.store.clear()
    llm.add_schema(schema)
    warm = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))[0]
    cached, new = warm.usage.cached_tokens, warm.usage.computed_tokens
    tail = list(warm.prompt_token_ids[-new:])
    timed: dict[str, Callable[[], None]] = {
        "ttft_ms": lambda: _first_token(llm, prompt),
        "bound_ms": lambda: _first_token(llm, tail),
    }
    if baseline:
        timed["full_prefill_ms"] = lambda: _full_prefill(llm, warm.prompt_token_ids)
    medians = _alternate(timed, runs)
    full = medians.get("full_prefill_ms")
    return {
        "cached": cached,
        "new": new,
        "ttft_ms": round(medians["ttft_ms"], 2),
        "full_prefill_ms": None if full is None else round(full, 2),
        "bound_ms": round(medians["bound_ms"], 2),
        "speedup": None if full is None else round(full / medians["ttft_ms"], 2),
        "over_bound": round(medians["ttft_ms"] / medians["bound_ms"], 3),
        "runs": runs,
    }


def _alternate(timed: dict[str, Callable[[], None]], runs: int) -> dict[str, float]:
    """Median milliseconds of each function, called in turns after one call of each that does not count."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(runs + 1):
        for name, call in timed.items():
            if name == "full_prefill_ms" and turn > (runs + 1) // 2:
                continue  # it takes seconds, and half as many runs give a steady median
            started = time.perf_counter()
            call()
            if turn:
                samples[name].append((time.perf_counter() - started) * 1000)
    return {name: statistics.median(values) for name, values in samples.items() if values}


def _first_token(llm: LLM, prompt: Any) -> None:
    llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))


def _full_prefill(llm: LLM, ids: tuple[int, ...]) -> None:
    model = llm.loaded.model
    with torch.inference_mode(), attention_implementation(model, "sdpa"):
        model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1)


def _workload(llm: LLM, name: str, setting: Setting) -> tuple[Schema, Prompt]:
    """A schema of eight modules that hold ``cached`` tokens together, and a prompt with ``new`` tokens behind them."""
    draw = random.Random(0)
    bos = len(llm.encoder.bos)
    sizes = [(setting.cached - bos) // MODULES] * MODULES
    sizes[-1] += setting.cached - bos - sum(sizes)
    modules = "".join(f'<module name="m{i}">{_text(llm, size, draw)}</module>' for i, size in enumerate(sizes))
    imports = "".join(f"<m{i}/>" for i in range(MODULES))
    schema = Schema.from_string(f'<schema name="{name}">{modules}</schema>', source="bench.xml")
    prompt = Prompt.from_string(
        f'<prompt schema="{name}">{imports}{_text(llm, setting.new, draw)}</prompt>', source="bench-prompt.xml"
    )
    return schema, prompt


def _text(llm: LLM, tokens: int, draw: random.Random) -> str:
    """Words that make that many tokens; a token or two off where the tokenizer joins what was cut."""
    text = " ".join(draw.choices(_WORDS, k=tokens))
    ids = llm.encoder.text(text)[:tokens]
    return str(llm.tokenizer.decode(list(ids)))
