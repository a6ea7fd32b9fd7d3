"""Linear layers with weights in 8 or 4 bits that compute in the model's dtype.

With few rows, the time of a product is that of reading its weights, and fewer bits are read faster. The compiled kernel
multiplies them as integers, for few rows and many (compiled_weight.py). If it was not built, or is not faster on this
processor, PyTorch's own kernels read them in place. Those repeat the conversion for every few rows. So with more rows
it is faster to convert a stretch of the weight once, while it is in the cache, and to multiply with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from inlay.models import ops
from inlay.models.compiled_weight import CompiledWeight, can_compile, padded
from inlay.models.formats.stored import GROUP, Grid, SideBySide, StoredLinear, StoredWeight
from inlay.models.linear import FrozenLinear, MakeLinear, packed

#: Bytes of converted weight at a time. Measured: 2 MiB and a whole weight are slower.
STRETCH = 8 << 20
_INT8_OUTPUTS, _INT8_INPUTS = 16, 32  # PyTorch's 8-bit kernel crashes on other multiples
BLOCK = 64  # outputs in one block of 4-bit weights
_CONVERTED = 16 << 20  # bytes of fp32 at a time during rounding, so that no large copies are made
_SMALLEST = 1e-12  # the scale of equal weights
_FEW_ROWS_INT8 = 12  # measured: PyTorch's kernel is faster up to this number of rows
_FEW_ROWS_INT4 = 24
_int4_mm = torch.ops.aten._weight_int4pack_mm_for_cpu
int4_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu


class _QuantizedLinear(FrozenLinear):
    """The common part of 8-bit and 4-bit layers."""

    _compiled: CompiledWeight | None
    _bias: Tensor | None

    def product(self) -> Any:
        """See FrozenLinear."""
        return None if self._compiled is None else self._compiled.product(self._bias)


class Int8Linear(_QuantizedLinear):
    """Integers of -127 … 127 and one scale for each output.

    In the compiled kernel, a stored weight has one for every ``GROUP`` inputs, unless the file has one for each output.
    This keeps the numbers of GGUF's Q8_0.

    Args:
        weight: (out_features, in_features). It is not kept.
        bias: (out_features,) or None.
        dtype: The dtype to compute in. None: that of the weight.
    """

    def __init__(
        self, weight: Tensor | StoredWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        dtype = _dtype_of(weight, dtype)
        self._compiled = None
        if can_compile(dtype):
            groups, rest = divmod(self.in_features, GROUP)
            grouped = isinstance(weight, StoredWeight) and not weight.by_output and groups > 1 and not rest
            grid = torch.float32 if grouped else None
            self._compiled = CompiledWeight(self.out_features, self.in_features, 8, grid, zeros=False)
            for first, part in _in_8_bits(weight, torch.float32, GROUP if grouped else self.in_features):
                self._compiled.put(first, *part)
            self._bias = padded(bias)
            return
        self._bias = bias
        self._scales, self._numbers = _for_pytorch8(weight, dtype)
        self._read_as_they_lie = self.in_features % _INT8_INPUTS == 0

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        rows = x.reshape(-1, self.in_features).contiguous()  # some recurrent layers give transposed rows
        if not len(rows):  # a pass without an end of a prompt has no rows for the head
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self._compiled is not None:
            return self._compiled.linear(rows, self._bias).view(*x.shape[:-1], self.out_features)
        if len(rows) <= _FEW_ROWS_INT8 and self._read_as_they_lie:
            output = torch._weight_int8pack_mm(rows, self._numbers, self._scales)
        else:
            stretches = self._numbers.split(_stretch(self.in_features, x.element_size(), STRETCH))
            output = torch.cat([F.linear(rows, numbers.to(x.dtype)) for numbers in stretches], -1).mul_(self._scales)
        return _finish(output[:, : self.out_features], self._bias, x)


class Int4Linear(_QuantizedLinear):
    """Numbers of 0 … 15 with one scale and one zero for every ``GROUP`` inputs of an output: 5 bits a weight.

    Args:
        weight: (out_features, in_features), divisible as ``fits`` says. It is not kept. A weight stored on this grid
            keeps its numbers, scales and zeros.
        bias: (out_features,) or None.
        dtype: The dtype to compute in. None: that of the weight.
    """

    def __init__(
        self, weight: Tensor | StoredWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        dtype = _dtype_of(weight, dtype)
        self._compiled = None
        if can_compile(dtype):
            zeros = not (isinstance(weight, StoredWeight) and weight.symmetric)
            self._compiled = CompiledWeight(self.out_features, self.in_features, 4, dtype, zeros=zeros)
            for first, part in _in_4_bits(weight, dtype):
                self._compiled.put(first, *part)
            self._bias = padded(bias)
            return
        self._bias = bias
        self._numbers, self._scales_zeros = _for_pytorch4(weight, dtype)

    @staticmethod
    def fits(weight: Tensor | StoredWeight) -> bool:
        """Return True if a weight can be divided into whole blocks and groups."""
        return weight.shape[0] % BLOCK == 0 and weight.shape[1] % GROUP == 0

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        rows = x.reshape(-1, self.in_features).contiguous()
        if not len(rows):
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self._compiled is not None:
            return self._compiled.linear(rows, self._bias).view(*x.shape[:-1], self.out_features)
        if len(rows) <= _FEW_ROWS_INT4 or not can_unpack(x.dtype):
            output = _int4_mm(rows, self._numbers, GROUP, self._scales_zeros)
        else:
            step = _stretch(self.in_features, x.element_size(), STRETCH)
            firsts = range(0, self.out_features, step)
            stretches = (self.unpacked(first, min(step, self.out_features - first)) for first in firsts)
            output = torch.cat([rows @ weight for weight in stretches], -1)
        return _finish(output, self._bias, x)

    def unpacked(self, first: int, count: int) -> Tensor:
        """Return the weights of some outputs, transposed: (in_features, count). first, count: multiples of 64."""
        return ops.unpack_int4(self._numbers, self._scales_zeros, GROUP, first // BLOCK, count // BLOCK)


def _in_8_bits(
    weight: Tensor | StoredWeight, dtype: torch.dtype, group: int
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield (first row, (numbers (rows, inputs) int8, scales (rows, inputs / group) in ``dtype``))."""
    inputs = weight.shape[1]
    for at, end in _steps(weight):
        if isinstance(weight, StoredWeight) and (weight.by_group if group < inputs else weight.by_output):
            numbers, scales = weight.bytes(at, end)
            yield at, (numbers, scales.view(end - at, -1).to(dtype))
            continue
        part = _rows(weight, at, end)
        groups = part.unflatten(1, (-1, group))
        scales = (groups.abs().amax(2) / 127).clamp_min(_SMALLEST).to(dtype)
        groups.mul_(1 / scales[:, :, None].float()).round_().clamp_(-127, 127)
        yield at, (part.to(torch.int8), scales)


