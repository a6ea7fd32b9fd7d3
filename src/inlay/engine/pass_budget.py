"""How many prompt tokens go into one forward pass, so that none takes long.

Whoever is past a deadline, gives a request up or shuts the engine down waits for the pass that is under way. How long
one takes depends on model, machine and context, so every pass that has prompt tokens is measured.

A pass of u tokens that took t seconds, where T are allowed, says that u · T / t tokens are about right. A part of t is
the same for any number of tokens: reading the weights, and the answers in the same pass. So where t is more than T this
number lies between u and the right one, from above, and where t is less, from below. Taken as it is, it comes closer
with every pass, and follows contexts that grow and answers that join without a model of either.
"""

from __future__ import annotations

#: Prompt tokens that any pass may have: also where that takes too long, a prompt gets on.
FLOOR = 32
#: A pass says nothing about one of more than so many times its tokens, whose attention costs more a token.
_FURTHEST = 4


class PassBudget:
    """The prompt tokens of the next pass.

    max_s: the most seconds that a pass should take; None for any time.
    """

    def __init__(self, max_s: float | None) -> None:
        self._max_s = max_s
        self._tokens = FLOOR  # of a pass that takes max_s, as far as has been seen

    def tokens(self, most: int) -> int:
        """How many prompt tokens the next pass may have. most: what else bounds them."""
        return most if self._max_s is None else min(most, self._tokens)

    def took(self, tokens: int, seconds: float) -> None:
        """Take in how long a pass took. tokens: its prompt tokens; a pass without them says nothing about them."""
        if self._max_s is None or not tokens:
            return
        right = int(min(tokens * self._max_s / max(seconds, 1e-9), _FURTHEST * tokens))
        if seconds > self._max_s:
            self._tokens = max(FLOOR, min(self._tokens, right))
        else:  # a short prompt does not say that a long pass would take too long
            self._tokens = max(self._tokens, right)
