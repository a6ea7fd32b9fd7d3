"""Schemas as token ids and positions, worked out by hand: one token a character."""

from __future__ import annotations

import pytest

from inlay.errors import ModelError
from inlay.models.shapes import bytes_tokenizer
from inlay.pml import Schema
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.layout import Extent, Hole, SchemaLayout, TextRun, lay_out_schema
from inlay.prompt.tokens import TextEncoder
from tests.raising import raises
from tests.tokenizers_for_tests import family, gpt2, llama2, with_template
from tests.unit.pml.helpers import sentences


def lay_out(body: str, tokenizer=None) -> SchemaLayout:
    tokenizer = tokenizer or bytes_tokenizer()
    schema = Schema.from_string(f'<schema name="s">{body}</schema>', source="s.xml")
    return lay_out_schema(schema, TextEncoder(tokenizer), ChatTemplate(tokenizer))


def shown(layout: SchemaLayout, tokenizer=None) -> list[str]:
    """One string an entry: owner, start, and its text, or the length and the default of a hole."""
    tokenizer = tokenizer or bytes_tokenizer()
    strings = []
    for number, entry in enumerate(layout.entries):
        assert entry.index == number
        if isinstance(entry, TextRun):
            assert entry.ids == tuple(token for part in entry.parts for token in part.ids)
            assert entry.ids
            what = tokenizer.decode(entry.ids)
            assert entry.end == entry.start + len(entry.ids)
        else:
            default = "" if entry.default is None else f"={tokenizer.decode(entry.default)}"
            what = f"[{entry.param.name} {entry.length}{default}]"
        strings.append(f"{'/'.join(entry.owner)}@{entry.start} {what}")
    return strings


BY_HAND = {
    "anonymous text": ("Hello", ["@0 Hello"], 5),
    "modules": (
        '<module name="a">AA</module>xyz<module name="b">BBB</module>',
        ["a@0 AA", "@2 xyz", "b@5 BBB"],
        8,
    ),
    "nested modules": (
        '<module name="a">AA<module name="b">B<module name="c">CCC</module>b</module>a</module>',
        ["a@0 AA", "a/b@2 B", "a/b/c@3 CCC", "a/b@6 b", "a@7 a"],
        8,
    ),
    "the members of a union start together, and it is as long as the longest": (
        'x<union><module name="a">A</module><module name="b">BBB</module><module name="c">CC</module></union>y',
        ["@0 x", "a@1 A", "b@1 BBB", "c@1 CC", "@4 y"],
        5,
    ),
    "unions in unions": (
        '<union><module name="a">A<union><module name="b">BB</module><module name="c">C</module></union></module>'
        '<module name="d">DD</module></union>y',
        ["a@0 A", "a/b@1 BB", "a/c@1 C", "d@0 DD", "@3 y"],
        4,
    ),
    "a union of empty modules": ('<union><module name="a"/><module name="b"/></union>y', ["@0 y"], 1),
    "a parameter is a hole": (
        '<module name="a">in <param name="n" len="4"/> days</module>x',
        ["a@0 in ", "a@3 [n 4]", "a@7  days", "@12 x"],
        13,
    ),
    "defaults": (
        '<module name="a"><param name="n" len="4" default="two"/><param name="m" len="1" default=""/>d</module>',
        ["a@0 [n 4=two]", "a@4 [m 1=]", "a@5 d"],
        6,
    ),
    "text on both sides of a module is two runs": ('x<module name="a"/>y', ["@0 x", "@1 y"], 2),
    "text on both sides of a comment": ("x<!-- no border -->y", ["@0 xy"], 2),
    "a module in a module is a border": ('<module name="a">x<module name="b"/>y</module>', ["a@0 x", "a@1 y"], 2),
    "a union is a border": ('x<union><module name="a"/></union>y', ["@0 x", "@1 y"], 2),
    "neighbours": ('<module name="a">A</module><module name="b">B</module>', ["a@0 A", "b@1 B"], 2),
    "nothing": ("", [], 0),
}


