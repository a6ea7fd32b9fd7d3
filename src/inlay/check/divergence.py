"""Compares a mode with full prefill, token by token, over the answer of full prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.engine.background.divergence import divergences


@dataclass(frozen=True, slots=True)
class Divergence:
    """The divergence of a mode from full prefill over one answer.

    Attributes:
        kl: KL(full prefill ‖ mode) in nats, the mean over tokens.
        top1: Share of tokens with the same most probable token in both.
        same: The mode's greedy answer equals this one.
    """

    kl: float
    top1: float
    same: bool


def divergence(reference: Tensor, other: Tensor) -> float:
    """Return KL(reference ‖ other) in nats, the mean over tokens.

    Args:
        reference: Natural log-probabilities, [tokens, vocabulary].
        other: The same of the other distribution.
    """
    return float(divergences(reference, other).mean())


def compare(reference: Tensor, other: Tensor, said: Sequence[int]) -> Divergence:
    """Compare a mode with full prefill over the greedy answer of full prefill.

    The mode gives the same answer if its most probable token equals each token of the answer.

    Args:
        reference: Natural log-probabilities of full prefill, [tokens, vocabulary]. Each row follows the prompt and the
            earlier tokens of the answer.
        other: The same of the mode.
        said: Token ids of the answer.
    """
    assert len(reference) == len(other) == len(said), (len(reference), len(other), len(said))
    tops = other.argmax(dim=-1)
    agreed = (tops == reference.argmax(dim=-1)).double().mean()
    return Divergence(divergence(reference, other), float(agreed), bool((tops == torch.tensor(list(said))).all()))
