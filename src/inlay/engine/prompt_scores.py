"""Log-probabilities of the tokens of a prompt, pass by pass as they are computed.

Of cached keys and values there are no logits, so such a prompt reads nothing from the store. All logits of a prompt
are never there at once: a pass computes so many of its tokens as their logits fit into a bound, and they are looked
at block by block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.logprobs import FlatLogprobs, Logprob, RankedLogprob

PASS_LOGITS = 2**26  # of one pass: 256 MiB in fp32
BLOCK = 64  # rows that are looked at together


class PromptScores:
    """What the model expected at every token of one prompt but the first.

    ids: of the prompt. top: how many of the most probable tokens to keep beside the token itself.
    entries: of each token so far, itself first, then the most probable others; None for the first one.
    told: whether the request's listener has heard of them.
    """

    def __init__(self, ids: Sequence[int], top: int) -> None:
        self._ids = ids
        self._top = top
        self.entries: FlatLogprobs[dict[int, Logprob] | None] = FlatLogprobs([None])
        self.told = False

    @property
    def complete(self) -> bool:
        """Whether all of them are there: passes compute a prompt from its beginning on."""
        return len(self.entries) == len(self._ids)

    def wanted(self, first: int, rows: int) -> int:
        """How many of the rows of tokens ``first`` and on are of use: not the last token's, nor those of an answer."""
        return max(0, min(rows, len(self._ids) - 1 - first))

    def add(self, first: int, logits: Tensor) -> None:
        """Take the logits of tokens ``first`` and on, (rows, vocabulary). Raises InlayError where they are damaged."""
        for at in range(0, len(logits), BLOCK):
            self._add(first + at, logits[at : at + BLOCK].float())

    def _add(self, first: int, scores: Tensor) -> None:
        targets = self._ids[first + 1 : first + 1 + len(scores)]
        columns = torch.tensor(targets, device=scores.device)[:, None]
        totals = scores.logsumexp(dim=1, keepdim=True)
        if not bool(totals.isfinite().all()):
            raise InlayError("the logits of the prompt hold NaN or inf; the model's weights or inputs are damaged")
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
            if row == len(self.entries):  # not where it was preempted, and is computed once more
                self.entries.append(entry)


def most_rows(vocabulary: int) -> int:
    """How many tokens a pass may compute in which a prompt is scored."""
    return max(1, PASS_LOGITS // vocabulary)
