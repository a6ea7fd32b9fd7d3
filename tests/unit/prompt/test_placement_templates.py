"""Prompts in chat templates that strip the bodies of turns, or change a turn when others follow."""

from __future__ import annotations

import logging

import pytest

from inlay.errors import ModelError
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.tokens import TextEncoder
from tests.tokenizers_for_tests import family, gpt2, with_template
from tests.unit.pml.helpers import sentences
from tests.unit.prompt.test_placement import place, shown

L3_USER = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
L3_NEXT = "<|eot_id|><|start_header_id|>{}<|end_header_id|>\n\n"
L3_ANSWER = L3_NEXT.format("assistant")

DOCS = '<user>\n  Docs:\n  <module name="a">\n  AA\n  </module>\n</user>'
#: family, schema, prompt, and the whole as (is it a piece of the template, text)
STRIPPED = {
    "a question on lines of its own": (
        "llama3",
        DOCS,
        "<a/>\n  Why?\n",
        [(True, L3_USER), (False, "Docs:\n"), (False, "AA\n"), (False, "Why?"), (True, L3_ANSWER)],
    ),
    "a system turn and own turns": (
        "llama3",
        "<system>\n Rule.\n</system>",
        "<user>\n Why?\n</user><assistant xml:space='preserve'> So. </assistant><user>Well?\n</user>",
        [
            (True, L3_USER.replace("user", "system")),
            (False, "Rule."),
            (True, L3_NEXT.format("user")),
            (False, "Why?"),
            (True, L3_ANSWER),
            (False, "So."),
            (True, L3_NEXT.format("user")),
            (False, "Well?"),
            (True, L3_ANSWER),
        ],
    ),
    "an assistant turn that is carried on": (
        "gemma",
        DOCS,
        "<a/>Why?\n<assistant>Because\n</assistant>",
        [
            (True, "<s><start_of_turn>user\n"),
            (False, "Docs:\n"),
            (False, "AA\n"),
            (False, "Why?"),
            (True, "<end_of_turn>\n<start_of_turn>model\n"),
            (False, "Because"),
        ],
    ),
    "a folded system turn keeps its ends": (
        "llama2",
        "<system>\n Rule.\n</system><user xml:space='preserve'> Docs:</user>",
        "\nWhy? \n",
        [
            (True, "<s>[INST] <<SYS>>\n"),
            (False, "Rule.\n"),
            (True, "\n<</SYS>>\n\n"),
            (False, " Docs:"),
            (False, "Why?"),
            (True, " [/INST]"),
        ],
    ),
    "a folded system turn alone": (
        "llama2",
        "<system>Rule.</system>",
        "Why?\n",
        [
            (True, "<s>[INST] <<SYS>>\n"),
            (False, "Rule."),
            (True, "\n<</SYS>>\n\n"),
            (False, "Why?"),
            (True, " [/INST]"),
        ],
    ),
    "an argument at the end": (
        "llama3",
        '<user><module name="q">Q: <param name="t" len="30"/></module></user>',
        "<q t=' why?  '/>",
        [(True, L3_USER), (False, "Q: "), (False, " why?"), (True, L3_ANSWER)],
    ),
    "turns around imports": (
        "llama3",
        '<module name="a">AA</module>',
        "<user xml:space='preserve'> <a/> Why? </user>",
        [(True, L3_USER), (False, "AA"), (False, " Why?"), (True, L3_ANSWER)],
    ),
}


