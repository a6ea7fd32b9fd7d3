"""From logits to tokens, for all rows of a step at once.

A draw depends only on its row's logits, parameters, seed and step. The random number comes from a counter-based
generator on (seed, step). The token is found by inverse CDF over integer weights.

The order of steps is vLLM's (vllm/v1/sample/sampler.py). Log-probabilities are those of the raw logits. Then come
grammars, ``min_tokens``, ``logit_bias`` and penalties (row.py), for greedy rows too. Then temperature, min-p, top-k,
top-p and typical-p, and a draw (plain.py).

plain.py is the specification, and chooses for logits on a device. For the CPU the compiled kernel (compiled.py) chooses
the same tokens, if it was built.

The log-probabilities that an answer reports are those of the chosen tokens and of the most probable others, under the
model's own distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.kernel import kernel
from inlay.errors import InlayError, ParameterError
from inlay.models.device import Download, upload
from inlay.sampling import compiled, plain
from inlay.sampling.compiled import Chosen
from inlay.sampling.params import SamplingParams
from inlay.sampling.plain import UNIT, Bits, tile_rows, weight_sums
from inlay.sampling.row import Ids, Row

#: So many tokens are packed as fast as they are searched.
_FEW = 4096


class TokenLogprob(NamedTuple):
    """A token's natural log-probability under the raw logits, and its rank from 1; ties rank by token id."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for one row.

    ``logprob`` is None and ``top`` empty unless log-probabilities were requested. Otherwise ``top`` holds the chosen
    token first, then as many of the most probable others as needed for the requested top N.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def scores(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Return the scores of the chosen tokens and of the ``most`` most probable ones. Waits for no device.

    Args:
        logits: raw logits, (rows, vocabulary).
        tokens: (rows,), the chosen tokens.

    Returns:
        (rows, 3 + 2 × most), int64: the sum of all weights, the bits of the chosen logit, its rank, then the ids of the
        most probable tokens and the bits of their logits. Fewer columns for a small vocabulary.
    """
    size = tile_rows(logits.device, logits.shape[1])
    parts = [
        _scores(logits[first : first + size].float(), tokens[first : first + size], most)
        for first in range(0, len(tokens), size)
    ]
    return torch.cat(parts)


def _scores(values: Tensor, tokens: Tensor, most: int) -> Tensor:
    ids = torch.arange(values.shape[1], device=values.device)
    own = tokens[:, None]
    chosen = values.gather(1, own)
    before = (values > chosen) | ((values == chosen) & (ids < own))
    ranks = before.sum(dim=1, keepdim=True) + 1
    sums = weight_sums(values)[:, None]
    leaders = _leaders(values, ids, min(most, values.shape[1])) if most else own[:, :0]
    return torch.cat([sums, bits_of(chosen), ranks, leaders, bits_of(values.gather(1, leaders))], dim=1)


def _leaders(values: Tensor, ids: Tensor, most: int) -> Tensor:
    """Return the ids of the greatest values, (rows, most), in order; ties are in order of id."""
    if values.device.type == "cpu" and len(values) == 1 and len(ids) > _FEW:  # pack few tokens instead of all
        reaching = (values[0] >= values.topk(most).values[0, -1]).nonzero()[:, 0]
        if len(reaching) >= most:  # none reaches NaN
            ids, values = reaching, values[:, reaching]
    return torch.topk(_packed(values, ids), most, dim=1, largest=False).values & 0xFFFFFFFF


def _packed(values: Tensor, ids: Tensor) -> Tensor:
    """Return integers whose ascending order is falling value, ties by id."""
    bits = values.add(0.0).view(torch.int32).long()  # the sum turns -0 into 0
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (~rising << 32) | ids


def bits_of(numbers: Tensor) -> Tensor:
    """Return the bits of fp32 numbers as integers."""
    return numbers.contiguous().view(torch.int32).long()


def numbers_of(bits: Ids) -> npt.NDArray[np.float32]:
    """Return the fp32 numbers with these bits, the inverse of ``bits_of``."""
    return np.asarray(bits.astype(np.int32).view(np.float32))


def entries(tokens: Ids, found: Ids, best: npt.NDArray[np.float32], wanted: Sequence[int]) -> list[Sampled]:
    """Return chosen tokens, (rows,), with their log-probabilities and those of the ``wanted`` most probable others.

    Args:
        found: see ``scores``.
        best: (rows,), the greatest logits.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # for rows with NaN or infinities
        totals = np.asarray(best + np.log(found[:, 0] / UNIT))  # the logarithms of the sums of all exponentials
        chosen = numbers_of(found[:, 1]).astype(np.float64) - totals
    ids, values = np.hsplit(found[:, 3:], 2)
    made = []
    for token, logprob, rank, count, token_ids, others, total in zip(
        tokens, chosen, found[:, 2], wanted, ids, numbers_of(np.ascontiguousarray(values)), totals, strict=True
    ):
        own = TokenLogprob(int(token), float(logprob), int(rank))
        top = [
            TokenLogprob(int(other), float(score) - float(total), place)
            for place, (other, score) in enumerate(zip(token_ids[:count], others[:count], strict=True), 1)
            if other != own.token_id and score > -np.inf
        ]
        made.append(Sampled(own.token_id, own.logprob, (own, *top)))
    return made


MAX_VOCABULARY = 2**22


def draw(seed: int, step: int) -> int:
    """64 random bits: the step-th block of Philox 4x64 under the seed (Salmon et al., SC 2011)."""
    return int(np.random.Philox(key=seed, counter=step).random_raw())


class PendingTokens:
    """The tokens of some rows, which a device may still be choosing.

    Attributes:
        there: the tokens on the device, (rows,), int64, before the host has them. A row without an allowed token has an
            arbitrary one. None if the host chooses.
    """

    def __init__(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """See ``begin``."""
        self._rows = rows
        self.there: Tensor | None = None
        self._wanted = [row.params.logprobs for row in rows]
        self._asked = np.flatnonzero([count is not None for count in self._wanted])
        bits = random_bits(rows)
        with torch.inference_mode():
            if on_device(logits) or not compiled.takes(logits):
                found = plain.choose(logits, rows, bits)
                self.there = found.tokens if on_device(logits) else None
            else:
                found = _choose_compiled(logits, rows, bits)
            told = [found.tokens, bits_of(found.raw), bits_of(found.best)]
            if len(self._asked):
                asked = upload(self._asked, logits.device)
                most = max(count for count in self._wanted if count is not None)
                tokens = found.tokens[asked].clamp_(0, logits.shape[1] - 1)  # of rows with an error, they are arbitrary
                told.append(scores(logits.index_select(0, asked), tokens, most))
            self._coming = Download(torch.cat([each.flatten() for each in told]))

    def wait(self) -> list[Sampled | InlayError]:
        """Wait for the tokens; see ``sample``."""
        count = len(self._rows)
        told = self._coming.wait()
        tokens, raw, best = told[: 3 * count].reshape(3, count)
        chosen = Chosen(tokens, numbers_of(raw), numbers_of(best))
        sampled = [Sampled(token) for token in tokens.tolist()]
        if len(self._asked):
            counts = [count for count in self._wanted if count is not None]
            found = told[3 * count :].reshape(len(counts), -1)
            for place, one in zip(
                self._asked, entries(tokens[self._asked], found, chosen.raw[self._asked], counts), strict=True
            ):
                sampled[place] = one
        return [error or one for error, one in zip(self._errors(chosen), sampled, strict=True)]

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


def _choose_compiled(logits: Tensor, rows: Sequence[Row], bits: Bits) -> plain.ChosenTokens:
    """Choose with the compiled kernel, which does not support typical-p."""
    found = plain.ChosenTokens(*map(torch.from_numpy, compiled.choose(logits, rows, bits)))
    places = [place for place, row in enumerate(rows) if row.params.typical_p < 1 and not row.params.greedy]
    if places:
        some = [rows[place] for place in places]
        found.tokens[places] = plain.choose(logits[places], some, bits[places]).tokens
    return found


def random_bits(rows: Sequence[Row]) -> Bits:
    """``draw`` for the next token of each row, (rows,)."""
    if kernel is None:
        return np.array([draw(row.seed, row.step) for row in rows], dtype=np.uint64)
    return compiled.random_bits(rows)


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
