"""Exercises across documents: the tasks of inlay_lab.eval.across, and steps towards them.

A conversation of a task has one question, as in evaluation. A second question on the same pair could be answered by
copying from the first answer. The steps ask several questions with independent answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from inlay_lab.eval.across import (
    MOST_RANKED,
    ask,
    conflict,
    rankable,
    shareable,
    shared_of,
    sort_of,
    superlative_of,
    write_again,
    write_paired,
    write_sharing,
)
from inlay_lab.eval.documents import Attribute, Document, kinds, write_documents
from inlay_lab.eval.questions import Asker, Question
from inlay_lab.eval.words import Words

#: Documents and the questions on them.
Drawn = tuple[list[Document], list[Question]]


def one_question(words: Words, task: str, documents: int) -> Drawn:
    """One question of a task, and documents for it, with planted pairs if the task needs them."""
    while True:  # some documents allow no such question
        if task in ("conflict", "shared"):
            written, _ = write_paired(words, documents, task)
        else:
            written = write_documents(words, documents)
        question = ask(Asker(words, written), task)
        if question is not None:
            return written, [question]


def contradictions(words: Words, documents: int, questions: int) -> Drawn:
    """Pairs of documents on one thing; half of the pairs contradict themselves. One question for each thing."""

    def second(first: Document, taken: set[str]) -> Document:
        return write_again(words, first, contradicting=words.rng.random() < 0.5)

    written = _in_pairs(words, documents, second)
    told: dict[str, list[Document]] = {}
    for document in written:
        told.setdefault(document.name, []).append(document)
    drawn = (conflict(Asker(words, two)) for two in list(told.values())[:questions])
    return written, [question for question in drawn if question is not None]


def sharings(words: Words, documents: int, questions: int) -> Drawn:
    """Pairs of documents that share a value. One question for each value."""
    while True:
        written = _in_pairs(words, documents, lambda first, taken: write_sharing(words, first, taken))
        options = shareable(written)
        if options:
            asker = Asker(words, written)
            chosen = words.rng.sample(options, k=min(questions, len(options)))
            return written, [shared_of(asker, *option) for option in chosen]


def rankings(words: Words, documents: int, questions: int) -> Drawn:
    """``superlative`` or ``sort`` questions on different attributes."""
    while True:
        written = write_documents(words, documents)
        options = rankable(written)
        if options:
            asker = Asker(words, written)
            chosen = words.rng.sample(options, k=min(questions, len(options)))
            return written, [_rank(asker, attribute, stating) for attribute, stating in chosen]


def ranked_numbers(words: Words, questions: int) -> list[Question]:
    """As ``rankings``, on things and numbers that the question itself states."""
    comparable = [(kind, attribute) for kind in kinds() for attribute in kind.attributes if attribute.compare]
    asked = []
    for _ in range(questions):
        kind, attribute = words.rng.choice(comparable)
        names = dict.fromkeys(words.name(kind.names) for _ in range(MOST_RANKED))
        values = {value.order: value for value in (words.value(attribute.value) for _ in names)}
        things = [
            Document(kind, name, {attribute.key: value}, {}, "")
            for name, value in zip(names, values.values(), strict=False)
        ]
        if len(things) > 1:
            question = _rank(Asker(words, things), attribute, things)
            stated = ", ".join(f"{thing.name}: {thing.facts[attribute.key].text}" for thing in things)
            asked.append(replace(question, text=f"{stated}. {question.text}"))
    return asked


def _rank(asker: Asker, attribute: Attribute, stating: Sequence[Document]) -> Question:
    of = asker.rng.sample(stating, k=min(asker.rng.randint(2, MOST_RANKED), len(stating)))
    return asker.rng.choice((superlative_of, sort_of))(asker, attribute, of)


def _in_pairs(words: Words, count: int, second: Callable[[Document, set[str]], Document]) -> list[Document]:
    """Documents in random order in pairs; the last one of an odd number stands alone."""
    written = write_documents(words, count)
    for index in range(0, count - 1, 2):
        written[index + 1] = second(written[index], {document.name for document in written})
    return words.rng.sample(written, k=count)