@pytest.mark.parametrize(("name", "schema", "prompt", "expected"), STRIPPED.values(), ids=STRIPPED.keys())
def test_ids_are_pieces_and_stripped_bodies(
    name: str, schema: str, prompt: str, expected: list[tuple[bool, str]], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = family(name)
    encoder = TextEncoder(tokenizer)
    placed = place(schema, prompt, "packed", tokenizer)
    assert placed.text == "".join(text for _, text in expected)
    parts = [encoder.template(text) if piece else encoder.text(text) for piece, text in expected]
    assert placed.ids == tuple(token for part in parts for token in part)
    assert not caplog.records


RECOMPUTED = {
    "the last user turn, without a question": ("<user>\n Docs:\n</user>", "", "Docs:"),
    "a question of white space alone": ("<user>\n Docs:\n</user>", "<![CDATA[ \n]]>", "Docs:"),
    "own turns": ("<user>\n Docs:\n</user>", "<assistant>So.</assistant>", f"Docs:{L3_ANSWER}So."),
    "a module left out at the end of a turn": (
        '<user>\n Docs:\n<module name="a">AA</module></user><assistant>So.</assistant>',
        "",
        f"Docs:{L3_ANSWER}So.",
    ),
    "a module left out at the start of a turn": (
        '<user><module name="a">AA</module> and more</user><assistant>So.</assistant>',
        "",
        f"and more{L3_ANSWER}So.",
    ),
}


@pytest.mark.parametrize(("schema", "prompt", "expected"), RECOMPUTED.values(), ids=RECOMPUTED.keys())
def test_schema_text_at_the_end_of_a_turn_is_stripped(
    schema: str, prompt: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = family("llama3")
    template = ChatTemplate(tokenizer)
    for _ in range(2):
        placed = place(schema, prompt, "packed", tokenizer, template)
    assert placed.text.removesuffix(L3_ANSWER) == L3_USER + expected
    assert tokenizer.decode(placed.ids) == placed.text
    assert placed.parts[-1].origin is None
    (record,) = caplog.records
    assert record.getMessage().startswith("the chat template strips the ends of turns: text of the schema that stands")
    caplog.clear()
    if "<module" in schema:  # where the module stands there, all is as the schema has it
        placed = place(schema, "<a/>", "packed", tokenizer)
        assert all(part.origin is not None for part in placed.parts[:-1])
        assert not caplog.records


@pytest.mark.parametrize("prompt", ["<a/>", "<d/>"])
def test_modules_and_defaults_at_an_end_stay_as_written(prompt: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = family("llama3")
    schema = (
        '<user>X<module name="a">AA \n</module><module name="d"><param name="p" len="9" default="D "/></module></user>'
    )
    placed = place(schema, prompt, "packed", tokenizer)
    assert len(placed.parts) == 3
    assert placed.parts[1].origin is not None
    assert tokenizer.decode(placed.ids) == placed.text
    assert "it strips, merges or rewrites them): the prompt differs from its rendering, first at turn 1" in caplog.text


def test_template_that_changes_earlier_turns_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = family("qwen3")
    template = ChatTemplate(tokenizer)
    schema = '<user>Hi<module name="a">AA</module></user><assistant>Yes?<module name="b">BB</module></assistant>'
    closing = "<|im_end|>\n<|im_start|>assistant\n"
    for question in ("Why?", "How?"):
        placed = place(schema, f"<a/><b/>{question}", "packed", tokenizer, template)
        assert [text.partition(" ")[2] for text in shown(placed, tokenizer)] == [
            "<|im_start|>user\nHi",
            "AA",
            f"{closing}Yes?",
            "BB",
            f"<|im_end|>\n<|im_start|>user\n{question}{closing}",
        ]
        assert [part.origin is None for part in placed.parts] == [False, False, True, False, True]
        assert placed.text == template.render(
            [
                {"role": "user", "content": "HiAA"},
                {"role": "assistant", "content": "Yes?BB"},
                {"role": "user", "content": question},
            ]
        )
    (record,) = caplog.records
    assert record.getMessage() == (
        "the chat template writes the schema's turns differently when turns follow: what it puts before turn 2 is "
        "recomputed for each prompt"
    )
    fixed = place(schema, "<a/><b/>Why?", "schema", tokenizer, template)
    assert fixed.parts[3].origin is not None
    assert fixed.parts[3].start == fixed.parts[3].origin.start > fixed.parts[2].end  # the piece is shorter now


def test_last_turn_is_read_from_the_schema(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = family("qwen3")
    placed = place("<user>Hi</user><assistant>Yes?</assistant>", "", "packed", tokenizer)
    assert [part.origin is None for part in placed.parts] == [False, True]
    assert not caplog.records


def test_changed_turn_longer_than_its_gap_is_rejected() -> None:
    growing = "{% for m in messages %}{{ '[%s]' % ('x' * messages|length * 3) }}{{ m.content }}{% endfor %}"
    tokenizer = with_template(gpt2(), growing)
    schema = '<user>Hi</user><assistant>Yes?<module name="b">BB</module></assistant>'
    place(schema, "<b/>Why?", "packed", tokenizer)
    (problem,) = sentences(lambda: place(schema, "<b/>Why?", "schema", tokenizer))
    assert problem.startswith("p.xml: the chat template adds ")
    assert problem.endswith(" more than the schema has room for; use positions 'packed'")


def test_empty_pieces() -> None:
    tokenizer = family("bare")
    schema = '<system><module name="a">A</module></system><user>U</user><assistant>V</assistant>'
    placed = place(schema, "<a/><user>W</user>", "schema", tokenizer)
    assert shown(placed, tokenizer) == ["0 A", "1 UV", "+3 W"]
    assert placed.text == "AUVW"
    assert place("<system/><user/>", "", "packed", tokenizer).parts == ()


def test_continued_turn_is_verified(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        placed = place("<user>hi</user>", "<assistant>So</assistant>", "packed", family("lower"))
    assert placed.text.endswith("<|im_start|>assistant\nSo")
    assert "first at turn 2 (assistant), near" in caplog.text


def test_turn_order_rejected_by_the_template() -> None:
    schema = '<user>Hi<module name="a">AA</module></user>'
    with pytest.raises(ModelError) as error:
        place(schema, "<a/><user>Why?</user>", "packed", family("gemma"))
    assert str(error.value) == (
        "the chat template refuses turns in the order user, user: "
        "Conversation roles must alternate user/assistant/user/assistant/..."
    )
