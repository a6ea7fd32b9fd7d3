"""The cases: right answers follow from the imported documents alone, and prompts have the training format."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from itertools import chain

import pytest

from inlay import LLM, SamplingParams
from inlay.pml import Import
from inlay_lab.eval.across import ACROSS_TASKS, ALL_TASKS
from inlay_lab.eval.conversations import Conversation
from inlay_lab.eval.documents import Document, kinds
from inlay_lab.eval.modular_cases import Case, Round, draw_rounds
from inlay_lab.eval.questions import KIND_COUNTS, TASKS, Form, Question
from inlay_lab.eval.words import held_out
from inlay_lab.train.lessons import Encoder
from tests.model.check.models import small_model, small_tokenizer


def draw(questions: int = 100, documents: int = 4, spare: int = 4, seed: int = 0) -> list[Round]:
    return draw_rounds(documents=documents, spare=spare, questions=questions, seed=seed)


def cases(task: str) -> list[tuple[Case, list[Document], list[Document]]]:
    """The cases of a task, each with its imported documents and with all documents of its schema."""
    return [
        (case, [each.documents[number] for number in case.imported], list(each.documents))
        for each in draw()
        for case in each.cases
        if case.task == task
    ]


@pytest.mark.parametrize(("asked", "each"), [(5, 1), (100, 20), (15, 3), (6, 2), (1, 1)])
def test_every_task_has_as_many_questions(asked, each):
    counts = Counter(case.task for one in draw(asked) for case in one.cases)
    assert counts == dict.fromkeys(TASKS, each)


@pytest.mark.parametrize(("documents", "spare"), [(2, 0), (3, 1), (12, 12)])
def test_any_number_of_documents(documents, spare):
    for each in draw(15, documents, spare):
        assert len(each.documents) == documents + spare
        assert len({document.name for document in each.documents}) == documents + spare
        for case in each.cases:
            assert len(case.imported) == documents
            assert list(case.imported) == sorted(set(case.imported))


def test_a_seed_names_its_cases():
    assert draw(10) == draw(10)
    assert draw(10) != draw(10, seed=1)


def test_questions_do_not_change():
    """Further wordings for training must not change the questions that compare models."""
    texts = [
        *(document.text for each in draw(20, 6, 6) for document in each.documents),
        *(f"{case.question} {case.answer}" for each in draw(20, 6, 6) for case in each.cases),
    ]
    assert sha256("\n".join(texts).encode()).hexdigest()[:16] == "ae0049cb987d58b6"


def test_prompts_of_one_schema_import_different_documents():
    for each in draw(20, 6, 6):
        assert len({case.imported for case in each.cases}) > 1
        imported = set(chain.from_iterable(case.imported for case in each.cases))
        assert len(imported) > 6


def test_scaffolds_equal_the_imports_of_cases():
    for each in draw(20, 6, 6):
        assert not each.schema().scaffolds
        named = [scaffold.modules for scaffold in each.schema(scaffolds=True).scaffolds]
        imports = [tuple(f"document-{number + 1}" for number in case.imported) for case in each.cases]
        assert named == list(dict.fromkeys(imports))
        assert len(each.schema(scaffolds=True).children) == len(each.schema().children)


def test_names_are_held_out():
    for case, imported, _ in cases("compare"):
        best = case.answer.partition(", so ")[2]
        assert best in {document.name for document in imported}
        made = [word for word in best.replace("-", " ").split() if word.isalpha() and word.istitle()]
        assert any(map(held_out, made))


def test_single_answers_are_in_an_imported_document():
    for case, imported, _ in cases("single"):
        (answer,) = {
            fact.text
            for document in imported
            for attribute in document.kind.attributes
            if attribute.key in document.facts and asks(case.question, document, attribute.key)
            for fact in [document.facts[attribute.key]]
        }
        assert case.answer == answer


def test_comparisons_are_of_imported_documents():
    for case, imported, _ in cases("compare"):
        matches = [
            (attribute, a, b)
            for a in imported
            for b in imported
            for attribute in a.kind.attributes
            if attribute.compare and case.question == attribute.compare.ways[-1].format(a=a.name, b=b.name)
        ]
        attribute, a, b = matches[0]
        first, second = a.facts[attribute.key], b.facts[attribute.key]
        best = a if (first.order > second.order) == attribute.greatest else b
        assert case.answer == f"{a.name}: {first.text}, {b.name}: {second.text}, so {best.name}"


def test_counts_are_of_imported_documents():
    everything = []
    for case, imported, written in cases("count"):
        assert case.answer == str(counted(case.question, imported))
        everything.append(counted(case.question, written) != int(case.answer))
    assert any(everything)  # counting over documents that are not imported would be noticed


def test_subtasks_are_as_named():
    found: dict[str, set[str]] = {}
    for task in TASKS:
        for case, imported, _ in cases(task):
            found.setdefault(task, set()).add(case.subtask)
            if task == "form":
                assert case.subtask == case.form.value
            elif task == "count":
                assert (case.subtask == "kind") == any(
                    case.question == KIND_COUNTS.ways[-1].format(many=kind.many) for kind in kinds()
                )
            elif task == "unstated":
                assert (case.subtask == "attribute") == any(document.name in case.question for document in imported)
    assert found == {
        "single": {""},
        "compare": {""},
        "count": {"kind", "value"},
        "unstated": {"attribute", "thing"},
        "form": {"capitals", "word", "sentence"},
    }


def test_unstated_facts_are_in_no_imported_document():
    for case, imported, _ in cases("unstated"):
        assert case.answer == "not stated"
        assert not any(asks(case.question, document, key) for document in imported for key in document.facts)


def test_forms_are_requested_and_followed():
    forms = set()
    for case, imported, _ in cases("form"):
        forms.add(case.form)
        facts = [value for document in imported for value in document.facts.values()]
        if case.form is Form.CAPITALS:
            assert case.answer in {fact.text.upper() for fact in facts}
        elif case.form is Form.WORD:
            assert case.answer in {fact.word for fact in facts}
        else:
            assert any(fact.text in case.answer for fact in facts)
            assert any(case.answer in document.text for document in imported)
    assert forms == {Form.CAPITALS, Form.WORD, Form.SENTENCE}


@pytest.mark.parametrize(
    ("reuse", "positions"), [("off", "packed"), ("off", "schema"), ("anchored", "packed"), ("isolated", "schema")]
)
def test_prompts_equal_the_training_format(reuse, positions):
    encoder = Encoder(small_tokenizer())
    llm = LLM(small_model(), kv_memory="64MiB")
    (each,) = draw(10, 2, 2)
    llm.add_schema(each.schema(), reuse=reuse, positions=positions)
    prompts = [each.prompt(case) for case in each.cases]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1), reuse=reuse, positions=positions)
    for case, prompt, output in zip(each.cases, prompts, outputs, strict=True):
        assert output.prompt_token_ids == tuple(trained_on(encoder, each, case))
        names = [child.name for child in prompt.children if isinstance(child, Import)]
        assert names[: len(names) - 2] == ([case.form.value] if case.task == "form" else [])
        gaps = output.prompt_positions[-1] >= len(output.prompt_positions)
        assert gaps == (positions == "schema")


def trained_on(encoder: Encoder, each: Round, case: Case) -> list[int]:
    """The token ids of a case in the training format."""
    instruction = each.instructions.get(case.form)
    system = "".join(line + "\n" for line in (each.system, instruction) if line)
    documents = [each.documents[number] for number in case.imported]
    conversation = Conversation(system, instruction, documents, [Question(case.task, case.question, case.answer)])
    runs, [(question, _)] = encoder.conversation(conversation)
    return [*chain.from_iterable(runs), *question]


def asks(question: str, document: Document, key: str) -> bool:
    """True if a question asks for this attribute of this document."""
    (attribute,) = [attribute for attribute in document.kind.attributes if attribute.key == key]
    ways = [attribute.questions.ways[-1]] + [f"Please give the {phrase} of {{n}}." for phrase in attribute.phrases]
    return question in [way.format(n=document.name) for way in ways]


def counted(question: str, documents: list[Document]) -> int:
    """The answer to a question of "count" over documents."""
    for kind in kinds():
        if question == f"How many of the documents are about {kind.many}?":
            return sum(document.kind is kind for document in documents)
        for attribute in kind.attributes:
            for value in attribute.value.split()[1:] if attribute.count else ():
                if attribute.count and question == attribute.count.ways[-1].format(v=value):
                    facts = [document.facts.get(attribute.key) for document in documents if document.kind is kind]
                    return sum(fact is not None and fact.text == value for fact in facts)
    raise AssertionError(question)


def test_tasks_do_not_affect_each_other():
    every = draw_rounds(documents=4, spare=4, questions=4 * len(ALL_TASKS), seed=0, tasks=ALL_TASKS)
    for task in ALL_TASKS:
        alone = draw_rounds(documents=4, spare=4, questions=4, seed=0, tasks=(task,))
        assert [case for each in alone for case in each.cases] == [
            case for each in every for case in each.cases if case.task == task
        ]
    five = [each.of(TASKS) for each in every if each.of(TASKS).cases]
    assert five == draw_rounds(documents=4, spare=4, questions=4 * len(TASKS), seed=0)


def test_fewer_questions_are_a_prefix_of_more():
    few, many = (draw_rounds(documents=3, spare=3, questions=n, seed=2, tasks=ALL_TASKS) for n in (18, 54))
    assert len(few) == len(many) / 3
    assert all(each in many for each in few)


@pytest.mark.parametrize(("documents", "spare"), [(2, 0), (6, 6), (24, 0)])
def test_questions_across_any_number_of_documents(documents, spare):
    rounds = draw_rounds(documents=documents, spare=spare, questions=8, seed=0, tasks=ACROSS_TASKS)
    found = [case for each in rounds for case in each.cases]
    assert Counter(case.task for case in found) == dict.fromkeys(ACROSS_TASKS, 2)
    assert all(list(case.imported) == sorted(set(case.imported)) for case in found)
    assert {len(case.imported) for case in found} == {documents}


def test_pairs_are_imported_together():
    rounds = draw_rounds(documents=4, spare=8, questions=40, seed=0, tasks=("conflict",))
    for each in rounds:
        for case in each.cases:
            assert len({each.documents[number].name for number in case.imported}) < 4
    answers = [case.answer.endswith("so no") for each in rounds for case in each.cases]
    assert 0.2 < sum(answers) / len(answers) < 0.8


def test_documents_in_any_order():
    rounds = draw_rounds(documents=5, spare=2, questions=30, seed=0, tasks=ALL_TASKS, permuted=True)
    llm = LLM(small_model(), kv_memory="64MiB")
    orders = [case.imported for each in rounds for case in each.cases]
    assert sum(list(order) != sorted(order) for order in orders) > len(orders) / 2
    each = rounds[0]
    llm.add_schema(each.schema(), reuse="anchored", positions="packed")
    case = next(case for case in each.cases if list(case.imported) != sorted(case.imported))
    (output,) = llm.generate([each.prompt(case)], SamplingParams(max_tokens=1), reuse="anchored", positions="packed")
    assert output.prompt_token_ids == tuple(trained_on(Encoder(small_tokenizer()), each, case))
