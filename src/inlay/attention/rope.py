"""Rotary position embeddings as data: the frequencies of a layer, and how a shift rotates a query.

Stored keys are already rotated by the model, to the positions they were encoded at. To read a segment ``shift``
positions further on, the *query* is rotated by ``-shift``. This works because a score depends only on the difference
of the two positions (Su et al., arXiv 2104.09864). Keys are never rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of one layer. ``UNTURNED`` stands for a layer without one.

    Args:
        inverse_frequencies: (rotated / 2,), fp32, radians per position.
        interleaved: True if the two elements of a pair are adjacent (GPT-J), False if half of the rotated dimensions
            apart (NeoX, Llama).
    """

    inverse_frequencies: Tensor
    interleaved: bool = False

    @property
    def rotated(self) -> int:
        """The number of leading dimensions of a head that are rotated."""
        return 2 * self.inverse_frequencies.numel()

    def angles(self, shifts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of ``-shift``: two tensors (shifts, rotated / 2), fp32, without scaling.

        Models that scale their cosines (YaRN) have scaled the query and the key already.
        """
        turns = torch.outer(torch.tensor([-float(s) for s in shifts], dtype=torch.float64), self._frequencies64())
        return turns.cos().float(), turns.sin().float()

    def angles_of(self, shifts: npt.NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
        """Like ``angles``, for many repeats of few shifts: two tensors (shifts, rotated / 2) on the device."""
        once, where = np.unique(shifts, return_inverse=True)
        cos, sin = (table.to(device) for table in self.angles(once.tolist()))
        at = torch.from_numpy(where).to(device)
        return cos[at], sin[at]

    def _frequencies64(self) -> Tensor:
        return self.inverse_frequencies.to(torch.float64)

    def turn(self, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate queries, in fp32.

        Args:
            query: (..., head_dim), any floating dtype.
            cos, sin: Broadcastable to (..., rotated / 2), fp32.

        Returns:
            fp32, of the broadcast shape.
        """
        query = query.float()
        if not self.rotated:
            return query
        turning, rest = query[..., : self.rotated], query[..., self.rotated :]
        if self.interleaved:
            swapped = torch.stack((turning[..., 1::2], turning[..., 0::2]), -1).flatten(-2)
            cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            swapped = torch.cat(turning.chunk(2, -1)[::-1], -1)
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        turned = torch.addcmul(turning * cos, swapped, sin)
        if rest.shape[-1] == 0:
            return turned
        return torch.cat((turned, rest.expand(*turned.shape[:-1], rest.shape[-1])), -1)


#: For layers whose keys carry no position: ALiBi layers, whose bias follows the distance, and layers without positions.
UNTURNED = Rotary(torch.empty(0))
