"""A tokenizer with more tokens than its model: a request that contains one fails before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from inlay import LLM, ModelError, ParameterError, PMLError, Prompt, SamplingParams, Schema
from inlay.models.load import stop_ids
from inlay.models.shapes import bytes_tokenizer
from tests.conftest import tiny
from tests.raising import raises

WIDE = "\u2003\u2003"  # white space may be a token in any text
WIDE_TOKEN = f"263 ({WIDE!r})"
REMEDY = "the tokenizer does not belong to this model; use the model's own, or resize the model's embeddings to the "
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SCHEMA = Schema.from_string(
    '<schema name="s">Go. <module name="a">One <param name="p" len="8" default="two"/></module></schema>'
)
TOOL = {"type": "function", "function": {"name": "f", "description": f"a{WIDE}b"}}


def tokenizer(template: str = "") -> Any:
    """Its tokens 262 and 263 are beyond the model. template: the start of the chat template."""
    made = bytes_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    made.add_tokens([AddedToken(WIDE, normalized=False)])
    made.chat_template = template + made.chat_template
    return made


def model(template: str = "", **settings: Any) -> LLM:
    loaded = replace(tiny("llama"), tokenizer=tokenizer(template))
    return LLM(loaded, kv_memory="16MiB", seed=0, chunk_size=4, **settings)


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = model("{{ tools[0].function.description if tools }}")
    llm.add_schema(SCHEMA)
    return llm


@pytest.mark.parametrize(
    ("prompt", "token"),
    [
        ("Hello <|tool|>", "262 ('<|tool|>')"),
        ({"prompt": f"Hello{WIDE}"}, WIDE_TOKEN),
        ([{"role": "user", "content": f"Hello{WIDE}"}], WIDE_TOKEN),
        ([{"role": "user", "content": [{"type": "text", "text": f"Hello{WIDE}"}]}], WIDE_TOKEN),
        ({"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL]}, WIDE_TOKEN),
        (SCHEMA.prompt().use("a").text(f"Well{WIDE}?"), WIDE_TOKEN),
        (SCHEMA.prompt().use("a", p=WIDE).text("Well?"), WIDE_TOKEN),
        (Prompt.from_json({"schema": "s", "content": [{"import": "a"}, f"Well{WIDE}?"]}), WIDE_TOKEN),
    ],
)
def test_a_prompt_of_any_form(llm: LLM, prompt: Any, token: str):
    alone = llm.generate("Hello", PARAMS)[0].outputs[0].token_ids
    with pytest.raises(ParameterError) as caught:
        llm.generate(prompt, PARAMS)
    assert f"the prompt holds token {token}, and the model knows tokens 0 to 261: {REMEDY}" in str(caught.value)
    assert not llm.stats().busy
    assert llm.generate("Hello", PARAMS)[0].outputs[0].token_ids == alone


def test_token_ids(llm: LLM):
    for prompt in ([1, 262], {"prompt_token_ids": [262]}):
        with raises("prompt.unknown_token", ParameterError, names="262"):
            llm.generate(prompt, PARAMS)


def test_unknown_token_in_a_schema_prompt_is_located(llm: LLM):
    prompt = Prompt.from_string(f'<prompt schema="s"><a/>Well{WIDE}?</prompt>', source="ask.xml")
    with raises("prompt.unknown_token", ParameterError, names="ask.xml:1:9"):
        llm.generate(prompt, PARAMS)


def test_a_chat_template():
    llm = model("<|tool|>")
    with raises("prompt.unknown_token", ParameterError, names="262"):
        llm.chat([{"role": "user", "content": "Hello"}], PARAMS)
    assert len(llm.generate("Hello", PARAMS)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (f'<schema name="s">Go.{WIDE}</schema>', "s.xml:1:18"),
        (f'<schema name="s">Go.\n<module name="a"><module name="b">{WIDE}</module></module></schema>', "s.xml:2:35"),
        (
            f'<schema name="s"><module name="a"><param name="p" len="8" default="{WIDE}"/></module></schema>',
            "s.xml:1:35",
        ),
        ('<schema name="s"><system>Go.</system></schema>', "s.xml:1:18"),
    ],
)
@pytest.mark.parametrize("encode", [True, False])
def test_a_schema(schema: str, place: str, encode: bool):
    llm = model("<|tool|>")
    with pytest.raises(PMLError) as caught:
        llm.add_schema(Schema.from_string(schema, source="s.xml"), encode=encode)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{place}: this becomes token 26")
    assert REMEDY in str(problem)
    assert llm.schema("s") is None


def test_unknown_token_in_the_schema_prefix_is_rejected():
    loaded = replace(tiny("llama"), tokenizer=tokenizer())
    backend = loaded.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<|tool|> $A", special_tokens=[("<|tool|>", 262)])
    llm = LLM(loaded, kv_memory="16MiB")
    with raises("model.unknown_token", PMLError, names="262"):
        llm.add_schema(Schema.from_string('<schema name="s">Go.</schema>', source="s.xml"))


def test_unknown_placeholder_token_is_rejected():
    loaded = replace(tiny("llama"), tokenizer=tokenizer())
    loaded.tokenizer.unk_token = "<|tool|>"
    assert LLM(loaded, kv_memory="16MiB").encoder.unk_id == 262
    with raises("model.unknown_token", ModelError, names="262"):
        LLM(loaded, kv_memory="16MiB", placeholders="unk")


def test_unknown_end_token_is_ignored():
    loaded = replace(tiny("llama"), tokenizer=tokenizer())
    ends = stop_ids(loaded)
    loaded.tokenizer.eos_token = "<|tool|>"
    assert stop_ids(loaded) < ends
    llm = LLM(loaded, kv_memory="16MiB", seed=0)
    (output,) = llm.generate("Hello", replace(PARAMS, ignore_eos=False, min_tokens=3))
    assert len(output.outputs[0].token_ids) >= 3


def test_grammar_over_a_larger_tokenizer(llm: LLM):
    with raises("structured.wrong_tokenizer"):
        llm.generate("Hello", replace(PARAMS, structured_outputs={"choice": ["yes"]}))
