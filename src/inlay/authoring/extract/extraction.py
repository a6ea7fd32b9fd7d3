"""Extracts a schema with its savings from a log, and describes the result as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from inlay.authoring.extract.choose import Encode, choose
from inlay.authoring.extract.corpus import Corpus
from inlay.authoring.extract.find import find
from inlay.authoring.extract.proposal import Proposal, propose
from inlay.authoring.extract.saving import Saving, measure
from inlay.errors import ParameterError

MOST_MODULES = 5_000

_FIRST_WORDS = 80  # characters of a module that are shown

Row = dict[str, Any]

Stage = Callable[[str], Callable[[int, int], None]]
"""Begins a stage of the work, by name, and returns a function of (done, total)."""


@dataclass(frozen=True)
class ExtractionSettings:
    """The thresholds for repeated text. Raises ParameterError for values out of range.

    Attributes:
        min_prompts: Number of different prompts that must hold a text, at least 2.
        min_tokens: Tokens of the shortest text, at least 2.
        max_modules: The most modules of a schema, 1 to 5,000. Modules that save most are kept.
    """

    min_prompts: int = 3
    min_tokens: int = 32
    max_modules: int = 100

    def __post_init__(self) -> None:
        for name, least, most in (("min_prompts", 2, None), ("min_tokens", 2, None), ("max_modules", 1, MOST_MODULES)):
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                allowed = f"at least {least}" if most is None else f"from {least} to {most:,}"
                raise ParameterError(f"{name} is {value}; it must be {allowed}", code="parameter.out_of_range")

    @property
    def size(self) -> int:
        """Words of the shortest run that is surely found. It assumes two tokens a word, which few texts exceed."""
        return max(self.min_tokens // 2, 1)


@dataclass(frozen=True)
class Extraction:
    """A schema for a log, and its savings on the log."""

    proposal: Proposal
    saving: Saving


def extract(
    corpus: Corpus, encode: Encode, *, name: str, settings: ExtractionSettings, stage: Stage | None = None
) -> Extraction:
    """Find repeated text in a log, make a schema of it, and count its savings.

    Args:
        encode: The tokenizer that counts tokens, for many texts at a time.
        name: The name of the schema.
        settings: The thresholds.
        stage: Begins a stage of the work, for progress.
    """
    begin = stage or (lambda name: lambda done, total: None)
    found = find(corpus, size=settings.size, least=settings.min_prompts, progress=begin("finding repeats"))
    choice = choose(corpus, found, encode, min_tokens=settings.min_tokens, max_modules=settings.max_modules)
    proposal = propose(corpus, found.frame, choice, name)
    return Extraction(proposal, measure(proposal, encode, begin("counting tokens")))


def describe(result: Extraction) -> Row:
    """Return the report as plain data. Shares are fractions of 1. ``Saving`` defines the counts of tokens."""
    proposal, saving = result.proposal, result.saving
    names, pieces = proposal.names, proposal.choice.pieces
    return {
        "schema": proposal.schema.name,
        "prompts": len(proposal.corpus),
        "prompts_that_fit": saving.fitting,
        "prompts_with_modules": saving.helped,
        "prompts_out_of_order": proposal.moved,
        "tokens": saving.tokens,
        "saved_by_schema": saving.by_schema,
        "saved_by_schema_share": _share(saving.by_schema, saving.tokens),
        "saved_by_prefix_cache": saving.by_prefix,
        "saved_by_prefix_cache_share": _share(saving.by_prefix, saving.tokens),
        "always_present": {
            "tokens": saving.always_tokens,
            "saved_tokens": saving.always,
            "share_of_saving": _share(saving.always, saving.by_schema),
        },
        "modules": [
            {
                "name": name,
                "tokens": piece.tokens,
                "prompts": piece.prompts,
                "saved_tokens": saving.by_module[name],
                "share_of_saving": _share(saving.by_module[name], saving.by_schema),
                "text": _first_words(piece.text),
            }
            for name, piece in zip(names, pieces, strict=True)
        ],
        "unions": [[names[piece] for piece in group] for group in proposal.arrangement.groups if len(group) > 1],
        "notes": _notes(result),
    }


def _first_words(text: str) -> str:
    """Return the start of a text on one line, without characters that a terminal might interpret."""
    line = " ".join(text[: 4 * _FIRST_WORDS].split())[:_FIRST_WORDS]
    return "".join(character if character.isprintable() else "·" for character in line)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _notes(result: Extraction) -> list[str]:
    """Return remarks on the result, one sentence each."""
    proposal, saving = result.proposal, result.saving
    notes = []
    if not proposal.schema.children:
        notes.append("no text repeats often and long enough for a module; lower --min-tokens or --min-prompts")
    notes += _order(result)
    if left_out := proposal.choice.left_out:
        worth = sum(piece.worth for piece in left_out)
        notes.append(
            f"{_many(len(left_out), 'more text')} would make modules, and save up to {worth:,} more tokens; "
            "they are left out, since a schema is limited by --max-modules and by the size of its file"
        )
    if saving.fitting < len(proposal.corpus):
        notes.append(
            f"{_many(len(proposal.corpus) - saving.fitting, 'prompt')} cannot use the schema, without the text that is "
            "always present; give them a schema of their own"
        )
    if saving.by_prefix > saving.by_schema:
        notes.append(
            "a prefix cache alone saves more on this log; modules pay where the same texts stand in new combinations"
        )
    if proposal.frame is None and any(role is not None for role in proposal.corpus.roles):
        notes.append("the schema holds modules alone, so prompts write their own chat turns around the imports")
    if unusable := _unusable(proposal.corpus):
        holds = "prompt holds" if unusable == 1 else "prompts hold"
        notes.append(f"{unusable:,} {holds} control characters that XML cannot carry; text with them stays new text")
    return notes


def _order(result: Extraction) -> list[str]:
    proposal = result.proposal
    if not proposal.arrangement.swapped:
        return []
    one, other, first, later = proposal.arrangement.examples[0]
    pairs = _many(proposal.arrangement.swapped, "pair")
    return [
        f"{pairs} of modules in both orders, such as {proposal.names[one]} and {proposal.names[other]} "
        f"({first:,} and {later:,} times); {_many(proposal.moved, 'prompt')} in another order than the schema's, which "
        "needs positions 'packed'"
    ]


def _unusable(corpus: Corpus) -> int:
    """Return the number of prompts with characters that no schema can hold."""
    usable = np.concatenate((corpus.usable, [True]))  # the last element is for END
    return len(np.unique(corpus.prompts_of(np.flatnonzero(~usable[corpus.words]))))


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
