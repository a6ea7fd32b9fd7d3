"""Which tokens of modules are computed anew, as a part of a reuse policy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from inlay.errors import ParameterError
from inlay.wording import show

_SHARE = r"(?:0(?:\.[0-9]{1,4})?|1(?:\.0{1,4})?)"
_AMOUNTS = {"linked": r"[0-9]{1,7}"} | dict.fromkeys(("profiled", "query", "profiled*query", "blend"), _SHARE)

#: What a repair is written like, as a regular expression; and what a sentence says of that.
REPAIR = f"(?:{'|'.join(f'{re.escape(kind)}:{amount}' for kind, amount in _AMOUNTS.items())})"
LIKE = "write it like anchored+linked:16 or anchored+profiled:0.15"


@dataclass(frozen=True, slots=True)
class Repair:
    """Which tokens of modules are computed anew, against what really stands before them in a prompt.

    kind: "linked" for the first ones of each (EPIC, arXiv 2410.15332); "profiled" for those that move most when other
        text stands before them; "query" for those that the new text attends to most (ProphetKV, arXiv 2602.02579), and
        "profiled*query" for those where the product of both is largest; "blend" for those whose keys move most in this
        very prompt at a layer a third of the way up (CacheBlend, arXiv 2405.16444).
    amount: of "linked", how many tokens of each module; of the others, which share of all tokens that are read from
        modules, 0 to 1.
    """

    kind: str
    amount: float

    def __str__(self) -> str:
        return f"{self.kind}:{f'{self.amount:.4f}'.rstrip('0').rstrip('.')}"

    @property
    def profiled(self) -> bool:
        """Whether profiles of modules say something of which tokens are chosen."""
        return self.kind in ("profiled", "profiled*query")

    @property
    def by_attention(self) -> bool:
        """Whether tokens are chosen by how much the new text attends to them."""
        return self.kind in ("query", "profiled*query")

    @property
    def by_keys(self) -> bool:
        """Whether tokens are chosen by how their keys change where they stand, which a pass of all of them finds."""
        return self.kind == "blend"

    @property
    def selects(self) -> bool:
        """Whether a pass before the prompt's own has to find out which tokens are chosen: not for all, nor for none."""
        return (self.by_attention or self.by_keys) and 0 < self.amount < 1

    def tokens(self, length: int) -> int:
        """How many of that many tokens are computed anew, where they are chosen among these alone."""
        return min(int(self.amount), length) if self.kind == "linked" else round(self.amount * length)

    @classmethod
    def parse(cls, written: str, reuse: str) -> Repair:
        """The repair that is written so. reuse: the policy that it is a part of. Raises ParameterError."""
        kind, _, amount = written.partition(":")
        told = f"reuse is {show(reuse)}"
        if kind == "healing":
            raise ParameterError(f"{told}; healing is 'off', or not written: write it like modular+healing:off")
        if kind not in _AMOUNTS:
            raise ParameterError(
                f"{told}, and no repair is called {show(kind)}; use one of {', '.join(_AMOUNTS)}: {LIKE}"
            )
        if is_repair(amount.partition("+")[2]):
            raise ParameterError(f"{told}, and a policy has one repair; write it like {_like(reuse, kind)}")
        if re.fullmatch(_AMOUNTS[kind], amount) is None:
            whole, share = (
                "a whole number of tokens, of at most 7 digits",
                "a share between 0 and 1 with at most 4 digits",
            )
            allowed = whole if kind == "linked" else f"{share} behind the point"
            raise ParameterError(f"{told}; {kind} takes {allowed}: write it like {_like(reuse, kind)}")
        return cls(kind, float(amount))


def is_repair(written: str) -> bool:
    """Whether a policy that is written so is a repair alone, with nothing that it repairs."""
    return re.fullmatch(REPAIR, written) is not None


def _like(reuse: str, kind: str) -> str:
    """A repair of that kind with an amount, behind the policy that was asked for."""
    return f"{reuse.partition('+')[0]}+{kind}:{16 if kind == 'linked' else 0.15}"
