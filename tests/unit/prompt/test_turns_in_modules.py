"""Chat turns that come with modules, and text without a role between turns."""

from __future__ import annotations

import pytest

from inlay.errors import ModelError, PMLError
from inlay.models.shapes import bytes_tokenizer
from inlay.pml import Prompt, Schema, resolve
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.layout import lay_out_schema
from inlay.prompt.placement import PromptLayout
from inlay.prompt.tokens import TextEncoder
from tests.raising import raises
from tests.tokenizers_for_tests import family
from tests.unit.pml.helpers import sentences
from tests.unit.prompt.test_placement import END, A, S, U, place, shown

L3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
EOT = "<|eot_id|>"


def chatml():
    tokenizer = family("qwen2.5")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "X"
    )
    return tokenizer


def texts(placed: PromptLayout, tokenizer) -> list[str]:
    """A string a part, with + before text that is computed for the prompt."""
    found = [text.partition(" ")[2] for text in shown(placed, tokenizer)]
    return [f"{'+' if part.origin is None else ''}{text}" for part, text in zip(placed.parts, found, strict=True)]


SHOTS = (
    "<system>Rule.</system>"
    '<module name="a"><user>Q1</user><assistant>A1</assistant></module>'
    '<module name="b"><user>Q2</user><assistant>A2</assistant></module>'
    '<module name="task">Task <param name="n" len="4"/>: <user>Now <module name="deep">deep </module></user></module>'
)
PLAIN = '<system>Rule.</system>Between.<module name="m"> M.</module><user>Docs:</user>'
#: schema, prompt, expected parts; + before text that is computed for the prompt
CHATML = {
    "no turn of a module": (SHOTS, "Why?", [f"{S}Rule.", f"+{END}{U}Why?{END}{A}"]),
    "the turns of one": (
        SHOTS,
        "<a/>Why?",
        [f"{S}Rule.", f"{END}{U}", "Q1", f"{END}{A}", "A1", f"+{END}{U}Why?{END}{A}"],
    ),
    "turns and text of a module": (
        SHOTS,
        '<task n="1"><deep/></task>Why?',
        [f"{S}Rule.", END, "Task ", "+1", ": ", U, "Now ", "deep ", f"+Why?{END}{A}"],
    ),
    "text between turns": (PLAIN, "", [f"{S}Rule.{END}Between.", f"{U}Docs:", f"+{END}{A}"]),
    "and modules": (PLAIN, "<m/>Why?", [f"{S}Rule.{END}Between.", " M.", f"{U}Docs:", f"+Why?{END}{A}"]),
    "text in front": (
        'Front.<module name="m"> M.</module><user>Docs:</user>',
        "<m/>",
        ["Front.", " M.", f"{S}X{END}{U}Docs:", f"+{END}{A}"],
    ),
    "text at the end": (
        '<user>Docs:</user>Last.<module name="m"> M.</module>',
        "<m/>Why?",
        [f"{S}X{END}{U}Docs:{END}Last.", " M.", f"+{U}Why?{END}{A}"],
    ),
    "modules alone, and a turn of the prompt": (
        '<module name="a">AA</module><module name="b">BB</module>',
        "<a/>new<user>Why?</user>",
        ["AA", f"+new{S}X{END}{U}Why?{END}{A}"],
    ),
}


def layout_of(schema: str, tokenizer):
    encoder = TextEncoder(tokenizer)
    return lay_out_schema(Schema.from_string(f'<schema name="s">{schema}</schema>'), encoder, ChatTemplate(tokenizer))


