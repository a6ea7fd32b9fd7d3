"""Time to first token with most of the prompt cached, against a full prefill and against a lower bound.

The prompt is N tokens of text in eight modules and a short new text behind them. These are timed in turns, so that a
slow moment of the machine affects all of them:

- ``ttft_ms``: a request, from the call to the first token: resolving, tokenizing, composing, forward pass, sampling.
  Each request has a new cache salt, so that only modules are cached and not its own earlier text.
- ``full_prefill_ms``: the stock transformers model on the same ids (sdpa, same dtype and threads, one row of logits).
- ``bound_ms``: a request of only the new tokens with nothing cached, as if reading the cache cost nothing. With
  selective recomputation, the recomputed tokens count as new.
- ``floor_ms``: the least time of the pass on this machine (floor.py), with attention over the cached keys.
- ``behind_ms``, with selective recomputation: as many new tokens behind the same modules without it.
- ``llama_ms`` and ``llama_held_ms``, optional: llama.cpp's whole prompt, and its new tokens behind a cached prefix,
  in as many bits.

A sweep over lengths follows figure 5 of Prompt Cache (arXiv 2311.04934). It fits a line to our times and a parabola to
those of the full prefill.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from inlay.authoring.plot import save
from inlay.client.llm import LLM
from inlay.errors import CapacityError, ContextError, ParameterError
from inlay.models.spec import dtype_name
from inlay.pml import Prompt, Schema
from inlay.policy import ReusePolicy
from inlay.sampling.params import SamplingParams
from inlay.settings import check_choice
from inlay.types import RequestOutput
from inlay_lab.bench.engines.gguf_file import OTHER_WEIGHTS, why_not
from inlay_lab.bench.engines.peer import Peer, llama_cpp
from inlay_lab.bench.floor import Rates
from inlay_lab.bench.machine import (
    Meter,
    Progress,
    Timing,
    clocked,
    describe_machine,
    in_turns,
    measure_ceilings,
    new_sender,
    part_of,
)
from inlay_lab.bench.stock import (
    another_fits,
    check_another_fits,
    exact_text,
    fit,
    is_quantized_file,
    load_stock,
    prefill,
)
from inlay_lab.bench.throughput.steps import Cost
from inlay_lab.drawing import add_legend, figure_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MODULES = 8
SWEEP = (256, 512, 1024, 2048, 4096, 8192, 16384)
BASELINES = ("transformers", "llama.cpp")
QUICK_SWEEP = (64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Setting:
    """One row of the table: numbers of cached and new tokens."""

    cached: int
    new: int


@dataclass(frozen=True, kw_only=True)
class TTFTSetting:
    """Options of the benchmark. Raises ParameterError.

    Attributes:
        reuse, positions: Policy of the requests. It reads modules and may have selective recomputation.
        baselines: From BASELINES; timed up to prompts of ``longest_baseline`` cached tokens.
        sweep: Rows are points of a curve. Rows that do not fit are left out with the reason, and curves are fitted.
    """

    model: str
    rows: tuple[Setting, ...]
    dtype: str = "auto"
    weights: str | None = "packed"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    reuse: str = "modular"
    positions: str | None = None
    runs: int = 7
    baselines: tuple[str, ...] = ("transformers",)
    longest_baseline: int | None = None
    sweep: bool = False
    quick: bool = False

    def __post_init__(self) -> None:
        if self.runs < 1 or any(row.cached < MODULES or row.new < 1 for row in self.rows):
            raise ParameterError(f"bench ttft needs runs ≥ 1, at least {MODULES} cached tokens and 1 new token")
        for word in self.baselines:
            check_choice("baseline", word, BASELINES)
        policy = ReusePolicy.parse(self.reuse)
        if policy.auto or policy.level == "off":
            allowed = "isolated, anchored, primed, modular, one of these with recomputation, or exact"
            raise ParameterError(f"reuse is '{self.reuse}', and cached modules are timed; use {allowed}")


def measure_ttft(setting: TTFTSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Measure every row; returns ``{"rows": […], "skipped": […], "fits": …, "machine": …}``. Raises InlayError."""
    llm = LLM(
        setting.model,
        dtype=setting.dtype,
        weights=setting.weights,
        quantization=setting.quantization,
        kv_cache_dtype=setting.kv_cache_dtype,
        reuse=setting.reuse,
        positions=setting.positions,
        promotion_memory=0,
        seed=0,
        device="cpu",
    )
    dtype = dtype_name(llm.loaded.model.dtype)
    if not setting.sweep:  # an error now, not after minutes of measuring
        for row in setting.rows:
            _check_context(llm, row)
    stock = _stock(setting, llm, dtype) if "transformers" in setting.baselines else None
    without_llama = _why_no_llama(setting, llm, dtype)
    ceilings = measure_ceilings([dtype], quick=setting.quick)
    rates = Rates.measured(dtype, quick=setting.quick)
    cost = Cost.of(llm, max(row.cached + row.new for row in setting.rows))
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    with ExitStack() as stack:
        llama = None if without_llama is not None else stack.enter_context(_llama(setting, llm))
        for number, row in enumerate(setting.rows):
            try:
                _check_context(llm, row)
                measured = _measure(llm, stock, llama, row, setting, part_of(progress, number, len(setting.rows)))
                rows.append(measured | _floor(measured, cost, rates))
            except (ContextError, CapacityError) as error:
                if not setting.sweep:
                    raise
                skipped.append({"cached": row.cached, "new": row.new, "reason": str(error)})
    return {
        "rows": rows,
        "skipped": skipped,
        "fits": _fits(rows) if setting.sweep else None,
        "left_out": {"llama.cpp": without_llama} if "llama.cpp" in setting.baselines and without_llama else {},
        "model": setting.model,
        "dtype": dtype,
        "weights": setting.weights,
        "quantization": setting.quantization,
        "kv_cache_dtype": setting.kv_cache_dtype,
        "quick": setting.quick,
        "ceilings": ceilings.report(),
        "machine": describe_machine(),
    }


