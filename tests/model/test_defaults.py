"""The default reuse policy of every interface, empty or malformed chats, and the repr of each object."""

from __future__ import annotations

import pytest

from inlay import LLM, ParameterError, SamplingParams, Schema
from inlay.config import EngineConfig
from inlay.errors import PolicyError
from inlay.prompt.inputs import has_modules
from tests.conftest import tiny
from tests.raising import raises

GREEDY = SamplingParams(temperature=0, max_tokens=3)
SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">One <param name="x" len="4"/>.</module></schema>'
)
DOCUMENT = {"type": "text", "text": "Miami has beaches, and it is warm there in winter."}
MARKED = [{"role": "user", "content": [{**DOCUMENT, "cache_control": {"type": "ephemeral"}}]}]
PLAIN = [{"role": "user", "content": [DOCUMENT]}]


def test_empty_policy_is_rejected():
    with raises("policy.unknown", ParameterError, field="reuse"):
        EngineConfig(reuse="")


@pytest.fixture
def llm():
    made = LLM(tiny("llama"), kv_memory="4MiB")
    yield made
    made.shutdown()


@pytest.mark.parametrize(
    ("prompt", "modules"),
    [
        (SCHEMA.prompt().use("a", x="1"), True),
        (SCHEMA.prompt().build(), True),
        (MARKED, True),
        ({"messages": MARKED}, True),
        ({"messages": MARKED, "tools": []}, True),
        (PLAIN, False),
        ([{"role": "user", "content": "Hello"}], False),
        ("Hello", False),
        ({"prompt": "Hello"}, False),
        ([1, 2, 3], False),
        ({"messages": None}, False),
        ([{"role": "user", "content": None}], False),
        (None, False),
    ],
)
def test_default_policy_depends_on_modules(llm, prompt, modules):
    assert has_modules(prompt) is modules
    assert str(llm.policy_for(prompt)) == ("modular" if modules else "exact")
    assert str(llm.policy_for(prompt, "isolated")) == "isolated"


def test_given_default_applies_to_all_prompts():
    llm = LLM(tiny("llama"), kv_memory="4MiB", reuse="off")
    assert {str(llm.policy_for(prompt)) for prompt in ("Hello", MARKED, SCHEMA.prompt())} == {"off"}
    llm.shutdown()


def test_batch_with_and_without_modules_gets_both_defaults(llm):
    llm.add_schema(SCHEMA)
    of_schema, plain = llm.generate([SCHEMA.prompt().use("a", x="1").text("?"), "Hello"], GREEDY)
    assert of_schema.usage.cached_tokens > 0
    assert plain.usage.cached_tokens == 0


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, [{"content": "hi"}], ["hi"], 3, None])
def test_a_chat_is_a_list_of_messages(llm, messages):
    with raises("parameter.wrong_type", ParameterError, names="chat"):
        llm.chat(messages)
    assert llm.chat([]) == []


def test_objects_have_a_one_line_repr(llm):
    layout = llm.add_schema(SCHEMA)
    (output,) = llm.generate("Hello", GREEDY)
    assert repr(SCHEMA) == '<Schema "s" of <schema>: 1 module>'
    assert repr(layout).startswith('<SchemaLayout of <Schema "s" of <schema>: 1 module>, ')
    assert repr(output).startswith("<RequestOutput 0: ")
    assert "prompt_token_ids" not in repr(output)
    for thing, word in ((SCHEMA, "x"), (layout, "positions"), (output, "finish reason")):
        html = thing._repr_html_()
        assert html.startswith("<table>")
        assert word in html
    assert (
        "<script>"
        not in Schema.from_string('<schema name="s"><module name="a">&lt;script></module></schema>')._repr_html_()
    )


def test_schemas_take_no_fields_of_requests(llm):
    with raises("policy.not_for_schemas", PolicyError, field="recompute") as caught:
        llm.add_schema(SCHEMA, recompute="linked:3")
    assert (caught.value.code, caught.value.field) == ("policy.not_for_schemas", "recompute")


def test_drift_is_a_deprecated_name(llm):
    with pytest.warns(DeprecationWarning, match="divergence"):
        assert llm.drift() == llm.divergence()


def test_policy_fields_equal_the_deprecated_key(llm):
    (fields,) = llm.generate("Hello", reuse="modular", recompute="linked:3", promote=False)
    with pytest.warns(DeprecationWarning, match="Write reuse='modular', recompute='linked:3', promote=False"):
        (key,) = llm.generate("Hello", reuse="modular+linked:3+promote:off")
    assert fields.reuse == key.reuse == "modular+linked:3+promote:off"
