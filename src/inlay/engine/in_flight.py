"""Tokens that a device has chosen or is choosing, and that the host does not know yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from inlay.engine.encoder import Task
from inlay.engine.request import Request
from inlay.engine.speculation.speculator import Draft
from inlay.models.device import upload
from inlay.sampling.sampler import PendingTokens


class InFlight:
    """The next tokens of some requests.

    Args:
        requests: in the order of the rows. A request with a draft has one row more for each draft token.
        choice: the tokens.
        logits: the logits that they are chosen from, (rows, vocabulary).
        drafts: the drafts of some of the requests.

    Attributes:
        drafts: see above.
        accepted: how many tokens of its draft each request has accepted.
    """

    def __init__(
        self, requests: Sequence[Request], choice: PendingTokens, logits: Tensor, drafts: Mapping[Request, Draft]
    ) -> None:
        self._rows = list(requests)
        self._choice = choice
        self._logits = logits
        self.drafts = drafts
        self.accepted: dict[Request, int] = {}
        #: The requests that have not ended meanwhile.
        self.requests = dict.fromkeys(requests)

    @property
    def may_wait(self) -> bool:
        """True if the next step may run before the host knows the tokens: a device has them, and none is forced.

        Only the host knows how many tokens of a draft are accepted.
        """
        if self.drafts or self._choice.there is None:
            return False
        return not any(request.sampling.forced for request in self._rows)

    @property
    def leaving(self) -> set[Request]:
        """The requests that reach their token limit with this token."""
        return {each for each in self.requests if len(each.token_ids) + 1 >= each.sampling.limit}

    def ids(self, requests: Sequence[Request]) -> Tensor:
        """The tokens of some requests on the device, (requests,), int64."""
        there = self._choice.there
        assert there is not None, "they are on a device"
        if requests == self._rows:
            return there
        places = {request: place for place, request in enumerate(self._rows)}
        return there.index_select(0, upload(np.array([places[each] for each in requests]), there.device))

    def forget(self, task: Task) -> None:
        """Drop a request that has ended meanwhile."""
        if isinstance(task, Request):
            self.requests.pop(task, None)

    def accept(self) -> list[Request]:
        """Wait for the tokens and give them to their requests. Returns these requests.

        The row of a draft token counts only if that token equals the one chosen before it. Then its KV belongs to the
        answer. The rows behind the first other token are dropped.
        """
        if not self.requests:
            return []
        done: set[Request] = set()
        for request, token, row in zip(self._rows, self._choice.wait(), self._logits, strict=True):
            if request not in self.requests or request in done:
                continue
            request.accept(row, token)
            number = self.accepted.get(request, -1) + 1
            self.accepted[request] = number
            draft = self.drafts.get(request)
            if request.finished or draft is None or not agrees(draft, number, request.token_ids[-1]):
                done.add(request)
            else:
                request.decoded()
        return [*self.accepted]


def agrees(draft: Draft, number: int, token: int) -> bool:
    """True if a chosen token is the one with this number in a draft."""
    return number < len(draft.tokens) and draft.tokens[number] == token
