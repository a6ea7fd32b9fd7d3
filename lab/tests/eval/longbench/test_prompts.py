"""Rows as prompts: every document is a module, nothing is lost, and long texts are cut as in the benchmark."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest

from inlay import LLM, ParameterError
from inlay_lab.eval.longbench.data import Sample, Template, open_suite
from inlay_lab.eval.longbench.datasets import DATASETS
from inlay_lab.eval.longbench.prompts import Case, fitted, has_turns
from tests.model.check.models import small_model, small_tokenizer

from .test_data import EXAMPLE

#: Documents of the example's first row, for datasets with more than one.
DOCUMENTS = {
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), 5),
    **dict.fromkeys(("dureader", "multi_news", "samsum", "repobench-p"), 2),
    **dict.fromkeys(("triviaqa", "lsht", "passage_retrieval_zh"), 3),
    **dict.fromkeys(("trec", "passage_count"), 4),
    "passage_retrieval_en": 7,
}
WORDS = Template(("Read. ",), (" Now: ", None))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(small_model(), kv_memory="32MiB", max_model_len=512, seed=0)


def sample(context: str, question: str = "Who?") -> Sample:
    return Sample("1", context, question, ("Rosa",), ())


@pytest.mark.parametrize("name", DATASETS)
def test_row_is_split_into_its_documents(name: str) -> None:
    first, second = open_suite(EXAMPLE).samples(DATASETS[name])
    for row in (first, second):
        assert "".join(DATASETS[name].documents(row.context)) == row.context
    assert len(DATASETS[name].documents(first.context)) == DOCUMENTS.get(name, 1)


def test_document_starts_only_at_the_next_number() -> None:
    context = "Passage 1:\nOne.\nPassage 7:\nof it\n\nPassage 2:\nTwo.\nPassage 1:\nAgain. Passage 3: no\nPassage 3:\nx"
    pieces = DATASETS["hotpotqa"].documents(context)
    assert [piece.partition("\n")[0] for piece in pieces] == ["Passage 1:", "Passage 2:", "Passage 3:"]
    assert "".join(pieces) == context


def test_a_context_without_documents() -> None:
    assert DATASETS["hotpotqa"].documents("no marks") == ("no marks",)
    assert DATASETS["hotpotqa"].documents("") == ()
    assert DATASETS["trec"].documents("Some examples.\nQuestion: a\nQuestion: b") == (
        "Some examples.\nQuestion: a\n", "Question: b"
    )  # fmt: skip


@pytest.mark.parametrize("name", ["hotpotqa", "trec", "lcc", "dureader"])
def test_prompt_equals_the_filled_template(llm: LLM, name: str) -> None:
    suite = open_suite(EXAMPLE)
    for row in suite.samples(DATASETS[name]):
        case = fitted(llm, DATASETS[name], suite.templates[name], row, 16, chat=True, longest=None)
        head, tail = suite.templates[name].around(row)
        assert "".join((case.head, *case.documents, case.tail)) == head + row.context + tail
        assert (case.cut, case.chat) == (False, name in ("hotpotqa", "dureader"))
        llm.add_schema(case.schema(), encode=False, replace=True)
        said = llm.tokenizer.decode(llm.lay_out(case.prompt()).ids)
        assert head + row.context + tail in said
        assert ("<|user|>" in said) == case.chat


def test_middle_is_left_out_as_in_the_benchmark(llm: LLM) -> None:
    """Half of the tokens remain from either end of the whole text; documents are the remaining pieces."""
    context = "".join(
        f"Passage {number}:\nThe town of Bravel was founded in {1400 + number}.\n" for number in range(1, 40)
    )
    row, limit = sample(context), 120
    case = fitted(llm, DATASETS["hotpotqa"], WORDS, row, 16, chat=False, longest=limit)
    text = f"Read. {context} Now: Who?"
    ids = llm.tokenizer(text).input_ids
    assert len(ids) > 512
    decode = llm.tokenizer.decode
    expected = decode(ids[: limit // 2], skip_special_tokens=True) + decode(
        ids[-(limit // 2) :], skip_special_tokens=True
    )
    assert "".join((case.head, *case.documents, case.tail)) == expected
    assert case.cut
    assert case.documents[0].startswith("Passage 1:\n")
    assert case.documents[-1].startswith("Passage 39:\n")
    assert 2 < len(case.documents) < 39


@pytest.mark.parametrize("chat", [False, True])
def test_space_is_left_for_the_answer(llm: LLM, chat: bool) -> None:
    """For any number of tokens in the template and at the borders of pieces."""
    for words in range(60, 900, 97):
        row = sample("".join(f"Passage {number}:\nglass\n" for number in range(1, words)))
        case = fitted(llm, DATASETS["hotpotqa"], WORDS, row, 100, chat=chat, longest=None)
        llm.add_schema(case.schema(), encode=False, replace=True)
        taken = len(llm.lay_out(case.prompt()).ids)
        assert taken <= 412
        assert taken > 370 or not case.cut, "no more is left out than must be"


def test_document_on_both_sides_of_the_cut_stays_one(llm: LLM) -> None:
    row = sample(" ".join(f"word{number}" for number in range(900)))
    case = fitted(llm, DATASETS["qasper"], WORDS, row, 32, chat=False, longest=None)
    (document,) = case.documents
    assert document.startswith("word0 word1 ")
    assert document.endswith(" word899")


def test_too_long_answers_are_an_error(llm: LLM) -> None:
    with pytest.raises(
        ParameterError, match=r"qasper: answers have up to 510 tokens, .* context of 512; give a smaller"
    ):
        fitted(llm, DATASETS["qasper"], WORDS, sample("a"), 510, chat=False, longest=None)


def test_a_row_without_a_context_is_asked(llm: LLM) -> None:
    case = fitted(llm, DATASETS["qasper"], WORDS, sample(""), 16, chat=True, longest=None)
    assert case.documents == ()
    llm.add_schema(case.schema(), encode=False, replace=True)
    assert llm.lay_out(case.prompt()).ids


def test_case_key_covers_the_whole_prompt() -> None:
    row = sample("a b")
    cases = [
        Case(row, "h", ("a", "b"), "t", True, False),
        Case(row, "h", ("ab",), "t", True, False),
        Case(row, "h", ("a", "b"), "t", False, False),
        Case(row, "h", ("a", "b"), "u", True, False),
        Case(Sample("1", "a b", "Who?", ("Pavel",), ()), "h", ("a", "b"), "t", True, False),
    ]
    keys = [case.key(16) for case in cases]
    assert len({*keys, cases[0].key(17)}) == 6
    assert all(one != other for one, other in pairwise(keys))
    assert keys == [case.key(16) for case in cases]


def test_a_model_without_a_template_has_no_turns(llm: LLM) -> None:
    assert has_turns(llm)
    bare = deepcopy(small_tokenizer())
    bare.chat_template = None
    assert not has_turns(LLM(replace(small_model(), tokenizer=bare), kv_memory="16MiB", seed=0))
