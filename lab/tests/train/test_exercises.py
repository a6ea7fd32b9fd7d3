"""Exercises: answers follow from the question, words are of the split, and only the practised tokens count."""

from __future__ import annotations

import random
import re

import pytest

from inlay_lab.eval.conversations import Conversation
from inlay_lab.eval.documents import kinds
from inlay_lab.eval.questions import Question
from inlay_lab.eval.words import Split
from inlay_lab.train.lessons import COMPARING, REPEATING, Encoder, Exercise, draw_exercise
from lab.tests.train.reading import Reading, all_text, made_words, read_question

SPLITS = pytest.mark.parametrize("split", list(Split), ids=lambda split: split.value)


def draw(exercise: Exercise, seed: int, split: Split, documents: int, questions: int) -> Conversation:
    return draw_exercise(exercise, random.Random(seed), split, documents=documents, questions=questions)


def drawn(split: Split, exercise: Exercise = Exercise.COMPARISONS) -> list[Question]:
    return [question for seed in range(40) for question in draw(exercise, seed, split, 0, 10).questions]


def parts(question: Question) -> tuple[Reading, list[str], list[int], str]:
    """A question's reading, the names and numbers of its answer, and its result."""
    (reading,) = read_question(question.text)
    stated, _, best = question.answer.partition(", so ")
    (names, texts) = zip(*(part.split(": ") for part in re.split(r", (?=[A-Z])", stated)), strict=True)
    return reading, list(names), [int(re.sub(r"\D", "", text)) for text in texts], best


@SPLITS
def test_repetitions_are_of_whole_documents(split: Split):
    conversation = draw(Exercise.REPETITIONS, 1, split, 5, 3)
    texts = {document.name: document.text for document in conversation.documents}
    assert len(texts) == 5
    assert len(conversation.questions) == len({question.text for question in conversation.questions}) == 3
    for question in conversation.questions:
        assert question.task == REPEATING
        assert [question.answer] == [text for name, text in texts.items() if f" {name}." in question.text]
    assert len(draw(Exercise.REPETITIONS, 1, split, 2, 3).questions) == 2


@SPLITS
def test_documents_of_every_kind_are_counted(split: Split):
    counts: set[str] = set()
    for seed in range(30):
        conversation = draw(Exercise.KIND_COUNTS, seed, split, 12, 9)
        asked: set[str] = set()
        for question in conversation.questions:
            (reading,) = read_question(question.text)
            assert (question.task, reading.asks) == ("count", "kinds")
            assert question.answer == str(sum(each.kind is reading.kind for each in conversation.documents))
            asked.add(reading.kind.name)
            counts.add(question.answer)
        assert asked == {kind.name for kind in kinds()}
    assert {"0", "3", "6"} <= counts
    assert len(draw(Exercise.KIND_COUNTS, 0, split, 2, 3).questions) == 3


@SPLITS
def test_the_result_follows_from_the_numbers(split: Split):
    firsts = 0
    for question in drawn(split):
        reading, names, numbers, best = parts(question)
        assert question.task == COMPARING
        assert reading.asks == "compare"
        assert list(reading.on) == names
        least = reading.attribute is not None and reading.attribute.value.startswith("year")
        assert numbers[0] != numbers[1]
        assert best == names[numbers.index((min if least else max)(numbers))]
        assert question.result == f" {best}"
        firsts += best == names[0]
    assert 0.4 < firsts / 400 < 0.6


def test_some_numbers_differ_in_their_last_digits_only():
    two = [parts(question)[2] for question in drawn(Split.TRAIN)]
    close = sum(str(a)[:-1] == str(b)[:-1] and a > 99 for a, b in two)
    assert 0.01 < close / len(two) < 0.5


def test_easy_comparisons_ask_for_the_larger_and_differ_in_first_digits():
    by_the_first = 0
    for question in drawn(Split.TRAIN, Exercise.EASY_COMPARISONS):
        _, names, numbers, best = parts(question)
        assert best == names[numbers.index(max(numbers))]
        texts = [str(number) for number in numbers]
        assert len(texts[0]) == len(texts[1])
        by_the_first += texts[0][0] != texts[1][0]
    assert by_the_first / 400 > 0.9


@SPLITS
def test_names_and_wordings_belong_to_their_split(split: Split):
    conversation = draw(Exercise.COMPARISONS, 0, split, 0, 40)
    assert conversation.documents == []
    assert {parts(question)[0].held_out for question in conversation.questions} == {split is Split.HELD_OUT}
    assert len(made_words(all_text(conversation))) > 40


def test_only_the_result_counts(encoder: Encoder):
    for question in drawn(Split.TRAIN)[:100]:
        weights = encoder.weights(question)
        ids = encoder(question.answer)
        assert len(weights) == len(ids) + 1
        counted = [token for token, weight in zip(ids, weights, strict=False) if weight > 0]
        assert encoder.tokenizer.decode(counted) == question.result
