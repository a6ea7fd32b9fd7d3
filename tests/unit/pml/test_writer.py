"""Written PML reads back to the same nodes, and is pleasant to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.errors import ParameterError
from inlay.pml import (
    Argument,
    Import,
    Meta,
    Module,
    Param,
    Prompt,
    PromptTurn,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
    numbered,
    use,
)
from inlay.pml.parser import parse
from inlay.pml.problems import Problems
from tests.generated import examples
from tests.unit.pml.helpers import LEVELS, TRAVEL
from tests.unit.pml.node_strategies import HERE, TEXTS, bare, prompts, schemas

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*/*.xml"))


def schema_of(*children: Text | Module | Union | Turn, scaffolds: tuple[Scaffold, ...] = ()) -> Schema:
    return Schema("s", numbered(children), scaffolds)


def module(name: str, *children: str | Param | Module | Union) -> Module:
    return Module(name, tuple(Text(one, HERE) if isinstance(one, str) else one for one in children), HERE)


@settings(max_examples=examples(200), deadline=None)
@given(schemas())
def test_a_schema_reads_back(schema: Schema) -> None:
    assert bare(Schema.from_string(schema.to_pml())) == bare(schema)


@settings(max_examples=examples(200), deadline=None)
@given(prompts())
def test_a_prompt_reads_back(prompt: Prompt) -> None:
    assert bare(Prompt.from_string(prompt.to_pml())) == bare(prompt)


@settings(max_examples=examples(200), deadline=None)
@given(st.text(" \t\n\ra", min_size=1, max_size=12), st.sampled_from(["alone", "start", "middle", "end"]))
def test_white_space_is_kept_at_every_position(text: str, place: str) -> None:
    one, other, inner = Param("p", 1, None, HERE), Param("q", 1, None, HERE), module("m", "x\n")
    children = {
        "alone": [text],
        "start": [text, inner],
        "middle": [one, text, inner, text, other],
        "end": [inner, text],
    }
    schema = schema_of(module("outer", *children[place]))
    assert bare(Schema.from_string(schema.to_pml())) == bare(schema)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_neighbouring_texts_are_joined(texts: list[str]) -> None:
    builder = Schema("s", ()).prompt()
    for text in texts:
        builder = builder.text(text)
    (read,) = Prompt.from_string(builder.build().to_pml()).children
    assert isinstance(read, Text)
    assert read.text == "".join(texts)


def test_texts_around_a_scaffold_stay_two() -> None:
    text = """\
<schema name="s">
  One.
  <scaffold modules="a b"/>
  Two.
  <module name="a"/>
  <module name="b"/>
</schema>
"""
    schema = Schema.from_string(text)
    assert [child.text for child in schema.children[:2]] == ["One.\n", "Two.\n"]
    assert schema.to_pml() == text


def test_empty_text_is_dropped() -> None:
    schema = schema_of(module("m", ""))
    assert schema.to_pml() == '<schema name="s">\n  <module name="m"/>\n</schema>\n'


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_examples_read_back(file: Path) -> None:
    root = parse(file.read_bytes(), Problems(str(file)))
    kind = Prompt if root is not None and root.tag == "prompt" else Schema
    assert bare(kind.from_string(kind.from_file(file).to_pml())) == bare(kind.from_file(file))


@pytest.mark.parametrize("text", [TRAVEL, LEVELS])
def test_writing_is_stable(text: str) -> None:
    once = Schema.from_string(text).to_pml()
    assert Schema.from_string(once).to_pml() == once


def test_formatted_schema_is_unchanged() -> None:
    assert Schema.from_string(TRAVEL).to_pml() == TRAVEL


def test_text_from_src_is_written_inline(tmp_path: Path) -> None:
    (tmp_path / "unit.py").write_text("def f(a):\n    return a < 1 and a & 2\n")
    (tmp_path / "s.xml").write_text('<schema name="s"><module name="unit.py" src="unit.py"/></schema>')
    assert (
        Schema.from_file(tmp_path / "s.xml").to_pml()
        == """\
<schema name="s">
  <module name="unit.py">
    def f(a):
        return a &lt; 1 and a &amp; 2
  </module>
