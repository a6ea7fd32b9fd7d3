"""Batches: weights and positions of tokens."""

from __future__ import annotations

import random
import re
from itertools import accumulate

import pytest
import torch

from inlay_lab.eval.conversations import Conversation
from inlay_lab.eval.words import Split
from inlay_lab.train.architecture import CONTEXT
from inlay_lab.train.lessons import Batch, Encoder, Exercise, Lesson, answering
from inlay_lab.train.recipe import RECIPE
from lab.tests.train.reading import all_text, made_words


def draw(
    encoder: Encoder, seed: int, *, tokens: int = 3000, gapped: float = 0.3, **lesson
) -> tuple[Batch, list[Conversation]]:
    lesson = {"documents": (1 + seed % 6,) * 2, "questions": 5} | lesson
    return answering(random.Random(seed), encoder, Split.TRAIN, Lesson(**lesson), tokens=tokens, gapped=gapped)


def written(encoder: Encoder, drawn: Conversation) -> tuple[list[int], list[bool], list[int]]:
    """A row's ids, whether each is in an answer, and the starts of its documents and its first question."""
    runs, turns = encoder.conversation(drawn)
    parts = [(run, False) for run in runs]
    parts += [part for asked, answer in turns for part in ((asked, False), (answer, True))]
    starts = [0, *accumulate(len(ids) for ids, _ in parts)]
    ids = [token for part, _ in parts for token in part]
    return ids, [answers for part, answers in parts for _ in part], starts[1 : len(runs) + 1]


@pytest.fixture(params=range(12))
def seed(request: pytest.FixtureRequest) -> int:
    return request.param


def test_rows_are_conversations_padded_to_a_round_width(encoder: Encoder, seed: int):
    batch, drawn = draw(encoder, seed)
    rows = [written(encoder, each)[0] for each in drawn]
    width = batch.ids.shape[1]
    assert width % 32 == 0
    assert 0 <= width - max(map(len, rows)) < 32
    assert batch.ids.shape == batch.positions.shape == batch.weights.shape == (len(drawn), width)
    assert (batch.ids.dtype, batch.positions.dtype, batch.weights.dtype) == (torch.int64, torch.int64, torch.float32)
    for line, row in zip(batch.ids.tolist(), rows, strict=True):
        assert line == row + [encoder.end] * (width - len(row))


def test_answers_have_full_weight_and_other_text_little(encoder: Encoder, seed: int):
    batch, drawn = draw(encoder, seed)
    shares = []
    for line, each in zip(batch.weights, drawn, strict=True):
        ids, answers, _ = written(encoder, each)
        counts = line[: len(ids)]
        assert (counts >= 1).tolist() == answers
        assert counts[0] == 0
        assert not line[len(ids) :].any()
        text = counts[~torch.tensor(answers)]
        assert ((text == 0) | ((text > 0) & (text < 0.05))).all()
        shares.append((text > 0).float().mean())
    assert 0.05 < torch.stack(shares).mean() < 0.15


def test_an_answer_ends_with_the_end_of_its_turn(encoder: Encoder, seed: int):
    batch, drawn = draw(encoder, seed)
    for line, counts, each in zip(batch.ids, batch.weights, drawn, strict=True):
        ends = (line == encoder.end) & (counts == 1)
        assert ends.sum() == len(each.questions)


def test_results_have_more_weight_than_their_derivation(encoder: Encoder):
    results = {}
    for seed in range(12):
        batch, drawn = draw(encoder, seed, gapped=0.0)
        for line, counts, each in zip(batch.ids, batch.weights, drawn, strict=True):
            said = encoder.tokenizer.decode(line[counts > 1])
            expected = "".join(question.result for question in each.questions if question.task in ("compare", "count"))
            assert said == expected
            results |= {question.task: question.result for question in each.questions if question.result}
    assert results.keys() == {"compare", "count"}


def test_lessons_without_documents_are_comparisons(encoder: Encoder):
    batch, drawn = draw(encoder, 0, exercise=Exercise.COMPARISONS)
    assert {question.task for each in drawn for question in each.questions} == {"comparing"}
    assert not any(each.documents for each in drawn)
    for line, counts, each in zip(batch.ids, batch.weights, drawn, strict=True):
        said = encoder.tokenizer.decode(line[counts > 1])
        assert said == "".join(question.result for question in each.questions)


