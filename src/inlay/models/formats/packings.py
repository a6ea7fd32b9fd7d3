"""Packed weights of AWQ, GPTQ, compressed-tensors and fp8 checkpoints, unpacked row by row.

A weight is (number - zero) · scale of its group, with numbers packed into 32-bit words, or an 8-bit float times a
scale. 4-bit weights with groups that are whole multiples of ours are on inlay's own grid.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from inlay.models.formats.stored import GROUP, Grid, StoredWeight


class MisfitError(ValueError):
    """The tensors of a packed weight do not fit together. The message continues a sentence that begins with the
    weight.
    """


class Grouping:
    """The inputs of an output that share a scale: runs of one size, the last maybe shorter, or arbitrary sets.

    Args:
        inputs, groups: Numbers of inputs and groups.
        sizes: The run sizes that the configuration names. One of them must fit.
        order: The group of each input, (inputs,), or None. It is kept only if groups are not runs.

    Raises:
        MisfitError: If inputs, groups, sizes and order do not fit together.
    """

    def __init__(self, inputs: int, groups: int, sizes: Collection[int] = (), order: Tensor | None = None) -> None:
        self.order: Tensor | None = None
        if groups == 1:
            self.size = inputs
        elif order is None:
            self.size = _fitting(inputs, groups, sizes)
        else:
            order = order.long()
            if order.shape != (inputs,) or not torch.equal(order.unique(), torch.arange(groups)):
                raise MisfitError(f"has an order of activations that is not of {inputs:,} inputs in {groups:,} groups")
            self.size = int((order == 0).sum())
            self.order = None if torch.equal(order, torch.arange(inputs) // self.size) else order
        #: Part of the names of tensors, if their shapes do not show the ends of runs.
        self.name = f"_by{self.size}" if self.order is None and inputs % self.size else ""

    def runs_of(self, count: int) -> bool:
        """Return True if every group is a run of a multiple of ``count`` inputs."""
        return self.order is None and self.size % count == 0

    def scaled(self, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        """Return (number - zero) · scale. numbers: (rows, inputs), overwritten. scales, zeros: (rows, groups). All are
        fp32.
        """
        if self.order is None and numbers.shape[1] % self.size == 0:
            groups = numbers.unflatten(1, (-1, self.size))
            if zeros is not None:
                groups.sub_(zeros.unsqueeze(2))
            return groups.mul_(scales.unsqueeze(2)).flatten(1)
        order = torch.arange(numbers.shape[1]) // self.size if self.order is None else self.order
        if zeros is not None:
            numbers.sub_(zeros[:, order])
        return numbers.mul_(scales[:, order])


def _fitting(inputs: int, groups: int, sizes: Collection[int]) -> int:
    """The run size that divides ``inputs`` into ``groups``. Raises MisfitError."""
    fitting = {size for size in sizes if size > 0 and -(-inputs // size) == groups}
    if len(fitting) == 1:
        return fitting.pop()
    named = "several that fit" if fitting else " and ".join(f"{size:,}" for size in sorted(sizes)) or "none"
    raise MisfitError(
        f"has {groups:,} groups for {inputs:,} inputs, and its configuration names {named} as the size of one "
        "(group_size)"
    )


#: The position in an AWQ word of each of its eight outputs.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class QuantizedGroups(StoredWeight):
    """Integers with a scale and a zero for each group of inputs of an output.

    Args:
        shape, bits: Of the weight.
        scales: (out_features, groups), a view in any dtype.
        sizes, order: As for Grouping.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        bits: int,
        scales: Tensor,
        sizes: Collection[int] = (),
        order: Tensor | None = None,
    ) -> None:
        self.shape, self._bits, self._scales = shape, bits, scales
        _expect("scales", scales, (shape[0], scales.shape[-1]))
        self._grouping = Grouping(shape[1], scales.shape[1], sizes, order)
        self.on_grid = bits == 4 and shape[1] % GROUP == 0 and self._grouping.runs_of(GROUP)

    @abstractmethod
    def numbers(self, first: int, last: int) -> Tensor:
        """Return integers 0 … 2^bits - 1, (rows, in_features)."""

    @abstractmethod
    def zeros(self, first: int, last: int) -> Tensor:
        """Return the integers that mean 0, (rows, groups)."""

    def dense(self, first: int, last: int) -> Tensor:
        numbers, zeros = self.numbers(first, last).float(), self.zeros(first, last).float()
        return self._grouping.scaled(numbers, self._scales[first:last].float(), zeros)

    def grid(self, first: int, last: int) -> Grid:
        scales = self._scales[first:last].float()
        zeros = (8 - self.zeros(first, last).float()) * scales
        more, count = self._grouping.size // GROUP, self.shape[1] // GROUP
        numbers = self.numbers(first, last).to(torch.uint8)
        scales, zeros = (each.repeat_interleave(more, 1)[:, :count] for each in (scales, zeros))
        return Grid(numbers, scales, zeros)


