"""The tolerated and the measured divergence of answers under reuse from full prefill.

``auto`` is the cheapest policy whose measured divergence is within a tolerance (policy.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from inlay.errors import PolicyError
from inlay.wording import show

#: The default tolerance of ``auto``, in nats a token. Answers at this divergence equal those of full prefill
#: (docs/guides/check-prompts.md).
DEFAULT_KL = 0.05

_RATE = "answers:"
_NUMBER = r"[0-9]{1,6}(?:\.[0-9]{1,6})?"

#: A regular expression of a tolerance behind ``auto:``.
WRITTEN = f"(?:{_RATE})?{_NUMBER}"

_LIKE = "Write nats a token like 0.05, or the least share of equal answers like answers:0.98."


@dataclass(frozen=True, slots=True)
class Measured:
    """The divergence of a policy from full prefill on a model, as measured by ``inlay check``, or by a server in
    idle time.

    Args:
        policy: its written form.
        positions: a word of policy.POSITIONS.
        prompts: the number of prompts compared.
        kl: the mean KL divergence from full prefill in nats a token, over all prompts.
        kl_high: the upper 95% bound of that mean, for the kind of prompts with the largest one.
        top1: the share of tokens that are the most probable one in both.
        same: the share of prompts with equal greedy answers. None for random weights.
        same_low: the lower 95% bound of that share, for the kind of prompts with the smallest one. None likewise.
        recomputed: the share of module tokens that were computed for the request, including token selection passes.
        ttft_ms: the median time to the first token behind encoded modules, in milliseconds. None if not measured.
    """

    policy: str
    positions: str
    prompts: int
    kl: float
    kl_high: float
    top1: float
    same: float | None
    same_low: float | None
    recomputed: float
    ttft_ms: float | None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The tolerated divergence from full prefill. ``str`` gives its written form, which ``parse`` reads.

    With neither field set, the engine's own tolerance applies.

    Args:
        kl: the largest mean KL divergence in nats a token.
        answers: the smallest share of prompts with equal greedy answers, in place of ``kl``.
    """

    kl: float | None = None
    answers: float | None = None

    @classmethod
    def parse(cls, written: object, typed: str | None = None) -> Tolerance:
        """Parse a tolerance, or take a number of nats. Raises PolicyError.

        Args:
            typed: the field as the user typed it, for errors. None for ``tolerance=…``.
        """
        number = _number(written)
        rate = isinstance(written, str) and written.startswith(_RATE)
        if number is None or (rate and not 0 < number <= 1):
            wrong = typed or f"tolerance={show(written)}"
            message = f"{wrong} is not a tolerance. {_LIKE}"
            raise PolicyError(message, field="tolerance", code="policy.bad_tolerance")
        return cls(answers=number) if rate else cls(kl=number)

    def __str__(self) -> str:
        if self.answers is not None:
            return f"{_RATE}{_written(self.answers)}"
        return "" if self.kl is None else _written(self.kl)

    @property
    def given(self) -> bool:
        """True if a tolerance is set."""
        return self.kl is not None or self.answers is not None

    @property
    def in_words(self) -> str:
        """The tolerance in words, for a sentence."""
        if self.answers is not None:
            return f"the same answer to {self.answers:.4g} of all prompts"
        return f"{self.kl:.4g} nats a token"

    def allows(self, row: Measured) -> bool:
        """True if a policy is within the tolerance by its 95% bound, not by its mean."""
        if self.answers is not None:
            return row.same_low is not None and row.same_low >= self.answers
        return self.kl is not None and row.kl_high <= self.kl

    def covers(self, other: Tolerance) -> bool:
        """True if both tolerances are of one kind and the other one allows no more."""
        if self.answers is not None:
            return other.answers is not None and other.answers >= self.answers
        return self.kl is not None and other.kl is not None and other.kl <= self.kl


DEFAULT = Tolerance(kl=DEFAULT_KL)


def _number(written: object) -> float | None:
    """Return the number of a tolerance, or None for an invalid one."""
    if isinstance(written, str):
        return float(written.removeprefix(_RATE)) if re.fullmatch(WRITTEN, written) else None
    if isinstance(written, bool) or not isinstance(written, int | float):
        return None
    return float(written) if math.isfinite(written) and 0 <= written < 1e6 else None


def _written(number: float) -> str:
    return f"{number:.6f}".rstrip("0").rstrip(".")
