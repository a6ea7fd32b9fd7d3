"""The selective recomputation part of a reuse policy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from inlay.errors import ParameterError
from inlay.wording import show

_SHARE = r"(?:0(?:\.[0-9]{1,4})?|1(?:\.0{1,4})?)"
_AMOUNTS = {"linked": r"[0-9]{1,7}"} | dict.fromkeys(("profiled", "query", "profiled*query", "blend"), _SHARE)

#: A regular expression of the written form, and its description for error messages.
RECOMPUTE = f"(?:{'|'.join(f'{re.escape(kind)}:{amount}' for kind, amount in _AMOUNTS.items())})"
LIKE = "write it like anchored+linked:16 or anchored+profiled:0.15"


@dataclass(frozen=True, slots=True)
class Recompute:
    """The choice of module tokens to recompute against the text before them.

    Args:
        kind: "linked" for the first tokens of each module (EPIC, arXiv 2410.15332). "profiled" for those with the
            largest
            deviation behind other text. "query" for those that the new text attends to most (ProphetKV, arXiv
            2602.02579). "profiled*query" for those with the largest product of both. "blend" for those whose keys
            deviate most in this prompt at a layer a third of the way up (CacheBlend, arXiv 2405.16444).
        amount: for "linked", the number of tokens of each module. Otherwise the share of all tokens read from modules,
            0 to 1.
    """

    kind: str
    amount: float

    def __str__(self) -> str:
        return f"{self.kind}:{f'{self.amount:.4f}'.rstrip('0').rstrip('.')}"

    @property
    def profiled(self) -> bool:
        """True if deviation profiles take part in the choice."""
        return self.kind in ("profiled", "profiled*query")

    @property
    def by_attention(self) -> bool:
        """True if the attention of the new text takes part in the choice."""
        return self.kind in ("query", "profiled*query")

    @property
    def by_keys(self) -> bool:
        """True if the choice depends on the deviation of keys in this prompt, which a pass over all of them
        measures.
        """
        return self.kind == "blend"

    @property
    def selects(self) -> bool:
        """True if a pass before the prompt's own must choose tokens. Not needed for all or none."""
        return (self.by_attention or self.by_keys) and 0 < self.amount < 1

    def tokens(self, length: int) -> int:
        """Return how many of ``length`` tokens to recompute."""
        return min(int(self.amount), length) if self.kind == "linked" else round(self.amount * length)

    @classmethod
    def parse(cls, written: str, reuse: str) -> Recompute:
        """Parse the written form. ``reuse`` is the whole policy, for errors. Raises ParameterError."""
        kind, _, amount = written.partition(":")
        told = f"reuse is {show(reuse)}"
        if kind == "healing":
            raise ParameterError(f"{told}; healing is 'off', or not written: write it like modular+healing:off")
        if kind not in _AMOUNTS:
            raise ParameterError(
                f"{told}, and no repair is called {show(kind)}; use one of {', '.join(_AMOUNTS)}: {LIKE}"
            )
        if is_recompute(amount.partition("+")[2]):
            raise ParameterError(f"{told}, and a policy has one repair; write it like {_like(reuse, kind)}")
        if re.fullmatch(_AMOUNTS[kind], amount) is None:
            whole, share = (
                "a whole number of tokens, of at most 7 digits",
                "a share between 0 and 1 with at most 4 digits",
            )
            allowed = whole if kind == "linked" else f"{share} behind the point"
            raise ParameterError(f"{told}; {kind} takes {allowed}: write it like {_like(reuse, kind)}")
        return cls(kind, float(amount))


def is_recompute(written: str) -> bool:
    """True if the text is only a recomputation, without a base policy."""
    return re.fullmatch(RECOMPUTE, written) is not None


def _like(reuse: str, kind: str) -> str:
    """Return an example of that kind with the requested base policy, for errors."""
    return f"{reuse.partition('+')[0]}+{kind}:{16 if kind == 'linked' else 0.15}"
