"""From logits to tokens, for all rows of a step at once.

A draw depends only on its row's logits, parameters, seed and step. The random number comes from a counter-based
generator on (seed, step). The token is found by inverse CDF over integer weights.

The order of steps is vLLM's (vllm/v1/sample/sampler.py). Log-probabilities are those of the raw logits. Then come
grammars, ``min_tokens``, ``logit_bias`` and penalties (row.py), for greedy rows too. Then temperature, min-p, top-k,
top-p and typical-p, and a draw (plain.py).

plain.py is the specification, and chooses for logits on a device. For the CPU the compiled kernel (compiled.py) chooses
the same tokens, if it was built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from inlay.attention.kernel import kernel
from inlay.errors import InlayError, ParameterError
from inlay.models.device import Download, upload
from inlay.sampling import compiled, plain
from inlay.sampling.compiled import Chosen
from inlay.sampling.params import SamplingParams
from inlay.sampling.plain import Bits
from inlay.sampling.report import Sampled, bits_of, entries, numbers_of, scores
from inlay.sampling.row import Row

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
