"""Generated documents and questions: held-out ones never occur in training, and every document omits something."""

from __future__ import annotations

import random

import pytest

from inlay_lab.eval.conversations import SYSTEM, Conversation, draw_conversation
from inlay_lab.eval.documents import write_documents
from inlay_lab.eval.questions import INSTRUCTIONS, Form
from inlay_lab.eval.words import Split, Value, Words, held_out
from lab.tests.train.reading import all_text, conversations, made_words, read_document, read_question

pytestmark = pytest.mark.long

SPLITS = pytest.mark.parametrize("split", list(Split), ids=lambda split: split.value)


@SPLITS
def test_made_up_words_belong_to_their_split(split: Split):
    found: set[str] = set()
    for drawn in conversations(split):
        found |= made_words(all_text(drawn))
    assert len(found) > 1000
    assert {held_out(word) for word in found} == {split is Split.HELD_OUT}


def test_one_word_in_eight_is_held_out():
    words = [f"Word{number}" for number in range(4000)]
    assert 0.1 < sum(map(held_out, words)) / len(words) < 0.15


def test_training_documents_hold_no_held_out_wording():
    for drawn in conversations(Split.TRAIN):
        for document in drawn.documents:
            opened, stated = read_document(document)
            assert not opened
            assert not any(kept for _, kept in stated)


def test_held_out_documents_mix_both_sorts_of_wordings():
    read = [read_document(document) for drawn in conversations(Split.HELD_OUT) for document in drawn.documents]
    sorts = [kept for opened, stated in read for kept in (opened, *(kept for _, kept in stated))]
    assert 0.4 < sum(sorts) / len(sorts) < 0.6


@SPLITS
def test_question_wordings_belong_to_their_split(split: Split):
    for drawn in conversations(split):
        for question in drawn.questions:
            (reading,) = read_question(question.text)
            assert reading.held_out == (split is Split.HELD_OUT)


@SPLITS
def test_instructions_belong_to_their_split(split: Split):
    seen = set()
    for drawn in conversations(split):
        sentence, *rest = drawn.system.splitlines()
        assert sentence in SYSTEM
        assert rest == ([drawn.instruction] if drawn.instruction else [])
        for form, wordings in INSTRUCTIONS.items():
            if drawn.instruction in wordings.ways:
                seen.add(form)
                assert (drawn.instruction == wordings.ways[-1]) == (split is Split.HELD_OUT)
    assert seen == set(INSTRUCTIONS)
    assert any(drawn.instruction is None for drawn in conversations(split))


def combinations(split: Split, form: Form) -> set[tuple[str, str]]:
    """Kinds and attributes that questions of a split ask for in a form."""
    found = set()
    for seed in range(40):
        mix = {"form": 1.0}
        drawn = draw_conversation(random.Random(seed), split, documents=8, questions=12, form=form, mix=mix)
        for question in drawn.questions:
            (reading,) = read_question(question.text)
            assert question.task == "form"
            assert reading.attribute
            found.add((reading.kind.name, reading.attribute.key))
    return found


@pytest.mark.parametrize("form", list(INSTRUCTIONS), ids=lambda form: form.value)
def test_held_out_forms_are_asked_of_other_attributes(form: Form):
    trained, kept = combinations(Split.TRAIN, form), combinations(Split.HELD_OUT, form)
    assert not trained & kept
    assert len(trained) > len(kept) >= 3


@SPLITS
def test_document_states_its_facts_once_and_omits_others(split: Split):
    for drawn in conversations(split):
        for document in drawn.documents:
            _, stated = read_document(document)
            assert [key for key, _ in stated] == list(document.facts)
            attributes = {attribute.key for attribute in document.kind.attributes}
            assert 3 <= len(document.facts) < len(attributes)
            assert set(document.facts) < attributes


@SPLITS
def test_documents_are_about_different_things(split: Split):
    for count in (1, 2, 12, 40):
        written = write_documents(Words(random.Random(count), split), count)
        assert len({document.name for document in written}) == len(written) == count
        assert len({document.kind.name for document in written}) <= 4


def test_repeated_name_is_drawn_again(monkeypatch: pytest.MonkeyPatch):
    made = iter(["Bolu", "Bolu", "Bolu", "Kana", "Bolu", "Kana", "Tiro"])
    monkeypatch.setattr("inlay_lab.eval.documents.Words.name", lambda words, maker: next(made))
    monkeypatch.setattr("inlay_lab.eval.documents.Words.value", lambda words, maker: Value("1", "1", 1))
    written = write_documents(Words(random.Random(0), Split.TRAIN), 3)
    assert [document.name for document in written] == ["Bolu", "Kana", "Tiro"]


@SPLITS
def test_similar_words_share_starts_and_ends(split: Split):
    """Counts words of ten documents that share their first two letters with another word, and their last two."""

    def shared(words: Words) -> float:
        made = [words.word() for _ in range(10)]
        assert {held_out(word) for word in made} == {split is Split.HELD_OUT}
        ends = [[word[:2] for word in made], [word[-2:] for word in made]]
        return sum(side.count(end) > 1 for side in ends for end in side) / 20

    plain = sum(shared(Words(random.Random(seed), split)) for seed in range(20)) / 20
    alike = sum(shared(Words.alike(random.Random(seed), split)) for seed in range(20)) / 20
    assert plain < 0.35
    assert alike > 0.5


def test_documents_and_questions_may_have_similar_words():
    drawn = draw_conversation(random.Random(2), Split.TRAIN, documents=12, questions=20, alike=True)
    syllables = {word[:2] for word in made_words(all_text(drawn))}
    assert len({document.name for document in drawn.documents}) == 12
    assert 2 <= len(syllables) <= 9


def draw(seed: int, split: Split) -> Conversation:
    return draw_conversation(random.Random(seed), split, documents=5, questions=6)


@SPLITS
def test_a_seed_names_its_text(split: Split):
    assert draw(3, split) == draw(3, split)
    assert all_text(draw(3, split)) != all_text(draw(4, split))
