"""One forward pass as the engine prepares it, its observers, and the tokens that it leaves in flight.

An observer sees the results of every pass, on the thread that steps the engine. Benchmarks measure with it. A token is
in flight while a device chooses it, and the host does not know it yet.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from inlay.attention.plan import Plan, advance, build_plan
from inlay.engine.allocation import Prefill, Work
from inlay.engine.encoder import Encoding, Task
from inlay.engine.request import Request
from inlay.engine.speculator import Draft
from inlay.errors import InlayError
from inlay.kv.offload.loader import Arrival
from inlay.models.device import upload
from inlay.sampling.sampler import PendingTokens


@dataclass
class ForwardPass:
    """One forward pass: its work in row order, the owners of the work, and the tasks it advances.

    Attributes:
        decode: requests that compute their last generated token. Their work comes first.
        completed: the prefills that it completes.
        sampled: requests that get their next token, with its row, in the order of the logits. If a request has a draft,
            the rows of its draft tokens follow.
        drafts: the drafts of requests. Their rows follow the decode row.
        scored: requests with prompt log-probabilities. Each is (request, first token, rows).
        embedded: requests with hidden states for an embedding. Each is (request, rows).
        ended: requests without new tokens.
        checks: work for the first layers only, behind the other work. Its tasks are in ``owners`` too.
        checked: the tasks of ``checks``.
        selected: requests that finish their token selection in this pass.
        arrivals: segments that load layer by layer while the pass reads them.
        waited_s: seconds that the host has waited for layers.
    """

    work: list[Work] = field(default_factory=list)
    owners: list[Task] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    completed: list[tuple[Task, Prefill]] = field(default_factory=list)
    sampled: list[tuple[Request, int]] = field(default_factory=list)
    drafts: dict[Request, Draft] = field(default_factory=dict)
    scored: list[tuple[Request, int, range]] = field(default_factory=list)
    embedded: list[tuple[Request, range]] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    checks: list[Work] = field(default_factory=list)
    checked: list[Task] = field(default_factory=list)
    selected: list[Request] = field(default_factory=list)
    arrivals: list[tuple[Request, Arrival]] = field(default_factory=list)
    waited_s: float = 0.0
    rows: int = 0

    def await_layer(self, layer: int) -> None:
        """Make the device wait for a layer of all arrivals. The host waits until the layer's copy has begun."""
        since = time.perf_counter()
        for _, arrival in self.arrivals:
            arrival.wait(layer)
        self.waited_s += time.perf_counter() - since

    def settle_arrivals(self, layers: int) -> list[Request]:
        """Finish the arrivals after all layers. Returns the requests that have read incomplete data."""
        self.await_layer(layers - 1)  # needed for models whose last layers have no attention
        lost = dict.fromkeys(request for request, arrival in self.arrivals if arrival.failed)
        for request, _ in self.arrivals:
            if request not in lost:
                request.allocation.arrivals = ()
        return [*lost]

    @property
    def encodings(self) -> list[Encoding]:
        """The encodings in this pass."""
        return [task for task in dict.fromkeys(self.owners) if isinstance(task, Encoding)]

    @property
    def only_answers(self) -> bool:
        """True if it computes the last tokens of answers, and nothing else."""
        return 0 < len(self.decode) == len(self.work)

    @property
    def wanted(self) -> list[int]:
        """The rows with logits: first the scored prompts' rows, then the embedded and the sampled ones."""
        embedded = [row for _, rows in self.embedded for row in rows]
        return [row for _, _, rows in self.scored for row in rows] + embedded + [row for _, row in self.sampled]

    def drop(self, requests: Collection[Task], logits: Tensor) -> Tensor:
        """Remove requests, none of them scored or embedded, from the pass. Returns the remaining logits."""
        if not requests:
            return logits
        left = [place for place, (request, _) in enumerate(self.sampled) if request not in requests]
        self.sampled = [self.sampled[place] for place in left]
        self.decode = [request for request in self.decode if request not in requests]
        self.drafts = {request: draft for request, draft in self.drafts.items() if request not in requests}
        self.completed = [(task, prefill) for task, prefill in self.completed if task not in requests]
        self.ended = [request for request in self.ended if request not in requests]
        self.selected = [request for request in self.selected if request not in requests]
        scored = sum(len(rows) for _, _, rows in self.scored) + sum(len(rows) for _, rows in self.embedded)
        rows = np.array([*range(scored), *(scored + place for place in left)], dtype=np.int64)
        return logits.index_select(0, upload(rows, logits.device))

    def add(self, task: Task, work: Sequence[Work]) -> None:
        before = self.rows
        for each in work:
            self.owners.append(task)
            if each.check:
                self.checks.append(each)
                self.checked.append(task)
                continue
            self.work.append(each)
            self.rows += each.part.rows
        if not isinstance(task, Request):
            return
        self.arrivals += [(task, arrival) for arrival in task.allocation.arrivals]
        if task.selection is not None:
            self.selected += [] if task.prompt_left else [task]
            return
        if task.scores is not None and not task.scores.complete:
            first = task.computed_tokens - (self.rows - before)
            wanted = task.scores.wanted(first, self.rows - before)
            self.scored.append((task, first, range(before, before + wanted)))
        if task.embedding is not None and not task.embedding.complete:
            first = task.computed_tokens - (self.rows - before)
            needed = task.embedding.wanted(first, self.rows - before)
            if needed:
                self.embedded.append((task, range(before + needed.start, before + needed.stop)))
        if not task.prompt_left and task.sampling.limit:
            drafted = len(self.drafts[task].tokens) if task in self.drafts else 0
            self.sampled += [(task, row) for row in range(self.rows - 1 - drafted, self.rows)]
        elif not task.prompt_left:
            self.ended.append(task)


