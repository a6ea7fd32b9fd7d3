"""Rows of logits and the sampler's results for them, for tests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from inlay.sampling import plain
from inlay.sampling.params import SamplingParams
from inlay.sampling.row import Row
from inlay.sampling.sampler import Sampled, sample


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def row(params: SamplingParams, step: int = 0, seed: int = 0, never: Collection[int] = (), **rest: Any) -> Row:
    """A row whose answer has ``step`` tokens."""
    made = Row(params, seed, never=never, **rest)
    made.step = step
    return made


def choose(logits: torch.Tensor, rows: list[Row]) -> list[Sampled]:
    """``sample`` where every row has a token."""
    found = sample(logits, rows)
    assert all(isinstance(one, Sampled) for one in found), found
    return found


def kept(logits: torch.Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """The token ids that can be drawn from logits (vocabulary,), in drawing order, and their probabilities."""
    ids, weights = plain.kept(logits, Row(params, 0))
    return ids.numpy(), (weights.double() / weights.sum()).numpy()


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    ids, shares = kept(logits, params)
    assert len(set(ids.tolist())) == len(ids)
    assert (shares > 0).all()
    dense = torch.zeros(len(logits), dtype=torch.float64)
    dense[torch.from_numpy(ids)] = torch.from_numpy(shares)
    return dense
