"""Exercises on what needs sight across documents: the tasks of inlay.quality.across, and steps towards them.

A conversation of the tasks themselves has one question, as evaluation asks it: behind the first answer a second
question on the same pair would be answered by copying. The steps ask several that don't tell each other's answers.
"""

from __future__ import annotations

from collections.abc import Callable

from inlay.quality.across import (
    ask,
    conflict_on,
    listable,
    shareable,
    shared_of,
    sort_of,
    superlative_of,
    write_again,
    write_paired,
    write_sharing,
)
from inlay.quality.documents import Document, write_documents
from inlay.quality.questions import Asker, Question
from inlay.quality.words import Words

#: Documents, and what is asked on them.
Drawn = tuple[list[Document], list[Question]]


def one_question(words: Words, task: str, documents: int) -> Drawn:
    """One question of a task, and documents for it, with pairs among them where the task has them."""
    while True:  # some documents allow no such question
        if task in ("conflict", "shared"):
            written, _ = write_paired(words, documents, task)
        else:
            written = write_documents(words, documents)
        question = ask(Asker(words, written), task)
        if question is not None:
            return written, [question]


def contradictions(words: Words, documents: int, questions: int) -> Drawn:
    """All documents are two on one thing, which contradict each other in one case of two; asked thing by thing."""

    def second(first: Document, taken: set[str]) -> Document:
        return write_again(words, first, contradicting=words.rng.random() < 0.5)

    written = _in_pairs(words, documents, second)
    names = list(dict.fromkeys(document.name for document in written))
    asker = Asker(words, written)
    return written, [conflict_on(asker, name) for name in words.rng.sample(names, k=min(questions, len(names)))]


def sharings(words: Words, documents: int, questions: int) -> Drawn:
    """All documents are two that share a value; asked value by value."""
    while True:
        written = _in_pairs(words, documents, lambda first, taken: write_sharing(words, first, taken))
        options = shareable(written)
        if options:
            asker = Asker(words, written)
            chosen = words.rng.sample(options, k=min(questions, len(options)))
            return written, [shared_of(asker, *option) for option in chosen]


def rankings(words: Words, documents: int, questions: int) -> Drawn:
    """``superlative`` or ``sort``, of as many attributes as allow it, each asked once."""
    while True:
        written = write_documents(words, documents)
        options = listable(written)
        if options:
            asker = Asker(words, written)
            chosen = words.rng.sample(options, k=min(questions, len(options)))
            return written, [words.rng.choice((superlative_of, sort_of))(asker, *option) for option in chosen]


def _in_pairs(words: Words, count: int, second: Callable[[Document, set[str]], Document]) -> list[Document]:
    """Documents in any order, every two of them a pair; the last one of an odd number stands alone."""
    written = write_documents(words, count)
    for index in range(0, count - 1, 2):
        written[index + 1] = second(written[index], {document.name for document in written})
    return words.rng.sample(written, k=count)
