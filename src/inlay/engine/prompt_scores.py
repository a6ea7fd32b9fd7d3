"""Log-probabilities of a prompt's tokens, collected pass by pass.

Cached KV has no logits, so a scored prompt reads nothing from the store. The logits of a whole prompt never exist at
once: a pass is limited to the tokens whose logits fit a bound, and processes them in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.logprobs import FlatLogprobs, Logprob, RankedLogprob

PASS_LOGITS = 2**26  # logits per pass: 256 MiB in fp32
BLOCK = 64  # rows per block


class PromptScores:
    """The log-probabilities of every token of one prompt but the first.

    Attributes:
        ids: of the prompt.
        top: the number of most probable tokens to report.
        entries: per token, itself first, then the most probable others; None for the first token.
        told: True if the listener has received them.
    """

    def __init__(self, ids: Sequence[int], top: int) -> None:
        self._ids = ids
        self._top = top
        self.entries: FlatLogprobs[dict[int, Logprob] | None] = FlatLogprobs([None])
        self.told = False

    @property
    def complete(self) -> bool:
        """True if all tokens are scored. A prompt is scored from its start on."""
        return len(self.entries) == len(self._ids)

    def wanted(self, first: int, rows: int) -> int:
        """How many rows from token ``first`` on are needed: none for the prompt's last token or for the answer."""
        return max(0, min(rows, len(self._ids) - 1 - first))

    def add(self, first: int, logits: Tensor) -> None:
        """Add the logits of the tokens from ``first`` on, (rows, vocabulary). Raises InlayError if they are damaged."""
        for at in range(0, len(logits), BLOCK):
            self._add(first + at, logits[at : at + BLOCK].float())

    def _add(self, first: int, scores: Tensor) -> None:
        targets = self._ids[first + 1 : first + 1 + len(scores)]
        columns = torch.tensor(targets, device=scores.device)[:, None]
        totals = scores.logsumexp(dim=1, keepdim=True)
        if not bool(totals.isfinite().all()):
            raise InlayError(
                "the logits of the prompt hold NaN or inf; the model's weights or inputs are damaged",
                code="model.invalid_numbers",
            )
        chosen = scores.gather(1, columns)
        earlier = torch.arange(scores.shape[1], device=scores.device) < columns  # ties rank by token id
        before = (scores > chosen) | ((scores == chosen) & earlier)
        ranks = (1 + before.sum(dim=1)).tolist()
        own = (chosen - totals)[:, 0].tolist()
        leaders = scores.topk(min(self._top, scores.shape[1]), dim=1)
        others = (leaders.values - totals).tolist(), leaders.indices.tolist()
        for row, (token, logprob, rank) in enumerate(zip(targets, own, ranks, strict=True), first + 1):
            entry: list[RankedLogprob] = [(token, logprob, rank)]
            for place, (value, other) in enumerate(zip(*(each[row - first - 1] for each in others), strict=True), 1):
                if other != token and value > -torch.inf:
                    entry.append((other, value, place))
            if row == len(self.entries):  # False for rows that are recomputed after a preemption
                self.entries.append(entry)


def most_rows(vocabulary: int) -> int:
    """The most tokens in a pass that scores a prompt."""
    return max(1, PASS_LOGITS // vocabulary)
