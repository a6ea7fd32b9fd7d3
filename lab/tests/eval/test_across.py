"""Questions across documents: right answers are derived a second time, and pairs are as planted."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from inlay_lab.eval.across import (
    ACROSS_TASKS,
    ALL_TASKS,
    CONFLICTS,
    MOST_RANKED,
    SHARED,
    SORTS,
    SUPERLATIVES,
    ask,
    import_pair,
    write_paired,
)
from inlay_lab.eval.documents import Document, write_documents
from inlay_lab.eval.modular_qa import MAX_TOKENS
from inlay_lab.eval.questions import TASKS, Asker, Question
from inlay_lab.eval.words import Split, Value, Words
from inlay_lab.train.lessons import Encoder
from tests.model.check.models import small_tokenizer

SPLITS = pytest.mark.parametrize("split", list(Split), ids=lambda split: split.value)


def asked(task: str, split: Split = Split.HELD_OUT, rounds: int = 60) -> Iterator[tuple[list[Document], Question]]:
    """Questions of a task on two to twelve documents, with the documents."""
    for seed in range(rounds):
        words, count = Words(random.Random(seed), split), 2 + seed % 11
        if task in ("conflict", "shared"):
            written, _ = write_paired(words, count, task)
        else:
            written = write_documents(words, count)
        found = (ask(Asker(words, written), task) for _ in range(4))
        yield from ((written, question) for question in found if question is not None)


def listed(answer: str) -> list[tuple[str, str]]:
    """The stated names and values in order, without conclusions."""
    return re.findall(r"(?:^|, so |, |; )([A-Z][^:;]*?): ((?:[^,;]|,\d)+)", answer)


def number(value: str) -> int:
    return int(re.sub(r"\D", "", value))


def test_all_tasks_are_the_old_ones_and_four():
    assert (*TASKS, "superlative", "sort", "conflict", "shared") == ALL_TASKS


@SPLITS
@pytest.mark.parametrize("task", ["superlative", "sort"])
def test_stated_values_belong_to_the_named_documents(task: str, split: Split):
    lengths = Counter()
    for documents, question in asked(task, split):
        found = dict(listed(question.answer))
        of = [next(each for each in documents if each.name == name) for name in found]
        assert len({each.kind.name for each in of}) == 1
        keys = [
            {key for key, value in each.facts.items() if value.text == text}
            for each, text in zip(of, found.values(), strict=True)
        ]
        assert set.intersection(*keys)
        names = list(found)
        assert f"{', '.join(names[:-1])} and {names[-1]}" in question.text
        lengths[len(found)] += 1
    assert lengths.total() > 100
    assert set(lengths) == set(range(2, MOST_RANKED + 1))
    assert min(lengths.values()) > 5


@pytest.mark.parametrize("task", ["superlative", "sort"])
def test_answer_follows_from_pairwise_comparisons(task: str):
    asks, firsts = set(), Counter()
    for _, question in asked(task):
        values = {name: number(value) for name, value in listed(question.answer)}
        (most,) = set(re.findall(r"earliest|highest", question.text))
        assert len(set(values.values())) == len(values)
        ranked = sorted(values, key=values.__getitem__, reverse=most == "highest")
        chosen, end = question.answer, ranked[0]
        if task == "sort":
            chosen, _, end = question.answer.rpartition("; ")
            assert end == ", ".join(ranked)
        assert question.result == f" {end}"
        assert question.answer.endswith(question.result)
        asks.add(most)
        firsts[list(values).index(ranked[0])] += 1
        steps = chosen.split("; ")
        assert len(steps) == (len(values) - 1 if task == "sort" else 1)
        for place, step in enumerate(steps):
            compared = step.split(", so ")
            assert compared[-1] == ranked[place]
            pairs = [listed(two) for two in compared[:-1]]  # the text before each conclusion
            assert all(len(two) == 2 for two in pairs)
            winners = [min(dict(two), key=ranked.index) for two in pairs]
            assert winners == [each.partition(":")[0] for each in compared[1:]]
            assert {name for two in pairs for name, _ in two} == {*ranked[place:]}
    assert asks == {"earliest", "highest"}
    assert min(firsts.values()) > 10


@SPLITS
def test_half_of_the_questions_have_contradictions(split: Split):
    answers: Counter[str] = Counter()
    for documents, question in asked("conflict", split, rounds=120):
        (name,) = {each.name for each in documents if re.search(rf"\b{each.name}\b", question.text)}
        two = [each for each in documents if each.name == name]
        both = [
            ([each.facts[attribute.key].text for each in two])
            for attribute in two[0].kind.attributes
            if all(attribute.key in each.facts for each in two)
            if any(f" {phrase} of " in question.text for phrase in attribute.phrases)
        ]
        assert question.answer in {f"{one}, {other}, so {'yes' if one == other else 'no'}" for one, other in both}
        assert question.answer.endswith(f", so{question.result}")
        answers[question.result] += 1
    assert 0.35 < answers[" yes"] / answers.total() < 0.65


@SPLITS
def test_two_documents_share_the_value(split: Split):
    texts = [
        ([each for each in documents if question.answer in {v.text for v in each.facts.values()}], question)
        for documents, question in asked("shared", split)
    ]
    assert len(texts) > 150
    for sharing, question in texts:
        assert len({each.name for each in sharing}) >= 2
        assert any(re.search(rf" {each.kind.many}\b", question.text) for each in sharing)
        assert all(question.answer in each.text for each in sharing)


@SPLITS
@pytest.mark.parametrize("task", ["conflict", "shared"])
@pytest.mark.parametrize("count", [2, 3, 24])
def test_pairs_have_one_name_or_share_a_value(task: str, count: int, split: Split):
    for seed in range(10):
        written, pairs = write_paired(Words(random.Random(seed), split), count, task)
        assert len(written) == count
        assert len({number for pair in pairs for number in pair}) == 2 * len(pairs) == 2 * max(1, count // 4)
        for first, second in ((written[one], written[other]) for one, other in pairs):
            assert first.kind is second.kind
            assert (first.name == second.name) == (task == "conflict")
            assert first.text != second.text
            if task == "shared":
                assert any(second.facts.get(key) == value for key, value in first.facts.items())
        names = [document.name for document in written]
        assert len(set(names)) == count - (len(pairs) if task == "conflict" else 0)


def test_document_states_its_facts():
    for task in ("conflict", "shared"):
        for documents, _ in asked(task, Split.TRAIN, rounds=20):
            for each in documents:
                assert list(each.sentences) == list(each.facts)
                assert all(value.text in each.sentences[key] for key, value in each.facts.items())


def test_both_documents_of_a_pair_are_imported():
    rng = random.Random(0)
    seen = Counter()
    for _ in range(200):
        numbers = import_pair(rng, (3, 1), 8, 5)
        assert len(set(numbers)) == 5
        assert {1, 3} <= set(numbers) <= set(range(8))
        seen[numbers.index(3) < numbers.index(1)] += 1
    assert min(seen.values()) > 60
    assert sorted(import_pair(rng, (1, 0), 2, 2)) == [0, 1]


@pytest.mark.parametrize("task", ACROSS_TASKS)
def test_answers_fit_the_token_limit(task: str):
    encoder = Encoder(small_tokenizer())
    assert max(len(encoder(question.answer)) for _, question in asked(task)) < MAX_TOKENS


@SPLITS
@pytest.mark.parametrize("task", ACROSS_TASKS)
def test_wordings_belong_to_their_split(task: str, split: Split):
    wordings = {
        "superlative": [SUPERLATIVES],
        "sort": [SORTS],
        "conflict": [CONFLICTS],
        "shared": [SHARED],
    }
    found = set()
    for _, question in asked(task, split):
        (kept,) = {
            way == each.ways[-1]
            for each in wordings[task]
            for way in (*each.ways, *each.more)
            if re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(way)), question.text)
        }
        assert kept == (split is Split.HELD_OUT)
        found.add(question.text)
    assert len(found) > 40


def test_unanswerable_questions_are_not_asked():
    words = Words(random.Random(0), Split.TRAIN)
    written = (write_documents(Words(random.Random(seed), Split.TRAIN), 1)[0] for seed in range(100))
    town = next(document for document in written if document.kind.name == "town")
    asker = Asker(words, [town])
    assert [ask(asker, task) for task in ACROSS_TASKS] == [None] * 4


def test_contradiction_is_asked_if_there_is_one():
    words = Words(random.Random(0), Split.TRAIN)
    town = next(d for s in range(99) for d in write_documents(Words(random.Random(s), Split.TRAIN), 1) if d.facts)
    key = next(iter(town.facts))

    def variant(name: str, value: str) -> Document:
        return Document(town.kind, name, {key: Value(value, None)}, {}, "")

    documents = [variant("Bolu", "1"), variant("Kana", "2"), variant("Bolu", "1"), variant("Kana", "3")]
    for _ in range(10):
        question = ask(Asker(words, documents), "conflict")
        assert question is not None
        assert (" of Kana" in question.text, question.answer) == (True, "2, 3, so no")
    question = ask(Asker(words, documents[::2]), "conflict")
    assert question is not None
    assert question.answer == "1, 1, so yes"
