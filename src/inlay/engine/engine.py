"""The engine: requests in, tokens out, one forward pass a step."""

from __future__ import annotations

import time
from collections.abc import Iterable

from inlay.attention.plan import Plan, advance, build_plan
from inlay.cache.pool import cut
from inlay.cache.segment import Segment, SegmentSpec
from inlay.cache.splice import Cached
from inlay.cache.store import SegmentStore
from inlay.engine.encoder import Encoder, Progress
from inlay.engine.request import Request, usage_of
from inlay.engine.runner import Runner
from inlay.engine.sampler import sample
from inlay.engine.scheduler import Scheduler, Step
from inlay.errors import CapacityError


class Engine:
    """Runs requests over one store of segments."""

    def __init__(self, store: SegmentStore, runner: Runner, *, max_requests: int, max_tokens: int) -> None:
        self.store = store
        self.scheduler = Scheduler(max_requests, max_tokens)
        self._runner = runner
        self._encoder = Encoder(store, runner, max_tokens)
        self._decoding: tuple[list[Request], Plan] | None = None  # the last step's plan, where it was decoding alone

    def encode(self, specs: Iterable[SegmentSpec], progress: Progress | None = None) -> dict[bytes, Segment]:
        """Make sure that these segments are stored. Raises CapacityError."""
        return self._encoder.encode(specs, progress)

    def add(self, request: Request) -> None:
        """Queue a request, and the answers that follow it right behind it."""
        for member in request.family:
            self.scheduler.waiting.append(member)
            request.readers += 1

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Request]:
        """Admit, run one forward pass, sample. Returns the requests that have a new token."""
        self._admit()
        step = self.scheduler.step()
        try:
            return self._compute(step)
        except BaseException as error:  # what was taken out of the queue for this step is lost
            for request in {member for owner in step.owners for member in owner.family if not member.finished}:
                request.error = error
                self.release(request)
            raise

    def _compute(self, step: Step) -> list[Request]:
        logits = self._runner.run(step.work, [row for _, row in step.sampled], self._plan(step))
        advanced = [request for request, _ in step.sampled]
        tokens = sample(logits, [request.row for request in advanced])
        for request, token, row in zip(advanced, tokens, logits, strict=True):
            if request.token_ids:
                request.decoded()
            request.accept(request.choose(row, token))
            if request.finished:
                self.release(request)
        return advanced

    def release(self, request: Request) -> None:
        """Give back what a request holds, whether it has ended or is given up."""
        self.scheduler.remove(request)
        self._give_back(request)
        for segment in request.segments:
            segment.pins -= 1
        request.segments = []
        self._decoding = None

    def _give_back(self, request: Request) -> None:
        """Free the slots that nobody reads any more: of a tail that others read, all but the prompt's."""
        pool, leader = self.store.pool, request.leader or request
        if request.released:
            return
        request.released = True
        leader.readers -= 1
        if leader is not request:
            pool.free(request.tail)
            request.tail = ()
        if leader.released:
            kept = pool.chunks_for(leader.fresh_tokens) * pool.chunk_size if leader.readers and leader.tail else 0
            held = sum(run.length for run in leader.tail)
            pool.free(cut(leader.tail, kept, held - kept))
            leader.tail = cut(leader.tail, 0, kept)

    def _admit(self) -> None:
        while (request := self.scheduler.next_to_admit()) is not None:
            try:
                self._place(request)
            except CapacityError:
                if not self.scheduler.running:
                    raise
                return  # it waits until a running request gives its memory back
            self.scheduler.admitted()

    def _place(self, request: Request) -> None:
        """Find or encode the segments of a request, and reserve its open tail."""
        if request.leader is not None:
            request.place_behind(request.leader, self.store.allocate(1 + request.limit))
            return
        specs = [part.spec for part in request.splice if isinstance(part, Cached)]
        hits = frozenset(spec.key for spec in specs if self.store.get(spec) is not None)
        request.hits = hits if request.hits is None else request.hits & hits  # it may have to wait and be placed again
        started = time.perf_counter()
        segments = self.encode(specs)
        if any(spec.key not in hits for spec in specs):
            request.encode_s += time.perf_counter() - started
        used = [segments[spec.key] for spec in specs]
        with self.store.pinned(used):
            tail = self.store.allocate(request.fresh_tokens + request.limit)
        for member in request.family:  # those who follow find the segments still there when their turn comes
            for segment in used:
                segment.pins += 1
            member.segments = used
        request.usage = usage_of(request.splice, request.hits)
        request.place(segments, tail)

    def _plan(self, step: Step) -> Plan:
        """The step's plan; while the same requests go on answering, the last one with its lengths advanced."""
        if not step.decodes_only:
            self._decoding = None
            return build_plan([work.span for work in step.work])
        before, spans = self._decoding, [work.span for work in step.work]
        if before is not None and before[0] == step.owners and _follows(before[1], step):
            plan = advance(before[1], spans)
        else:
            plan = build_plan(spans)
        self._decoding = (step.owners, plan)
        return plan


def _follows(plan: Plan, step: Step) -> bool:
    """Whether every request's next slot lies right behind its last one."""
    return all(span.slots[0].end == work.span.slots[0].first for span, work in zip(plan.spans, step.work, strict=True))
