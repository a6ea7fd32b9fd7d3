"""From a log to a schema with its savings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inlay.errors import ParameterError
from inlay.extract.choose import Encode, choose
from inlay.extract.corpus import Corpus
from inlay.extract.find import find
from inlay.extract.proposal import Proposal, propose
from inlay.extract.saving import Saving, measure

MOST_MODULES = 5_000

Stage = Callable[[str], Callable[[int, int], None]]
"""Begins a stage of the work, by name; gives a function of (done, total)."""


@dataclass(frozen=True)
class Settings:
    """What counts as repeated.

    min_prompts: how many different prompts must hold a text. min_tokens: how long it must be.
    max_modules: how many a schema may have; those that save most are kept.
    Raises ParameterError for values out of range.
    """

    min_prompts: int = 3
    min_tokens: int = 32
    max_modules: int = 100

    def __post_init__(self) -> None:
        for name, least, most in (("min_prompts", 2, None), ("min_tokens", 2, None), ("max_modules", 1, MOST_MODULES)):
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                allowed = f"at least {least}" if most is None else f"from {least} to {most:,}"
                raise ParameterError(f"{name} is {value}; it must be {allowed}")

    @property
    def size(self) -> int:
        """The words of the shortest run that is found for certain: two tokens a word, which few texts exceed."""
        return max(self.min_tokens // 2, 1)


@dataclass(frozen=True)
class Extraction:
    """A schema for a log, and what it saves on it."""

    proposal: Proposal
    saving: Saving


def extract(corpus: Corpus, encode: Encode, *, name: str, settings: Settings, stage: Stage | None = None) -> Extraction:
    """Find what repeats in a log, make a schema of it, and count what that saves.

    encode: the tokenizer that counts, for many texts at a time. name: of the schema.
    """
    begin = stage or (lambda name: lambda done, total: None)
    found = find(corpus, size=settings.size, least=settings.min_prompts, progress=begin("finding repeats"))
    choice = choose(corpus, found, encode, min_tokens=settings.min_tokens, max_modules=settings.max_modules)
    proposal = propose(corpus, found.frame, choice, name)
    return Extraction(proposal, measure(proposal, encode, begin("counting tokens")))
