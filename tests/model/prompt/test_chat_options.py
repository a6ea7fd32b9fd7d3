"""Chat template options of a conversation: variables, documents, and the end of the rendering."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inlay import LLM, ModelError, ParameterError, SamplingParams
from tests.conftest import tiny
from tests.raising import raises
from tests.tokenizers_for_tests import with_template

THINKING = (
    "{%- if effort is not defined %}{%- set effort = 'some' %}{%- endif %}"
    "{%- for doc in documents or [] %}[{{ doc.title }}: {{ doc.text }}]\n{% endfor %}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>({{ effort }})"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "What is it?"}
BEGUN = {"role": "assistant", "content": "It is "}


def model(template: str) -> LLM:
    loaded = tiny("llama")
    return LLM(replace(loaded, tokenizer=with_template(loaded.tokenizer, template)), kv_memory="16MiB", seed=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return model(THINKING)


def text(llm: LLM, messages: list[dict[str, Any]], **options: Any) -> str:
    layout = llm.lay_out({"messages": messages, **options})
    assert llm.tokenizer.decode(layout.ids) == layout.text
    return layout.text


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@pytest.mark.parametrize("make", [dict, in_parts])
def test_variables_reach_the_template_and_no_other_conversation(llm, make):
    messages = [make(USER)]
    plain = "<|user|>What is it?<|end|>\n<|assistant|>(some)"
    assert text(llm, messages) == plain
    off = {"enable_thinking": False}
    assert text(llm, messages, chat_template_kwargs=off) == plain + "<think></think>"
    assert text(llm, messages, chat_template_kwargs={"effort": "high"}) == plain.replace("some", "high")
    long = "high " * 50
    assert text(llm, messages, chat_template_kwargs={"effort": long}) == plain.replace("some", long)
    assert text(llm, messages) == plain


@pytest.mark.parametrize("make", [dict, in_parts])
def test_documents_reach_a_template_with_document_support(llm, make):
    documents = [{"title": "A", "text": "one"}, {"title": "B", "text": "two"}]
    assert text(llm, [make(USER)], documents=documents).startswith("[A: one]\n[B: two]\n<|user|>")


@pytest.mark.parametrize("make", [dict, in_parts])
def test_a_rendering_without_a_generation_prompt(llm, make):
    assert text(llm, [make(USER)], add_generation_prompt=False) == "<|user|>What is it?<|end|>\n"


@pytest.mark.parametrize("make", [dict, in_parts])
def test_final_message_is_continued_verbatim(llm, make):
    said = text(llm, [make(USER), make(BEGUN)], continue_final_message=True)
    assert said == "<|user|>What is it?<|end|>\n<|assistant|>It is "
    assert said == text(llm, [make(USER), make(BEGUN)], continue_final_message=True, add_generation_prompt=False)


def test_variable_value_cannot_open_a_role():
    llm = model("{{ messages[0].content }}{{ hint }}")
    (special,) = {llm.tokenizer.eos_token}
    layout = llm.lay_out({"messages": [USER], "chat_template_kwargs": {"hint": special}})
    assert llm.tokenizer.eos_token_id not in layout.ids
    assert llm.tokenizer.decode(layout.ids) == "What is it?" + special


def test_template_without_the_last_message_cannot_continue_it():
    llm = model("{{ messages[0].content }}")
    with raises("model.unusable_chat_template", ModelError):
        text(llm, [USER, BEGUN], continue_final_message=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chat_template_kwargs": 3}, "chat_template_kwargs is 3; it must be an object"),
        (
            {"chat_template_kwargs": {"thinking": True}},
            "chat_template_kwargs has 'thinking', and this model's chat template takes effort, enable_thinking; write",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs has 'messages', which is a field of its own",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has 'tokenize', and this model's"),
        ({"documents": ["text"]}, "documents is ['text']; it must be a list of objects of texts"),
        ({"documents": [{"title": 1}]}, "documents is [{'title': 1}]; it must be a list of objects of texts"),
        ({"add_generation_prompt": 1}, "add_generation_prompt is 1; it must be True or False"),
        ({"continue_final_message": "yes"}, "continue_final_message is 'yes'; it must be True or False"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message goes on with the last message, and add_generation_prompt opens a new one",
        ),
        ({"continue_final_message": True}, "continue_final_message is given, and the last message is no text of the"),
    ],
)
def test_invalid_options_are_rejected(llm, options, sentence):
    with pytest.raises(ParameterError) as caught:
        text(llm, [USER], **options)
    assert str(caught.value).startswith(sentence)


def test_template_without_variables_rejects_them():
    llm = model("{% for message in messages %}{{ message.content }}{% endfor %}")
    with raises("parameter.unknown", ParameterError, names="'effort'"):
        text(llm, [USER], chat_template_kwargs={"effort": "high"})
    with raises("request.unsupported_documents", ParameterError, names="documents"):
        text(llm, [USER], documents=[])


def test_template_functions_are_not_variables():
    llm = model("{% for message in messages %}{{ message.content }}{% else %}{{ raise_exception('x') }}{% endfor %}")
    with raises("parameter.unknown", ParameterError, names="'raise_exception'"):
        text(llm, [USER], chat_template_kwargs={"raise_exception": "x"})


def test_chat_accepts_all_template_options():
    llm = model(THINKING)
    params = SamplingParams(temperature=0, max_tokens=1)
    (off,) = llm.chat([USER], params, chat_template_kwargs={"enable_thinking": False})
    assert off.prompt.endswith("<think></think>")
    outputs = llm.chat([[USER, BEGUN], [BEGUN]], params, continue_final_message=True)
    assert [output.prompt[-6:] for output in outputs] == ["It is ", "It is "]
    (whole,) = llm.chat([USER], params, documents=[{"title": "A", "text": "one"}], add_generation_prompt=False)
    assert whole.prompt == "[A: one]\n<|user|>What is it?<|end|>\n"
    with raises("parameter.unknown", ParameterError, names="'tool_use'"):
        llm.chat([USER], params, chat_template_kwargs={"tool_use": 1})