@pytest.mark.parametrize(("body", "expected", "length"), BY_HAND.values(), ids=BY_HAND.keys())
def test_by_hand(body: str, expected: list[str], length: int) -> None:
    layout = lay_out(body)
    assert shown(layout) == expected
    assert layout.length == length


def test_extents() -> None:
    layout = lay_out(
        'x<module name="a">A<union><module name="b">BB</module><module name="c">C</module></union>'
        '<param name="p" len="5"/>aa</module><module name="d"/>'
    )
    assert layout.extents == {
        "a": Extent(1, 11, 3),
        "a/b": Extent(2, 4, 2),
        "a/c": Extent(2, 3, 1),
        "d": Extent(11, 11, 0),
    }
    assert layout.extents["b"] == layout.extents["a/b"]


def test_layout_maps_nodes_to_runs() -> None:
    layout = lay_out('x<module name="a">A<param name="p" len="5"/>B</module>y')
    for order, index in layout.run_of.items():
        entry = layout.entries[index]
        assert isinstance(entry, TextRun)
        assert order in {part.node for part in entry.parts}
    assert sorted(layout.run_of.values()) == [0, 1, 3, 4]
    (hole,) = (entry for entry in layout.entries if isinstance(entry, Hole))
    assert layout.hole_of == {hole.param.order: hole.index}
    assert [layout.text_of(order) for order in sorted(layout.run_of)] == ["x", "A", "B", "y"]
    assert layout.text_of(99) == ""
    assert layout.by_owner[()] == (layout.entries[0], layout.entries[4])
    assert layout.chain(4, frozenset({(), ("a",)})) == list(layout.entries[:4])
    assert layout.chain(3, frozenset({("a",)})) == list(layout.entries[1:3])


def test_overlong_defaults_are_rejected() -> None:
    assert sentences(
        lambda: lay_out(
            '<module name="a"><param name="n" len="2" default="two"/>\n<param name="m" len="1" default="1"/></module>'
            '<module name="b"><param name="k" len="1" default="four"/></module>'
        )
    ) == [
        "s.xml:1:35: the default of 'n' is 3 tokens long and its len is 2; write len=\"3\" or a shorter default",
        "s.xml:2:64: the default of 'k' is 4 tokens long and its len is 1; write len=\"4\" or a shorter default",
    ]


def test_text_that_looks_like_a_special_token() -> None:
    layout = lay_out('<![CDATA[<|end|>]]><module name="a"><param name="n" len="20" default="&lt;|bos|>"/></module>')
    assert shown(layout) == ["@0 <|end|>", "a@7 [n 20=<|bos|>]"]
    assert layout.length == 27


def test_bos_comes_first_in_a_schema_without_turns() -> None:
    tokenizer = llama2()
    layout = lay_out('The ferry<module name="a"> leaves</module>', tokenizer)
    encoder = TextEncoder(tokenizer)
    assert [entry.ids for entry in layout.entries] == [(1, *encoder.text("The ferry")), encoder.text(" leaves")]
    alone = lay_out('<module name="a"> leaves</module>', tokenizer)
    assert [(entry.ids, entry.start, entry.owner) for entry in alone.entries] == [
        ((1,), 0, ()),
        (encoder.text(" leaves"), 1, ("a",)),
    ]
    assert [entry.ids for entry in lay_out("", tokenizer).entries] == [(1,)]


def test_template_adds_bos_in_a_schema_of_turns() -> None:
    tokenizer = family("llama3")
    encoder = TextEncoder(tokenizer)
    assert encoder.bos
    layout = lay_out("<system>Be kind.</system>", tokenizer)
    piece = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    assert [entry.ids for entry in layout.entries] == [encoder.template(piece) + encoder.text("Be kind.")]
    assert layout.entries[0].ids[: len(encoder.bos)] == encoder.bos  # type: ignore[union-attr]


