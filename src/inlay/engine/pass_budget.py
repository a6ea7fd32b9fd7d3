"""The number of prompt tokens in a forward pass, chosen so that no pass takes too long.

Deadlines, cancellations and shutdown take effect after the current pass. The duration of a pass depends on model,
machine and context, so every pass with prompt tokens is measured.

If u tokens took t seconds and T are allowed, u · T / t estimates the right number. A part of t is fixed: reading the
weights, and the answers in the same pass. If t exceeds T, the estimate therefore lies between the right number and u;
if
t is below T, it lies between u and the right number. So it improves with every pass. It also follows growing contexts
and joining answers, without a model of either.
"""

from __future__ import annotations

#: Minimum of prompt tokens per pass, so that every prompt advances.
FLOOR = 32
#: Estimates are limited to this multiple of the measured tokens, because attention costs more per token in longer
#: passes.
_FURTHEST = 4


class PassBudget:
    """The prompt tokens of the next pass. ``max_s`` is the target duration in seconds; None for no limit."""

    def __init__(self, max_s: float | None) -> None:
        self._max_s = max_s
        self._tokens = FLOOR  # current estimate for a pass of max_s seconds

    def tokens(self, most: int) -> int:
        """How many prompt tokens the next pass may have, and at most ``most``."""
        return most if self._max_s is None else min(most, self._tokens)

    def took(self, tokens: int, seconds: float) -> None:
        """Record the duration of a pass. ``tokens`` are its prompt tokens; passes without any are ignored."""
        if self._max_s is None or not tokens:
            return
        right = int(min(tokens * self._max_s / max(seconds, 1e-9), _FURTHEST * tokens))
        if seconds > self._max_s:
            self._tokens = max(FLOOR, min(self._tokens, right))
        else:  # a short prompt is no reason to lower the estimate
            self._tokens = max(self._tokens, right)
