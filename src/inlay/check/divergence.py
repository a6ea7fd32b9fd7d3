"""How far one mode's distributions are from full prefill's, token by token of an answer that both were made to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.engine.drift import divergences


@dataclass(frozen=True, slots=True)
class Drift:
    """How far a mode is from full prefill over one answer.

    kl: KL(full prefill ‖ mode) in nats, the mean over tokens. top1: the share of tokens whose most probable one
    is the same in both. same: whether the mode's own greedy answer is this one.
    """

    kl: float
    top1: float
    same: bool


def divergence(reference: Tensor, other: Tensor) -> float:
    """KL(reference ‖ other) in nats, the mean over tokens.

    reference, other: (tokens, vocabulary), natural log-probabilities.
    """
    return float(divergences(reference, other).mean())


def compare(reference: Tensor, other: Tensor, said: Sequence[int]) -> Drift:
    """How far a mode is from full prefill over the answer that full prefill gave.

    reference, other: (tokens, vocabulary), natural log-probabilities, each behind the prompt and the answer's tokens
    before it. said: the answer, greedy. A mode says just that where each of its tokens is the mode's most probable one.
    """
    assert len(reference) == len(other) == len(said), (len(reference), len(other), len(said))
    tops = other.argmax(dim=-1)
    agreed = (tops == reference.argmax(dim=-1)).double().mean()
    return Drift(divergence(reference, other), float(agreed), bool((tops == torch.tensor(list(said))).all()))
