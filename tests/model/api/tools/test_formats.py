"""Which format of calls a model has."""

from __future__ import annotations

import pytest

from inlay import ParameterError
from inlay.api.tools.formats import FORMATS, model_tools, named_format
from tests.model.api.tool_templates import tool_tokenizer
from tests.raising import raises
from tests.tokenizers_for_tests import with_template


@pytest.mark.parametrize(
    ("family", "name", "key", "ends"),
    [
        ("qwen", "hermes", "arguments", False),
        ("llama", "llama3_json", "parameters", True),
        ("mistral", "mistral", "arguments", True),
        ("simple", "json", "arguments", False),
    ],
)
def test_call_format_is_detected_from_the_template(family: str, name: str, key: str, ends: bool):
    found = model_tools(tool_tokenizer(family))
    assert found is not None
    assert (found.format.name, found.format.key, bool(found.ends)) == (name, key, ends)
    assert found.history == (family != "simple")
    marks = {found.format.opens, found.format.closes, *found.format.inside}
    assert not found.ends & marks


SHOWS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("said", "name", "key"),
    [
        ("<tool_call>", "hermes", "arguments"),
        ("<tool_call><function=", "qwen3_coder", "arguments"),
        ("<seed:tool_call>", "seed_oss", "arguments"),
        ("<tool_call>name<arg_key>", "glm45", "arguments"),
        ("<minimax:tool_call>", "minimax_m2", "arguments"),
        ("<｜DSML｜function_calls>", "deepseek_v32", "arguments"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3", "arguments"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31", "arguments"),
        ("<|tool_calls_section_begin|>", "kimi_k2", "arguments"),
        ("<|tool_list_start|>", "lfm2", "arguments"),
        ("<|tool_call>call:", "gemma4", "arguments"),
        ("<start_function_call>", "functiongemma", "arguments"),
        ("<|channel|>commentary<|message|>", "openai", "arguments"),
        ("<|header_start|>", "llama4_pythonic", "parameters"),
        ("Write [func_name1(params_name1=value)]", "pythonic", "arguments"),
        ("<|tool_call|>", "granite", "arguments"),
        ('Answer with {"name": "…", "parameters": {…}}', "json", "parameters"),
        ('Answer with {"name": "…", "arguments": {…}, "parameters": {…}}', "json", "arguments"),
    ],
)
def test_other_templates(said: str, name: str, key: str):
    tokenizer = with_template(tool_tokenizer("none"), "{# " + said + " #}" + SHOWS)
    found = model_tools(tokenizer)
    assert found is not None
    assert (found.format.name, found.format.key) == (name, key)


def test_a_named_parser():
    found = model_tools(tool_tokenizer("simple"), "hermes")
    assert found is not None
    assert found.format.name == "hermes"
    for row in FORMATS:
        assert named_format(row.name) is row
    assert model_tools(tool_tokenizer("none"), "hermes") is None  # even though its template shows no tools
    with raises("parameter.invalid", ParameterError, names="'xlam'"):
        model_tools(tool_tokenizer("qwen"), "xlam")


def test_tool_template_is_preferred_among_several():
    tokenizer = with_template(tool_tokenizer("none"), None)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": tool_tokenizer("qwen").chat_template}
    found = model_tools(tokenizer)
    assert found is not None
    assert found.format.name == "hermes"


def test_no_template():
    assert model_tools(with_template(tool_tokenizer("none"), None)) is None