def _check_context(llm: LLM, row: Setting) -> None:
    longest = llm.loaded.spec.max_positions
    if row.cached + row.new >= longest:
        raise ContextError(f"{row.cached} + {row.new} tokens do not fit the model's context of {longest}")


def _stock(setting: TTFTSetting, llm: LLM, dtype: str) -> PreTrainedModel:
    check_another_fits(llm.loaded.model.config, llm.loaded.model.dtype, "use a smaller model, or --baselines none")
    return load_stock(setting.model, dtype)


def _why_no_llama(setting: TTFTSetting, llm: LLM, dtype: str) -> str | None:
    """The reason that llama.cpp is not measured, or None."""
    if "llama.cpp" not in setting.baselines:
        return "not asked for"
    config = llm.loaded.model.config
    if reason := OTHER_WEIGHTS if is_quantized_file(llm.loaded) else why_not(config, dtype, setting.quantization):
        return reason
    return None if another_fits(config, llm.loaded.model.dtype) else "there is no memory for one more model"


def _llama(setting: TTFTSetting, llm: LLM) -> AbstractContextManager[Peer]:
    longest = max(row.cached + row.new for row in setting.rows if _timed(row, setting))
    remedy = "leave it out with --baselines transformers"
    return llama_cpp(llm.loaded.model.config, longest + 1, remedy, quantization=setting.quantization)


def _timed(row: Setting, setting: TTFTSetting) -> bool:
    """True if baselines are measured for a row."""
    return setting.longest_baseline is None or row.cached <= setting.longest_baseline


def _measure(
    llm: LLM,
    stock: PreTrainedModel | None,
    llama: Peer | None,
    row: Setting,
    setting: TTFTSetting,
    progress: Progress | None,
) -> dict[str, Any]:
    schema, prompt = workload(llm, f"bench-{row.cached}-{row.new}", row)
    llm.reset_prefix_cache()
    llm.add_schema(schema)
    if ReusePolicy.parse(setting.reuse).level == "exact":
        first_token(llm, prompt)  # an exact prefix is stored by the first request that has it
    warm = first_token(llm, prompt)
    recomputed, computed = warm.usage.recomputed_tokens, warm.usage.computed_tokens
    cached, new = warm.usage.cached_tokens + recomputed, computed - recomputed
    tail = list(warm.prompt_token_ids[-computed:])
    meters: dict[str, Meter] = {
        "ttft_ms": clocked(partial(first_token, llm, prompt)),
        "bound_ms": clocked(partial(first_token, llm, tail)),
    }
    if recomputed:
        _, longer = workload(llm, schema.name, replace(row, new=computed))
        plain = str(ReusePolicy.parse(setting.reuse).without_recompute())
        meters["behind_ms"] = clocked(partial(first_token, llm, longer, reuse=plain))
    if stock is not None and _timed(row, setting):
        meters["full_prefill_ms"] = clocked(partial(prefill, stock, torch.tensor([warm.prompt_token_ids])))
    if llama is not None and _timed(row, setting):
        ids = list(warm.prompt_token_ids)
        meters["llama_ms"] = partial(llama.first_token, ids)
        meters["llama_held_ms"] = partial(llama.first_token, ids, cached)
    counts = {"cached": cached, "new": new} | ({"repaired": recomputed} if recomputed else {})
    return counts | _cells(in_turns(meters, setting.runs, progress))


