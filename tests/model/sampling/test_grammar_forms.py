"""Grammars written out: Lark, GBNF and structural tags."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest

from inlay import LLM, ParameterError, SamplingParams
from inlay.models.shapes import bytes_tokenizer
from inlay.sampling.structured import Grammars, Guide
from tests.conftest import tiny
from tests.raising import raises
from tests.tokenizers_for_tests import family

LARK = 'start: greeting " " NAME\ngreeting: "Hello" | "Good day"\nNAME: /[A-Z][a-z]{1,6}/\n'
GBNF = 'root ::= greeting " " name\ngreeting ::= "Hello" | "Good day"\nname ::= [A-Z] [a-z]{1,6}\n'
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TAG = {"structures": [{"begin": "<fn=a>", "schema": SCHEMA, "end": "</fn>"}], "triggers": ["<fn="]}


@cache
def model() -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0)


@cache
def grammars() -> tuple[Grammars, object]:
    tokenizer = family("llama3")
    return Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]), tokenizer


def follows(structure: dict, text: str) -> Guide | None:
    """The parser's state after a text; None if the text is not a prefix of the language."""
    made, tokenizer = grammars()
    guide = made.guide(structure)
    try:
        for token in tokenizer.encode(text, add_special_tokens=False):
            guide.take(token)
    except ParameterError:
        return None
    return guide


@pytest.mark.parametrize("grammar", [LARK, GBNF])
def test_answers_are_in_the_language_of_a_grammar(grammar):
    params = SamplingParams(n=3, seed=1, max_tokens=50, structured_outputs={"grammar": grammar})
    (output,) = model().generate("x", params)
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        assert re.fullmatch(r"(Hello|Good day) [A-Z][a-z]{1,6}", answer.text)


@pytest.mark.parametrize("given", [TAG, {"type": "structural_tag", **TAG}, json.dumps(TAG)])
def test_structural_tag_constrains_only_text_after_its_trigger(given):
    structure = {"structural_tag": given}
    assert follows(structure, "Any text < at all, {x}") is not None
    assert follows(structure, 'Text <fn=a>{"x": 3}</fn> and more <fn=a>{"x":1}</fn>') is not None
    assert follows(structure, "Text <fn=b>") is None
    assert follows(structure, 'Text <fn=a>{"y": 3}') is None


def test_forced_structural_tag_constrains_special_tokens():
    tokenizer = bytes_tokenizer()
    tokenizer.add_tokens(["<|channel|>", "<|message|>", "<|start|>"], special_tokens=True)
    made = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tag = {
        "structures": [{"begin": "<|channel|>to=a<|message|>", "schema": schema, "end": ""}],
        "triggers": ["<|channel|>"],
        "forced": True,
        "lead": "<|start|>assistant",
    }

    def complete(text: str, *, special: bool = True) -> bool:
        guide = made.guide({"structural_tag": tag})
        marked = tokenizer if special else bytes_tokenizer()
        try:
            for token in marked.encode(text, add_special_tokens=False):
                guide.take(token)
        except ParameterError:
            return False
        return guide.complete

    assert complete('<|channel|>to=a<|message|>{"x": 3}')
    assert complete('<|start|>assistant<|channel|>to=a<|message|>{"x": 3}')
    assert not complete('<|channel|>to=a<|message|>{"x": 3}', special=False)
    assert not complete("Hello")
    assert not complete('<|channel|>to=a<|message|>{"y": 3}')
    with raises("structured.invalid", ParameterError):
        made.guide({"structural_tag": {**tag, "lead": 3}})


def test_json_schemas_of_structural_tags_are_bounded():
    wide = {"type": "object", "properties": {f"p{n}": {} for n in range(5_000)}}
    tag = {"structures": [{"begin": "<a>", "schema": wide, "end": ""}], "triggers": ["<a>"]}
    with pytest.raises(ParameterError, match="it has more than 4,096 keys"):
        model().generate("x", SamplingParams(structured_outputs={"structural_tag": tag}))


@pytest.mark.parametrize(
    ("structure", "sentence"),
    [
        ({"grammar": "nonsense"}, "structured_outputs['grammar'] cannot be used: it is neither Lark nor GBNF: "),
        ({"grammar": "start: missing"}, "structured_outputs['grammar'] cannot be used: "),
        ({"grammar": "root ::= missing"}, "structured_outputs['grammar'] cannot be used: "),
        (
            {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
            "structured_outputs['grammar'] cannot be used: it",
        ),
        ({"grammar": "start: " + '"a"' * 60_000}, "structured_outputs['grammar'] cannot be used: it takes 180,007"),
        (
            {"grammar": 'start: %json {"type": "object"}'},
            "structured_outputs['grammar'] cannot be used: it has '%json', and a grammar may not hold others; write",
        ),
        ({"structural_tag": "[]"}, "structured_outputs['structural_tag'] cannot be used: it must be an object"),
        ({"structural_tag": "{"}, "structured_outputs['structural_tag'] is no JSON: "),
        ({"structural_tag": {"format": {}}}, "structured_outputs['structural_tag'] cannot be used: \"format\" is the"),
        ({"structural_tag": {**TAG, "structures": []}}, "structured_outputs['structural_tag'] cannot be used: \"struc"),
        ({"structural_tag": {**TAG, "triggers": [""]}}, "structured_outputs['structural_tag'] cannot be used: \"trig"),
        (
            {"structural_tag": {**TAG, "triggers": ["[x"]}},
            "structured_outputs['structural_tag'] cannot be used: \"structures\"[0] begins with '<fn=a>', and no",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unusable_structures_are_rejected_with_a_reason(structure, sentence):
    with pytest.raises(ParameterError) as caught:
        model().generate("x", SamplingParams(structured_outputs=structure))
    assert str(caught.value).startswith(sentence)


def test_texts_of_a_grammar_may_look_like_directives():
    assert follows({"grammar": 'start: "%json @" /%[a-z]/ // %json\n'}, "%json @%a") is not None
