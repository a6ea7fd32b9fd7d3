"""The divergence of answers from full prefill, by salt, schema and policy, and the fallback to a safer policy.

Divergence is KL(full prefill ‖ given answer) in nats per token, averaged over the answer's tokens. It is checked at
every 32nd answer of one salt, schema and policy. If the lower 95% bound of the mean over the latest 256 answers exceeds
the threshold, later requests get the next safer policy. So single outliers decide nothing, and few checks limit false
alarms.
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
from inlay.types import DIVERGENCE_BOUNDS, DivergenceStats, DivergenceTotals

logger = logging.getLogger(__name__)

#: Answers between two checks, and the most answers in a mean.
LOOK, _LATEST = 32, 256
#: Standard errors between a mean and its 95% bounds.
_Z95 = 1.96
#: Limits of subjects, and of schemas under a policy with totals of their own.
MOST_KNOWN, _MOST_TOTALS = 1024, 256
_OTHER = "(other)"


def divergences(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference ‖ other) of each token in nats, (tokens,), fp64.

    Args:
        reference, other: natural log-probabilities, (tokens, vocabulary).
    """
    expected, found = reference.double(), other.double()
    weights = expected.exp()
    terms = torch.where(weights == 0, 0.0, weights * (expected - found))  # NaN stays NaN
    # Rounding may make the divergence of almost equal distributions negative.
    return terms.sum(dim=-1).clamp(min=0.0)


@dataclass(frozen=True, slots=True)
class Subject:
    """Answers that are counted together.

    Attributes:
        salt: the cache salt.
        schema, digest: see EngineRequest.
        policy: the policy in effect.
    """

    salt: str
    schema: str
    digest: str
    policy: ReusePolicy


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """One answer compared with full prefill. ``kl`` is in nats per token; ``agreeing`` counts steps with equal top
    tokens.
    """

    kl: float
    steps: int
    agreeing: int


@dataclass(eq=False, slots=True)
class _Record:
    """The counts of a subject. ``latest`` has the divergence of its last answers; ``taken``: see DivergenceStats."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    samples: int = 0
    steps: int = 0
    agreeing: int = 0
    taken: ReusePolicy | None = None

    def add(self, comparison: AnswerComparison) -> None:
        self.latest.append(comparison.kl)
        self.samples += 1
        self.steps += comparison.steps
        self.agreeing += comparison.agreeing

    def bounds(self) -> tuple[float, float, float]:
        """The mean of the latest divergences, and its 95% bounds."""
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
    at_most: list[int] = field(default_factory=lambda: [0] * len(DIVERGENCE_BOUNDS))

    def add(self, comparison: AnswerComparison) -> None:
        self.kl += comparison.kl
        self.samples += 1
        self.steps += comparison.steps
        self.agreeing += comparison.agreeing
        for number, bound in enumerate(DIVERGENCE_BOUNDS):
            self.at_most[number] += comparison.kl <= bound


class DivergenceLog:
    """Counts comparisons and decides the policy of requests. Thread-safe.

    Args:
        threshold: nats per token above which requests get a safer policy; None for none.
        profiles: True if modules have deviation profiles.
    """

    def __init__(self, threshold: float | None, *, profiles: bool) -> None:
        self._threshold = threshold
        self._profiles = profiles
        self._records: OrderedDict[Subject, _Record] = OrderedDict()  # the last counted at the end
        self._totals: dict[tuple[str, str], _Total] = {}
        self._lock = Lock()

    def add(self, subject: Subject, comparison: AnswerComparison, tenant: str = "") -> None:
        """Count an answer. ``tenant`` is its name in the log."""
        with self._lock:
            record = self._records.setdefault(subject, _Record())
            self._records.move_to_end(subject)
            record.add(comparison)
            self._total(subject).add(comparison)
            self._trim()
            if record.samples % LOOK == 0:
                self._look(subject, record, tenant)

    def taken(self, policy: ReusePolicy, salt: str, schema: str, digest: str) -> ReusePolicy:
        """The policy in effect for a request with this policy."""
        with self._lock:
            while True:
                record = self._records.get(Subject(salt, schema, digest, policy))
                if record is None or record.taken is None:
                    return policy
                policy = record.taken

    def lift(self, salt: str, schema: str | None = None) -> int:
        """Forget the records of a salt, of one schema or of all. Returns how many policies were replaced until now.

        Requests get their own policy again, and counting starts over.
        """
        with self._lock:
            gone = [each for each in self._records if each.salt == salt and schema in (None, each.schema)]
            return sum(self._records.pop(each).taken is not None for each in gone)

    def of(self, salt: str) -> tuple[DivergenceStats, ...]:
        """The statistics of a salt's answers."""
        with self._lock:
            return tuple(_stats(subject, record) for subject, record in self._records.items() if subject.salt == salt)

    def totals(self) -> tuple[DivergenceTotals, ...]:
        """The totals over all salts."""
        with self._lock:
            fallen = Counter(_name(subject) for subject, record in self._records.items() if record.taken is not None)
            return tuple(
                DivergenceTotals(
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
        """Drop a record above the limit: of the largest salt, the least recently counted one. Replaced policies go
        last.

        So the traffic of one tenant never restores a policy that another tenant's answers have replaced.
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
            "schema changes or this is lifted (DELETE /v1/divergence, LLM.lift_fallback)",
            *(whose, subject.policy, found, self._threshold, record.taken),
        )


def _name(subject: Subject) -> tuple[str, str]:
    return subject.schema, str(subject.policy)


def _stats(subject: Subject, record: _Record) -> DivergenceStats:
    mean, low, high = record.bounds()
    return DivergenceStats(
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
