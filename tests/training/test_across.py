"""Exercises across documents: their answers follow from the documents, and no answer gives away another's."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from inlay.quality.conversations import Conversation
from inlay.quality.documents import Document
from inlay.quality.words import Split
from training.lessons import TASKS, Exercise, draw_exercise

SPLITS = pytest.mark.parametrize("split", list(Split), ids=lambda split: split.value)
STEPS = (Exercise.CONTRADICTIONS, Exercise.SHARINGS, Exercise.RANKINGS)


def draw(exercise: Exercise, seed: int, split: Split, documents: int, questions: int = 8) -> Conversation:
    return draw_exercise(exercise, random.Random(seed), split, documents=documents, questions=questions)


def stated(documents: list[Document], key: str) -> list[str]:
    return [document.facts[key].text for document in documents if key in document.facts]


@SPLITS
@pytest.mark.parametrize(("exercise", "task"), list(TASKS.items()), ids=lambda value: str(value))
def test_a_task_itself_is_asked_once_of_its_documents(exercise: Exercise, task: str, split: Split):
    for seed in range(20):
        conversation = draw(exercise, seed, split, 2 + seed % 7)
        assert len(conversation.documents) == 2 + seed % 7
        assert [question.task for question in conversation.questions] == [task]
    assert draw(exercise, 3, split, 5) == draw(exercise, 3, split, 5)


@SPLITS
@pytest.mark.parametrize("exercise", STEPS, ids=lambda exercise: exercise.value)
def test_a_step_has_as_many_documents_as_asked_for_and_at_most_so_many_questions(exercise: Exercise, split: Split):
    several = 0
    for seed in range(20):
        conversation = draw(exercise, seed, split, 2 + seed % 7, 3)
        assert len(conversation.documents) == 2 + seed % 7
        assert 1 <= len(conversation.questions) <= 3
        several += len(conversation.questions) > 1
    assert several > 5
    assert draw(exercise, 3, split, 5) == draw(exercise, 3, split, 5)


@SPLITS
def test_contradictions_are_asked_of_every_thing_by_itself(split: Split):
    answers: Counter[str] = Counter()
    for seed in range(40):
        conversation = draw(Exercise.CONTRADICTIONS, seed, split, 7)
        named: dict[str, list[Document]] = {}
        for document in conversation.documents:
            named.setdefault(document.name, []).append(document)
        assert sorted(len(documents) for documents in named.values()) == [1, 2, 2, 2]
        asked = set()
        for question in conversation.questions:
            (name,) = [name for name in named if question.text.removesuffix("?").endswith(f" {name}")]
            asked.add(name)
            differing = [
                attribute.phrases[0]
                for attribute in named[name][0].kind.attributes
                if len(set(stated(named[name], attribute.key))) > 1
            ]
            assert question.answer == (f"yes, {differing[0]}" if differing else "no")
            if len(named[name]) > 1:
                answers[question.answer[:2]] += 1
        assert len(asked) == len(conversation.questions)
    assert 0.3 < answers["ye"] / answers.total() < 0.7


@SPLITS
def test_shared_values_stand_in_two_documents_each(split: Split):
    for seed in range(40):
        conversation = draw(Exercise.SHARINGS, seed, split, 8)
        values = Counter(fact.text for document in conversation.documents for fact in document.facts.values())
        answers = [question.answer for question in conversation.questions]
        assert all(values[answer] >= 2 for answer in answers)
        assert len({question.text for question in conversation.questions}) == len(answers)


@SPLITS
def test_no_list_of_a_conversation_is_of_the_same_values_as_another(split: Split):
    tasks = set()
    for seed in range(40):
        conversation = draw(Exercise.RANKINGS, seed, split, 6)
        lists = []
        for question in conversation.questions:
            tasks.add(question.task)
            listed = question.answer.partition(", so ")[0].split(": ")[1:]
            lists.append(frozenset(listed))
            names = [document.name for document in conversation.documents if f"{document.name}: " in question.answer]
            assert 2 <= len(names) <= 4
        assert len(set(lists)) == len(lists)
    assert tasks == {"superlative", "sort"}