</schema>
"""
    )


# the name of a case, the children of a module, and the module
MODULES = {
    "lines": (["a\nb\n"], "<module name=\"m\">\n    a\n    b\n  </module>"),
    "no line break": (["Go."], '<module name="m">Go.</module>'),
    "blank lines": (["\na\n\nb\n\n"], '<module name="m">\n\n    a\n\n    b\n\n  </module>'),
    "indented lines": (["a\n  b\n"], '<module name="m">\n    a\n      b\n  </module>'),
    "no line break at the end": (["a\nb"], '<module name="m">\n    a\n    b</module>'),
    "an indented line": (["  a\n"], '<module name="m">  a\n  </module>'),
    "indented lines alone": (["  a\n  b\n"], '<module name="m" xml:space="preserve">  a\n  b\n</module>'),
    "white space at the end of lines": (["a \nb\n"], '<module name="m">\n    a \n    b\n  </module>'),
    "white space on a line": (["a\n \nb\n"], '<module name="m" xml:space="preserve">a\n \nb\n</module>'),
    "white space at the end": (["a\n  "], '<module name="m" xml:space="preserve">a\n  </module>'),
    "a line break": (["\n"], '<module name="m" xml:space="preserve">\n</module>'),
    "a blank": ([" "], '<module name="m"> </module>'),
    "carriage returns": (["a\r\nb\r\n"], '<module name="m">\n    a&#13;\n    b&#13;\n  </module>'),
    "markup": (["<a> & ]]> \"x\" 'y' é"], "<module name=\"m\">&lt;a> &amp; ]]&gt; \"x\" 'y' é</module>"),
    "nothing": ([], '<module name="m"/>'),
    "a parameter in a text": (
        ["For ", Param("p", 5, "3 days", HERE), ".\n"],
        '<module name="m">\n    For <param name="p" len="5" default="3 days"/>.\n  </module>',
    ),
    "a parameter on one line": (
        ["For ", Param("p", 5, "", HERE), "."],
        '<module name="m">For <param name="p" len="5" default=""/>.</module>',
    ),
    "values": (
        [Param("p", 5, "\"\n<b>\t'c'&\r]]>", HERE)],
        """<module name="m"><param name="p" len="5" default="&quot;&#10;&lt;b>&#9;'c'&amp;&#13;]]>"/></module>""",
    ),
    "a union": (
        ["Go.\n", Union((module("a", "A\n"), module("b")), HERE), " there"],
        """\
<module name="m">
    Go.
    <union>
      <module name="a">
        A
      </module>
      <module name="b"/>
    </union> there</module>""",
    ),
    "only what needs it keeps white space": (
        ["  a\n  b\n", module("a", "A\nB\n"), module("b", "B"), Union((module("c", "C\n"), module("d", "\n")), HERE)],
        """\
<module name="m" xml:space="preserve">  a
  b
<module name="a" xml:space="default">
      A
      B
    </module><module name="b">B</module><union>
      <module name="c" xml:space="default">
        C
      </module>
      <module name="d">
</module>
    </union></module>""",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("children", "written"), MODULES.values(), ids=MODULES.keys())
def test_modules(children: list[str | Param | Module | Union], written: str) -> None:
    schema = schema_of(module("m", *children))
    assert schema.to_pml() == f'<schema name="s">\n  {written}\n</schema>\n'
    assert bare(Schema.from_string(schema.to_pml())) == bare(schema)


def test_prompts() -> None:
    base = Schema("trip", ()).prompt()
    built = (
        base.use("plan", use("miami"), duration="3 days")
        .use("budget", "Not much.\nReally.\n", use("limit", x="1"))
        .text("Where can we surf?\n")
        .user("And then?")
        .assistant("Then\n", use("a"), use("b"))
    )
    assert (
        built.build().to_pml()
        == """\
<prompt schema="trip">
  <plan duration="3 days"><miami/></plan>
  <budget>
    Not much.
    Really.
    <limit x="1"/>
  </budget>
  Where can we surf?
  <user>And then?</user>
  <assistant>
    Then
    <a/>
    <b/>
  </assistant>