def _floor(row: dict[str, Any], cost: Cost | None, rates: Rates) -> dict[str, Any]:
    """The floor of a row, and the share of it that is reached. None where the model's work cannot be counted."""
    if cost is None:
        return {"floor_ms": None, "of_floor": None}
    computed = row["new"] + row.get("repaired", 0)
    # A new token reads the keys before it: on average, half of the new ones.
    floor = cost.floor_of(computed, 1, row["cached"] + row["new"] // 2, rates)
    floor_ms = floor.seconds * 1000
    parts = {**floor.report(), **rates.at(computed)}
    return {"floor_ms": round(floor_ms, 2), "of_floor": round(floor_ms / row["ttft_ms"], 3), "floor": parts}


def _cells(timed: dict[str, Timing]) -> dict[str, Any]:
    ours, bound, full = timed["ttft_ms"], timed["bound_ms"], timed.get("full_prefill_ms")
    behind = timed.get("behind_ms")
    return {
        "ttft_ms": round(ours.ms, 2),
        "full_prefill_ms": None if full is None else round(full.ms, 2),
        "bound_ms": round(bound.ms, 2),
        "speedup": None if full is None else round(full.ms / ours.ms, 2),
        "over_bound": round(ours.ms / bound.ms, 3),
        "runs": ours.runs,
        "full_prefill_runs": None if full is None else full.runs,
        **({} if behind is None else {"behind_ms": round(behind.ms, 2), "over_behind": round(ours.ms / behind.ms, 3)}),
        **{name: round(timing.ms, 2) for name, timing in timed.items() if name.startswith("llama_")},
    }


def _fits(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A line through our times and a parabola through the full prefill's; None with too few points."""

    def curve(name: str, degree: int) -> dict[str, Any] | None:
        points = [(row["cached"] + row["new"], row[name]) for row in rows if row[name] is not None]
        return fit(points, degree)

    return {"x": "prompt tokens", "ttft_ms": curve("ttft_ms", 1), "full_prefill_ms": curve("full_prefill_ms", 2)}


def first_token(llm: LLM, prompt: Any, reuse: str | None = None) -> RequestOutput:
    """Send a request under a new cache salt: it finds public modules only."""
    once = SamplingParams(max_tokens=1, temperature=0)
    policy = None if reuse is None else ReusePolicy.parse(reuse)
    return llm.generate(prompt, once, reuse=policy, cache_salt=new_sender())[0]


def workload(llm: LLM, name: str, row: Setting) -> tuple[Schema, Prompt]:
    """A schema of eight modules with ``cached`` tokens together, and a prompt with ``new`` tokens behind them."""
    draw = random.Random(0)
    bos = len(llm.encoder.bos)
    sizes = [(row.cached - bos) // MODULES] * MODULES
    sizes[-1] += row.cached - bos - sum(sizes)
    modules = "".join(f'<module name="m{i}">{exact_text(llm, size, draw)}</module>' for i, size in enumerate(sizes))
    imports = "".join(f"<m{i}/>" for i in range(MODULES))
    schema = Schema.from_string(f'<schema name="{name}">{modules}</schema>', source="bench.xml")
    prompt = Prompt.from_string(
        f'<prompt schema="{name}">{imports}{exact_text(llm, row.new, draw)}</prompt>', source="bench-prompt.xml"
    )
    return schema, prompt


_CURVES = (
    ("full_prefill_ms", "full prefill, stock transformers", "#D55E00", "s"),
    ("ttft_ms", "inlay, modules cached", "#0072B2", "o"),
    ("bound_ms", "the new tokens alone, nothing cached", "#999999", "x"),
)


@figure_style()
def draw_ttft(result: dict[str, Any], path: Path) -> None:
    """Draw points and fits, linear on the left and logarithmic on the right. Raises ParameterError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.0))
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        _draw(axes, result)
        axes.set_xlabel("prompt tokens")
    left.set_ylabel("time to first token, s")
    left.set_ylim(bottom=0)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    figure.suptitle(f"{result['model']}, {result['dtype']}, {result['machine']['threads']} threads")
    add_legend(figure, 3)
    save(figure, path)


def _draw(axes: Axes, result: dict[str, Any]) -> None:
    for name, label, colour, marker in _CURVES:
        points = [(row["cached"] + row["new"], row[name] / 1000) for row in result["rows"] if row[name] is not None]
        if not points:
            continue
        x = np.array([tokens for tokens, _ in points])
        axes.plot(x, [seconds for _, seconds in points], marker, color=colour, markersize=5, label=label)
        curve = (result["fits"] or {}).get(name)
        if curve is not None:
            along = np.geomspace(x.min(), x.max(), 100)
            axes.plot(along, np.polyval(curve["coefficients"][::-1], along) / 1000, color=colour, linewidth=1)
