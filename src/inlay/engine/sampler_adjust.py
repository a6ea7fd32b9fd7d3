"""What changes logits before anything is drawn, for greedy rows too: grammars, min_tokens, biases, penalties.

In vLLM's order (vllm/v1/sample/sampler.py): tokens that must not come, then ``logit_bias``, then the penalties:
repetition, frequency, presence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.engine.sampler_row import SETTINGS, Row
from inlay.engine.structured import allowed_tokens


def adjust(scores: Tensor, rows: Sequence[Row], vocabulary: int) -> Tensor:
    """The logits that tokens are chosen from, (rows, width), fp32; ``scores`` itself where nothing changes it.

    Only columns up to ``vocabulary`` are tokens.
    """
    guided = [place for place, row in enumerate(rows) if row.guide is not None]
    forbidden = [row.forbidden for row in rows]
    biased = any(len(row.bias_ids) for row in rows)
    penalized = [place for place, row in enumerate(rows) if row.seen is not None]
    if not (guided or biased or penalized or any(map(len, forbidden))):
        return scores
    scores = scores.clone()
    if guided:
        _mask(scores, rows, guided, vocabulary)
    if any(map(len, forbidden)):
        scores[_places(forbidden, scores)] = -math.inf
    if biased:
        places = _places([row.bias_ids for row in rows], scores)
        scores[places] += _tensor(np.concatenate([row.biases for row in rows]), scores)
    if penalized:
        _penalize(scores, rows, penalized)
    return scores


def _mask(scores: Tensor, rows: Sequence[Row], guided: list[int], vocabulary: int) -> None:
    allowed = allowed_tokens([guide for row in rows if (guide := row.guide) is not None], vocabulary)
    where = torch.tensor(guided, device=scores.device)
    kept = torch.where(_tensor(allowed, scores), scores[where, :vocabulary], -math.inf)
    scores[where, :vocabulary] = kept


def _penalize(scores: Tensor, rows: Sequence[Row], penalized: list[int]) -> None:
    seen = [found for row in rows if (found := row.seen) is not None]
    lengths = [len(found.ids) for found in seen]
    numbers = np.array([rows[place].settings for place in penalized], dtype=SETTINGS).repeat(lengths)
    counts = _tensor(np.concatenate([found.counts for found in seen]), scores)
    repetition, frequency, presence = (
        _tensor(numbers[name].copy(), scores) for name in ("repetition", "frequency", "presence")
    )
    places = (
        _tensor(np.array(penalized).repeat(lengths), scores),
        _tensor(np.concatenate([found.ids for found in seen]), scores),
    )
    logits = scores[places]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    scores[places] = logits - frequency * counts - presence * (counts > 0)


def _places(ids: Sequence[npt.NDArray[np.int64]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of every row's tokens."""
    rows = np.arange(len(ids)).repeat([len(one) for one in ids])
    return _tensor(rows, like), _tensor(np.concatenate(ids), like)


def _tensor(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
