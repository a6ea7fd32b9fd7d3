"""The memory of a model's weights, computed from its configuration alone by a load without data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from inlay.models.families import family_of
from inlay.models.fill import on_meta
from inlay.models.formats.stored import GROUP, StoredLinear, StoredWeight
from inlay.models.linear import FrozenLinear
from inlay.models.quantize import BLOCK
from inlay.models.weights import WeightForm, parts


def weight_bytes(config: PretrainedConfig, dtype: torch.dtype, quantization: str | None = None) -> int:
    """Return the bytes of all weights after a load, with tied ones counted once. No weights are read or allocated.

    A tied head is a copy of the embedding if it is quantized. It is a copy too if oneDNN packs it, because our own
    kernel is not available; that case is not counted.

    Args:
        quantization: As in ``load_model``.

    Raises:
        ModelError: If the family is not supported.
        ParameterError: If the quantization does not exist.
    """
    WeightForm(quantization=quantization)
    family = family_of(config)
    model = on_meta(copy.deepcopy(config), dtype)
    model.tie_weights()
    output: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    tied = output is not None and output.weight is embedding.weight
    family.patch(model)
    heads = {path for path, part in parts(model) if isinstance(part, nn.Linear)}
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(path, StoredLinear(_Shape(tuple(module.weight.shape)), module.bias, dtype))
    total = 0
    for path, part in parts(model):
        head = path in heads
        count = _Count(dtype, quantization, head=head, shared=tied and head)
        replacement = family.fuse(path, part, count)
        total += count.bytes + sum(_left(module, dtype) for module in replacement.modules())
    return total


def _left(module: nn.Module, dtype: torch.dtype) -> int:
    """The bytes that a module itself keeps in the model's dtype."""
    left = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
    if isinstance(module, StoredLinear) and module.stored is not None:  # stays a stock layer
        left += module.out_features * module.in_features * dtype.itemsize
    return left


class _Shape(StoredWeight):
    """A weight with a known shape and no data."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = (shape[0], shape[1])

    def tensors(self) -> Mapping[str, Tensor]:
        return {}

    def dense(self, first: int, last: int) -> Tensor:
        raise AssertionError("only counted")


class _Count:
    """A maker of empty layers that counts the bytes of the real ones."""

    def __init__(self, dtype: torch.dtype, quantization: str | None, *, head: bool, shared: bool) -> None:
        self.bytes = 0
        self._dtype, self._quantization, self._head, self._shared = dtype, quantization, head, shared

    def __call__(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        self.bytes += self._of(weight.shape[0], weight.shape[1])
        self.bytes += 0 if bias is None else bias.numel() * self._dtype.itemsize
        return FrozenLinear(weight.shape[1], weight.shape[0])

    def keep(self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """Count one layer for several weights."""
        rows = sum(weight.shape[0] for weight in weights)
        return self(torch.empty(rows, weights[0].shape[1], device="meta", dtype=dtype), bias)

    def _of(self, outputs: int, inputs: int) -> int:
        if self._quantization is None:
            return 0 if self._shared else outputs * inputs * self._dtype.itemsize
        four = self._quantization == "int4" and not self._head and outputs % BLOCK == inputs % GROUP == 0
        if four:  # a scale and a zero for each group
            return outputs * inputs // 2 + outputs * (inputs // GROUP) * 2 * self._dtype.itemsize
        return outputs * (inputs + 4)  # a scale for each output
