"""How far answers are from full prefill, by salt, schema and policy; and the safer policy where that is too far.

What is counted is nats a token of an answer, KL(full prefill ‖ as it was given), the mean over its tokens. At every
32nd answer of one salt, schema and policy it is looked at: where the lower 95% bound of the mean over the latest 256 is
above the threshold, requests get the next safer policy from then on. So a few odd answers decide nothing, and there are
few looks, each of which may err.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from inlay.policy import ReusePolicy
from inlay.types import DRIFT_BOUNDS, DriftStats, DriftTotals

logger = logging.getLogger(__name__)

#: Answers from one look at a mean to the next, and those that it is over at most.
LOOK, _LATEST = 32, 256
#: So many standard errors are the 95% bounds of a mean away from it.
_Z95 = 1.96
#: So many salts' schemas under a policy are known at most, and so many schemas under a policy are counted apart.
MOST_KNOWN, _MOST_TOTALS = 1024, 256
_OTHER = "(other)"


def divergences(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference ‖ other) in nats, of each token; (tokens,), fp64.

    reference, other: (tokens, vocabulary), natural log-probabilities.
    """
    expected, found = reference.double(), other.double()
    weights = expected.exp()
    terms = torch.where(weights > 0, weights * (expected - found), 0.0)
    # Rounding may take the divergence of almost equal distributions below zero, where none is.
    return terms.sum(dim=-1).clamp(min=0.0)


@dataclass(frozen=True, slots=True)
class Subject:
    """Answers that are counted together. salt: whose. schema, digest: see EngineRequest. policy: as it was taken."""

    salt: str
    schema: str
    digest: str
    policy: ReusePolicy


@dataclass(frozen=True, slots=True)
class Comparison:
    """One answer beside full prefill. kl: nats a token. agreeing: of its steps, at how many the likeliest token is the
    same."""

    kl: float
    steps: int
    agreeing: int


