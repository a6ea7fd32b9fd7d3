"""Jobs and a memory for the scheduler that are nothing but numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from inlay.engine.scheduler import Admission, Scheduler, Step
from inlay.errors import CapacityError


@dataclass(eq=False)
class FakeJob:
    """prompt: its prompt tokens. answer: its answer tokens. topic: the text that it shares with other jobs, if any."""

    number: int
    prompt: int
    answer: int
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    topic: int | None = None
    tenant: str = ""
    weight: float = 1.0
    sequences: int = 1
    prompt_left: int = 0
    said: int = 0
    admitted: int = 0  # how often

    @property
    def place(self) -> tuple[int, float, int]:
        return self.priority, self.arrival, self.number


@dataclass
class FakeMemory:
    """Chunks of one token. A topic is computed by one job at a time; the others wait for it and then need half."""

    chunks: int
    held: dict[FakeJob, int] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    asked: list[tuple[FakeJob, Admission]] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.chunks - sum(self.held.values())

    def admit(self, job: FakeJob, alone: bool) -> Admission:
        answer = self.answer(job)
        self.asked.append((job, answer))
        return answer

    def answer(self, job: FakeJob) -> Admission:
        assert job not in self.held
        tokens = job.prompt + job.said
        if tokens + 1 > self.chunks:
            raise CapacityError(f"job {job.number} never fits")
        if job.topic is not None and self.computing(job.topic):
            return Admission.LATER
        if tokens + 1 > self.free:
            return Admission.NO_ROOM
        self.held[job] = tokens + 1
        job.prompt_left = max(1, tokens // 2) if job.topic in self.known else tokens
        job.admitted += 1
        return Admission.ADMITTED

    def computing(self, topic: int) -> bool:
        return topic not in self.known and any(job.topic == topic and job.prompt_left for job in self.held)

    def grow(self, job: FakeJob) -> bool:
        if self.held[job] > job.prompt + job.said:
            return True
        if not self.free:
            return False
        self.held[job] += 1
        return True

    def release(self, job: FakeJob) -> None:
        del self.held[job]  # a second release is a KeyError
        job.prompt_left = 0


def run(scheduler: Scheduler[FakeJob], memory: FakeMemory, step: Step[FakeJob]) -> None:
    """The forward pass: every job of the step computes its planned tokens; jobs at their end generate a token."""
    for job, tokens in step.prefill:
        job.prompt_left -= tokens
        if not job.prompt_left and job.topic is not None:
            memory.known.add(job.topic)
    for job in [*step.decode, *(job for job, _ in step.prefill if not job.prompt_left)]:
        job.said += 1
        if job.said >= job.answer:
            scheduler.remove(job)


def make(chunks=20, requests=4, tokens=8, prefill=4, waiting=None) -> tuple[Scheduler[FakeJob], FakeMemory]:
    memory = FakeMemory(chunks)
    return Scheduler(requests, tokens, prefill, waiting, memory), memory
