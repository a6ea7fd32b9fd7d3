"""One forward pass as the engine lays it out, and who is told of it.

An observer sees what every pass computes, on the thread that steps the engine: benchmarks take their figures from it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from inlay.attention.plan import Plan, advance, build_plan
from inlay.engine.allocation import Prefill, Work
from inlay.engine.encoder import Encoding, Task
from inlay.engine.request import Request
from inlay.kv.arrivals import Arrival
from inlay.models.device import upload


@dataclass
class ForwardPass:
    """One forward pass: work in row order, whose it is, what it completes, and which row each new token comes from.

    decode: requests that compute the token they said last; their work comes first.
    sampled: requests with the row that their next token is chosen from, in the order of the rows of logits.
    scored: requests that are told the log-probabilities of their prompts: from which token on, and which rows.
    ended: requests that want no token.
    checks: work for the first layers alone, which comes behind the other; owners are of that, too, and checked of it
        alone.
    selected: requests for which it ends the pass that chooses what is computed anew of their modules.
    arrivals: what comes up from the host tier layer by layer while the pass reads it, with whose it is.
    waited_s: for how long the host has waited for layers.
    """

    work: list[Work] = field(default_factory=list)
    owners: list[Task] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    completed: list[tuple[Task, Prefill]] = field(default_factory=list)
    sampled: list[tuple[Request, int]] = field(default_factory=list)
    scored: list[tuple[Request, int, range]] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    checks: list[Work] = field(default_factory=list)
    checked: list[Task] = field(default_factory=list)
    selected: list[Request] = field(default_factory=list)
    arrivals: list[tuple[Request, Arrival]] = field(default_factory=list)
    waited_s: float = 0.0
    rows: int = 0

    def await_layer(self, layer: int) -> None:
        """Let the device wait for a layer of what is on its way up; the host does until its copy has begun."""
        since = time.perf_counter()
        for _, arrival in self.arrivals:
            arrival.wait(layer)
        self.waited_s += time.perf_counter() - since

    def settle_arrivals(self, layers: int) -> list[Request]:
        """Note that all layers have been read. Returns the requests that have read what was not there as it should."""
        self.await_layer(layers - 1)  # also where no attention has
        lost = dict.fromkeys(request for request, arrival in self.arrivals if arrival.failed)
        for request, _ in self.arrivals:
            if request not in lost:
                request.allocation.arrivals = ()
        return [*lost]

    @property
    def encodings(self) -> list[Encoding]:
        """Those that it computes a part of."""
        return [task for task in dict.fromkeys(self.owners) if isinstance(task, Encoding)]

    @property
    def wanted(self) -> list[int]:
        """The rows whose logits are looked at: those of prompts, then those that tokens are sampled from."""
        return [row for _, _, rows in self.scored for row in rows] + [row for _, row in self.sampled]

    def drop(self, requests: Collection[Task], logits: Tensor) -> Tensor:
        """Forget what requests have computed here, none of which are scored. Returns the logits of the others."""
        if not requests:
            return logits
        left = [place for place, (request, _) in enumerate(self.sampled) if request not in requests]
        self.sampled = [self.sampled[place] for place in left]
        self.decode = [request for request in self.decode if request not in requests]
        self.completed = [(task, prefill) for task, prefill in self.completed if task not in requests]
        self.ended = [request for request in self.ended if request not in requests]
        self.selected = [request for request in self.selected if request not in requests]
        scored = sum(len(rows) for _, _, rows in self.scored)
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
        if not task.prompt_left and task.sampling.limit:
            self.sampled.append((task, self.rows - 1))
        elif not task.prompt_left:
            self.ended.append(task)


class PassPlans:
    """The plans of passes: while the same requests go on answering, the last one with its lengths advanced."""

    def __init__(self) -> None:
        self._decoding: tuple[list[Task], Plan] | None = None  # the last pass's, where it was decoding alone

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
        """Make the next plan anew, where the last one has anything of a task, or whatever it has."""
        if task is None or (self._decoding is not None and task in self._decoding[0]):
            self._decoding = None


def _follows(plan: Plan, work: Sequence[Work]) -> bool:
    """Whether every request's next slot lies right behind its last one."""
    return bool((plan.slots + 1).tolist() == [after.part.first_slot for after in work])


class StepObserver:
    """Told of an engine's steps by whoever takes them; it must be quick, and what it raises fails the step."""

    def computed(self, made: ForwardPass, logits: Tensor, running: Sequence[Task], seconds: float) -> None:
        """The model has run, and nothing is chosen yet.

        logits: (len(made.sampled), vocabulary), in the model's dtype; to be copied where they are kept.
        running: all that have a place in the pool, whether or not this pass computes something of theirs.
        seconds: of the call of the model, with the attention's planning.
        """

    def stepped(self, seconds: float) -> None:
        """The step of the pass told of last is over. seconds: of all of it, from scheduling on."""