class PassPlans:
    """The plans of passes. While the same requests decode, the last plan is advanced instead of rebuilt."""

    def __init__(self) -> None:
        self._decoding: tuple[list[Task], Plan] | None = None  # the last pass, if it was pure decoding

    def plan_of(self, made: ForwardPass) -> Plan:
        """The plan of the next pass."""
        parts = [work.part for work in made.work]
        if len(made.decode) < len(made.work):
            self._decoding = None
            return build_plan(parts)
        before = self._decoding
        if before is not None and before[0] == made.owners and _follows(before[1], made.work):
            plan = advance(before[1], parts)
        else:
            plan = build_plan(parts)
        self._decoding = (made.owners, plan)
        return plan

    def forget(self, task: Task | None = None) -> None:
        """Do not advance the last plan if ``task`` is in it. None for any task."""
        if task is None or (self._decoding is not None and task in self._decoding[0]):
            self._decoding = None


def _follows(plan: Plan, work: Sequence[Work]) -> bool:
    """True if each request has one row in both passes, and its next slot follows its last one."""
    if plan.rows != len(work) or any(after.part.rows > 1 for after in work):
        return False
    return bool((plan.slots + 1).tolist() == [after.part.first_slot for after in work])


class StepObserver:
    """Observes an engine's steps on the stepping thread. It must be quick; an exception fails the step."""

    def computed(self, made: ForwardPass, logits: Tensor, running: Sequence[Task], seconds: float) -> None:
        """Called after the model has run and before tokens are chosen.

        Args:
            logits: (len(made.sampled), vocabulary), in the model's dtype. Copy them to keep them.
            running: all tasks with slots in the pool, in this pass or not.
            seconds: the duration of the model call, including attention planning.
        """

    def stepped(self, seconds: float) -> None:
        """Called at the end of the step. ``seconds`` is its whole duration, scheduling included."""


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
        """Return the tokens of these requests on the device, (requests,), int64."""
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

        A draft token is accepted if it equals the token that the row before it has chosen. Then its KV belongs to the
        answer, and its own row chooses the next token. The rows behind the first rejected token are dropped. If a draft
        token's row has no next token, it is rejected: the next pass computes it alone and tells the error.
        """
        if not self.requests:
            return []
        done: set[Request] = set()
        tokens = self._choice.wait()
        for at, (request, token, row) in enumerate(zip(self._rows, tokens, self._logits, strict=True)):
            if request not in self.requests or request in done:
                continue
            request.accept(row, token)
            number = self.accepted.get(request, -1) + 1
            self.accepted[request] = number
            draft = self.drafts.get(request)
            agreed = not request.finished and draft is not None and agrees(draft, number, request.token_ids[-1])
            if not agreed or isinstance(tokens[at + 1], InlayError):
                done.add(request)
            else:
                request.decoded()
        return [*self.accepted]


def agrees(draft: Draft, number: int, token: int) -> bool:
    """True if token ``number`` of a draft equals a chosen token."""
    return number < len(draft.tokens) and draft.tokens[number] == token
