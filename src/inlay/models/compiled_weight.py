"""Weights in 4 or 8 bits in the layout of the compiled kernel (csrc/quantized.h), for any number of rows.

The inputs of a row are rounded with one scale for every 32 of them. For 8-bit weights they get 16 bits, which is finer
than bfloat16. For 4-bit weights they get 8 bits, which adds little to the error of the weights. They are multiplied as
integers. A row gives the same bits alone and in a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inlay.attention.kernel import kernel
from inlay.models.formats.stored import GROUP
from inlay.models.linear import huge_pages

#: Outputs in one block.
BLOCK = 16


def can_compile(dtype: torch.dtype) -> bool:
    """Return True if the kernel is built, faster than PyTorch's own on this processor, and accurate enough for this
    dtype.

    float32 is excluded: its logits must be within 1e-4 of the stock model's, and 16 bits of inputs are too few for
    that.
    """
    return dtype == torch.bfloat16 and hasattr(kernel, "quantized_supported") and bool(kernel.quantized_supported(""))


class CompiledWeight:
    """A weight (outputs, inputs) in 4 or 8 bits, to be filled with ``put``.

    Args:
        bits: 4: numbers of 0 … 15. 8: numbers of -127 … 127.
        grid: dtype of the scales and zeros of every 32 inputs of an output. None, in 8 bits: each output has one scale.
        zeros: True if there are zeros in 4 bits. Else the number 8 means 0.
        instruction_set: A version of the kernel by name. "": the best one that runs here.
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        bits: int,
        grid: torch.dtype | None,
        *,
        zeros: bool = True,
        instruction_set: str = "",
    ) -> None:
        self.outputs, self.inputs, self.bits = outputs, inputs, bits
        self._grid, self._zeros, self._instruction_set = grid, zeros, instruction_set
        blocks, groups = -(-outputs // BLOCK), -(-inputs // GROUP)
        self._numbers_size = BLOCK * GROUP * bits // 8
        self._scales_size = 0 if grid is None else BLOCK * grid.itemsize
        size = self._numbers_size + self._scales_size * (2 if zeros else 1)
        self._data = huge_pages((blocks, groups, size), torch.uint8)
        self._scales = torch.zeros(blocks * BLOCK) if grid is None else None

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and zeros."""
        return self._data.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def put(self, first: int, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Set the outputs from ``first`` on, a multiple of 16. Their number is one too, unless they are the last ones.

        Args:
            numbers: (rows, inputs), uint8 or int8.
            scales: (rows, inputs / 32), or (rows, 1) without a grid.
            zeros: (rows, inputs / 32) in 4 bits. A weight is (number - 8) · scale + zero.
        """
        numbers = numbers.contiguous()
        rows = len(numbers)
        into = self._data[first // BLOCK : -(-(first + rows) // BLOCK)]
        kernel.pack_quantized(
            numbers.data_ptr(), into.data_ptr(), rows, self.inputs, self.bits, into.shape[2], torch.get_num_threads()
        )
        if self._scales is not None:
            self._scales[first : first + rows] = scales.squeeze(1)
            return
        self._put_grid(into, self._numbers_size, scales)
        if self._zeros:
            assert zeros is not None
            self._put_grid(into, self._numbers_size + self._scales_size, zeros)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by the weight.

        Args:
            x: (rows, inputs), fp32 or bfloat16.
            bias: As returned by ``padded``.

        Returns:
            (rows, outputs) in x's dtype.
        """
        if x.dtype not in (torch.float32, torch.bfloat16) or x.dim() != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"a layer of {self.inputs} inputs got {x.dtype} of shape {tuple(x.shape)}")
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape[0], self.outputs, dtype=x.dtype)
        kernel.quantized_linear(
            x.data_ptr(), x.stride(0), self._data.data_ptr(), _address(self._scales), _address(bias), y.data_ptr(),
            x.shape[0], self.inputs, self.outputs, self.bits, x.dtype == torch.bfloat16, self._grid == torch.bfloat16,
            self._zeros, self._instruction_set, torch.get_num_threads(),
        )  # fmt: skip
        return y

    def product(self, bias: Tensor | None) -> Any:
        """Return the kernel's form of a layer in bfloat16, valid as long as this object and the bias.

        Args:
            bias: As returned by ``padded``.
        """
        return kernel.quantized_product(
            self._data.data_ptr(), _address(self._scales), _address(bias), self.inputs, self.outputs, self.bits,
            self._grid == torch.bfloat16, self._zeros, self._instruction_set,
        )  # fmt: skip

    def _put_grid(self, into: Tensor, at: int, numbers: Tensor) -> None:
        """Store scales or zeros (rows, groups) of whole blocks after the numbers of their groups."""
        blocks, groups = into.shape[:2]
        full = numbers.new_zeros(blocks * BLOCK, groups, dtype=self._grid)
        full[: len(numbers)] = numbers
        by_group = full.view(blocks, BLOCK, groups).transpose(1, 2).contiguous()
        into[:, :, at : at + self._scales_size] = by_group.view(torch.uint8)


def padded(bias: Tensor | None) -> Tensor | None:
    """Return a bias (outputs,) as the kernel adds it: fp32, padded to whole blocks."""
    if bias is None:
        return None
    full = torch.zeros(-(-len(bias) // BLOCK) * BLOCK)
    full[: len(bias)] = bias.detach()
    return full


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