@pytest.mark.parametrize(("schema", "prompt", "expected"), CHATML.values(), ids=CHATML.keys())
def test_chatml(schema: str, prompt: str, expected: list[str], caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = chatml()
    placed = place(schema, prompt, "packed", tokenizer)
    whole = "".join(text.removeprefix("+") for text in expected)
    assert placed.text == tokenizer.decode(placed.ids) == whole
    assert placed.positions == tuple(range(len(placed.ids)))
    assert texts(placed, tokenizer) == expected
    assert not caplog.records


def test_bos_comes_once_before_text_without_a_role() -> None:
    tokenizer = family("llama3")
    bos = tokenizer.bos_token
    for prompt in ("", "<m/>", "<user>Why?</user>", "<m/><user>Why?</user>"):
        for schema in ('Front.<module name="m"> M.</module>', '<module name="m">M.<user>Docs</user></module>'):
            decoded = tokenizer.decode(place(schema, prompt, "packed", tokenizer).ids)
            assert decoded.startswith(bos)
            assert decoded.count(bos) == 1
    placed = place('<module name="m"> M.</module><system>Rule.</system>', "<m/>Why?", "packed", tokenizer)
    opened = f"{L3.format('system')}Rule.{EOT}{L3.format('user')}Why?{EOT}{L3.format('assistant')}"
    assert tokenizer.decode(placed.ids) == f"{bos} M.{opened}"


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "gemma", "llama2", "mistral"])
def test_turns_of_modules_equal_the_template(name: str) -> None:
    """The same turns in a conversation of messages."""
    tokenizer = family(name)
    schema = (
        '<module name="a"><user>Q1</user><assistant>A1</assistant></module>'
        '<module name="b"><user>Q2</user><assistant>A2</assistant></module><user>Docs: </user>'
    )
    template, encoder = ChatTemplate(tokenizer), TextEncoder(tokenizer)
    for prompt, turns in {"<a/><b/>Why?": ["Q1", "A1", "Q2", "A2"], "<b/>Why?": ["Q2", "A2"], "Why?": []}.items():
        placed = place(schema, prompt, "packed", tokenizer)
        roles = ["user", "assistant"] * (len(turns) // 2) + ["user"]
        pieces = template.pieces(roles, generation=True)
        bodies = [*turns, "Docs: Why?"]
        assert placed.text == "".join(text for pair in zip(pieces, [*bodies, ""], strict=True) for text in pair)
        ids = [encoder.template(pieces[0])]
        for body, piece in zip([*([text] for text in turns), ["Docs: ", "Why?"]], pieces[1:], strict=True):
            ids += [*map(encoder.text, body), encoder.template(piece)]
        assert placed.ids == tuple(token for each in ids for token in each)


def test_only_a_differing_template_piece_is_computed() -> None:
    """gemma's template puts BOS before the first turn alone."""
    tokenizer = family("gemma")
    schema = (
        '<module name="a"><user>Q1</user></module><module name="b"><assistant>A1</assistant><user>Q2</user></module>'
    )
    placed = place(schema, "<a/><b/>", "packed", tokenizer)
    assert [part.origin is None for part in placed.parts if "A1" in tokenizer.decode(part.ids)] == [False]
    assert [part.origin is None for part in placed.parts if "Q2" in tokenizer.decode(part.ids)] == [False]


def test_turn_order_rejected_by_the_template() -> None:
    tokenizer = family("mistral")
    schema = (
        '<module name="a"><user>Q1</user><assistant>A1</assistant></module>'
        '<module name="b"><assistant>A2</assistant></module><user>Docs:</user>'
    )
    (problem,) = sentences(lambda: place(schema, "<a/><b/>Why?", "packed", tokenizer))
    assert problem.startswith(
        "p.xml:1:24: the chat template refuses turns in the order user, assistant, assistant, user: "
    )
    assert problem.endswith(
        'turns come with "a", "b" here: import others, or write the schema\'s turns in an order that it takes'
    )
    with raises("model.chat_template_refusal", ModelError, names="assistant"):
        place("<assistant>A</assistant><assistant>A</assistant>", "", "packed", tokenizer)


def test_a_question_ends_the_user_turn_of_a_module() -> None:
    tokenizer = chatml()
    schema = '<module name="docs"><system>Rule.</system><user>Docs:</user></module>'
    assert place(schema, "<docs/>Why?", "packed", tokenizer).text == f"{S}Rule.{END}{U}Docs:Why?{END}{A}"
    assert place(schema, "<docs>Why?</docs>", "packed", tokenizer).text == f"{S}Rule.{END}{U}Docs:Why?{END}{A}"
    assert place(schema, "Why?", "packed", tokenizer).text == "Why?"


def test_module_with_turns_inside_a_turn_is_rejected() -> None:
    schema = Schema.from_string('<schema name="s"><module name="m"><user>U</user></module></schema>')
    prompt = Prompt.from_string('<prompt schema="s"><user><m/></user></prompt>', source="p.xml")
    assert sentences(lambda: resolve(schema, prompt)) == [
        "p.xml:1:26: <m/> stands inside <user>, and has chat turns of its own; write it outside <user>, before it"
    ]


def test_schema_positions_keep_the_gap_of_a_module_with_turns() -> None:
    tokenizer = chatml()
    layout = layout_of(SHOTS, tokenizer)
    starts = {run.start for run in layout.runs if tokenizer.decode(run.ids) == "Q2"}
    for prompt in ("<a/><b/>", "<b/>"):
        placed = place(SHOTS, prompt, "schema", tokenizer)
        assert {part.start for part in placed.parts if tokenizer.decode(part.ids) == "Q2"} == starts


def test_uncached_modules_are_separate_from_new_text() -> None:
    schema = 'Always.<module name="m" cache="false">M<module name="n">N</module></module><module name="o">O</module>'
    placed = place(schema, "new<m><n/></m><o/>", "packed", bytes_tokenizer())
    assert [(part.origin is None, part.kept) for part in placed.parts] == [
        *((False, True), (True, True), (True, False), (False, True)),
    ]
    assert layout_of(schema, bytes_tokenizer()).uncached == {("m",), ("m", "n")}


def test_a_scaffold_of_a_parameter_longer_than_its_hole() -> None:
    with raises("pml.argument_too_long", PMLError, names="'p'"):
        layout_of('<module name="m"><param name="p" len="4" scaffold="abcde"/></module>', bytes_tokenizer())