def _in_4_bits(weight: Tensor | StoredWeight, dtype: torch.dtype) -> Iterator[tuple[int, Grid]]:
    """Yield (first row, grid of the rows), with scales and zeros in ``dtype``."""
    for at, end in _steps(weight):
        if isinstance(weight, StoredWeight) and weight.on_grid:
            yield at, weight.grid(at, end)
        else:
            numbers, scale, zero = _rounded(_rows(weight, at, end), dtype)
            yield at, Grid(numbers.to(torch.uint8), scale, zero)


def _for_pytorch8(weight: Tensor | StoredWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales (outputs,) and numbers (outputs, inputs) int8, padded to whole blocks."""
    outputs, inputs = weight.shape
    more = -outputs % _INT8_OUTPUTS  # PyTorch's kernel reads whole blocks, even past the end
    scales = torch.zeros(outputs + more, dtype=dtype)
    numbers = torch.zeros(outputs + more, inputs, dtype=torch.int8)
    for at, (some, their_scales) in _in_8_bits(weight, dtype, inputs):
        numbers[at : at + len(some)], scales[at : at + len(some)] = some, their_scales.squeeze(1)
    return scales, numbers


def _for_pytorch4(weight: Tensor | StoredWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers as PyTorch packs them, and (inputs / group, outputs, 2): the scale, and the value of the number 8."""
    outputs, inputs = weight.shape
    scales_zeros = torch.empty(inputs // GROUP, outputs, 2, dtype=dtype)
    packed = []
    for at, (numbers, scale, zero) in _in_4_bits(weight, dtype):
        packed.append(int4_pack(numbers.int(), 1))
        scales_zeros[:, at : at + len(numbers)] = torch.stack((scale, zero), -1).transpose(0, 1)
    return torch.cat(packed), scales_zeros


def _steps(weight: Tensor | StoredWeight) -> Iterator[tuple[int, int]]:
    """Ranges of outputs in whole blocks, small enough to be rounded without large copies."""
    outputs, inputs = weight.shape
    step = _stretch(inputs, 4, _CONVERTED)
    return ((at, min(at + step, outputs)) for at in range(0, outputs, step))


def _rounded(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Round rows, which are overwritten: numbers (rows, inputs), scales and zeros (rows, groups)."""
    groups = rows.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)  # aminmax takes three times as long
    scale = ((high - low) / 15).clamp_min(_SMALLEST).to(dtype)
    zero = (low + 8 * scale.float()).to(dtype)
    groups.sub_(zero.float().unsqueeze(2)).mul_((1 / scale.float()).unsqueeze(2))
    return groups.add_(8).round_().clamp_(0, 15).flatten(1), scale, zero


def _rows(weight: Tensor | StoredWeight, first: int, last: int) -> Tensor:
    """A copy of some outputs' weights, fp32."""
    if isinstance(weight, StoredWeight):
        return weight.dense(first, last)
    return weight[first:last].to(torch.float32, copy=True)


def _dtype_of(weight: Tensor | StoredWeight, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        assert isinstance(weight, Tensor)  # a stored weight has no dtype of its own
        return weight.dtype
    return dtype


def _stretch(inputs: int, element_size: int, most: int) -> int:
    """Return the number of outputs whose weights have at most ``most`` bytes, in whole blocks, and at least one block.

    Args:
        inputs: Inputs of each output.
        element_size: Bytes of one weight.
    """
    return max(1, most // (inputs * element_size * BLOCK)) * BLOCK


def _finish(output: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Add the bias to a product, and restore the shape of the input."""
    output = output.reshape(*x.shape[:-1], output.shape[-1])
    return output if bias is None else output.add_(bias)


@cache
def can_unpack(dtype: torch.dtype) -> bool:
    """Return True if the compiled step reads 4-bit weights as PyTorch packs them on this processor. Tested once."""
    return ops.COMPILED and _unpacks_a_sample(dtype)


def _unpacks_a_sample(dtype: torch.dtype) -> bool:
    numbers = torch.randint(16, (2 * BLOCK, GROUP), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    scales_zeros = torch.tensor([1.0, 8.0], dtype=dtype).expand(1, 2 * BLOCK, 2).contiguous()
    packed = int4_pack(numbers, 1)
    found = ops.unpack_int4(packed, scales_zeros, GROUP, 0, 2) if packed.shape == (2 * BLOCK, GROUP // 2) else None
    return found is not None and torch.equal(found.t().to(torch.int32), numbers)


def int8(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Make an 8-bit layer."""
    return Int8Linear(weight, bias)


def _int4(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Make a 4-bit layer, or an 8-bit one if the weight can't be divided into whole blocks and groups."""
    return Int4Linear(weight, bias) if Int4Linear.fits(weight) else Int8Linear(weight, bias)


class FusedLayers(FrozenLinear):
    """Several layers of the same inputs with their outputs concatenated. A file may give them different bits."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers[0].in_features, sum(layer.out_features for layer in layers))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features). Returns (..., out_features)."""
        return torch.cat([layer(x) for layer in self.layers], -1)


@dataclass(frozen=True)
class AsStored:
    """Makes layers that keep a checkpoint's own 4 bits, and all other layers with ``make``.

    Args:
        make: Makes a layer of a dense weight.
        eight: True if weights that the checkpoint has in 5 to 8 bits, or in fewer than 4, are kept in 8 bits.
    """

    make: MakeLinear
    eight: bool

    def __call__(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return self.make(weight, bias)

    def keep(self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """Make one layer with the outputs of several weights, concatenated."""
        runs = [SideBySide(list(run)) for _, run in groupby(weights, key=lambda each: (each.on_grid, each.narrow))]
        biases = [None] * len(runs) if bias is None else bias.split([run.shape[0] for run in runs])
        layers = [self._layer(run, own, dtype) for run, own in zip(runs, biases, strict=True)]
        return layers[0] if len(layers) == 1 else FusedLayers(layers)

    def _layer(self, weight: StoredWeight, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        if weight.on_grid and Int4Linear.fits(weight):
            return Int4Linear(weight, bias, dtype)
        if self.eight and weight.narrow:
            return Int8Linear(weight, bias, dtype)
        return self.make(weight.whole(dtype), bias)


def as_in_file(part: nn.Module) -> nn.Module:
    """Return a tied head with its weight in the bits of its file if the compiled kernel reads them, else the part.

    The embedding stays dense.
    """
    in_file = getattr(part, "in_file", None)
    if not isinstance(part, nn.Linear) or in_file is None or not in_file.narrow or not can_compile(part.weight.dtype):
        return part
    return StoredLinear(in_file, part.bias, part.weight.dtype)


int4 = AsStored(_int4, eight=False)
#: For quantized checkpoints without another ``quantization`` option.
as_stored = AsStored(packed, eight=True)

#: Name → makers of the linear layers and of the output head. No later layer averages out the head's errors, so it keeps
#: 8 bits.
QUANTIZATIONS: dict[str, tuple[MakeLinear, MakeLinear]] = {"int8": (int8, int8), "int4": (int4, int8)}
