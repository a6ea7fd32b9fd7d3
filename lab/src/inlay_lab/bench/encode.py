"""The speed of encoding modules, many packed into one forward pass, beside the stock model on the same texts.

The modules have equal lengths and see only themselves (``isolated``). So the stock model computes the same keys and
values from their token ids as a batch of prompts, with a cache and without logits. Several batch sizes are tried on
some of the texts. The best one runs over all texts, in turns with ours.

- ours: from the schema's text to the last stored module: parsing, tokenizing, planning and the forward passes.
- stock: the base model's forward passes with a DynamicCache (sdpa, same dtype and threads).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from inlay.client.llm import LLM
from inlay.engine.unshared_runner import with_cache
from inlay.errors import ContextError, ParameterError
from inlay.models.interface import attention_implementation
from inlay.models.spec import dtype_name
from inlay.pml import Schema
from inlay_lab.bench.machine import Progress, clocked, describe_machine, in_turns, measure_ceilings
from inlay_lab.bench.stock import check_another_fits, exact_text, load_stock
from inlay_lab.options import check_least

_TRIAL = 16  # modules in each trial of a batch size, or one batch if that is more


@dataclass(frozen=True, kw_only=True)
class EncodeSetting:
    """Options of the encoding benchmark. Raises ParameterError.

    Attributes:
        modules: Number of modules.
        tokens: Tokens of each module.
        batches: Batch sizes to try with the stock model.
    """

    model: str
    modules: int = 64
    tokens: int = 256
    dtype: str = "auto"
    weights: str | None = "packed"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    runs: int = 3
    quick: bool = False

    def __post_init__(self) -> None:
        check_least(1, modules=self.modules, tokens=self.tokens, batch=self.batches, runs=self.runs)


def measure_encode(setting: EncodeSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Tokens a second of ours and of the stock model, and their ratio. Raises InlayError."""
    llm = _load(setting)
    dtype = dtype_name(llm.loaded.model.dtype)
    ceilings = measure_ceilings([dtype], quick=setting.quick)
    text = _schema(llm, setting)
    ids = module_ids(llm, text)
    stock = load_stock(setting.model, dtype)
    rates = _rates(stock, ids, setting.batches)
    best = max(rates, key=rates.__getitem__)
    meters = {"inlay": clocked(partial(encode, llm, text)), "stock": clocked(partial(compute, stock, ids, best))}
    timed = in_turns(meters, setting.runs, progress)
    tokens = sum(map(len, ids))
    ours, theirs = (tokens / timed[name].seconds for name in ("inlay", "stock"))
    return {
        "model": setting.model,
        "dtype": dtype,
        "weights": setting.weights,
        "quantization": setting.quantization,
        "kv_cache_dtype": setting.kv_cache_dtype,
        "modules": len(ids),
        "tokens": tokens,
        "tokens_s": round(ours, 1),
        "stock_tokens_s": round(theirs, 1),
        "stock_batch": best,
        "stock_tokens_s_by_batch": {str(batch): round(rate, 1) for batch, rate in rates.items()},
        "ratio": round(ours / theirs, 3),
        "runs": timed["inlay"].runs,
        "quick": setting.quick,
        "ceilings": ceilings.report(),
        "machine": describe_machine(),
    }


def encode(llm: LLM, text: str) -> None:
    """Encode every module of a schema into an empty store."""
    llm.reset_prefix_cache()
    llm.add_schema(Schema.from_string(text, source="bench.xml"))


@torch.inference_mode()
def compute(model: PreTrainedModel, ids: Sequence[tuple[int, ...]], batch: int) -> DynamicCache:
    """Compute the stock model's keys and values, ``batch`` texts at a time, with padding at the end of short ones.

    Returns the last batch's cache only: keeping all would need memory on top of ours.
    """
    with attention_implementation(model, "sdpa"):
        for first in range(0, len(ids), batch):
            cache = DynamicCache(config=model.config)
            past = with_cache(model.base_model, cache)
            model.base_model(input_ids=_padded(ids[first : first + batch]), use_cache=True, **past)
    return cache


def module_ids(llm: LLM, text: str) -> list[tuple[int, ...]]:
    """The token ids of a schema's modules."""
    layout = llm.add_schema(Schema.from_string(text, source="bench.xml"), encode=False)
    return [run.ids for run in layout.runs if run.owner]


def _padded(ids: Sequence[tuple[int, ...]]) -> Tensor:
    longest = max(map(len, ids))
    return torch.tensor([[*each, *[0] * (longest - len(each))] for each in ids])


def _rates(model: PreTrainedModel, ids: list[tuple[int, ...]], batches: tuple[int, ...]) -> dict[int, float]:
    """Tokens a second by batch size, on the first texts."""
    trials = {batch: ids[: max(batch, _TRIAL)] for batch in batches if batch <= len(ids)}
    if not trials:
        raise ParameterError(f"batch is {min(batches)} at least, and there are {len(ids)} modules; give a smaller one")
    meters = {str(batch): clocked(partial(compute, model, texts, batch)) for batch, texts in trials.items()}
    timed = in_turns(meters, 1)
    return {batch: sum(map(len, texts)) / timed[str(batch)].seconds for batch, texts in trials.items()}


def _load(setting: EncodeSetting) -> LLM:
    llm = LLM(
        setting.model,
        dtype=setting.dtype,
        weights=setting.weights,
        quantization=setting.quantization,
        kv_cache_dtype=setting.kv_cache_dtype,
        reuse="isolated",
        seed=0,
        device="cpu",
    )
    longest = llm.loaded.spec.max_positions
    if setting.tokens >= longest:
        raise ContextError(f"modules of {setting.tokens} tokens do not fit the model's context of {longest}; use fewer")
    check_another_fits(llm.loaded.model.config, llm.loaded.model.dtype)
    return llm


def _schema(llm: LLM, setting: EncodeSetting) -> str:
    draw = random.Random(0)
    texts = (exact_text(llm, setting.tokens, draw) for _ in range(setting.modules))
    modules = "".join(f'<module name="m{number}">{text}</module>' for number, text in enumerate(texts))
    return f'<schema name="bench-encode">{modules}</schema>'
