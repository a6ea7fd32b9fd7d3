"""Helpers of benchmarks: the stock transformers model, its memory, polynomial fits, and texts of a given token
count.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from inlay.client.base import Base
from inlay.errors import CapacityError
from inlay.models.interface import attention_implementation
from inlay.models.load import LoadedModel, load_model
from inlay.models.quantize import Int4Linear, Int8Linear
from inlay.models.weight_size import weight_bytes as quantized_bytes

_SLACK = 1.2  # memory of a running model over its weights


def load_stock(name: str, dtype: str, device: str = "cpu") -> PreTrainedModel:
    """The stock transformers model, with the weights of ``LLM(name, dtype=dtype, seed=0)``."""
    return load_model(name, dtype=dtype, seed=0, weights="stock", device=device).model


def prefill(model: PreTrainedModel, ids: Tensor) -> None:
    """A forward pass over (batch, tokens) ids as for a first token: sdpa, one row of logits, no cache."""
    with torch.inference_mode(), attention_implementation(model, "sdpa"):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)


def _skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this configuration without memory for its weights."""
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        made: PreTrainedModel = factory.from_config(copy.deepcopy(config))
    made.tie_weights()
    return made


def weight_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights; tied ones count once."""
    return sum(parameter.numel() for parameter in _skeleton(config).parameters()) * dtype.itemsize


def bytes_read_per_token(config: PretrainedConfig, dtype: torch.dtype, quantization: str | None = None) -> int:
    """Weight bytes that one decode step reads. An untied input embedding does not count: a step reads one row of it.

    Args:
        quantization: As in ``load_model``. With quantization, a tied head is a copy of the embedding.
    """
    model: Any = _skeleton(config)
    looked_up = model.get_input_embeddings().weight
    if quantization is not None:
        return quantized_bytes(config, dtype, quantization) - int(looked_up.numel()) * dtype.itemsize
    output = model.get_output_embeddings()
    tied = output is not None and output.weight is looked_up
    weights = sum(parameter.numel() for parameter in model.parameters())
    return int(weights if tied else weights - looked_up.numel()) * dtype.itemsize


def is_quantized_file(loaded: LoadedModel) -> bool:
    """True if a checkpoint or GGUF file has quantized weights and they are multiplied as they are."""
    layers = (module for module in loaded.model.modules() if isinstance(module, Int8Linear | Int4Linear))
    return loaded.form.quantization is None and next(layers, None) is not None


def another_fits(config: PretrainedConfig, dtype: torch.dtype, copies: int = 1) -> bool:
    """True if free memory has room for ``copies`` more models of this size."""
    return copies * weight_bytes(config, dtype) * _SLACK < psutil.virtual_memory().available


def check_another_fits(config: PretrainedConfig, dtype: torch.dtype, remedy: str = "use a smaller model") -> None:
    """Raise CapacityError if the stock model does not fit in free memory beside ours."""
    if not another_fits(config, dtype):
        needed, free = (bytes_ / 1e9 for bytes_ in (weight_bytes(config, dtype), psutil.virtual_memory().available))
        raise CapacityError(f"the stock model takes {needed:.1f} GB beside ours and {free:.1f} GB are free; {remedy}")


def fit(points: Sequence[tuple[float, float]], degree: int) -> dict[str, Any] | None:
    """The least-squares polynomial of (x, y) points, or None if there are too few points for it.

    Returns:
        Coefficients, the constant one first, and R², the share of the variance that the polynomial explains.
    """
    if len({x for x, _ in points}) <= degree + 1:
        return None
    x, y = np.array(points, dtype=np.float64).T
    coefficients = np.polyfit(x, y, degree)
    left = y - np.polyval(coefficients, x)
    spread = float(((y - y.mean()) ** 2).sum())
    explained = 1 - float((left**2).sum()) / spread if spread else 1.0
    return {"degree": degree, "coefficients": [float(c) for c in coefficients[::-1]], "r2": round(explained, 6)}


_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


def exact_text(llm: Base, tokens: int, draw: random.Random) -> str:
    """Words of ``tokens`` tokens. The count is off by one or two if the tokenizer joins tokens at the cut."""
    text = " ".join(draw.choices(_WORDS, k=tokens))
    ids = llm.encoder.text(text)[:tokens]
    return str(llm.tokenizer.decode(list(ids)))
