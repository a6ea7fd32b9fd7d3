"""How far answers under reuse may be from full prefill's, and how far they were measured to be.

``auto`` is made of both: it is the cheapest policy whose measured drift is within a tolerance (policy.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from inlay.errors import ParameterError
from inlay.wording import show

#: Of ``auto`` where nobody says, in nats a token: the divergence of a repair that answers as full prefill does
#: (docs/check.md).
DEFAULT_KL = 0.05

_RATE = "answers:"
_NUMBER = r"[0-9]{1,6}(?:\.[0-9]{1,6})?"

#: What a tolerance is written like behind ``auto:``, as a regular expression.
WRITTEN = f"(?:{_RATE})?{_NUMBER}"

_LIKE = "write it like 0.05, in nats a token, or like answers:0.98, the least share of same answers"


@dataclass(frozen=True, slots=True)
class Measured:
    """How far a policy is from full prefill on a model, as ``inlay check`` has found.

    policy: its written form. positions: a word of policy.POSITIONS. prompts: how many were compared.
    kl, kl_high: the mean divergence from full prefill's distributions in nats a token, over all prompts; and the upper
        95% bound of the mean over those of the kind where that is largest.
    top1: the share of tokens that are the most probable one in both.
    same, same_low: the share of prompts whose greedy answers are the same, over all of them; and the lower 95% bound of
        that of the kind where it is smallest. None where answers mean nothing, as random weights give them.
    recomputed: of the tokens of modules, how many were computed for the request all the same, as a share of all; passes
        that only choose some of them count as well.
    ttft_ms: the median time to the first token, behind modules that are encoded, in milliseconds.
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
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far answers may be from full prefill's. ``str`` gives its written form, which ``parse`` reads.

    kl: the most divergence of distributions, the mean in nats a token. answers: the least share of prompts whose greedy
    answers are the same, in place of that. Neither: the engine's own tolerance.
    """

    kl: float | None = None
    answers: float | None = None

    @classmethod
    def parse(cls, written: object, where: str = "tolerance") -> Tolerance:
        """The tolerance that is written so, or a number of nats. where: what says it. Raises ParameterError."""
        number = _number(written)
        if isinstance(written, str) and written.startswith(_RATE) and number is not None:
            if 0 < number <= 1:
                return cls(answers=number)
            raise ParameterError(f"{where} is {show(written)}; the share is above 0 and at most 1: {_LIKE}")
        if number is None or (isinstance(written, str) and written.startswith(_RATE)):
            raise ParameterError(f"{where} is {show(written)}; {_LIKE}")
        return cls(kl=number)

    def __str__(self) -> str:
        if self.answers is not None:
            return f"{_RATE}{_written(self.answers)}"
        return "" if self.kl is None else _written(self.kl)

    @property
    def given(self) -> bool:
        """Whether it says anything."""
        return self.kl is not None or self.answers is not None

    @property
    def in_words(self) -> str:
        """As a sentence has it."""
        if self.answers is not None:
            return f"the same answer to {self.answers:.4g} of all prompts"
        return f"{self.kl:.4g} nats a token"

    def allows(self, row: Measured) -> bool:
        """Whether a policy is within it, as sure as the measurement is: by the bound, not by the mean."""
        if self.answers is not None:
            return row.same_low is not None and row.same_low >= self.answers
        return self.kl is not None and row.kl_high <= self.kl

    def covers(self, other: Tolerance) -> bool:
        """Whether another one allows no more than this one: both are of one kind."""
        if self.answers is not None:
            return other.answers is not None and other.answers >= self.answers
        return self.kl is not None and other.kl is not None and other.kl <= self.kl


DEFAULT = Tolerance(kl=DEFAULT_KL)


def _number(written: object) -> float | None:
    """The number of a tolerance, or None where there is none."""
    if isinstance(written, str):
        return float(written.removeprefix(_RATE)) if re.fullmatch(WRITTEN, written) else None
    if isinstance(written, bool) or not isinstance(written, int | float):
        return None
    return float(written) if math.isfinite(written) and 0 <= written < 1e6 else None


def _written(number: float) -> str:
    return f"{number:.6f}".rstrip("0").rstrip(".")
