"""Chat templates of real families, taken apart by sentinels."""

from __future__ import annotations

import logging

import pytest

from inlay.errors import ModelError
from inlay.prompt.chat import ChatTemplate, Trim
from tests.raising import raises
from tests.tokenizers_for_tests import family, gpt2, with_template

BOTH = Trim(None, None)
QWEN = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"

PIECES = {
    "a system turn is given": (
        "qwen2.5",
        ("system", "user"),
        ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    ),
    "a default system turn": (
        "qwen2.5",
        ("user",),
        (QWEN + "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    ),
    "system folded into user": (
        "llama2",
        ("system", "user", "assistant", "user"),
        ("<s>[INST] <<SYS>>\n", "\n<</SYS>>\n\n", " [/INST] ", " </s><s>[INST] ", " [/INST]"),
    ),
    "begins with BOS": (
        "llama3",
        ("user",),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ),
    "another name for the assistant": (
        "gemma",
        ("user", "assistant"),
        (
            "<s><start_of_turn>user\n",
            "<end_of_turn>\n<start_of_turn>model\n",
            "<end_of_turn>\n<start_of_turn>model\n",
        ),
    ),
    "letters in another case": (
        "lower",
        ("system", "user"),
        ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    ),
    "nothing at all": ("bare", ("user", "assistant"), ("", "", "")),
}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(family(name))


@pytest.mark.parametrize(("name", "roles", "expected"), PIECES.values(), ids=PIECES.keys())
def test_pieces(name: str, roles: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert template(name).pieces(roles, generation=True) == expected
    assert len(template(name).trims(roles, generation=True)) == len(roles)


def test_without_a_generation_prompt() -> None:
    assert template("qwen2.5").pieces(["user"], generation=False) == (QWEN + "<|im_start|>user\n", "<|im_end|>\n")


def test_many_turns_have_empty_pieces() -> None:
    pieces = template("bare").pieces(["user"] * 120, generation=True)
    assert pieces == ("",) * 121


def test_piece_depends_on_following_turns() -> None:
    qwen3 = template("qwen3")
    opened = "<|im_end|>\n<|im_start|>assistant\n"
    assert qwen3.opening_pieces(["user", "assistant"])[1] == opened + "<think>\n\n</think>\n\n"
    assert qwen3.pieces(["user", "assistant", "user"], generation=True)[1] == opened


OPENING = {
    "accepted as they are": ("qwen2.5", ["system", "user"], ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n")),
    "accepted though an assistant is last": (
        "mistral",
        ["user", "assistant"],
        ("<s>[INST] ", " [/INST]"),
    ),
    "a system turn alone is not shown": ("llama2", ["system"], ("<s>[INST] <<SYS>>\n",)),
    "a system turn goes into the last user turn": ("mistral-last", ["system"], ("<s>[INST] ",)),
}


@pytest.mark.parametrize(("name", "roles", "expected"), OPENING.values(), ids=OPENING.keys())
def test_opening_pieces(name: str, roles: list[str], expected: tuple[str, ...]) -> None:
    assert template(name).opening_pieces(roles) == expected
    assert len(template(name).opening_trims(roles)) == len(roles)


def test_opening_pieces_if_an_assistant_turn_may_not_be_last() -> None:
    refuses = ChatTemplate(
        with_template(
            gpt2(),
            "{% if messages[-1].role == 'assistant' %}{{ raise_exception('The last turn must be of a user.') }}"
            "{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}",
        )
    )
    assert refuses.opening_pieces(["user", "assistant"]) == ("[user]", "[assistant]")
    assert refuses.opening_trims(["user", "assistant"]) == (BOTH, BOTH)
    with raises("model.chat_template_refusal", ModelError, names="The last turn must be of a user"):
        refuses.pieces(["user", "assistant"], generation=False)


TRIMS = {
    "none": ("qwen2.5", ("system", "user", "assistant"), (Trim(), Trim(), Trim())),
    "all": ("llama3", ("system", "user", "assistant"), (BOTH, BOTH, BOTH)),
    "an assistant, in a template that wants turns to alternate": ("gemma", ("user", "assistant"), (BOTH, BOTH)),
    "a user turn": ("llama2", ("user", "assistant", "user"), (BOTH, BOTH, BOTH)),
    "a user turn behind a folded system turn": ("llama2", ("system", "user"), (Trim(), Trim("", None))),
    "line breaks alone, of the last turn": ("qwen3", ("user", "assistant"), (Trim(), Trim("\n", ""))),
    "nothing of that turn when others follow": ("qwen3", ("user", "assistant", "user"), (Trim(), Trim(), Trim())),
    "nothing between": ("bare", ("user", "user"), (Trim(), Trim())),
}


@pytest.mark.parametrize(("name", "roles", "expected"), TRIMS.values(), ids=TRIMS.keys())
def test_trims(name: str, roles: tuple[str, ...], expected: tuple[Trim, ...]) -> None:
    assert template(name).trims(roles, generation=False) == expected


def test_trims_between_bodies_that_touch() -> None:
    touching = "{% for m in messages %}{{ m.content | trim if m.role == 'user' else m.content }}{% endfor %}"
    trims = ChatTemplate(with_template(gpt2(), touching)).trims(["user", "assistant", "user"], generation=True)
    assert trims == (BOTH, Trim(), BOTH)


def test_a_template_that_rewrites_white_space_trims_nothing() -> None:
    rewriting = "{% for m in messages %}{{ m.content.replace('\\n', '/') }}{% endfor %}"
    assert ChatTemplate(with_template(gpt2(), rewriting)).trims(["user"], generation=True) == (Trim(),)
    breaking = "{% for m in messages %}{{ raise_exception('no') if '\\n' in m.content else m.content }}{% endfor %}"
    assert ChatTemplate(with_template(gpt2(), breaking)).trims(["user"], generation=True) == (Trim(),)


def test_trim() -> None:
    assert (BOTH.start(" \t\n a "), BOTH.end(" a\u00a0\n")) == ("a ", " a")
    assert (Trim("\n", "\n").start("\n a"), Trim("\n", "\n").end("a \n\n")) == (" a", "a ")
    assert (Trim().start(" a"), Trim().end("a ")) == (" a", "a ")


REFUSED = {
    "no system turns": (
        "gemma",
        ["system", "user"],
        "the chat template refuses turns in the order system, user: System role not supported",
    ),
    "roles that do not alternate": (
        "llama2",
        ["user", "user"],
        "the chat template refuses turns in the order user, user: "
        "Conversation roles must alternate user/assistant/user/assistant/...",
    ),
    "a body that is dropped": (
        "llama2",
        ["system"],
        "the chat template does not show the body of turn 1 (system) once, for turns in the order system",
    ),
    "bodies in another order": (
        "mistral-last",
        ["system", "user", "assistant", "user"],
        "the chat template moves the body of turn 2 (user) in front of another one, "
        "for turns in the order system, user, assistant, user",
    ),
}


@pytest.mark.parametrize(("name", "roles", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_rejected_turn_orders_are_reported(name: str, roles: list[str], expected: str) -> None:
    with pytest.raises(ModelError) as error:
        template(name).pieces(roles, generation=True)
    assert str(error.value) == expected


def test_rejected_opening_names_the_schemas_turns() -> None:
    with pytest.raises(ModelError) as error:
        template("gemma").opening_pieces(["system"])
    assert str(error.value) == "the chat template refuses turns in the order system: System role not supported"


BROKEN = {
    "a body shown twice": ("{{ messages[0].content * 2 }}", "does not show the body of turn 1 (user) once"),
    "a later body shown early": (
        "{{ messages[1].content }}{{ messages[0].content }}{{ messages[1].content }}",
        "does not show the body of turn 2 (user) once",
    ),
    "a syntax error": ("{% nonsense %}", "refuses turns in the order user, user: Encountered unknown tag 'nonsense'."),
    "an undefined name": ("{{ messages[0].content.a.b }}", "refuses turns in the order user, user: "),
    "a division by zero": ("{{ 1 / 0 }}", "refuses turns in the order user, user: division by zero"),
    "an error on several lines": ("{{ raise_exception('one\n  two') }}", "user, user: one two"),
    "an error without words": ("{{ raise_exception('') }}", "user, user: TemplateError"),
}


@pytest.mark.parametrize(("source", "expected"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_templates(source: str, expected: str) -> None:
    with pytest.raises(ModelError) as error:
        ChatTemplate(with_template(gpt2(), source)).pieces(["user", "user"], generation=True)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_no_template() -> None:
    none = ChatTemplate(gpt2())
    assert not none.exists
    for call in (none.pieces, none.trims):
        with pytest.raises(ModelError) as error:
            call(["user"], generation=True)
        assert str(error.value) == "the model's tokenizer has no chat template; write prompts without chat turns"


def test_verify_logs_nothing_if_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("qwen2.5", "llama2", "llama3", "gemma"):
        chat = template(name)
        for generation in (False, True):
            pieces = chat.pieces(["user"], generation=generation)
            for body in ("Hello", "", "73109460000951268373109460001951268 {{ x }} {% y %} <|im_end|>"):
                chat.verify(["user"], [body], pieces, generation=generation)
    assert not caplog.records


def test_verify_warns_once_with_the_place(caplog: pytest.LogCaptureFixture) -> None:
    lower = template("lower")
    roles = ["system", "user"]
    pieces = lower.pieces(roles, generation=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            lower.verify(roles, ["be kind", "well, Where to?"], pieces)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the chat template changes the text of turns (it strips, merges or rewrites them): the prompt differs from its "
        "rendering, first at turn 2 (user), near 'm_start|>user\\nwell, Where to?<|im_end|>\\n'; "
        "inlay keeps the text as written"
    )


def test_verify_reports_a_missing_end(caplog: pytest.LogCaptureFixture) -> None:
    bare = template("bare")
    bare.verify(["user"], ["abc"], ("", "more"))
    assert "first at turn 1 (user), near 'abcmore';" in caplog.text


def test_verify_reports_a_template_refusal(caplog: pytest.LogCaptureFixture) -> None:
    prudish = ChatTemplate(
        with_template(
            gpt2(),
            "{% for m in messages %}{% if 'x' in m.content %}{{ raise_exception('no x') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
        )
    )
    for _ in range(2):
        prudish.verify(["user"], ["x"], ("", ""))
    (record,) = caplog.records
    assert record.getMessage() == (
        "the chat template refuses the text of this prompt: the chat template refuses turns in the order user: no x"
    )


def test_a_refusal_of_many_turns_is_short() -> None:
    template = ChatTemplate(with_template(gpt2(), "{{ raise_exception('no') }}"))
    with pytest.raises(ModelError) as caught:
        template.pieces(["user", "assistant"] * 10_000, generation=True)
    assert str(caught.value).startswith("the chat template refuses turns in the order user, assistant, user")
    assert str(caught.value).endswith("assistant, … (20,000 turns): no")
    assert len(str(caught.value)) < 400