class AWQ(QuantizedGroups):
    """AutoAWQ's "gemm" layout, 4 bits.

    Args:
        numbers: (in_features, out_features / 8), int32.
        zeros: (groups, out_features / 8), int32.
        scales: (groups, out_features).
        sizes: As for Grouping.
    """

    def __init__(self, numbers: Tensor, zeros: Tensor, scales: Tensor, sizes: Collection[int] = ()) -> None:
        super().__init__((scales.shape[-1], numbers.shape[0]), 4, scales.t(), sizes)
        words = -(-self.shape[0] // 8)
        _expect("numbers", numbers, (self.shape[1], words))
        _expect("zeros", zeros, (len(scales), words))
        kind = f"awq{self._grouping.name}"
        self._numbers, self._zeros = numbers, zeros
        self._files = {f"{kind}_numbers": numbers, f"{kind}_zeros": zeros, f"{kind}_scales": scales}

    def tensors(self) -> Mapping[str, Tensor]:
        return self._files

    def numbers(self, first: int, last: int) -> Tensor:
        return _columns(self._numbers, first, last, 4, _AWQ_PLACES).t()

    def zeros(self, first: int, last: int) -> Tensor:
        return _columns(self._zeros, first, last, 4, _AWQ_PLACES).t()


class GPTQ(QuantizedGroups):
    """GPTQ's layout, in 2, 4 or 8 bits.

    Args:
        numbers: (in_features · bits / 32, out_features), int32.
        zeros: (groups, out_features · bits / 32), int32.
        scales: (groups, out_features).
        order, sizes: As for Grouping.
        less: Subtracted from the zeros when the file was written: 1 in GPTQ's first version, 0 in the second.
    """

    def __init__(
        self,
        numbers: Tensor,
        zeros: Tensor,
        scales: Tensor,
        order: Tensor | None,
        bits: int,
        less: int,
        sizes: Collection[int] = (),
    ) -> None:
        super().__init__((scales.shape[-1], numbers.shape[0] * 32 // bits), bits, scales.t(), sizes, order)
        _expect("numbers", numbers, (numbers.shape[0], self.shape[0]))
        _expect("zeros", zeros, (len(scales), -(-self.shape[0] * bits // 32)))
        kind = f"gptq{bits}_{less}{self._grouping.name}"
        self._numbers, self._zeros, self._less = numbers, zeros, less
        self._files = {f"{kind}_numbers": numbers, f"{kind}_zeros": zeros, f"{kind}_scales": scales}
        if self._grouping.order is not None:
            self._files[f"{kind}_order"] = self._grouping.order

    def tensors(self) -> Mapping[str, Tensor]:
        return self._files

    def numbers(self, first: int, last: int) -> Tensor:
        return _unpacked(self._numbers[:, first:last].t(), self._bits)

    def zeros(self, first: int, last: int) -> Tensor:
        zeros = _columns(self._zeros, first, last, self._bits).t()
        return (zeros + self._less) & ((1 << self._bits) - 1)


class PackQuantized(QuantizedGroups):
    """compressed-tensors' "pack-quantized" layout, in 4 or 8 bits.

    Args:
        numbers: (out_features, in_features · bits / 32), int32, rounded up.
        shape: Of the weight.
        scales: (out_features, groups).
        zeros: (out_features · bits / 32, groups), int32. None if 0 is in the middle of the range.
        order, sizes: As for Grouping.
    """

    def __init__(
        self,
        numbers: Tensor,
        shape: tuple[int, int],
        scales: Tensor,
        zeros: Tensor | None,
        order: Tensor | None,
        bits: int,
        sizes: Collection[int] = (),
    ) -> None:
        super().__init__(shape, bits, _by_output(scales, shape[0]), sizes, order)
        _expect("numbers", numbers, (shape[0], -(-shape[1] * bits // 32)))
        if zeros is not None:
            _expect("zeros", zeros, (-(-shape[0] * bits // 32), self._scales.shape[1]))
        self._numbers, self._zeros = numbers, zeros
        kind = f"packed{bits}{self._grouping.name}"
        named = {"numbers": numbers, "scales": scales, "zeros": zeros, "order": self._grouping.order}
        self._files = {f"{kind}_{name}": tensor for name, tensor in named.items() if tensor is not None}

    def tensors(self) -> Mapping[str, Tensor]:
        return self._files

    def numbers(self, first: int, last: int) -> Tensor:
        return _unpacked(self._numbers[first:last], self._bits)[:, : self.shape[1]]

    def zeros(self, first: int, last: int) -> Tensor:
        if self._zeros is None:
            return torch.full((last - first, self._scales.shape[1]), 1 << (self._bits - 1), dtype=torch.int32)
        return _columns(self._zeros.t(), first, last, self._bits).t()


class Int8(StoredWeight):
    """compressed-tensors' "int-quantized" layout: one byte for each number.

    Args:
        numbers: (out_features, in_features), int8.
        scales: (out_features, groups), or a single one.
        zeros: Integers of the shape of the scales. None if the number 0 means 0.
        order, sizes: As for Grouping.
    """

    def __init__(
        self,
        numbers: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        order: Tensor | None = None,
        sizes: Collection[int] = (),
    ) -> None:
        self.shape = _matrix(numbers)
        self._numbers = numbers
        self._scales = _by_output(scales, self.shape[0])
        self._zeros = None if zeros is None or not zeros.any() else _by_output(zeros, self.shape[0])
        if self._zeros is not None:
            _expect("zeros", self._zeros, tuple(self._scales.shape))
        self._grouping = Grouping(self.shape[1], self._scales.shape[1], sizes, order)
        self.by_output = self._scales.shape[1] == 1 and self._zeros is None
        kind = f"int8{self._grouping.name}"
        named = {"numbers": numbers, "scales": scales, "zeros": self._zeros, "order": self._grouping.order}
        self._files = {f"{kind}_{name}": tensor for name, tensor in named.items() if tensor is not None}

    def tensors(self) -> Mapping[str, Tensor]:
        return self._files

    def dense(self, first: int, last: int) -> Tensor:
        zeros = None if self._zeros is None else self._zeros[first:last].float()
        return self._grouping.scaled(self._numbers[first:last].float(), self._scales[first:last].float(), zeros)

    def bytes(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        return self._numbers[first:last], self._scales[first:last, 0].float()


class Float8(StoredWeight):
    """8-bit floats with a single scale, or one for each output, each group of inputs of an output, or each block.

    Args:
        numbers: (out_features, in_features), e4m3 or e5m2.
        scales: A single one, (out_features,), (out_features, groups), or (blocks of outputs, blocks of inputs).
        block: Outputs and inputs of a block. None without blocks.
        order, sizes: As for Grouping.
    """

    narrow = False  # bfloat16 holds each of them exactly, and int8 would not

    def __init__(
        self,
        numbers: Tensor,
        scales: Tensor,
        block: tuple[int, int] | None,
        order: Tensor | None = None,
        sizes: Collection[int] = (),
    ) -> None:
        self.shape = _matrix(numbers)
        self._numbers = numbers
        self._block = None
        if block is not None and scales.numel() > 1:
            counts = tuple(-(-size // each) for size, each in zip(self.shape, block, strict=True))
            self._block = block if tuple(scales.shape) == counts else None
        self._scales = scales.float() if self._block else _by_output(scales, self.shape[0]).float()
        kind, grouping = "float8", None
        if self._block is None:
            grouping = Grouping(self.shape[1], self._scales.shape[1], sizes, order)
            kind += grouping.name
        elif order is not None:
            raise MisfitError("has an order of activations and scales of blocks, which do not go together")
        self._grouping = grouping
        self._files = {f"{kind}_numbers": numbers, f"{kind}_scales": scales}
        if grouping is not None and grouping.order is not None:
            self._files[f"{kind}_order"] = grouping.order

    def tensors(self) -> Mapping[str, Tensor]:
        return self._files

    def dense(self, first: int, last: int) -> Tensor:
        rows = self._numbers[first:last].float()
        if self._grouping is not None:
            return self._grouping.scaled(rows, self._scales[first:last])
        assert self._block is not None
        outputs, inputs = self._block
        scales = self._scales[torch.arange(first, last) // outputs]
        return rows.mul_(scales.repeat_interleave(inputs, 1)[:, : rows.shape[1]])


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack the numbers in words, lowest bits first: (rows, words) → (rows, words · 32 / bits)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(2) >> shifts & ((1 << bits) - 1)).flatten(1)


def _columns(words: Tensor, first: int, last: int, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Return the columns ``first`` to ``last`` - 1 of numbers that are packed along the second dimension.

    Args:
        words: (rows, words).
        bits: Of each number.
        places: The position of each number in its word. None: in order, lowest bits first.
    """
    each = 32 // bits
    begin = first // each
    numbers = _unpacked(words[:, begin : -(-last // each)], bits)
    if places is not None:
        numbers = numbers.unflatten(1, (-1, each))[:, :, list(places)].flatten(1)
    return numbers[:, first - begin * each : last - begin * each]


def _by_output(values: Tensor, outputs: int) -> Tensor:
    """Return scales or zeros as (out_features, groups).

    Args:
        values: One value for all outputs, one for each, or one for each group of each.

    Raises:
        MisfitError: If their shape is another one.
    """
    if values.numel() == 1:
        return values.reshape(1, 1).expand(outputs, 1)
    if values.dim() not in (1, 2) or len(values) != outputs:
        raise MisfitError(
            f"has scales or zeros of the shape {tuple(values.shape)}, which are not of {outputs:,} outputs"
        )
    return values.reshape(outputs, -1)


def _matrix(numbers: Tensor) -> tuple[int, int]:
    """Return the shape of a weight. Raises MisfitError if it is not a matrix."""
    if numbers.dim() != 2:
        raise MisfitError(f"is of the shape {tuple(numbers.shape)}, which is no matrix")
    return numbers.shape[0], numbers.shape[1]


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise MisfitError if a tensor has another shape."""
    if tuple(tensor.shape) != shape:
        raise MisfitError(f"has {what} of the shape {tuple(tensor.shape)}, where {shape} fits the others")