@dataclass(eq=False, slots=True)
class _Record:
    """What is known of a subject. latest: nats a token, of the last answers. taken: see DriftStats."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    samples: int = 0
    steps: int = 0
    agreeing: int = 0
    taken: ReusePolicy | None = None

    def add(self, comparison: Comparison) -> None:
        self.latest.append(comparison.kl)
        self.samples += 1
        self.steps += comparison.steps
        self.agreeing += comparison.agreeing

    def bounds(self) -> tuple[float, float, float]:
        """The mean of the latest, and its 95% bounds."""
        count, mean = len(self.latest), statistics.fmean(self.latest)
        if count < 2:
            return mean, 0.0, math.inf
        variance = math.fsum((each - mean) ** 2 for each in self.latest) / (count - 1)
        reach = _Z95 * math.sqrt(variance / count)
        return mean, max(0.0, mean - reach), mean + reach


@dataclass(eq=False, slots=True)
class _Total:
    kl: float = 0.0
    samples: int = 0
    steps: int = 0
    agreeing: int = 0
    at_most: list[int] = field(default_factory=lambda: [0] * len(DRIFT_BOUNDS))

    def add(self, comparison: Comparison) -> None:
        self.kl += comparison.kl
        self.samples += 1
        self.steps += comparison.steps
        self.agreeing += comparison.agreeing
        for number, bound in enumerate(DRIFT_BOUNDS):
            self.at_most[number] += comparison.kl <= bound


class DriftLog:
    """Counts comparisons, and says which policy requests get. Any thread may ask.

    threshold: nats a token, beyond which they get a safer one; None for none. profiles: whether modules have any.
    """

    def __init__(self, threshold: float | None, *, profiles: bool) -> None:
        self._threshold = threshold
        self._profiles = profiles
        self._records: OrderedDict[Subject, _Record] = OrderedDict()  # the one counted last at the end
        self._totals: dict[tuple[str, str], _Total] = {}
        self._lock = Lock()

    def add(self, subject: Subject, comparison: Comparison, tenant: str = "") -> None:
        """Count an answer. tenant: what the log calls the one whose it is."""
        with self._lock:
            record = self._records.setdefault(subject, _Record())
            self._records.move_to_end(subject)
            record.add(comparison)
            self._total(subject).add(comparison)
            self._trim()
            if record.samples % LOOK == 0:
                self._look(subject, record, tenant)

    def taken(self, policy: ReusePolicy, salt: str, schema: str, digest: str) -> ReusePolicy:
        """The policy that a request gets that asks for this one."""
        with self._lock:
            while True:
                record = self._records.get(Subject(salt, schema, digest, policy))
                if record is None or record.taken is None:
                    return policy
                policy = record.taken

    def lift(self, salt: str, schema: str | None = None) -> int:
        """Forget what is known of a salt's answers, of one schema or of all; returns how many policies were replaced.

        What was asked for is given again, and counted from the start.
        """
        with self._lock:
            gone = [each for each in self._records if each.salt == salt and schema in (None, each.schema)]
            return sum(self._records.pop(each).taken is not None for each in gone)

    def of(self, salt: str) -> tuple[DriftStats, ...]:
        """What is known of a salt's answers."""
        with self._lock:
            return tuple(_stats(subject, record) for subject, record in self._records.items() if subject.salt == salt)

    def totals(self) -> tuple[DriftTotals, ...]:
        """What is known of everybody's."""
        with self._lock:
            fallen = Counter(_name(subject) for subject, record in self._records.items() if record.taken is not None)
            return tuple(
                DriftTotals(
                    *name, each.samples, each.kl, tuple(each.at_most), each.steps, each.agreeing, fallen.get(name, 0)
                )
                for name, each in self._totals.items()
            )

    def _total(self, subject: Subject) -> _Total:
        name = _name(subject)
        if name not in self._totals and len(self._totals) >= _MOST_TOTALS:
            name = _OTHER, _OTHER
        return self._totals.setdefault(name, _Total())

    def _trim(self) -> None:
        """Forget what is too much: of the salt that has most, what was not counted for longest, a replaced policy last.

        So nobody's traffic brings back the policy that another one's answers have replaced.
        """
        if len(self._records) > MOST_KNOWN:
            salt, _ = Counter(subject.salt for subject in self._records).most_common(1)[0]
            own = [subject for subject in self._records if subject.salt == salt]
            del self._records[next((each for each in own if self._records[each].taken is None), own[0])]

    def _look(self, subject: Subject, record: _Record, tenant: str) -> None:
        mean, low, high = record.bounds()
        what = f"schema {subject.schema!r}" if subject.schema else "messages in parts"
        whose = f"{what} of {tenant}" if tenant else what
        found = f"{mean:.3g} nats a token from full prefill (95% bounds {low:.3g} to {high:.3g}, {len(record.latest)})"
        logger.info(
            "shadow: answers to %s under %s are %s; %.1f%% of likeliest tokens are the same",
            *(whose, subject.policy, found, 100 * record.agreeing / record.steps),
        )
        if self._threshold is None or record.taken is not None or low <= self._threshold:
            return
        record.taken = subject.policy.safer(profiles=self._profiles)
        logger.warning(
            "shadow: answers to %s under %s are %s, which is beyond %g: its requests get %s from now on, until the "
            "schema changes or this is lifted (DELETE /v1/drift, LLM.lift_fallback)",
            *(whose, subject.policy, found, self._threshold, record.taken),
        )


def _name(subject: Subject) -> tuple[str, str]:
    return subject.schema, str(subject.policy)


def _stats(subject: Subject, record: _Record) -> DriftStats:
    mean, low, high = record.bounds()
    return DriftStats(
        schema=subject.schema,
        reuse=str(subject.policy),
        positions=str(subject.policy.positions),
        samples=record.samples,
        kl=mean,
        low=low,
        high=high if math.isfinite(high) else None,
        top1=record.agreeing / record.steps,
        taken=None if record.taken is None else str(record.taken),
    )
