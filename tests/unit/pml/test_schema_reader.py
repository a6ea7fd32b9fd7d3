import pytest

from inlay.errors import Place
from inlay.pml import Module, Param, Scaffold, Schema, Text, Turn, Union
from tests.unit.pml.helpers import TRAVEL, schema_problems


def inside(body: str) -> str:
    return f'<schema name="s">{body}</schema>'


ATTRIBUTES = {
    "<schema/>": ['s.xml:1:1: <schema> has no name; write <schema name="…">'],
    '<schema name=""/>': ['s.xml:1:9: <schema> has an empty name; write <schema name="…">'],
    '<schema name=" "/>': ['s.xml:1:9: <schema> has an empty name; write <schema name="…">'],
    '<schema nmae="s"/>': ['s.xml:1:9: <schema> takes no attribute "nmae"; did you mean "name"?'],
    '<schema name="s" zzz="1"/>': ['s.xml:1:18: <schema> takes no attribute "zzz"; it takes name, xml:space'],
    '<schema name="s" xml:space="keep"/>': ['s.xml:1:18: xml:space="keep" is unknown; write "preserve" or "default"'],
    inside("<module/>"): ['s.xml:1:18: <module> has no name; write <module name="…">'],
    inside('<module name=""/>'): ['s.xml:1:26: <module> has an empty name; write <module name="…">'],
    inside('<union name="u"><module name="m"/></union>'): [
        's.xml:1:25: <union> takes no attribute "name"; it takes scaffold'
    ],
    inside('<module name="m">\n  <param/></module>'): [
        's.xml:2:3: <param> has no name; write <param name="…" len="…"/>',
        's.xml:2:3: <param> has no len; write <param name="…" len="…"/>',
    ],
    inside('<module name="m"><parameter name="p"/></module>'): [
        's.xml:1:35: <parameter> has no length; write <parameter name="…" length="…"/>'
    ],
    inside('<module name="m"><param name="p" length="3"/></module>'): [
        's.xml:1:51: <param> takes no attribute "length"; did you mean "len"?'
    ],
    inside('<module name="m"><parameter name="p" len="3"/></module>'): [
        's.xml:1:55: <parameter> takes no attribute "len"; did you mean "length"?'
    ],
    inside("<scaffold/>"): ['s.xml:1:18: <scaffold> has no modules; write <scaffold modules="… …"/>'],
    inside('<scaffold modules=" "/>'): ['s.xml:1:28: <scaffold> has an empty modules; write <scaffold modules="… …"/>'],
}

NAMES = {
    inside('<module name="my module"/>'): [
        's.xml:1:26: "my module" is not a name; write letters, digits, "_", "-" and ".", with a letter or "_" first'
    ],
    inside('<module name="2b"/>'): [
        's.xml:1:26: "2b" is not a name; write letters, digits, "_", "-" and ".", with a letter or "_" first'
    ],
    inside('<module name="a:b"/>'): [
        's.xml:1:26: "a:b" is not a name; write letters, digits, "_", "-" and ".", with a letter or "_" first'
    ],
    inside('<module name="×"/>'): [
        's.xml:1:26: "×" is not a name; write letters, digits, "_", "-" and ".", with a letter or "_" first'
    ],
    inside('<module name="user"/>'): ['s.xml:1:26: "user" is a tag of PML; choose another name for the module'],
    inside(f'<module name="{"m" * 300}"/>'): [
        f's.xml:1:26: the name "{"m" * 59}…" has 300 characters; write at most 256'
    ],
    inside('<module name="m"><param name="a b" len="1"/></module>'): [
        's.xml:1:42: "a b" is not a name; write letters, digits, "_", "-" and ".", with a letter or "_" first'
    ],
    inside('<module name="m"/>\n<union>\n<module name="m"/></union>'): [
        's.xml:3:9: module "m" is defined twice, first in line 1; give this one another name'
    ],
    inside('<module name="n"><module name="m"/><union>\n<module name="m"/></union></module>'): [
        's.xml:2:9: module "n/m" is defined twice, first in line 1; give this one another name'
    ],
    inside('<module name="m"><param name="p" len="1"/>\n<param name="p" len="2"/></module>'): [
        's.xml:2:1: parameter "p" is defined twice in module "m"; give this one another name'
    ],
}

LENGTHS = ["0", "-1", "+1", "1.5", "ten", "1000001", "9" * 5000, "٣", "0x10", "1_0"]

