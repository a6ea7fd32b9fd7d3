"""Exercises across documents: answers follow from the documents, and no answer reveals another one."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from inlay_lab.eval.conversations import Conversation
from inlay_lab.eval.documents import Document
from inlay_lab.eval.words import Split
from inlay_lab.train.lessons import TASKS, Encoder, Exercise, draw_exercise

SPLITS = pytest.mark.parametrize("split", list(Split), ids=lambda split: split.value)
STEPS = (Exercise.CONTRADICTIONS, Exercise.SHARINGS, Exercise.RANKINGS)


def draw(exercise: Exercise, seed: int, split: Split, documents: int, questions: int = 8) -> Conversation:
    return draw_exercise(exercise, random.Random(seed), split, documents=documents, questions=questions)


def stated(documents: list[Document], key: str) -> list[str]:
    return [document.facts[key].text for document in documents if key in document.facts]


@SPLITS
@pytest.mark.parametrize(("exercise", "task"), list(TASKS.items()), ids=lambda value: str(value))
def test_lone_task_is_asked_once_of_its_documents(exercise: Exercise, task: str, split: Split):
    for seed in range(20):
        conversation = draw(exercise, seed, split, 2 + seed % 7)
        assert len(conversation.documents) == 2 + seed % 7
        assert [question.task for question in conversation.questions] == [task]
    assert draw(exercise, 3, split, 5) == draw(exercise, 3, split, 5)


@SPLITS
@pytest.mark.parametrize("exercise", STEPS, ids=lambda exercise: exercise.value)
def test_step_has_the_given_documents_and_bounded_questions(exercise: Exercise, split: Split):
    several = 0
    for seed in range(20):
        conversation = draw(exercise, seed, split, 2 + seed % 7, 3)
        assert len(conversation.documents) == 2 + seed % 7
        assert 1 <= len(conversation.questions) <= 3
        several += len(conversation.questions) > 1
    assert several > 5
    assert draw(exercise, 3, split, 5) == draw(exercise, 3, split, 5)


@SPLITS
def test_contradictions_are_asked_of_each_name(split: Split):
    answers: Counter[str] = Counter()
    for seed in range(40):
        conversation = draw(Exercise.CONTRADICTIONS, seed, split, 7)
        told = Counter(document.name for document in conversation.documents)
        assert sorted(told.values()) == [1, 2, 2, 2]
        asked = [
            name for question in conversation.questions for name in told if re.search(rf"\b{name}\b", question.text)
        ]
        assert sorted(asked) == sorted(name for name, times in told.items() if times == 2)
        for question in conversation.questions:
            one, other, result = question.answer.rsplit(", ", 2)
            assert result == ("so yes" if one == other else "so no")
            answers[result] += 1
    assert 0.3 < answers["so yes"] / answers.total() < 0.7


@SPLITS
def test_shared_values_are_in_two_documents(split: Split):
    for seed in range(40):
        conversation = draw(Exercise.SHARINGS, seed, split, 8)
        values = Counter(fact.text for document in conversation.documents for fact in document.facts.values())
        answers = [question.answer for question in conversation.questions]
        assert all(values[answer] >= 2 for answer in answers)
        assert len({question.text for question in conversation.questions}) == len(answers)


@SPLITS
def test_lists_of_a_conversation_have_different_values(split: Split):
    tasks = set()
    for seed in range(40):
        conversation = draw(Exercise.RANKINGS, seed, split, 6)
        lists = []
        for question in conversation.questions:
            tasks.add(question.task)
            lists.append(frozenset(re.findall(r": ((?:[^,;]|,\d)+)", question.answer)))
            names = [document.name for document in conversation.documents if f"{document.name}: " in question.answer]
            assert 2 <= len(names) <= 3
        assert len(set(lists)) == len(lists)
    assert tasks == {"superlative", "sort"}


def test_numbers_that_the_question_states_are_ranked():
    conversation = draw(Exercise.RANKED_NUMBERS, 1, Split.TRAIN, 0, 40)
    assert conversation.documents == []
    assert len(conversation.questions) > 30
    for question in conversation.questions:
        stated, _, text = question.text.partition(". ")
        names = re.findall(r"(?:^|, )([A-Z][^:,]*): ", stated)
        assert 2 <= len(names) <= 3
        ranked = {name for name in names if name in text}
        assert len(ranked) >= 2
        assert set(re.findall(r"(?:^|, so |, |; )([A-Z][^:;]*?): ", question.answer)) == ranked
        assert all(f"{each[0]}: {each[1]}" in stated for each in re.findall(r"([A-Z][^:;,]*): (\d+)", question.answer))
    assert draw(Exercise.RANKED_NUMBERS, 1, Split.TRAIN, 0, 40) == conversation


def test_every_step_of_a_ranking_weighs_as_much_as_its_end(encoder: Encoder):
    for question in draw(Exercise.RANKED_NUMBERS, 1, Split.TRAIN, 0, 40).questions:
        steps = re.findall(r", so( [^:,;]+)", question.answer)
        ids, weights = encoder(question.answer), encoder.weights(question)
        counted = [token for token, weight in zip(ids, weights, strict=False) if weight > 1]
        end = question.result if question.task == "sort" else ""
        assert encoder.tokenizer.decode(counted) == "".join(steps) + end
        assert min(weights) == 1
