"""The groups of weights that share a scale, in quantized checkpoints."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


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
        """Return (number - zero) · scale. numbers: (rows, inputs), overwritten. scales, zeros: (rows, groups). All
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