PLACES = {
    inside("<param name='p' len='1'/>"): ["s.xml:1:18: <param> stands outside a module; move it into a <module>"],
    inside('<union><module name="m"/><param name="p" len="1"/></union>'): [
        "s.xml:1:43: <param> stands outside a module; move it into a <module>"
    ],
    inside('<union>\n  text <module name="m"/></union>'): [
        "s.xml:2:3: text stands directly inside <union>; put it into a <module>"
    ],
    inside("<union/>"): ["s.xml:1:18: <union> is empty; put a <module> for each choice into it"],
    inside('<union><module name="m"/><union><module name="n"/></union></union>'): [
        "s.xml:1:43: <union> stands inside <union>; "
        "list all members in one <union>, or put the inner one into a <module>"
    ],
    inside('<union><module name="m"/><user>a</user></union>'): [
        "s.xml:1:43: <user> stands inside <union>; chat tags stand at the top level of a schema, or in a <module>: "
        "put the <union> inside it"
    ],
    inside("<user><system>a</system></user>"): [
        "s.xml:1:24: <system> stands inside <user>; chat tags stand in no other: close <user> first"
    ],
    inside('<user><module name="m">\n<system>a</system></module></user>'): [
        "s.xml:2:1: <system> stands inside <user>; chat tags stand in no other: close <user> first"
    ],
    inside('<module name="m"><module name="n"/><scaffold modules="m n"/></module>'): [
        "s.xml:1:53: <scaffold> stands inside <module>; move it to the top level of the schema"
    ],
    inside('<schema name="t"/>'): [
        "s.xml:1:18: <schema> stands inside <schema>; keep one <schema> in a file, as its outermost tag"
    ],
    inside('<prompt schema="s"/>'): [
        "s.xml:1:18: <prompt> stands inside <schema>; write prompts into files of their own"
    ],
    inside('<modul name="m"/>'): ["s.xml:1:18: <modul> is not a tag of PML; did you mean <module>?"],
    inside("<miami/>"): ['s.xml:1:18: <miami> is not a tag of PML; write <module name="miami"> to define a module'],
    inside("<a:b/>"): ["s.xml:1:18: <a:b> is not a tag of PML; write &lt; for a < that is text"],
    inside('<module name="m"><param name="p" len="1">x</param></module>'): [
        's.xml:1:35: <param> is not empty; write <param …/>, and a default as default="…"'
    ],
    inside('<module name="m"><parameter name="p" length="1"><module name="n"/></parameter></module>'): [
        's.xml:1:35: <parameter> is not empty; write <parameter …/>, and a default as default="…"'
    ],
    '<prompt schema="s"/>': ["s.xml:1:1: the outermost tag is <prompt>, not <schema>; read it as a Prompt"],
    "<html/>": ['s.xml:1:1: the outermost tag is <html>, not <schema>; write <schema name="…"> around everything'],
}

MN = '<module name="miami"/><module name="n"/>'
SCAFFOLDS = {
    inside(f'{MN}<scaffold modules="n">x</scaffold>'): [
        's.xml:1:58: <scaffold> is not empty; write <scaffold modules="… …"/>',
        's.xml:1:58: <scaffold> names "n" alone; name at least two modules, or delete it',
    ],
    inside(f'{MN}<scaffold modules="n n"/>'): [
        's.xml:1:58: <scaffold> names "n" alone; name at least two modules, or delete it'
    ],
    inside(f'{MN}<scaffold modules="n maimi"/>'): [
        's.xml:1:58: <scaffold> names "maimi", which is no module of this schema; did you mean "miami"?'
    ],
    inside(f'{MN}<scaffold modules="n zzz"/>'): [
        's.xml:1:58: <scaffold> names "zzz", which is no module of this schema; name modules of this schema'
    ],
    inside(f'<union>{MN}</union><scaffold modules="miami n"/>'): [
        's.xml:1:73: <scaffold> names "miami" and "n", of which a union allows one; leave one of them out'
    ],
    inside('<union><module name="m"><module name="o"/></module><module name="n"/></union><scaffold modules="n o"/>'): [
        's.xml:1:95: <scaffold> names "n" and "m/o", of which a union allows one; leave one of them out'
    ],
}


@pytest.mark.parametrize(
    ("text", "expected"), [*ATTRIBUTES.items(), *NAMES.items(), *PLACES.items(), *SCAFFOLDS.items()]
)
def test_problems(text: str, expected: list[str]) -> None:
    assert schema_problems(text) == expected


