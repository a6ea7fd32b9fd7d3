"""Which requests run in the next step: a plain batch, first come first served.

A request is admitted when there is a place for it in the batch; its prompt is computed in chunks of at most
``max_tokens`` tokens a step, beside one token for each request that is already answering.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from inlay.engine.request import Request, Work


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: work and whose it is. sampled: the requests whose next token it yields, with their rows."""

    work: list[Work]
    owners: list[Request]
    sampled: list[tuple[Request, int]]

    @property
    def decodes_only(self) -> bool:
        """Whether every request in it computes exactly its last token."""
        return all(
            owner.token_ids and work.span.length == 1 for owner, work in zip(self.owners, self.work, strict=True)
        )


class Scheduler:
    """Keeps waiting and running requests, and turns them into steps."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def next_to_admit(self) -> Request | None:
        """The request that is to be admitted now, if one is waiting and there is a place."""
        return self.waiting[0] if self.waiting and len(self.running) < self.max_requests else None

    def admitted(self) -> None:
        """Note that the first waiting request runs from now on."""
        self.running.append(self.waiting.popleft())

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it stands."""
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def step(self) -> Step:
        """The next forward pass: a token of every answer, and prompts as far as the budget goes."""
        step = Step([], [], [])
        budget, row = self.max_tokens, 0
        for request in self.running:
            chunks = self._chunks(request, budget) if request.prefill else [request.decode_work()]
            for work in chunks:
                step.work.append(work)
                step.owners.append(request)
                row += work.span.length
                budget -= work.span.length
            if chunks and not request.prefill:
                step.sampled.append((request, row - 1))
        return step

    def _chunks(self, request: Request, budget: int) -> list[Work]:
        """Take as much of a request's prompt as the budget allows."""
        taken = []
        while request.prefill and budget > 0:
            work = request.prefill.pop(0)
            if work.span.length > budget:
                work, rest = work.split(budget)
                request.prefill.insert(0, rest)
            taken.append(work)
            budget -= work.span.length
        return taken
