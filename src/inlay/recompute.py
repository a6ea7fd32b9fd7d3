"""The selective recomputation part of a reuse policy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from inlay.errors import PolicyError

_SHARE = r"(?:0(?:\.[0-9]{1,4})?|1(?:\.0{1,4})?)"
_AMOUNTS = {"linked": r"[0-9]{1,7}"} | dict.fromkeys(("profiled", "query", "profiled*query", "blend"), _SHARE)

KINDS = tuple(_AMOUNTS)

#: A regular expression of the written form.
RECOMPUTE = f"(?:{'|'.join(f'{re.escape(kind)}:{amount}' for kind, amount in _AMOUNTS.items())})"


@dataclass(frozen=True, slots=True)
class Recompute:
    """The choice of module tokens to recompute against the text before them.

    Args:
        kind: "linked" for the first tokens of each module (EPIC, arXiv 2410.15332). "profiled" for those with the
            largest deviation behind other text. "query" for those that the new text attends to most (ProphetKV, arXiv
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
        """True if the choice depends on the deviation of keys in this prompt."""
        return self.kind == "blend"

    @property
    def selects(self) -> bool:
        """True if a pass before the prompt's own must choose tokens. Not needed for all or none."""
        return (self.by_attention or self.by_keys) and 0 < self.amount < 1

    def tokens(self, length: int) -> int:
        """Return how many of ``length`` tokens to recompute."""
        return min(int(self.amount), length) if self.kind == "linked" else round(self.amount * length)

    @classmethod
    def parse(cls, written: object, typed: str) -> Recompute:
        """Parse the written form. ``typed`` is the field as the user typed it, for errors. Raises PolicyError."""
        kind, _, amount = written.partition(":") if isinstance(written, str) else ("", "", "")
        if kind not in _AMOUNTS:
            wrong = f"{typed} names no selective recomputation. Use one of {', '.join(_AMOUNTS)}"
        elif re.fullmatch(_AMOUNTS[kind], amount) is not None:
            return cls(kind, float(amount))
        elif kind == "linked":
            wrong = f"{typed} has no valid amount. linked takes a whole number of tokens with at most 7 digits"
        else:
            wrong = f"{typed} has no valid amount. {kind} takes a share between 0 and 1 with at most 4 decimals"
        example = f"{kind if kind in _AMOUNTS else 'profiled'}:{16 if kind == 'linked' else 0.15}"
        raise PolicyError(f"{wrong}, like {example}.", field="recompute", code="policy.bad_recompute")
