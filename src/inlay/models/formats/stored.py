"""Linear layers of quantized checkpoints in the form of their files, until they are converted.

The files are mapped, and a few rows are unpacked at a time, so that a model is never in memory at full width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

#: Inputs that share one scale and one zero in 4 bits.
GROUP = 32
_UNPACKED = 16 << 20  # bytes of fp32 at a time


class Grid(NamedTuple):
    """Rows in 4 bits: a weight is (number - 8) · scale + zero of its group.

    Args:
        numbers: (rows, inputs), 0 … 15, uint8.
        scales, zeros: (rows, inputs / GROUP), fp32.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor

    def dense(self) -> Tensor:
        """(rows, inputs), fp32."""
        groups = self.numbers.unflatten(1, (-1, GROUP)).float().sub_(8)
        return groups.mul_(self.scales.unsqueeze(2)).add_(self.zeros.unsqueeze(2)).flatten(1)


class StoredWeight(ABC):
    """A weight (out_features, in_features) in the form of a quantized checkpoint.

    Attributes:
        shape: (out_features, in_features).
        on_grid: True if ``grid`` returns its rows. Then it takes 4 bits without further rounding.
        symmetric: True if all zeros of that grid are 0, so that they need not be kept.
        by_output: True if ``bytes`` returns its rows, with one scale each. Then it takes 8 bits without further
            rounding.
        by_group: The same with a scale for every ``GROUP`` inputs.
        narrow: True if 8-bit integers hold it accurately. Others are used in the model's dtype.
    """

    shape: tuple[int, int]
    on_grid: bool = False
    symmetric: bool = False
    by_output: bool = False
    by_group: bool = False
    narrow: bool = True

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the file for the fingerprint, by names that differ between packings."""

    @abstractmethod
    def dense(self, first: int, last: int) -> Tensor:
        """Return the rows from ``first`` up to ``last``: (last - first, in_features), fp32."""

    def grid(self, first: int, last: int) -> Grid:
        """Return the same rows in 4 bits."""
        raise NotImplementedError(f"{type(self).__name__} is on no grid")

    def bytes(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the same rows in 8 bits: (rows, in_features) int8, and scales (rows,) or (rows, groups), fp32."""
        raise NotImplementedError(f"{type(self).__name__} has other scales")

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the whole weight, (out_features, in_features)."""
        outputs, inputs = self.shape
        weight = torch.empty(self.shape, dtype=dtype)
        step = max(1, _UNPACKED // (4 * inputs))
        for first in range(0, outputs, step):
            last = min(first + step, outputs)
            weight[first:last] = self.dense(first, last)
        return weight


class SideBySide(StoredWeight):
    """The concatenated outputs of several weights of the same inputs."""

    def __init__(self, weights: Sequence[StoredWeight]) -> None:
        self._weights = weights
        self.shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
        self.on_grid = all(weight.on_grid for weight in weights)
        self.symmetric = all(weight.symmetric for weight in weights)
        self.by_output = all(weight.by_output for weight in weights)
        self.by_group = all(weight.by_group for weight in weights)
        self.narrow = all(weight.narrow for weight in weights)

    def tensors(self) -> Mapping[str, Tensor]:
        each = enumerate(self._weights)
        return {f"{i}.{name}": tensor for i, weight in each for name, tensor in weight.tensors().items()}

    def dense(self, first: int, last: int) -> Tensor:
        return torch.cat([weight.dense(*rows) for weight, rows in self._rows(first, last)])

    def grid(self, first: int, last: int) -> Grid:
        grids = [weight.grid(*rows) for weight, rows in self._rows(first, last)]
        return Grid(*(torch.cat(tensors) for tensors in zip(*grids, strict=True)))

    def bytes(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        numbers, scales = zip(*(weight.bytes(*rows) for weight, rows in self._rows(first, last)), strict=True)
        return torch.cat(numbers), torch.cat(scales)

    def _rows(self, first: int, last: int) -> list[tuple[StoredWeight, tuple[int, int]]]:
        found, at = [], 0
        for weight in self._weights:
            begin, end = max(first - at, 0), min(last - at, weight.shape[0])
            if begin < end:
                found.append((weight, (begin, end)))
            at += weight.shape[0]
        return found


class StoredLinear(nn.Linear):
    """A linear layer that unpacks its ``weight`` on every access. It is converted before use, not run.

    Args:
        stored: The packed weight.
        bias: (out_features,) or None.
        dtype: Of ``weight``.
    """

    stored: StoredWeight | None

    def __init__(self, stored: StoredWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = stored.shape
        self.stored = stored
        self.register_parameter("bias", bias)
        self.dtype = dtype
        for name, tensor in stored.tensors().items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:
        """(out_features, in_features)."""
        if self.stored is None:
            raise ValueError("the weight of this layer has gone into another form")
        return self.stored.whole(self.dtype)

    @weight.setter
    def weight(self, value: Tensor | None) -> None:
        """Release the weight, after another layer was made of it."""
        self.stored = None
        self._buffers.clear()

    def take(self) -> StoredWeight:
        """Return the weight and release it."""
        if self.stored is None:
            raise ValueError("the weight of this layer has gone into another form")
        stored, self.weight = self.stored, None
        return stored

    def restored(self) -> nn.Linear:
        """Return an ordinary layer with the same weight."""
        bias = self.bias
        layer = nn.Linear(self.in_features, self.out_features, bias=bias is not None, device="meta", dtype=self.dtype)
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        layer.bias = bias
        return layer


@runtime_checkable
class KeepsStored(Protocol):
    """A maker of linear layers that can keep weights in their stored form."""

    def keep(self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """Make one layer with the outputs of several weights, concatenated."""
        ...


def has_stored(model: nn.Module) -> bool:
    """Return True if some layers of a model are StoredLinear."""
    return any(isinstance(module, StoredLinear) for module in model.modules())


def restore(part: nn.Module) -> nn.Module:
    """Replace StoredLinear layers in a part of a model by ordinary ones. Returns the part or its replacement."""
    if isinstance(part, StoredLinear):
        return part.restored()
    for path, module in list(part.named_modules()):
        if isinstance(module, StoredLinear):
            part.set_submodule(path, module.restored())
    return part
