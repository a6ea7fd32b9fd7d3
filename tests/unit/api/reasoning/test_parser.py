"""Reasoning is separated from content, however the text is cut."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import ParameterError
from inlay.api.reasoning import FORMATS, EndMarks, ModelReasoning, ReasoningUse, model_reasoning
from tests.raising import raises
from tests.tokenizers_for_tests import gpt2, with_template

QWEN, R1, SEED, HARMONY, GEMMA, MISTRAL = FORMATS
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)

#: format, prompt, text → reasoning, content
CASES = [
    (QWEN, "<a>", "<think>\nWell.\n</think>\n\nYes.", "Well.", "Yes."),
    (QWEN, "<a>", "Yes. No <think> here.", "", "Yes. No <think> here."),
    (QWEN, "<a>", "  <thin", "", "  <thin"),
    (QWEN, "<a><think>\n", "Well.</think>Yes.", "Well.", "Yes."),
    (QWEN, "<a><think>\n", "<think>Well.</think>Yes.", "Well.", "Yes."),
    (QWEN, "<a><think>\n", "<think>\n<think>Well.</think>Yes.", "<think>Well.", "Yes."),
    (QWEN, "<a><think>\n\n</think>\n\n", "Yes. </think>", "", "Yes. </think>"),
    (QWEN, "<a>", "<think>It goes on </thin and on", "It goes on </thin and on", ""),
    (QWEN, "<a>", "<think></think>Yes.", "", "Yes."),
    (R1, "<a>", "Well.\n</think>\n\nYes. \n", "Well.", "Yes. \n"),
    (R1, "<a>", "Well.", "Well.", ""),
    (SEED, "<a>", "<seed:think>a b</seed:think>c", "a b", "c"),
    (GEMMA, "<a>", "<|channel>thought\nWell.<channel|>Yes.", "Well.", "Yes."),
    (GEMMA, "<a><|channel>thought\n", "Well.<channel|>Yes.", "Well.", "Yes."),
    (GEMMA, "<a><|channel>thought\n<channel|>", "Yes.", "", "Yes."),
    (MISTRAL, "<a>", "[THINK]Well.[/THINK]Yes.", "Well.", "Yes."),
]


def use(row, last: str | None = None) -> ReasoningUse:
    tokenizer = gpt2()
    return ReasoningUse(ModelReasoning(row, frozenset(), None, lambda ids: str(tokenizer.decode(list(ids)))), last=last)


def split(reader: ReasoningUse, prompt: str, pieces: list[str]) -> tuple[str, str]:
    parser = reader.parser(prompt)
    parts = [*map(parser.feed, pieces), parser.finish()]
    return "".join(one.reasoning for one in parts), "".join(one.content for one in parts)


@pytest.mark.parametrize(("row", "prompt", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_are_separated(row, prompt, text, reasoning, content):
    assert split(use(row), prompt, [text]) == (reasoning, content)
    assert split(use(row), prompt, list(text)) == (reasoning, content)


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_splitting_the_text_does_not_change_the_result(case, cuts):
    row, prompt, text, reasoning, content = case
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert split(use(row), prompt, [text[a:b] for a, b in pairwise(edges)]) == (reasoning, content)


@pytest.mark.parametrize(
    ("last", "text", "expected"),
    [
        ("<think>Well", " then.</think>Yes.", ("then.", "Yes.")),
        ("<think>Well.</think>Ye", "s.", ("", "s.")),
        ("Ye", "s.", ("", "s.")),
    ],
)
def test_continued_message_keeps_its_reasoning_state(last, text, expected):
    assert split(use(QWEN, last), "<a>" + last, [text]) == expected


@pytest.mark.parametrize(("row", "prompt", "text", "reasoning", "content"), CASES)
def test_tokens_are_counted_up_to_the_mark(row, prompt, text, reasoning, content):
    tokenizer, reader = gpt2(), use(row)
    ids = tokenizer.encode(text)
    count = reader.count(prompt, ids)
    if not reasoning:
        assert count in (0, len(tokenizer.encode("<think></think>")))
    elif content:
        assert row.closes in tokenizer.decode(ids[:count])
        assert row.closes not in tokenizer.decode(ids[: count - 1])
    else:
        assert count == len(ids)


def test_reasoning_format_is_detected_from_the_template():
    assert model_reasoning(gpt2()).format is None
    told = model_reasoning(with_template(gpt2(), TEMPLATE))
    assert told.format is QWEN
    assert "enable_thinking" in told.variables
    assert model_reasoning(with_template(gpt2(), TEMPLATE), "off").format is None
    assert model_reasoning(gpt2(), "deepseek_r1").format is R1
    with raises("parameter.invalid", ParameterError, names="reasoning_parser"):
        model_reasoning(gpt2(), "r2")


def test_special_token_marks_require_end_token_removal():
    tokenizer = copy.deepcopy(gpt2())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|end|>"]})
    found = model_reasoning(with_template(tokenizer, TEMPLATE))
    assert found.format is QWEN
    assert "<|end|>" in found.ends
    assert not found.ends & {"<think>", "</think>"}
    assert not model_reasoning(with_template(gpt2(), TEMPLATE)).ends


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Yes.<|end|>", "Yes."), ("<|end|>Yes.", "<|end|>Yes."), ("Yes.<|en", "Yes.<|en"), ("<|end|>", ""), ("", "")],
)
def test_the_token_at_the_end_is_removed(text: str, expected: str):
    for pieces in ([text], list(text)):
        marks = EndMarks(frozenset(("<|end|>", "<|x|>")))
        assert "".join([*map(marks.feed, pieces), marks.finish()]) == expected


def test_harmony_is_detected_from_its_template():
    template = "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}"
    assert model_reasoning(with_template(gpt2(), template)).format is HARMONY


def test_single_token_mark_is_used_to_count_reasoning():
    tokenizer = gpt2()
    tokenizer.add_tokens(["<think>", "</think>"])
    model = model_reasoning(with_template(tokenizer, TEMPLATE))
    ids = tokenizer.encode("<think>a b c</think>d e")
    assert model.close_id is not None
    assert ReasoningUse(model).count("<a>", ids) == ids.index(model.close_id) + 1
    assert ReasoningUse(model).count("<a>", ids[:3]) == 3
    assert ReasoningUse(model).count("<a>", tokenizer.encode("d e")) == 0
