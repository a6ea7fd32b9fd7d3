"""From logits to tokens, for all rows of a step at once.

The order is vLLM's (vllm/v1/sample/sampler.py): log-probabilities are those of the raw logits; then grammars,
``min_tokens``, ``logit_bias`` and penalties (sampler_adjust.py), which greedy rows see too; then temperature, min-p,
top-k, top-p and typical-p (sampler_filters.py), and a draw (sampler_choose.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from torch import Tensor

from inlay.engine.sampler_adjust import adjust
from inlay.engine.sampler_choose import choose
from inlay.engine.sampler_lists import blocked, first_best, pad
from inlay.engine.sampler_report import Sampled, report
from inlay.engine.sampler_row import Row
from inlay.errors import InlayError
from inlay.types import SamplingParams

MAX_VOCABULARY = 2**22


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled | InlayError]:
    """Choose one token for every row.

    Arguments:
        logits: (rows, vocabulary), any float dtype, any device; left unchanged. All is computed in fp32.
        rows: what is asked of each; left unchanged (see ``Row.take``).

    Returns the tokens; for a row that holds NaN or +inf, or leaves no token to choose, the error that says so.
    """
    vocabulary = logits.shape[1]
    assert logits.shape[0] == len(rows), "one row of logits for each"
    assert 0 < vocabulary <= MAX_VOCABULARY, vocabulary
    raw = blocked(pad(logits))
    scores = adjust(raw.values, rows, vocabulary)
    blocks = raw if scores is raw.values else blocked(scores)
    best = blocks.maxima.max(axis=1, initial=-np.inf)
    errors = [_why_not(*row) for row in zip(rows, raw.maxima.max(axis=1).tolist(), best.tolist(), strict=True)]
    tokens = first_best(blocks)
    drawing = [place for place, row in enumerate(rows) if errors[place] is None and not row.params.greedy]
    if drawing:
        some = np.array(drawing)
        tokens[some] = choose(blocks.take(some), best[some], [rows[place] for place in drawing], vocabulary)
    wanted = [None if error else row.params.logprobs for row, error in zip(rows, errors, strict=True)]
    return [error or found for error, found in zip(errors, report(raw, tokens, wanted), strict=True)]


def request_seed(params: SamplingParams, request_index: int, entropy: int, answer: int = 0) -> int:
    """The seed of an answer's draws.

    It is the request's own, or one derived from the engine's entropy and the request's number. Answers behind the
    first derive theirs from it by a hash, so that neighbouring seeds share no answers.
    """
    seed = params.seed
    if seed is None:
        seed = _hashed(f"{entropy}:{request_index}")
    return _hashed(f"{seed}/{answer}") if answer else seed


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _why_not(row: Row, raw: float, adjusted: float) -> InlayError | None:
    """What is wrong with a row, if anything, by its greatest logit before and after it was adjusted."""
    where = f"the logits of token {row.step + 1} of the answer"
    for best in (raw, adjusted):
        if math.isnan(best) or best == math.inf:
            held = "NaN" if math.isnan(best) else "+inf"
            return InlayError(f"{where} hold {held}; the model's weights or inputs are damaged")
    if adjusted == -math.inf:
        return InlayError(f"{where} leave no token to choose: every one is -inf or forbidden")
    return None
