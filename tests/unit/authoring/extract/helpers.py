"""Shared by the tests of extraction: short logs, and the text of a resolved prompt."""

from __future__ import annotations

from collections.abc import Sequence

from inlay.authoring.extract import Corpus, LoggedPrompt, LoggedTurn
from inlay.authoring.extract.proposal import Proposal
from inlay.pml import NewText, Schema, SchemaText, TurnStart, resolve

Said = list[tuple[str | None, str]]


def plain(*texts: str) -> list[LoggedPrompt]:
    """Prompts without turns."""
    return [LoggedPrompt(line, (LoggedTurn(None, text),)) for line, text in enumerate(texts, start=1)]


def chat(*prompts: Sequence[tuple[str, str]]) -> list[LoggedPrompt]:
    """Prompts of turns: (role, text)."""
    return [
        LoggedPrompt(line, tuple(LoggedTurn(role, text) for role, text in turns))
        for line, turns in enumerate(prompts, start=1)
    ]


def corpus_of(prompts: list[LoggedPrompt]) -> Corpus:
    return Corpus.of(prompts, "log.jsonl")


def encode(texts: Sequence[str]) -> list[Sequence[int]]:
    """A tokenizer of one token a byte."""
    return [tuple(text.encode()) for text in texts]


def turns_of(schema: Schema, proposal: Proposal, prompt: int) -> Said:
    """The role and text of each turn of a logged prompt, written as a prompt of the schema."""
    written = proposal.prompt(prompt)
    assert written is not None
    turns: Said = []
    for item in resolve(schema, written, moves=True).items:
        if isinstance(item, TurnStart):
            turns.append((item.role, ""))
        elif isinstance(item, SchemaText | NewText):
            role, text = turns.pop() if turns else (None, "")
            turns.append((role, text + (item.text if isinstance(item, NewText) else item.node.text)))
    return turns or [(None, "")]
