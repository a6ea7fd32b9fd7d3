"""What the sampler keeps of one request: parameters made ready once, and what the penalties count."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from inlay.engine.structured import Guide
from inlay.types import SamplingParams

Ids = npt.NDArray[np.int64]

#: One row's numbers, so that a batch of rows becomes an array in one call.
SETTINGS = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
    ]
)


class Row:
    """One answer as the sampler sees it, one row of logits a step.

    Arguments:
        params: how its tokens are chosen.
        seed: of its draws, 0 to 2**64 - 1; see ``request_seed``.
        prompt_ids: of the prompt; the repetition penalty counts them too.
        stop_ids: the tokens that end an answer, and that ``min_tokens`` therefore keeps back.
        never: tokens that must not be chosen at any step.
        guide: where the answer stands in its grammar, if it has one.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        *,
        prompt_ids: Sequence[int] = (),
        stop_ids: Collection[int] = (),
        never: Collection[int] = (),
        guide: Guide | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.guide = guide
        self.step = 0  # how many tokens the answer has
        self.settings = (
            params.temperature,
            params.min_p,
            max(params.top_k, 0),
            params.top_p,
            params.typical_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        biases = params.logit_bias or {}
        self.bias_ids: Ids = np.fromiter(biases, np.int64, len(biases))
        self.biases = np.fromiter(biases.values(), np.float32, len(biases))
        self.seen = _seen(params, prompt_ids)
        self._never = np.array(sorted(never), dtype=np.int64)
        self._early = np.array(sorted({*never, *stop_ids, *params.stop_ids}), dtype=np.int64)

    @property
    def forbidden(self) -> Ids:
        """Tokens that must not come next."""
        return self._early if self.step < self.params.min_tokens else self._never

    def take(self, token: int) -> None:
        """Note the token that was chosen. Raises InlayError where the row's grammar cannot follow it."""
        self.step += 1
        if self.seen is not None:
            self.seen.add(token)
        if self.guide is not None:
            self.guide.take(token)


class Seen:
    """The tokens that penalties apply to, each once, and how often the answer holds them.

    A short list instead of a count for each token of the vocabulary: a step reads and changes these logits alone.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._size = len(self._ids)
        self._places = {int(token): place for place, token in enumerate(self._ids)}

    @property
    def ids(self) -> Ids:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often the answer holds each of ``ids``; 0 for tokens of the prompt alone."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        place = self._places.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._grow()
            self._ids[place], self._counts[place] = token, 0
            self._size += 1
        self._counts[place] += 1

    def _grow(self) -> None:
        room = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])


def _seen(params: SamplingParams, prompt_ids: Sequence[int]) -> Seen | None:
    if params.repetition_penalty != 1:
        return Seen(prompt_ids)
    return Seen(()) if params.presence_penalty or params.frequency_penalty else None