S, U, A, END = "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
TURNS = {
    "always-present text of several turns is one run": (
        "<system>S</system><user>U</user>",
        [("", f"{S}S{END}{U}U")],
    ),
    "a turn that starts with a module": (
        '<system>S</system><user><module name="a">A</module>U</user>',
        [("", f"{S}S{END}{U}"), ("a", "A"), ("", "U")],
    ),
    "a turn that ends with a module": (
        '<system>S<module name="a">A</module></system><user>U</user>',
        [("", f"{S}S"), ("a", "A"), ("", f"{END}{U}U")],
    ),
    "an empty turn": ("<system/><user>U</user>", [("", f"{S}{END}{U}U")]),
    "three turns": (
        '<system>S</system><user>U</user><assistant>A<module name="a">A</module></assistant>',
        [("", f"{S}S{END}{U}U{END}{A}A"), ("a", "A")],
    ),
}


@pytest.mark.parametrize(("body", "expected"), TURNS.values(), ids=TURNS.keys())
def test_turns_are_laid_out(body: str, expected: list[tuple[str, str]]) -> None:
    tokenizer = family("qwen2.5")
    layout = lay_out(body, tokenizer)
    assert [("/".join(e.owner), tokenizer.decode(e.ids)) for e in layout.runs] == expected
    turns = body.count("</user>") + body.count("<system") + body.count("</assistant>")
    assert sorted(layout.run_of_turn) == list(range(turns))
    assert sum(len(run.ids) for run in layout.runs) == layout.length
    for run in layout.runs:  # pieces of the template are tokenized alone, with special tokens; text without
        encoder = TextEncoder(tokenizer)
        for part in run.parts:
            assert part.ids == (encoder.text(part.text) if part.turn is None else encoder.template(part.text))


TRIMMED = {
    "both ends": ("<system xml:space='preserve'> S \n</system><user>U</user>", ["S", "U"]),
    "not beside a module": (
        "<system xml:space='preserve'> S <module name='a'> A </module> T </system><user/>",
        ["S ", " A ", " T"],
    ),
    "a module at an end stays as written": (
        "<system xml:space='preserve'><module name='a'> A </module></system><user/>",
        [" A "],
    ),
    "text of white space alone": (
        "<system xml:space='preserve'> <module name='a'>A</module> </system><user/>",
        ["A"],
    ),
    "the question may follow the last user turn": ("<user xml:space='preserve'> U \n</user>", ["U \n"]),
    "it never follows a last system turn": ("<system>S\n</system>", ["S"]),
    "nor a last assistant turn": ("<user>U</user><assistant xml:space='preserve'> A\n</assistant>", ["U", "A"]),
}


@pytest.mark.parametrize(("body", "expected"), TRIMMED.values(), ids=TRIMMED.keys())
@pytest.mark.parametrize("name", ["llama3", "qwen2.5"])
def test_ends_of_turns_are_stripped_like_the_template(name: str, body: str, expected: list[str]) -> None:
    layout = lay_out(body, family(name))
    texts = [part.text for run in layout.runs for part in run.parts if part.turn is None]
    if name == "llama3":
        assert texts == expected
    else:  # keeps the serialized form
        assert [text.strip() for text in texts if text.strip()] == [text.strip() for text in expected]
        assert any(text != text.strip() for text in texts)


def test_a_folded_system_turn() -> None:
    tokenizer = family("llama2")
    layout = lay_out("<system>\nS\n</system><user xml:space='preserve'> U\n</user>", tokenizer)
    parts = [part.text for run in layout.runs for part in run.parts]
    assert parts == ["<s>[INST] <<SYS>>\n", "S\n", "\n<</SYS>>\n\n", " U\n"]


def test_empty_pieces() -> None:
    """Turns of which the template shows nothing but the body make no empty runs."""
    tokenizer = family("bare")
    layout = lay_out('<system><module name="a">A</module></system><user>U</user><assistant>V</assistant>', tokenizer)
    assert shown(layout, tokenizer) == ["a@0 A", "@1 UV"]
    assert layout.run_of_turn == {2: 1}
    assert lay_out("<system/><user/>", tokenizer).entries == ()


def test_rejected_turns_raise_a_model_error() -> None:
    with raises("model.chat_template_refusal", ModelError, names="System role not supported"):
        lay_out("<system>S</system>", family("gemma"))
    with raises("model.no_chat_template", ModelError):
        lay_out("<user>U</user>", with_template(gpt2(), None))