@pytest.mark.parametrize("length", LENGTHS)
def test_invalid_length_is_rejected(length: str) -> None:
    shown = length if len(length) < 60 else length[:59] + "…"
    assert schema_problems(inside(f'<module name="m"><param name="p" len="{length}"/></module>')) == [
        f's.xml:1:51: len="{shown}" is not a whole number from 1 to 1000000; write how many tokens an argument may have'
    ]


def test_lengths() -> None:
    body = '<module name="m"><param name="p" len="1"/><parameter name="q" length="01000000" default=""/></module>'
    p, q = Schema.from_string(inside(body)).modules["m"].children
    assert (p.length, p.default) == (1, None)
    assert (q.length, q.default) == (1_000_000, "")


def test_src_in_a_string_without_a_folder() -> None:
    assert schema_problems(inside('<module name="m" src="a.py"/>')) == [
        "s.xml:1:35: src needs a folder, and a schema in a string has none; "
        "give one with Schema.from_string(text, folder=…)"
    ]


def test_src_and_content() -> None:
    assert schema_problems(inside('<module name="m" src="a.py">x</module>')) == [
        "s.xml:1:35: the module has both src and content; leave one of them out"
    ]
    assert schema_problems(inside('<module name="m" src="a.py"><union><module name="n"/></union></module>')) == [
        "s.xml:1:35: the module has both src and content; leave one of them out"
    ]


def test_problems_are_sorted_and_precede_a_broken_end() -> None:
    assert schema_problems("<schema>\n <module/>\n <union>") == [
        's.xml:1:1: <schema> has no name; write <schema name="…">',
        's.xml:2:2: <module> has no name; write <module name="…">',
        "s.xml:3:2: <union> is never closed; write </union>",
    ]


def test_truncated_document_reports_only_its_end() -> None:
    assert schema_problems('<schema name="s"><scaffold modules="a b"/>\n<union>\n  <!-- ') == [
        "s.xml:3:3: a tag, comment or entity begins here and does not end; close it"
    ]


def test_twenty_problems_are_shown_and_the_rest_counted() -> None:
    twenty = schema_problems(inside("<module/>\n" * 20))
    assert len(twenty) == 20
    assert "not shown" not in twenty[-1]
    more = schema_problems(inside("<module/>\n" * 21))
    assert more[:20] == twenty
    assert more[20:] == ["s.xml: 1 more problem is not shown; correct these first"]
    assert schema_problems(inside("<module/>\n" * 5000))[20:] == [
        "s.xml: 4980 more problems are not shown; correct these first"
    ]


def test_nodes_and_their_locations() -> None:
    schema = Schema.from_string(
        '<schema name="s">\n  Hi.\n  <module name="a"><param name="p" len="3" default="d"/></module>\n'
        '  <union><module name="b">B</module></union><scaffold modules="a b"/>\n</schema>',
        source="s.xml",
    )
    param = Param("p", 3, "d", Place("s.xml", 3, 20), order=2)
    member = Module("b", (Text("B", Place("s.xml", 4, 27), order=5),), Place("s.xml", 4, 10), order=4)
    assert schema.children == (
        Text("Hi.\n", Place("s.xml", 2, 3), order=0),
        Module("a", (param,), Place("s.xml", 3, 3), order=1),
        Union((member,), Place("s.xml", 4, 3), order=3),
    )
    assert schema.scaffolds == (Scaffold(("a", "b"), Place("s.xml", 4, 45)),)


def test_the_travel_schema() -> None:
    schema = Schema.from_string(TRAVEL)
    assert schema.name == "travel"
    assert schema.has_turns
    assert [turn.role for turn in schema.children if isinstance(turn, Turn)] == ["system", "user", "assistant"]
    assert list(schema.modules) == [
        *("travel-plan", "travel-plan/domestic", "travel-plan/overseas"),
        *("travel-plan/overseas/miami", "travel-plan/overseas/maldives"),
    ]
    assert schema.parents["travel-plan"] == ()
    assert schema.parents["miami"] == ("travel-plan", "overseas")
    plan = schema.modules["travel-plan"]
    assert [type(child).__name__ for child in plan.children] == ["Text", "Param", "Text", "Union"]
    assert [child.text for child in plan.children if isinstance(child, Text)] == ["Plan a trip of ", ".\n"]


def test_names_may_be_in_any_script_and_look_like_files() -> None:
    schema = Schema.from_string(
        inside('<module name="unit.py"/><module name="北京"><param name="città" len="2"/></module>')
    )
    assert list(schema.modules) == ["unit.py", "北京"]
