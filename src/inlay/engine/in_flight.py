"""Tokens that a device has chosen or is choosing, and that the host does not know yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from inlay.engine.encoder import Task
from inlay.engine.request import Request
from inlay.models.device import upload
from inlay.sampling.sampler import PendingTokens


class InFlight:
    """The next tokens of some requests.

    Args:
        requests: in the order of the rows.
        choice: the tokens.
        logits: the logits that they are chosen from, (rows, vocabulary).
    """

    def __init__(self, requests: Sequence[Request], choice: PendingTokens, logits: Tensor) -> None:
        self._rows = list(requests)
        self._choice = choice
        self._logits = logits
        #: The requests that have not ended meanwhile.
        self.requests = dict.fromkeys(requests)

    @property
    def may_wait(self) -> bool:
        """True if the next step may run before the host knows the tokens: a device has them, and none is forced."""
        return self._choice.there is not None and not any(request.sampling.forced for request in self._rows)

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
        """Wait for the tokens and give them to their requests. Returns these requests."""
        if not self.requests:
            return []
        told = []
        for request, token, row in zip(self._rows, self._choice.wait(), self._logits, strict=True):
            if request in self.requests:
                request.accept(row, token)
                told.append(request)
        return told
