"""From logits to tokens, for all rows of a step at once.

A draw depends only on its row's logits, parameters, seed and step. The random number comes from a counter-based
generator on (seed, step). The token is found by inverse CDF over integer weights.

Rows take one of three paths:
- *free*: only temperature and min-p. Tokens are in order of their ids.
- *ranked*: top-k or top-p. Tokens are in order of falling score, ties by id.
- *typical*: typical-p without these. Tokens are in order of typicality.

The order of steps is vLLM's (vllm/v1/sample/sampler.py). Log-probabilities are those of the raw logits. Then come
grammars, ``min_tokens``, ``logit_bias`` and penalties (row.py), for greedy rows too. Then temperature, min-p, top-k,
top-p and typical-p (filters.py), and a draw.

This file is the specification, in PyTorch and numpy. The compiled kernel (compiled.py) chooses the same tokens and is
used if it was built. device.py does the same for logits on a device, without copying them to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inlay.attention.kernel import kernel
from inlay.errors import InlayError, ParameterError
from inlay.sampling import compiled
from inlay.sampling.compiled import Chosen
from inlay.sampling.device import Launched
from inlay.sampling.filters import (
    BLOCK,
    Blocks,
    Floats,
    KeptTokens,
    Settings,
    block_sums,
    block_weights,
    blocked,
    first_best,
    pad,
    ranked,
    typical,
)
from inlay.sampling.params import SamplingParams
from inlay.sampling.report import Sampled, report
from inlay.sampling.row import SETTINGS, Row, adjust
from inlay.sampling.token_rules import Ids

Bits = compiled.Bits
_Draws = npt.NDArray[np.object_]  # Python integers of 64 random bits


def choose(logits: Tensor, rows: Sequence[Row], bits: Bits) -> Chosen:
    """Choose one token per row with PyTorch and numpy.

    Args:
        logits: (rows, vocabulary), left unchanged.
        bits: (rows,), 64 random bits each.
    """
    vocabulary = logits.shape[1]
    raw = blocked(pad(logits))
    scores = adjust(raw.values, rows, vocabulary)
    blocks = raw if scores is raw.values else blocked(scores)
    best = blocks.maxima.max(axis=1, initial=-np.inf)
    tokens = first_best(blocks)
    drawing = np.flatnonzero(np.isfinite(best) & np.array([not row.params.greedy for row in rows], dtype=bool))
    if len(drawing):
        some = [rows[place] for place in drawing.tolist()]
        tokens[drawing] = _draw(blocks.take(drawing), best[drawing], some, bits[drawing], vocabulary)
    return Chosen(tokens, raw.maxima.max(axis=1, initial=-np.inf), best)


def _draw(blocks: Blocks, best: Floats, rows: Sequence[Row], bits: Bits, vocabulary: int) -> Ids:
    """Draw one token per row.

    Args:
        blocks: adjusted logits, (rows, width).
        best: the greatest logit of each row, finite, (rows,).

    Returns:
        Token ids, (rows,).
    """
    settings = np.array([row.settings for row in rows], dtype=SETTINGS)
    settings["top_k"][settings["top_k"] >= vocabulary] = 0
    draws = bits.astype(object)
    tokens = np.empty(len(rows), dtype=np.int64)
    free, by_rank, by_type = paths(settings)
    totals = np.zeros(len(rows), dtype=np.int64)
    if len(free):
        tokens[free] = _draw_by_id(blocks.take(free), best[free], settings[free], draws[free])
    if len(by_rank):
        summed = by_rank[settings["top_k"][by_rank] == 0]
        totals[summed] = block_sums(blocks.take(summed), best[summed], settings[summed]).sum(axis=1)
        lists = ranked(blocks.take(by_rank), best[by_rank], settings[by_rank], totals[by_rank])
        _draw_listed(tokens, by_rank, lists, draws)
    if len(by_type):
        _draw_listed(tokens, by_type, typical(blocks.take(by_type), best[by_type], settings[by_type]), draws)
    return tokens


def draw(seed: int, step: int) -> int:
    """64 random bits: the step-th block of Philox 4x64 under the seed (Salmon et al., SC 2011)."""
    return int(np.random.Philox(key=seed, counter=step).random_raw())


def paths(settings: Settings) -> tuple[Ids, Ids, Ids]:
    """The indices of the free, ranked and typical rows."""
    by_rank = (settings["top_k"] > 0) | (settings["top_p"] < 1)
    by_type = ~by_rank & (settings["typical_p"] < 1)
    return np.flatnonzero(~by_rank & ~by_type), np.flatnonzero(by_rank), np.flatnonzero(by_type)


def _draw_by_id(blocks: Blocks, best: Floats, settings: Settings, draws: _Draws) -> Ids:
    """Find the block of the draw, then the token."""
    sums = block_sums(blocks, best, settings)
    ends = sums.cumsum(axis=1)
    targets = _targets(draws, ends[:, -1])
    rows = np.arange(len(draws))
    numbers = (ends <= targets[:, None]).sum(axis=1)
    inside = block_weights(blocks, best, settings, numbers)
    rest = targets - (ends[rows, numbers] - sums[rows, numbers])
    return np.asarray(numbers * BLOCK + (inside.cumsum(axis=1) <= rest[:, None]).sum(axis=1))


def _draw_listed(tokens: Ids, rows: Ids, lists: Iterable[KeptTokens], draws: _Draws) -> None:
    for places, ids, weights in lists:
        ends = weights.cumsum(axis=1)
        targets = _targets(draws[rows[places]], ends[:, -1])
        numbers = (ends <= targets[:, None]).sum(axis=1)
        tokens[rows[places]] = ids[np.arange(len(places)), numbers]


def _targets(draws: _Draws, totals: Ids) -> Ids:
    """Numbers from 0 to total - 1, from 64 random bits each. The products take 126 bits."""
    return np.asarray((draws * totals.astype(object)) >> 64, dtype=np.int64)


MAX_VOCABULARY = 2**22


class PendingTokens:
    """The tokens of some rows, which a device may still be choosing.

    Attributes:
        there: the tokens on the device, (rows,), int64, before the host has them. None if the host chooses.
    """

    def __init__(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """See ``begin``."""
        self._rows = rows
        self._chosen: Chosen | None = None
        self._launched: Launched | None = None
        bits = random_bits(rows)
        if on_device(logits):
            self._launched = Launched(logits, rows, bits)
        else:
            self._chosen, self._logits = _choose_here(logits, rows, bits), logits

    @property
    def there(self) -> Tensor | None:
        return None if self._launched is None else self._launched.tokens

    def wait(self) -> list[Sampled | InlayError]:
        """Wait for the tokens; see ``sample``."""
        if self._launched is not None:
            chosen, sampled = self._launched.wait()
            return [error or found for error, found in zip(self._errors(chosen), sampled, strict=True)]
        assert self._chosen is not None, "the host has chosen"
        errors = self._errors(self._chosen)
        wanted = [None if error else row.params.logprobs for row, error in zip(self._rows, errors, strict=True)]
        found = report(self._logits, self._chosen.tokens, wanted)
        return [error or one for error, one in zip(errors, found, strict=True)]

    def _errors(self, chosen: Chosen) -> list[InlayError | None]:
        """The error of each row, or None."""
        errors: list[InlayError | None] = [None] * len(self._rows)
        for place in np.flatnonzero(~np.isfinite(chosen.raw) | ~np.isfinite(chosen.best)).tolist():
            errors[place] = _why_not(self._rows[place], float(chosen.raw[place]), float(chosen.best[place]))
        return errors


def on_device(logits: Tensor) -> bool:
    """True if tokens are chosen on the device that holds the logits."""
    return logits.device.type != "cpu"


def begin(logits: Tensor, rows: Sequence[Row]) -> PendingTokens:
    """Start choosing one token per row, on the host or on the device of the logits. Does not wait for a device.

    Args:
        logits: (rows, vocabulary), any float dtype, any device; left unchanged. All is computed in fp32.
        rows: the state of each row; left unchanged (see ``Row.take``).
    """
    vocabulary = logits.shape[1]
    assert logits.shape[0] == len(rows), "one row of logits for each"
    assert 0 < vocabulary <= MAX_VOCABULARY, vocabulary
    return PendingTokens(logits, rows)


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled | InlayError]:
    """Choose one token per row; see ``begin``.

    Returns:
        The tokens. A row gets an error instead if it holds NaN or +inf, or if no token is allowed.
    """
    return begin(logits, rows).wait()


def _choose_here(logits: Tensor, rows: Sequence[Row], bits: Bits) -> Chosen:
    if not compiled.takes(logits):
        return choose(logits, rows, bits)
    chosen = compiled.choose(logits, rows, bits)
    _choose_typical(chosen, logits, rows, bits)
    return chosen


def random_bits(rows: Sequence[Row]) -> Bits:
    """``draw`` for the next token of each row, (rows,)."""
    if kernel is None:
        return np.array([draw(row.seed, row.step) for row in rows], dtype=np.uint64)
    return compiled.random_bits(rows)


def _choose_typical(chosen: Chosen, logits: Tensor, rows: Sequence[Row], bits: Bits) -> None:
    """Choose tokens for the rows with typical-p, which the compiled kernel does not support."""
    places = [place for place, row in enumerate(rows) if row.params.typical_p < 1 and not row.params.greedy]
    if places:
        chosen.tokens[places] = choose(logits[places], [rows[place] for place in places], bits[places]).tokens


def request_seed(params: SamplingParams, request_index: int, entropy: int, answer: int = 0) -> int:
    """The seed of an answer's draws: the request's own, or one derived from the engine's entropy and the request's
    number.

    Answers after the first derive theirs by a hash, so that requests with neighbouring seeds share no answers.
    """
    seed = params.seed
    if seed is None:
        seed = _hashed(f"{entropy}:{request_index}")
    return _hashed(f"{seed}/{answer}") if answer else seed


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _why_not(row: Row, raw: float, adjusted: float) -> InlayError | None:
    """The error of a row, from its greatest logit before and after adjustment; None for no error."""
    where = f"the logits of token {row.step + 1} of the answer"
    for best in (raw, adjusted):
        if math.isnan(best) or best == math.inf:
            held = "NaN" if math.isnan(best) else "+inf"
            return InlayError(
                f"{where} hold {held}; the model's weights or inputs are damaged", code="model.invalid_numbers"
            )
    if row.guide is not None and row.guide.failure is not None:
        return row.guide.failure
    if raw > adjusted == -math.inf:
        return ParameterError(
            f"{where} leave no token to choose: allowed_token_ids, bad_words, min_tokens and structured_outputs forbid "
            "all of them together; forbid less",
            code="request.no_token_left",
        )
    if adjusted == -math.inf:
        return InlayError(
            f"{where} leave no token to choose: every one is -inf or forbidden", code="model.invalid_numbers"
        )
    return None
