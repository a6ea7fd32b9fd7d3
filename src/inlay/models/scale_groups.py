"""Which weights of an output share a scale, in checkpoints that are quantized already."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


class MisfitError(ValueError):
    """The tensors of a packed weight do not fit together: what is wrong, as a sentence that the weight begins."""


class Grouping:
    """Which inputs of an output share a scale: runs of a size, of which the last may be a part, or any of them.

    inputs, groups: how many there are. sizes: those of a run that the configuration names, of which one has to fit.
    order: the group of each input, (inputs,), or None; it is kept only where groups are no runs.
    Raises MisfitError.
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
        #: What tells it in the names of tensors, which alone would not show where runs end.
        self.name = f"_by{self.size}" if self.order is None and inputs % self.size else ""

    def runs_of(self, count: int) -> bool:
        """Whether it cuts the inputs into whole multiples of so many."""
        return self.order is None and self.size % count == 0

    def scaled(self, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        """(number - zero) · scale: numbers (rows, inputs), overwritten; scales and zeros (rows, groups). All fp32."""
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
    """The size of a run with which so many inputs make so many groups. Raises MisfitError."""
    fitting = {size for size in sizes if size > 0 and -(-inputs // size) == groups}
    if len(fitting) == 1:
        return fitting.pop()
    named = "several that fit" if fitting else " and ".join(f"{size:,}" for size in sorted(sizes)) or "none"
    raise MisfitError(
        f"has {groups:,} groups for {inputs:,} inputs, and its configuration names {named} as the size of one "
        "(group_size)"
    )
