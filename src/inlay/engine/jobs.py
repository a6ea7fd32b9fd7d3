"""The scheduler's interfaces: jobs, the memory that admits them, and the step that it decides on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar


class Admission(Enum):
    """The answer of a memory to a job that wants to run."""

    ADMITTED = "admitted"
    NO_ROOM = "no room"
    LATER = "later"  # another job is computing KV that it could share
    COMING = "coming"  # its segments are loading from a lower tier
    FREEING = "freeing"  # no room now, but a transfer between the tiers will free some
    TAKEN = "taken"  # no more jobs of this kind may run; others with as many sequences are not asked in this step
    DONE = "done"  # nothing is left to compute


class Job(Protocol):
    """A request or an encoding, as the scheduler sees it.

    Attributes:
        sent: the time of creation, on the clock of ``arrival``.
        deadline: the time when it ends, complete or not. None for no limit.
        tenant: its tenant. All jobs with "" form one tenant.
        weight: the tenant's share relative to other tenants.
        sequences: its share of ``max_requests``; 0 for a job without an answer.
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
        """The number of tokens to compute before its next token can be sampled; 0 while it decodes."""
        ...


J = TypeVar("J", bound=Job)
K = TypeVar("K", bound=Job, contravariant=True)
L = TypeVar("L", bound=Job)


class Memory(Protocol[K]):
    """The pool as the scheduler sees it."""

    def admit(self, job: K, alone: bool) -> Admission:
        """Look up a job and allocate room for its missing tokens. Raises CapacityError if it can never run.

        Args:
            alone: True if no other job runs, so that this one may start before all layers are loaded.
        """
        ...

    def grow(self, job: K) -> bool:
        """Make room for the job's next token. Returns False if the pool is full."""
        ...

    def release(self, job: K) -> None:
        """Free a job's allocation."""
        ...


class Waits(Protocol[L]):
    """Reports the jobs with a changed admission, so that waiting jobs need not be asked at every step."""

    def begun(self, job: L, answer: Admission) -> None:
        """Record that a job was answered LATER or COMING."""
        ...

    def over(self, alone: bool) -> Iterable[L]:
        """The jobs to ask again, each reported once. Some may have left since. alone: see ``Memory.admit``."""
        ...

    @property
    def room(self) -> object:
        """A value that changes whenever a job answered FREEING may find room."""
        ...


@dataclass
class Step(Generic[J]):
    """The work of the next forward pass, and the jobs that left.

    Attributes:
        decode: jobs that compute one token.
        prefill: jobs with the number of prompt tokens to compute.
        preempted: jobs that wait again.
        expired: jobs past their deadline.
        done: jobs that had nothing left to compute.
        failed: jobs that can never run or were removed from the queue, with the reason.
    """

    decode: list[J] = field(default_factory=list)
    prefill: list[tuple[J, int]] = field(default_factory=list)
    preempted: list[J] = field(default_factory=list)
    expired: list[J] = field(default_factory=list)
    done: list[J] = field(default_factory=list)
    failed: list[tuple[J, Exception]] = field(default_factory=list)
