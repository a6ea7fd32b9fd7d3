"""Options of a model: its chat template, and the length of its context."""

from __future__ import annotations

import pytest

from inlay import LLM, ContextError, ParameterError, Prompt, SamplingParams, Schema
from inlay.models.load import LoadedModel
from tests.conftest import tiny
from tests.raising import raises

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}!"
CHAT = [{"role": "user", "content": "Hello"}]
ONE = SamplingParams(temperature=0, max_tokens=1)


def made(**options: object) -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", **options)


def test_chat_template_option_replaces_the_models():
    theirs, own = made(chat_template=TEMPLATE), made()
    (output,) = theirs.chat(CHAT, ONE)
    assert theirs.tokenizer.decode(output.prompt_token_ids).endswith("[user]Hello!")
    assert theirs.model_name == own.model_name
    assert "[user]" not in own.tokenizer.decode(own.chat(CHAT, ONE)[0].prompt_token_ids), "it is not another caller's"
    schema = Schema.from_string('<schema name="s"><user>Hello <module name="m">there</module></user></schema>')
    theirs.add_schema(schema)
    laid_out = theirs.lay_out(Prompt.from_string('<prompt schema="s"><m/></prompt>'))
    assert "[user]Hello there" in theirs.tokenizer.decode(laid_out.ids)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "chat_template: it shows no messages; give the text of a chat template in Jinja"),
        ("my-template.jinja", "chat_template: it shows no messages"),
        ("{% for message in messages %}\n{{ message.role }}\n{% endfro %}", "chat_template:3: Encountered unknown tag"),
        ("{{ messages", "chat_template:1: unexpected end of template"),
    ],
)
def test_invalid_chat_template_is_rejected(text, sentence):
    with pytest.raises(ParameterError) as caught:
        made(chat_template=text)
    assert str(caught.value).startswith(sentence)


def test_a_shorter_context():
    model: LoadedModel = tiny("llama")
    llm = made(max_model_len=16)
    assert llm.loaded.spec.max_positions == 16
    assert model.spec.max_positions == made().loaded.spec.max_positions == 2048
    answer = llm.generate([3] * 10, SamplingParams(temperature=0, ignore_eos=True))[0].outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (6, "length")
    with raises("request.too_long", ContextError, names="16"):
        llm.generate([3] * 16, ONE)


@pytest.mark.parametrize(
    ("length", "code"),
    [
        (2049, "parameter.out_of_range"),
        (1, "parameter.out_of_range"),
        (True, "parameter.out_of_range"),
    ],
)
def test_unsupported_context_lengths_are_rejected(length, code):
    with raises(code, ParameterError, names="max_model_len"):
        made(max_model_len=length)
