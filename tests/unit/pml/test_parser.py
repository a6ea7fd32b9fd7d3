import pytest

from inlay.pml import Prompt, Schema
from inlay.pml.parser import Element, Run, parse
from inlay.pml.problems import Problems
from tests.unit.pml.helpers import prompt_problems, schema_problems

BROKEN = {
    "": 's.xml:1:1: there is nothing here; write <schema name="…"> or <prompt schema="…">',
    " \n ": 's.xml:2:2: there is nothing here; write <schema name="…"> or <prompt schema="…">',
    '\n{"name": "s"}': (
        's.xml:2:1: there is text before any tag; begin with <schema name="…"> or <prompt schema="…">, '
        "or, if this is JSON, give its file a name that ends in .json"
    ),
    "Bravel is a town.": (
        's.xml:1:1: there is text before any tag; begin with <schema name="…"> or <prompt schema="…">, '
        "or, if this is JSON, give its file a name that ends in .json"
    ),
    "<schema name='s'>\n <module name='m'>\n</union></schema>": (
        "s.xml:3:3: <module> of line 2 is still open here; write </module> first"
    ),
    "<schema name='s'>\n  <module name='m'>": "s.xml:2:3: <module> is never closed; write </module>",
    "<schema name='s'>a & b</schema>": (
        "s.xml:1:21: this is not well-formed XML; write &lt; for <, &amp; for &, quotation marks around attribute "
        "values, and no control characters"
    ),
    "<schema name='s'>\x0b</schema>": (
        "s.xml:1:18: this is not well-formed XML; write &lt; for <, &amp; for &, quotation marks around attribute "
        "values, and no control characters"
    ),
    "<schema name='s'>é &copy;</schema>": (
        "s.xml:1:20: unknown entity; write one of &lt; &gt; &amp; &quot; &apos; or the character itself"
    ),
    "<schema name='s'>&#0;</schema>": "s.xml:1:18: this character cannot stand in XML; leave it out",
    "<schema name='s' name='t'/>": "s.xml:1:18: the same attribute stands twice in one tag; keep one of them",
    "<schema name='s'/>x": "s.xml:1:19: something stands after </schema>; keep one <schema> and nothing after it",
    "<schema name='s'>\n<!-- ": "s.xml:2:1: a tag, comment or entity begins here and does not end; close it",
    "<schema name='s'><![CDATA[ a": "s.xml:1:29: a CDATA section does not end; write ]]> where it should",
    "\n<?xml version='1.0'?><schema name='s'/>": (
        "s.xml:2:1: the XML declaration is not at the very start; move it there or delete it"
    ),
    "<schema name='s'>\n <?php ?></schema>": ("s.xml:2:2: processing instructions are not allowed; delete <?php …?>"),
    "<!-- <!DOCTYPE -->\n <!DOCTYPE schema [<!ENTITY x 'y'>]><schema name='s'>&x;</schema>": (
        "s.xml:2:2: a DOCTYPE is not allowed; delete it: "
        "PML needs none, and knows the entities &lt; &gt; &amp; &quot; &apos;"
    ),
    "<!DOCTYPE schema SYSTEM 'http://x/y.dtd'><schema name='s'/>": (
        "s.xml:1:1: a DOCTYPE is not allowed; delete it: "
        "PML needs none, and knows the entities &lt; &gt; &amp; &quot; &apos;"
    ),
    "<schema name='s'>\n a\0</schema>": (
        "s.xml:2:3: a NUL character is not text; leave it out, or save the file as UTF-8"
    ),
    "<schema name='s'>\n a\ud800</schema>": (
        "s.xml:2:3: a lone surrogate is not a character; decode the text properly or leave it out"
    ),
}


@pytest.mark.parametrize(("text", "expected"), BROKEN.items())
def test_malformed_xml_is_located(text: str, expected: str) -> None:
    assert schema_problems(text) == [expected]


def test_columns_count_characters_and_crlf_is_one_line_break() -> None:
    assert schema_problems("<schema name='é😀'>\r\né😀\t<x/>\r<y/></schema>") == [
        's.xml:2:4: <x> is not a tag of PML; write <module name="x"> to define a module',
        's.xml:3:1: <y> is not a tag of PML; write <module name="y"> to define a module',
    ]


def test_attributes_are_located_on_any_line() -> None:
    text = "<prompt schema='s'>é<a\r\n  é='>=\n' b = '2'\tc=\"'\"/></prompt>"
    _, node = Prompt.from_string(text, source="p").children
    found = [(argument.name, argument.value, str(argument.place)) for argument in node.arguments]
    assert found == [("é", ">= ", "p:2:3"), ("b", "2", "p:3:3"), ("c", "'", "p:3:11")]


def test_text_is_located_at_its_first_visible_character() -> None:
    text = "<prompt schema='s'>\n\n  é\n<a> </a>\t<!-- c -->b &amp; c<b/><![CDATA[ \n x]]>&#32;</prompt>"
    children = Prompt.from_string(text, source="p").children
    places = [str(child.place) for child in children]
    assert places == ["p:3:3", "p:4:1", "p:4:20", "p:4:29", "p:5:2"]
    assert str(children[1].children[0].place) == "p:4:4"


def test_long_text_around_tags_is_kept_whole() -> None:
    # longer than the parser's buffer, with pieces of every kind
    parts = ["a" * 100_000, "\n" * 3, "é&amp;" * 30_000, "<![CDATA[<]]>", "x"]
    root = parse(f"<r>{''.join(parts)}<s/>{parts[0]}</r>".encode(), Problems("p"))
    assert root is not None
    first, tag, last = root.children
    assert isinstance(first, Run)
    assert isinstance(tag, Element)
    assert isinstance(last, Run)
    assert first.text == "a" * 100_000 + "\n" * 3 + "é&" * 30_000 + "<x"
    assert last.text == "a" * 100_000


def test_xml_declaration_in_a_string_is_ignored() -> None:
    schema = Schema.from_string("<?xml version='1.0' encoding='latin-1'?><schema name='é'/>")
    assert schema.name == "é"
    assert Schema.from_string("\ufeff<schema name='s'/>").name == "s"


def test_problems_before_malformed_xml_are_reported() -> None:
    assert prompt_problems("<prompt>\n<module/>\n<a></b>") == [
        'p.xml:1:1: <prompt> has no schema; write <prompt schema="…">',
        "p.xml:2:1: <module> is a tag of schemas; to import a module write its name as a tag, as in <miami/>",
        "p.xml:3:6: <a> of line 3 is still open here; write </a> first",
    ]