</prompt>
"""
    )
    assert base.text("Hello.").build().to_pml() == '<prompt schema="trip">Hello.</prompt>\n'
    assert base.build().to_pml() == '<prompt schema="trip"/>\n'
    assert base.use("a").text("Hello.").build().to_pml() == '<prompt schema="trip">\n  <a/>\n  Hello.</prompt>\n'


def test_many_imports_are_written_on_separate_lines() -> None:
    prompt = Schema("s", ()).prompt().user(*(use(f"module-number-{number}") for number in range(6))).build()
    lines = prompt.to_pml().splitlines()
    assert lines[1:4] == ["  <user>", "    <module-number-0/>", "    <module-number-1/>"]


def refused(document: Schema | Prompt) -> str:
    with pytest.raises(ParameterError) as error:
        document.to_pml()
    return str(error.value)


@pytest.mark.parametrize("character", ["\0", "\x0b", "\x1b", "\ud800", "\ufffe", "\uffff"])
def test_characters_without_xml_form_are_rejected(character: str) -> None:
    point = f"U+{ord(character):04X}"
    where = f"the character {point} at index 1 of a text or value, which XML cannot carry; leave it out"
    assert refused(schema_of(module("plan", f"a{character}"))) == f'module "plan" holds {where}'
    assert refused(schema_of(module("m", Param("p", 1, f"a{character}", HERE)))) == f'parameter "p" holds {where}'
    built = Schema("s", ()).prompt()
    if character != "\ud800":  # which builders refuse themselves
        assert refused(built.use("plan", x=f"a{character}").build()) == f'module "plan" holds {where}'
        assert refused(built.user(f"a{character}").build()) == f"<user> holds {where}"
        assert refused(built.text(f"a{character}").build()) == f'the prompt of schema "s" holds {where}'


@pytest.mark.parametrize("character", ["\x7f", "\x80", "\ue000", "\ufffd", "\U0010ffff", "\U0001fffe"])
def test_boundary_characters_of_xml_are_written(character: str) -> None:
    schema = schema_of(module("plan", character))
    assert bare(Schema.from_string(schema.to_pml())) == bare(schema)


def test_white_space_beside_a_turn() -> None:
    prompt = Schema("s", ()).prompt().use("a").text(" \n").user("x").build()
    sentence = "white space alone beside <user> is layout in PML; leave it out, or use to_json()"
    assert refused(prompt) == f'the prompt of schema "s" cannot be written as PML: {sentence}'


def nested(depth: int) -> Module:
    return module(f"m{depth}", *([nested(depth - 1)] if depth > 1 else []))


def test_depth() -> None:
    assert Schema.from_string(schema_of(nested(31)).to_pml()).modules["m31"]
    assert refused(schema_of(nested(32))) == "tags would be nested more than 32 deep; nest less deeply"
    assert refused(schema_of(nested(300))) == "tags would be nested more than 32 deep; nest less deeply"


def test_preserved_white_space_at_every_depth_is_fast() -> None:
    inner = module("m0", "\n")
    for number in range(1, 31):
        inner = module(f"m{number}", inner, "\n")
    schema = schema_of(inner)
    assert bare(Schema.from_string(schema.to_pml())) == bare(schema)


def imports(name: str, *arguments: str) -> Prompt:
    return Prompt("s", (Import(name, tuple(Argument(one, "x", HERE) for one in arguments), (), HERE),))


BROKEN = {
    "a module twice": (schema_of(module("a"), module("a")), 'module "a" is defined twice'),
    "a name that is none": (schema_of(module("a b")), '"a b" is not a name'),
    "a reserved name": (schema_of(module("user")), '"user" is a tag of PML'),
    "an empty name": (Schema(" ", ()), "has an empty name"),
    "an empty union": (schema_of(Union((), HERE)), "<union> is empty"),
    "a length": (schema_of(module("a", Param("p", 0, None, HERE))), 'len="0" is not a whole number'),
    "a turn in a turn": (
        schema_of(Turn("user", (Module("m", (Turn("user", (), HERE),), HERE),), HERE)),
        "<user> stands inside <user>",
    ),
    "metadata twice": (
        Schema("s", (), meta=(Meta("a", "1", HERE), Meta("a", "2", HERE))),
        'metadata "a" stands here twice',
    ),
    "metadata of a parameter": (
        schema_of(module("m", Param("p", 1, None, HERE, meta=(Meta("a", "1", HERE),)))),
        'parameter "p" has the metadata "a", which in a parameter stands in a namespace; write app:a, or use to_json()',
    ),
    "blanks beside turns": (schema_of(Turn("user", (), HERE), Text(" ", HERE)), "white space alone beside <user>"),
    "a role": (schema_of(Turn("tool", (), HERE)), '"tool" is no role; use one of system, user, assistant'),
    "a role of a prompt": (Prompt("s", (PromptTurn("tool", (), HERE),)), '"tool" is no role'),
    "a scaffold's names": (
        schema_of(module("a"), module("b"), scaffolds=(Scaffold(("a b", "a"), HERE),)),
        '"a b" is not a name of PML; rename it',
    ),
    "an import's name": (imports('a b="1"'), "is not a name of PML; rename it"),
    "an import named like a tag": (imports("user"), '"user" is a tag of PML, not a module that a prompt can import'),
    "an argument's name": (imports("a", "b c"), '"b c" is not a name of PML; rename it'),
    "xml:space": (imports("a", "xml:space"), '"xml:space" is not a name of PML; rename it'),
    "an argument twice": (imports("a", "b", "b"), "the same attribute stands twice"),
    "much text": (schema_of(module("a", "x" * 2**24)), "is larger than the 16777216 bytes"),
}


@pytest.mark.parametrize(("document", "sentence"), BROKEN.values(), ids=BROKEN.keys())
def test_unwritable_nodes_are_rejected(document: Schema | Prompt, sentence: str) -> None:
    assert sentence in refused(document)
