"""What the scheduler is told, and what it says: jobs, the memory that they want room in, and the step it decides on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar


class Admission(Enum):
    """What a memory says to a job that wants to run."""

    ADMITTED = "admitted"
    NO_ROOM = "no room"
    LATER = "later"  # somebody is computing what it could share
    COMING = "coming"  # what it reads is on its way from a lower tier
    FREEING = "freeing"  # no room, but what is on its way between the tiers gives some back before long
    TAKEN = "taken"  # as many jobs of its kind run as may: no other of that many sequences is asked in this step
    DONE = "done"  # there is nothing left to compute


class Job(Protocol):
    """A request, or an encoding, as the scheduler sees it.

    sent: when it was made, on the clock of ``arrival``.
    deadline: when it ends whether or not it has its answer; None for never. tenant: whose it is; "" for nobody's in
    particular, who are one tenant. weight: how large that tenant's share is beside others'. sequences: how many of
    ``max_requests`` it is; 0 for one that computes no answer.
    """

    priority: int
    arrival: float

    @property
    def sent(self) -> float: ...

    deadline: float | None
    tenant: str
    weight: float
    sequences: int

    @property
    def prompt_left(self) -> int:
        """How many tokens it has to compute before its next token can be sampled; 0 while it answers."""
        ...


J = TypeVar("J", bound=Job)
K = TypeVar("K", bound=Job, contravariant=True)
L = TypeVar("L", bound=Job)


class Memory(Protocol[K]):
    """The pool as the scheduler sees it."""

    def admit(self, job: K) -> Admission:
        """Find what is stored of a job and reserve room for the rest. Raises CapacityError where it can never run."""
        ...

    def grow(self, job: K) -> bool:
        """Make room for the job's next token."""
        ...

    def release(self, job: K) -> None:
        """Take back what a job has."""
        ...


class Waits(Protocol[L]):
    """Says when what a memory has said may have changed, so that jobs which wait need not be asked at every step."""

    def begun(self, job: L, answer: Admission) -> None:
        """Note that a job was told LATER or COMING."""
        ...

    def over(self) -> Iterable[L]:
        """The jobs that may be asked again. Each is named once; some may have left meanwhile."""
        ...

    @property
    def room(self) -> object:
        """Another value whenever a job that was told FREEING may find room."""
        ...


@dataclass
class Step(Generic[J]):
    """What the next forward pass computes, and who left.

    decode: jobs that compute one token. prefill: jobs with how many tokens of their prompts are computed.
    preempted: jobs that wait again. expired: jobs past their deadline. done: jobs that had nothing left to compute.
    failed: jobs that can never run, or were put out of the line, and why.
    """

    decode: list[J] = field(default_factory=list)
    prefill: list[tuple[J, int]] = field(default_factory=list)
    preempted: list[J] = field(default_factory=list)
    expired: list[J] = field(default_factory=list)
    done: list[J] = field(default_factory=list)
    failed: list[tuple[J, Exception]] = field(default_factory=list)
