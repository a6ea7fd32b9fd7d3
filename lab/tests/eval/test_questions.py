"""Answers, derived a second time from the facts alone."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from inlay.errors import ParameterError
from inlay_lab.eval.conversations import Conversation, draw_conversation
from inlay_lab.eval.documents import Attribute, Document, kinds, write_documents
from inlay_lab.eval.questions import INSTRUCTIONS, TASKS, Asker, Form
from inlay_lab.eval.words import Split, Value, Words
from lab.tests.train.reading import KIND_COUNTS, Reading, conversations, fact_questions, read_question, statements, ways

pytestmark = pytest.mark.long

SPLITS = pytest.mark.parametrize("split", list(Split), ids=lambda split: split.value)
UNSTATED = {
    Form.PLAIN: "not stated",
    Form.CAPITALS: "NOT STATED",
    Form.WORD: "unknown",
    Form.SENTENCE: "The documents do not state this.",
}


def form_of(drawn: Conversation) -> Form:
    asked_for = [form for form, wordings in INSTRUCTIONS.items() if drawn.instruction in dict(ways(wordings))]
    return asked_for[0] if asked_for else Form.PLAIN


def right_answer(reading: Reading, documents: list[Document], form: Form, wording: str) -> str:
    """The right answer to a question, from its reading."""
    about = [document for document in documents if document.kind is reading.kind]
    if reading.asks == "kinds":
        return str(len(about))
    assert reading.attribute
    stated = {document.name: document.facts.get(reading.attribute.key) for document in about}
    values = {name: value.text for name, value in stated.items() if value is not None}
    if reading.asks == "count":
        return str(list(values.values()).count(reading.on[0]))
    if reading.asks == "compare":
        sizes = {name: int(re.sub(r"\D", "", values[name])) for name in reading.on}
        earliest = bool({"older", "first"} & set(re.findall(r"\w+", wording)))
        first, second = reading.on
        best = (min if earliest else max)(sizes, key=lambda name: sizes[name])
        return f"{first}: {values[first]}, {second}: {values[second]}, so {best}"
    (name,) = reading.on
    if name not in values:
        return UNSTATED[form]
    if form is Form.SENTENCE:
        (document,) = [document for document in about if document.name == name]
        return sentence_on(document, reading.attribute)
    return {
        Form.PLAIN: values[name],
        Form.CAPITALS: values[name].upper(),
        Form.WORD: values[name].split()[0],
    }[form]


def sentence_on(document: Document, attribute: Attribute) -> str:
    """The sentence of a document that states an attribute."""
    value = document.facts[attribute.key].text
    subjects = (document.name, *document.kind.pronouns)
    possible = {way.format(n=subject, v=value) for way, _ in statements(attribute) for subject in subjects}
    (sentence,) = possible & set(re.split(r"(?<=\.) ", document.text))
    return sentence


@SPLITS
def test_answers_follow_from_the_facts(split: Split):
    checked: Counter[str] = Counter()
    for drawn in conversations(split):
        for question in drawn.questions:
            (reading,) = read_question(question.text)
            assert question.answer == right_answer(reading, drawn.documents, form_of(drawn), question.text)
            checked[question.task] += 1
    assert set(checked) == set(TASKS)
    assert min(checked.values()) >= 40


@SPLITS
def test_tasks_are_as_named(split: Split):
    asks = {"single": {"fact"}, "form": {"fact"}, "unstated": {"fact"}, "compare": {"compare"}}
    for drawn in conversations(split):
        form = form_of(drawn)
        for question in drawn.questions:
            (reading,) = read_question(question.text)
            assert reading.asks in asks.get(question.task, {"count", "kinds"})
            assert (question.answer == UNSTATED[form]) == (question.task == "unstated")
            assert question.task != ("form" if form is Form.PLAIN else "single")


@SPLITS
def test_word_answer_is_one_word_of_the_fact(split: Split):
    answers = set()
    for seed in range(40):
        mix = {"form": 1.0}
        drawn = draw_conversation(random.Random(seed), split, documents=6, questions=8, form=Form.WORD, mix=mix)
        facts = {value.text for document in drawn.documents for value in document.facts.values()}
        for question in drawn.questions:
            assert " " not in question.answer
            assert question.answer in {fact.split()[0] for fact in facts}
            answers.add(question.answer)
    assert len(answers) > 50


@SPLITS
def test_comparisons_are_of_two_different_values(split: Split):
    firsts = 0
    asked = [
        (drawn.documents, question)
        for drawn in conversations(split)
        for question in drawn.questions
        if question.task == "compare"
    ]
    for documents, question in asked:
        (reading,) = read_question(question.text)
        assert reading.attribute
        facts = {document.name: document.facts for document in documents}
        first, second = (facts[name][reading.attribute.key].text for name in reading.on)
        assert first != second
        firsts += question.answer.endswith(f", so {reading.on[0]}")
    assert 0.35 < firsts / len(asked) < 0.65  # the position in the question does not give the answer away


def test_unstated_questions_are_of_known_and_of_unknown_things():
    known = [
        any(document.name == name for document in drawn.documents)
        for drawn in conversations(Split.TRAIN)
        for question in drawn.questions
        if question.task == "unstated"
        for reading in read_question(question.text)
        for name in reading.on
    ]
    assert 0.5 < sum(known) / len(known) < 0.9


def every_question(documents: list[Document]) -> list[tuple[str, Reading]]:
    """All questions on some documents, in every wording, with their readings."""
    asked = []
    for kind in kinds():
        asked += [
            (way.format(many=kind.many), Reading("kinds", kind, None, (), kept)) for way, kept in ways(KIND_COUNTS)
        ]
        for attribute in kind.attributes:
            values = attribute.value.split()[1:]
            names = [document.name for document in documents if document.kind is kind]
            for name in names:
                for way, kept in fact_questions(attribute):
                    asked.append((way.format(n=name), Reading("fact", kind, attribute, (name,), kept)))
            for way, kept in ways(attribute.count) if attribute.count else ():
                asked += [(way.format(v=v), Reading("count", kind, attribute, (v,), kept)) for v in values]
            two = [name for name in names if attribute.key in facts_of(documents, name)]
            for way, kept in ways(attribute.compare) if attribute.compare else ():
                for a in two:
                    asked += [
                        (way.format(a=a, b=b), Reading("compare", kind, attribute, (a, b), kept)) for b in two if a != b
                    ]
    return asked


def facts_of(documents: list[Document], name: str) -> dict:
    (document,) = [document for document in documents if document.name == name]
    return document.facts


@SPLITS
def test_no_question_has_two_answers(split: Split):
    for seed in range(8):
        documents = write_documents(Words(random.Random(seed), split), 12)
        answers: dict[str, str] = {}
        for text, reading in every_question(documents):
            answer = right_answer(reading, documents, Form.SENTENCE, text)
            assert answers.setdefault(text, answer) == answer


@SPLITS
def test_no_question_is_asked_twice(split: Split):
    for drawn in conversations(split):
        assert 1 <= len({question.text for question in drawn.questions}) == len(drawn.questions) <= 6


def test_tasks_and_forms_can_be_selected():
    for task in ("single", "count", "unstated"):
        drawn = draw_conversation(
            random.Random(1), Split.TRAIN, documents=5, questions=4, form=Form.PLAIN, mix={task: 1.0}
        )
        assert drawn.instruction is None
        assert [question.task for question in drawn.questions] == [task] * 4


def test_unanswerable_questions_are_not_asked():
    written = (write_documents(Words(random.Random(seed), Split.TRAIN), 1)[0] for seed in range(100))
    alone = next(document for document in written if document.kind.name == "town")
    words = Words(random.Random(0), Split.TRAIN)
    assert Asker(words, [alone]).ask("compare") is None
    mayor = replace(alone, facts={"mayor": Value("Bolu Kana", None)})
    assert Asker(words, [mayor], Form.WORD).ask("form") is None
    assert Asker(words, [mayor]).ask("single") is not None


def test_impossible_questions_are_rejected():
    with pytest.raises(ParameterError, match="no question of compare can be asked on 1 documents; take more"):
        draw_conversation(
            random.Random(1), Split.TRAIN, documents=1, questions=1, form=Form.PLAIN, mix={"compare": 1.0}
        )
