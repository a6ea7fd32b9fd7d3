"""Prompts as token ids and positions, worked out by hand: one token a character, but for chat templates."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from inlay.errors import ModelError
from inlay.models.shapes import bytes_tokenizer
from inlay.pml import Prompt, Schema, resolve
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.layout import Hole, TextRun, lay_out_schema
from inlay.prompt.placement import Placed, PromptLayout, lay_out_ids, lay_out_prompt
from inlay.prompt.tokens import TextEncoder
from tests.raising import raises
from tests.tokenizers_for_tests import family, llama2
from tests.unit.pml.helpers import sentences

S, U, A, END = "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"


def place(schema: str, prompt: str, positions: str = "packed", tokenizer=None, template=None) -> PromptLayout:
    tokenizer = tokenizer or bytes_tokenizer()
    encoder, template = TextEncoder(tokenizer), template or ChatTemplate(tokenizer)
    layout = lay_out_schema(Schema.from_string(f'<schema name="s">{schema}</schema>'), encoder, template)
    parsed = Prompt.from_string(f'<prompt schema="s">{prompt}</prompt>', source="p.xml")
    resolved = resolve(layout.schema, parsed, moves=positions == "packed")
    return lay_out_prompt(resolved, layout, encoder, template, packed=positions == "packed")


def shown(placed: PromptLayout, tokenizer=None) -> list[str]:
    """One string a part: its start and its text, with + before text of the request and = before a default."""
    tokenizer = tokenizer or bytes_tokenizer()
    strings = []
    for part in placed.parts:
        mark = "+" if part.origin is None else "=" if isinstance(part.origin, Hole) else ""
        strings.append(f"{mark}{part.start} {tokenizer.decode(part.ids)}")
        if isinstance(part.origin, TextRun):
            assert part.ids == part.origin.ids
        elif isinstance(part.origin, Hole):
            assert part.ids == part.origin.default
    return strings


TRIP = (
    'Go.<module name="trip">For <param name="d" len="6" default="a day"/> to <union><module name="m">Miami</module>'
    '<module name="u">Ulm</module></union><module name="v">V</module>!</module><module name="b">Bye</module>'
)
#: schema, prompt, expected positions under schema positions, and under packed positions
BY_HAND = {
    "anonymous text alone": ("Hello", "", ["0 Hello"], ["0 Hello"]),
    "and new text": ("Hello", "you", ["0 Hello", "+5 you"], ["0 Hello", "+5 you"]),
    "no import": (TRIP, "x", ["0 Go.", "+3 x"], ["0 Go.", "+3 x"]),
    "a module that follows a gap": (TRIP, "<b/>", ["0 Go.", "24 Bye"], ["0 Go.", "3 Bye"]),
    "a default": (
        TRIP,
        "<trip><m/></trip>",
        ["0 Go.", "3 For ", "=7 a day", "13  to ", "17 Miami", "23 !"],
        ["0 Go.", "3 For ", "=7 a day", "12  to ", "16 Miami", "21 !"],
    ),
    "a short argument, a shorter member": (
        TRIP,
        '<trip d="2"><u/></trip><b/>',
        ["0 Go.", "3 For ", "+7 2", "13  to ", "17 Ulm", "23 !", "24 Bye"],
        ["0 Go.", "3 For ", "+7 2", "8  to ", "12 Ulm", "15 !", "16 Bye"],
    ),
    "an argument that fills its hole": (
        TRIP,
        '<trip d="3 days"/>',
        ["0 Go.", "3 For ", "+7 3 days", "13  to ", "23 !"],
        ["0 Go.", "3 For ", "+7 3 days", "13  to ", "17 !"],
    ),
    "an empty argument": (
        TRIP,
        '<trip d=""/>',
        ["0 Go.", "3 For ", "13  to ", "23 !"],
        ["0 Go.", "3 For ", "7  to ", "11 !"],
    ),
    "new text in gaps that it fits": (
        TRIP,
        '<trip d="2"><u/>mm<v/></trip><b/>?',
        ["0 Go.", "3 For ", "+7 2", "13  to ", "17 Ulm", "+20 mm", "22 V", "23 !", "24 Bye", "+27 ?"],
        ["0 Go.", "3 For ", "+7 2", "8  to ", "12 Ulm", "+15 mm", "17 V", "18 !", "19 Bye", "+22 ?"],
    ),
    "new text in place of a module": (
        TRIP,
        "xyz<b/>",
        ["0 Go.", "+3 xyz", "24 Bye"],
        ["0 Go.", "+3 xyz", "6 Bye"],
    ),
}


@pytest.mark.parametrize(("schema", "prompt", "fixed", "packed"), BY_HAND.values(), ids=BY_HAND.keys())
def test_by_hand(schema: str, prompt: str, fixed: list[str], packed: list[str]) -> None:
    assert shown(place(schema, prompt, "schema")) == fixed
    assert shown(place(schema, prompt, "packed")) == packed


def test_ids_positions_and_names() -> None:
    placed = place(TRIP, "<trip><u/></trip><b/>?", "schema")
    assert placed.positions == (*range(12), *range(13, 20), *range(23, 28))
    assert placed.text == bytes_tokenizer().decode(placed.ids) == "Go.For a day to Ulm!Bye?"
    assert placed.imported == {"trip", "trip/u", "b"}
    assert lay_out_ids([5, 6], "x") == PromptLayout(None, (Placed((5, 6), 0, None),), "x")


def test_moved_imports() -> None:
    assert shown(place(TRIP, "<b/>x<trip><m/></trip>")) == [
        "0 Go.",
        "3 Bye",
        "+6 x",
        "7 For ",
        "=11 a day",
        "16  to ",
        "20 Miami",
        "25 !",
    ]


@pytest.mark.parametrize("positions", ["schema", "packed"])
def test_overlong_argument_is_rejected(positions: str) -> None:
    assert sentences(lambda: place(TRIP, "<trip d='4 weeks'/>", positions)) == [
        "p.xml:1:26: the argument 'd' is 7 tokens long and its len is 6; shorten it, or write len=\"7\" in the schema"
    ]


REMEDY = "shorten it, move it to the end, or use positions 'packed'"
OVERFLOWS = {
    "by one token": (
        "<trip><u/>mmm<v/></trip>",
        "p.xml:1:30: the new text is 1 token too long for its gap in the schema",
    ),
    "by several": ("<trip/>mmm<b/>", "p.xml:1:27: the new text is 3 tokens too long for its gap in the schema"),
    "two texts together, at the latest": (
        "<trip><u/><!-- -->mm</trip>xy<b/>",
        "p.xml:1:47: the new text is 4 tokens too long for its gap in the schema",
    ),
    "before the first import": (
        "m" * 23 + "<b/>",
        "p.xml:1:20: the new text is 2 tokens too long for its gap in the schema",
    ),
}


@pytest.mark.parametrize(("prompt", "expected"), OVERFLOWS.values(), ids=OVERFLOWS.keys())
def test_new_text_longer_than_its_gap_is_rejected(prompt: str, expected: str) -> None:
    assert sentences(lambda: place(TRIP, prompt, "schema")) == [f"{expected}; {REMEDY}"]
    place(TRIP, prompt, "packed")


def test_all_problems_are_reported() -> None:
    problems = sentences(lambda: place(TRIP, "<trip d='4 weeks'/>mmm<b/>", "schema"))
    assert [problem.split(":")[2] for problem in problems] == ["26", "39"]


@pytest.mark.parametrize("positions", ["schema", "packed"])
def test_bos_once_and_first(positions: str) -> None:
    tokenizer = llama2()
    for schema in ('The ferry<module name="a"> leaves</module>', '<module name="a"> leaves</module>'):
        for prompt in ("", "<a/>", "<a/>today", "today"):
            ids = place(schema, prompt, positions, tokenizer).ids
            assert (ids[:1], ids.count(1)) == ((1,), 1)


def test_new_text_before_a_module_that_follows_bos() -> None:
    assert place('<module name="a">x</module>', "m<a/>", "packed", llama2()).positions == (0, 1, 2)
    with raises("pml.too_long", line=1):
        place('<module name="a">x</module>', "m<a/>", "schema", llama2())


CHAT = '<system>Rule.</system><user>Docs:<module name="a">AA</module><module name="b">BB</module></user>'
OPEN = f"{S}Rule.{END}{U}Docs:"
#: family, schema, prompt, parts under packed positions without their starts
CHATS = {
    "a question ends the user turn of the schema": (
        CHAT,
        "<a/>Why?",
        [OPEN, "AA", f"+Why?{END}{A}"],
    ),
    "without a question": (CHAT, "<b/>", [OPEN, "BB", f"+{END}{A}"]),
    "a user turn that ends with text": ("<user>Docs: </user>", "Why?", [f"{S}X{END}{U}Docs: ", f"+Why?{END}{A}"]),
    "an own turn for a question behind an assistant": (
        "<user>Hi</user><assistant>Yes?</assistant>",
        "Why?",
        [f"{S}X{END}{U}Hi{END}{A}Yes?", f"+{END}{U}Why?{END}{A}"],
    ),
    "an own turn for a question behind a system turn": (
        '<system>Rule.<module name="a">AA</module></system>',
        "<a/>Why?",
        [f"{S}Rule.", "AA", f"+{END}{U}Why?{END}{A}"],
    ),
    "own turns": (
        CHAT,
        "<a/><assistant>Well.</assistant><user>Why?</user>",
        [OPEN, "AA", f"+{END}{A}Well.{END}{U}Why?{END}{A}"],
    ),
    "an own assistant turn is carried on": (
        CHAT,
        "<a/>Why?<assistant>Because </assistant>",
        [OPEN, "AA", f"+Why?{END}{A}Because "],
    ),
    "an assistant turn of the schema is closed": (
        "<user>Hi</user><assistant>Yes?</assistant>",
        "",
        [f"{S}X{END}{U}Hi{END}{A}Yes?", f"+{END}{A}"],
    ),
    "empty turns": ("<system/><user/>", "<assistant/><user/>", [f"{S}{END}{U}", f"+{END}{A}{END}{U}{END}{A}"]),
    "a turn that starts with a module": (
        '<user><module name="a">AA</module>B</user>',
        "<a/>C",
        [f"{S}X{END}{U}", "AA", "B", f"+C{END}{A}"],
    ),
    "turns around the imports of modules alone": (
        '<module name="a">AA</module><module name="b">BB</module>',
        "<system>Rule.</system><user><a/>Why?<b/></user>",
        [f"+{S}Rule.{END}{U}", "AA", "+Why?", "BB", f"+{END}{A}"],
    ),
    "a question that opens a role": (CHAT, "&lt;|im_end|>", [OPEN, f"+<|im_end|>{END}{A}"]),
}


@pytest.mark.parametrize(("schema", "prompt", "expected"), CHATS.values(), ids=CHATS.keys())
def test_chats(schema: str, prompt: str, expected: list[str], caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = family("qwen2.5")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "X"
    )
    placed = place(schema, prompt, "packed", tokenizer)
    assert [text.partition(" ")[2] for text in shown(placed, tokenizer)] == [e.removeprefix("+") for e in expected]
    assert [part.origin is None for part in placed.parts] == [e.startswith("+") for e in expected]
    assert placed.text == "".join(e.removeprefix("+") for e in expected)
    assert placed.positions == tuple(range(len(placed.ids)))
    assert not caplog.records
    opens, closes = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert placed.ids.count(opens) == placed.text.count("<|im_start|>")
    assert placed.ids.count(closes) == placed.text.count("<|im_end|>") - prompt.count("im_end")
    if not schema.startswith("<module"):  # where modules alone start at 0, a template in front finds no room
        assert place(schema, prompt, "schema", tokenizer).ids == placed.ids


def test_schema_positions_of_a_chat() -> None:
    tokenizer = family("qwen2.5")
    encoder = TextEncoder(tokenizer)
    placed = place(CHAT, "<b/>Why?", "schema", tokenizer)
    length = len(encoder.template(S) + encoder.text("Rule.") + encoder.template(END + U) + encoder.text("Docs:"))
    a, b = len(encoder.text("AA")), len(encoder.text("BB"))
    assert [part.start for part in placed.parts] == [0, length + a, length + a + b]


def test_schema_positions_reject_module_only_turns_without_space() -> None:
    tokenizer = family("llama3")
    schema = '<module name="a">AA</module>'
    placed = place(schema, "<user><a/></user>", "packed", tokenizer)
    assert placed.ids.count(TextEncoder(tokenizer).bos[0]) == 1
    assert placed.ids[:1] == TextEncoder(tokenizer).bos
    (problem,) = sentences(lambda: place(schema, "<user><a/></user>", "schema", tokenizer))
    assert problem.startswith("p.xml: the chat template adds ")
    assert problem.endswith("tokens more than the schema has room for; use positions 'packed'")


def test_prompt_turn_without_a_chat_template_is_rejected() -> None:
    with raises("model.no_chat_template", ModelError):
        place('<module name="a">AA</module>', "<user><a/></user>", "packed", llama2())


def test_ids_and_positions_are_built_once():
    placed = place('<module name="m">abc</module>', "<m/>de")
    assert placed.ids is placed.ids
    assert placed.positions is placed.positions
    shorter = replace(placed, parts=placed.parts[:1])
    assert (shorter.ids, shorter.positions) == (placed.parts[0].ids, tuple(range(3)))
    assert placed == place('<module name="m">abc</module>', "<m/>de")
    with pytest.raises(FrozenInstanceError):
        placed.text = ""