def test_repetition_lessons_ask_for_nothing_else(encoder: Encoder):
    batch, drawn = draw(encoder, 0, exercise=Exercise.REPETITIONS)
    assert {question.task for each in drawn for question in each.questions} == {"repeating"}
    for line, counts, each in zip(batch.ids, batch.weights, drawn, strict=True):
        said = encoder.tokenizer.decode(line[counts >= 1])
        assert said == "".join(question.answer + "<|end|>" for question in each.questions)


def test_easy_comparisons_differ_from_others(encoder: Encoder):
    exercises = (Exercise.EASY_COMPARISONS, Exercise.COMPARISONS)
    (_, easy), (_, any_two) = (draw(encoder, 0, exercise=exercise) for exercise in exercises)
    years = [re.search(r": \d{4},", question.answer) for each in easy for question in each.questions]
    assert not any(years)
    assert any(re.search(r": \d{4},", question.answer) for each in any_two for question in each.questions)


def test_lessons_of_kinds_count_documents_of_any_length(encoder: Encoder):
    _, drawn = draw(encoder, 0, exercise=Exercise.KIND_COUNTS, documents=(4, 4))
    assert {question.task for each in drawn for question in each.questions} == {"count"}
    assert {len(document.facts) for each in drawn for document in each.documents} == {1, 2, 3, 4}


def test_a_batch_has_one_number_of_documents(encoder: Encoder):
    found = []
    for seed in range(40):
        (count,) = {len(each.documents) for each in draw(encoder, seed, documents=(2, 5))[1]}
        found.append(count)
    assert set(found) == {2, 3, 4, 5}


def test_lessons_with_similar_words(encoder: Encoder):
    _, drawn = draw(encoder, 0, documents=(8, 8), alike=True)
    for each in drawn:
        assert len({word[:2] for word in made_words(all_text(each))}) <= 9


def test_documents_of_fewer_facts(encoder: Encoder):
    _, drawn = draw(encoder, 0, facts=(1,))
    assert {len(document.facts) for each in drawn for document in each.documents} == {1}


def test_positions_without_gaps_are_contiguous(encoder: Encoder, seed: int):
    batch, drawn = draw(encoder, seed, gapped=0.0)
    for line, each in zip(batch.positions, drawn, strict=True):
        length = len(written(encoder, each)[0])
        assert line[:length].tolist() == list(range(line[0], line[0] + length))
        assert int(line.max()) < CONTEXT


def test_gaps_are_before_documents_and_the_first_question(encoder: Encoder, seed: int):
    batch, drawn = draw(encoder, seed, gapped=1.0)
    wide = 0
    for line, each in zip(batch.positions, drawn, strict=True):
        ids, _, borders = written(encoder, each)
        steps = (line[1 : len(ids)] - line[: len(ids) - 1]).tolist()
        assert all(step >= 1 for step in steps)
        jumps = [index + 1 for index, step in enumerate(steps) if step > 1]
        assert set(jumps) <= set(borders)
        wide += len(jumps)
    assert wide > 0.8 * sum(len(each.documents) + 1 for each in drawn)


def test_some_conversations_have_gaps_and_some_start_late(encoder: Encoder):
    starts, gaps = [], []
    for seed in range(30):
        batch, drawn = draw(encoder, seed)
        for line, each in zip(batch.positions, drawn, strict=True):
            length = len(written(encoder, each)[0])
            starts.append(int(line[0]))
            gaps.append(int(line[length - 1] - line[0]) >= length)
    assert 0.3 < starts.count(0) / len(starts) < 0.7
    assert max(starts) > CONTEXT / 2
    assert 0.15 < sum(gaps) / len(gaps) < 0.45


def test_the_longest_lessons_fit_the_context(encoder: Encoder):
    lessons = [lesson for stage in RECIPE for lesson in (stage.lesson, *stage.drills)]
    documents = max(lesson.documents[1] for lesson in lessons)
    questions = max(lesson.questions for lesson in lessons)
    for seed in range(20):
        batch, _ = draw(encoder, seed, documents=(documents, documents), questions=questions, gapped=1.0, tokens=1)
        assert batch.ids.shape[1] < CONTEXT / 2
        assert int(batch.positions.max()) < CONTEXT


def test_more_tokens_are_more_conversations(encoder: Encoder):
    assert len(draw(encoder, 0, tokens=1)[1]) == 1
    assert len(draw(encoder, 0, tokens=1000)[1]) < len(draw(encoder, 0, tokens=8000)[1])


def test_a_seed_names_its_lesson(encoder: Encoder):
    (first, _), (again, _), (other, _) = (draw(encoder, seed, documents=(3, 3)) for seed in (1, 1, 2))
    for name in ("ids", "positions", "weights"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
