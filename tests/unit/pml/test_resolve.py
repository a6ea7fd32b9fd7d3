import pytest

from inlay.errors import Place, PMLError
from inlay.pml import Filled, NewText, Prompt, Schema, SchemaText, TurnEnd, TurnStart, resolve
from tests.unit.pml.helpers import ALONE, LEVELS, TRAVEL, resolve_problems, resolved, shorthand


def prompt(body: str, schema: str = "s") -> str:
    return f'<prompt schema="{schema}">{body}</prompt>'


PLACEMENT = {
    "nothing imported": ("", ["Text.\n"]),
    "new text alone ends the prompt": ("x", ["Text.\n", "+x"]),
    "an import, with its default": ("<a/>", ["A", "(d)", "Text.\n"]),
    "an argument": ("<a p='v'/>", ["A", "[v]", "Text.\n"]),
    "an empty argument": ("<a p=''/>", ["A", "[]", "Text.\n"]),
    "every zone": ("<a/><b/><u2/><c/>", ["A", "(d)", "B", "V", "Text.\n", "C"]),
    "text before the first import stands before it": ("x<c/>", ["Text.\n", "+x", "C"]),
    "text between imports stands after the first of them": ("<b/>x<c/>", ["B", "+x", "Text.\n", "C"]),
    "text after the last import ends the prompt": ("<b/>x", ["B", "Text.\n", "+x"]),
    "all three": ("1<a/>2<b/>3<c/>4", ["+1", "A", "(d)", "+2", "B", "+3", "Text.\n", "C", "+4"]),
    "inside: nothing but text ends the module": ("<a>x</a>", ["A", "(d)", "+x", "Text.\n"]),
    "inside: zones around the parameter": ("<a><a1/><a3/></a>", ["A", "1", "(d)", "3", "Text.\n"]),
    "inside: text everywhere": (
        "<a>1<a1/>2<a3/>3</a>4",
        ["A", "+1", "1", "+2", "(d)", "3", "+3", "Text.\n", "+4"],
    ),
    "inside: last import before a fixed piece": ("<a><a1/>x</a>", ["A", "1", "(d)", "+x", "Text.\n"]),
}


@pytest.mark.parametrize(("body", "expected"), PLACEMENT.values(), ids=PLACEMENT.keys())
def test_placement(body: str, expected: list[str]) -> None:
    assert shorthand(resolved(LEVELS, prompt(body))) == expected
    assert shorthand(resolved(LEVELS, prompt(body), moves=True)) == expected


MOVED = {
    "<b/><a/>": ["B", "A", "(d)", "Text.\n"],
    "<u1/>x<b/>y<a/>z": ["U", "+x", "B", "+y", "A", "(d)", "Text.\n", "+z"],
    "<a><a2/>x<a1/><a3/></a>": ["A", "2", "+x", "1", "(d)", "3", "Text.\n"],
    "1<b/><a/>2<c/>": ["+1", "B", "A", "(d)", "+2", "Text.\n", "C"],
}


@pytest.mark.parametrize(("body", "expected"), MOVED.items())
def test_imports_can_be_reordered_inside_a_zone(body: str, expected: list[str]) -> None:
    assert shorthand(resolved(LEVELS, prompt(body), moves=True)) == expected
    (problem,) = {sentence.partition("; ")[2] for sentence in resolve_problems(LEVELS, prompt(body))[:1]}
    assert problem.endswith(" first (with packed positions, their order is free)")


ORDER = {
    "<b/><a/>": [
        "p.xml:1:24: <a/> stands after <b/>, but the schema has it before; write <a/> first "
        "(with packed positions, their order is free)"
    ],
    "<c/><a/>": ["p.xml:1:24: <a/> stands after <c/>, but the schema has it before; write <a/> first"],
    "<a><a3/><a1/></a>": ["p.xml:1:28: <a1/> stands after <a3/>, but the schema has it before; write <a1/> first"],
    "<c/><u1/><a/>": [
        "p.xml:1:24: <u1/> stands after <c/>, but the schema has it before; write <u1/> first",
        "p.xml:1:29: <a/> stands after <c/>, but the schema has it before; write <a/> first",
    ],
}


@pytest.mark.parametrize(("body", "expected"), ORDER.items())
def test_imports_out_of_order(body: str, expected: list[str]) -> None:
    assert resolve_problems(LEVELS, prompt(body)) == expected


def test_reordering_does_not_cross_zones() -> None:
    assert resolve_problems(LEVELS, prompt("<c/><a/>"), moves=True) == ORDER["<c/><a/>"]
    assert resolve_problems(LEVELS, prompt("<a><a3/><a1/></a>"), moves=True) == ORDER["<a><a3/><a1/></a>"]


PROBLEMS = {
    "<zzz/>": ['p.xml:1:20: schema "s" has no module "zzz"; its modules are a, a/a1, a/a2, a/a3, b, u1, u2, c'],
    "<U1/>": ['p.xml:1:20: schema "s" has no module "U1"; did you mean <u1/>?'],
    "<a q='1'/>": ['p.xml:1:23: <a/> has no parameter "q"; it takes p'],
    "<a pp='1'/>": ['p.xml:1:23: <a/> has no parameter "pp"; did you mean "p"?'],
    "<b p='1'/>": ['p.xml:1:23: <b/> has no parameter "p"; it takes none'],
    "<b/>\n<b/>": ["p.xml:2:1: <b/> is imported twice, first in line 1; keep one of them"],
    "<u1/><u2/>": ["p.xml:1:25: <u2/> and <u1/> are members of one union; keep one of them"],
    "<a1/>": ["p.xml:1:20: <a1/> stands at the top level, but the schema has it inside <a>; write <a><a1/></a>"],
    "<b><a1/></b>": ["p.xml:1:23: <a1/> stands inside <b>, but the schema has it inside <a>; write <a><a1/></a>"],
    "<a><b/></a>": ["p.xml:1:23: <b/> stands inside <a>, but the schema has it in no module; write it outside"],
    "<b><zzz/></b><a q='1'><a1/><a1/></a>\n<u2/><u1/>": [
        'p.xml:1:23: schema "s" has no module "zzz"; its modules are a, a/a1, a/a2, a/a3, b, u1, u2, c',
        "p.xml:1:33: <a/> stands after <b/>, but the schema has it before; write <a/> first "
        "(with packed positions, their order is free)",
        'p.xml:1:36: <a/> has no parameter "q"; it takes p',
        "p.xml:1:47: <a1/> is imported twice, first in line 1; keep one of them",
        "p.xml:2:6: <u1/> and <u2/> are members of one union; keep one of them",
    ],
}


@pytest.mark.parametrize(("body", "expected"), PROBLEMS.items())
def test_problems(body: str, expected: list[str]) -> None:
    assert resolve_problems(LEVELS, prompt(body)) == expected


def test_prompt_of_another_schema_is_rejected() -> None:
    assert resolve_problems(LEVELS, prompt("<zzz/>", "t")) == [
        'p.xml:1:9: the prompt is for schema "t", not for "s"; write <prompt schema="s">'
    ]
    with pytest.raises(Exception, match=r'^p: the prompt is for schema "t"'):
        resolve(Schema.from_string(LEVELS), Prompt("t", (), "p"))


def test_a_schema_without_modules_or_with_many() -> None:
    assert resolve_problems('<schema name="s"/>', prompt("<zzz/>")) == [
        'p.xml:1:20: schema "s" has no module "zzz"; it has no modules'
    ]
    many = "".join(f'<module name="m{number}"/>' for number in range(10))
    assert resolve_problems(f'<schema name="s">{many}</schema>', prompt("<zzz/>")) == [
        'p.xml:1:20: schema "s" has no module "zzz"; its modules are m0, m1, m2, m3, m4, m5, m6, m7, …'
    ]


def test_missing_argument() -> None:
    assert resolve_problems(TRAVEL, prompt("<travel-plan><domestic city='Oslo'/></travel-plan>", "travel")) == [
        'p.xml:1:25: <travel-plan/> needs "duration", which has no default; write <travel-plan duration="…"/>'
    ]


def test_a_deep_child_without_its_parents() -> None:
    assert resolve_problems(TRAVEL, prompt("<miami/>", "travel")) == [
        "p.xml:1:25: <miami/> stands at the top level, but the schema has it inside <overseas>; "
        "write <travel-plan><overseas><miami/></overseas></travel-plan>"
    ]


def test_the_travel_prompt() -> None:
    plan = '<travel-plan duration="3 days"><overseas><miami/></overseas></travel-plan>'
    body = f"\n  {plan}\n  Highlight the surfing spots.\n"
    result = resolved(TRAVEL, prompt(body, "travel"))
    # the schema's last turn is not the user's: the question gets one of its own
    assert shorthand(result) == [
        *("<system", "You plan trips.\n", "</system"),
        *("<user", "Plan a trip of ", "[3 days]", ".\n", "Go overseas.\n", "To Miami.\n", "</user"),
        *("<assistant", "Which budget?\n", "</assistant"),
        *("+<user", "+Highlight the surfing spots.\n", "+</user"),
    ]
    assert result.imported == {"travel-plan", "travel-plan/overseas", "travel-plan/overseas/miami"}
    assert result.source == "p.xml"
    owners = {item.node.text: item.owner for item in result.items if isinstance(item, SchemaText)}
    assert owners["You plan trips.\n"] == ()
    assert owners["To Miami.\n"] == ("travel-plan", "overseas", "miami")


def test_two_members_of_the_travel_unions() -> None:
    body = '<travel-plan duration="3"><domestic city="Oslo"/><overseas><miami/><maldives/></overseas></travel-plan>'
    assert resolve_problems(TRAVEL, prompt(body, "travel")) == [
        "p.xml:1:74: <overseas/> and <domestic/> are members of one union; keep one of them",
        "p.xml:1:92: <maldives/> and <miami/> are members of one union; keep one of them",
    ]


CODE = """\
<schema name="code">
  <system>You are a programmer.</system>
  <user>
    <module name="unit.py" src="unit.py"/>
    <module name="map.py" src="map.py"/>
    <module name="player.py" src="player.py"/>
  </user>
</schema>
"""


def test_the_code_generation_schema(tmp_path) -> None:
    for name in ("unit", "map", "player"):
        (tmp_path / f"{name}.py").write_text(f"class {name.title()}:\n    ok = 1 < 2 & 3\n")
    schema = Schema.from_string(CODE, folder=tmp_path)
    result = resolve(schema, Prompt.from_string(prompt("\n<unit.py/>\n<player.py/>\nWrite a game.\n", "code")))
    assert shorthand(result) == [
        *("<system", "You are a programmer.", "</system"),
        *("<user", "class Unit:\n    ok = 1 < 2 & 3\n", "class Player:\n    ok = 1 < 2 & 3\n"),
        *("+Write a game.\n", "</user"),
    ]


def test_items_carry_their_nodes_owners_and_locations() -> None:
    result = resolved(LEVELS, prompt("<a p='v'><a1/>x</a>"))
    schema = result.schema
    a, a1 = schema.modules["a"], schema.modules["a1"]
    assert result.items == (
        SchemaText(a.children[0], ("a",)),
        SchemaText(a1.children[0], ("a", "a1")),
        Filled(a.children[3], "v", False, ("a",), Place("p.xml", 1, 23)),
        NewText("x", Place("p.xml", 1, 34)),
        SchemaText(schema.children[3], ()),
    )
    default = resolved(LEVELS, prompt("<a/>")).items[1]
    assert default == Filled(a.children[3], "d", True, ("a",), a.children[3].place)


CHAT = """\
<schema name="s"><system>S<module name="m">M</module></system><user><module name="n">N</module>U<module name="o">O\
</module></user></schema>"""

TURNS = {
    "": ["<system", "S", "</system", "<user", "U", "</user"],
    "x": ["<system", "S", "</system", "<user", "U", "+x", "</user"],
    "<n/>x": ["<system", "S", "</system", "<user", "N", "U", "+x", "</user"],
    "1<m/>2<o/>3": ["<system", "S", "+1", "M", "+2", "</system", "<user", "U", "O", "+3", "</user"],
    "<m/>x<assistant>A</assistant><user>B</user>": [
        *("<system", "S", "M", "</system", "<user", "U", "+x", "</user"),
        *("+<assistant", "+A", "+</assistant", "+<user", "+B", "+</user"),
    ],
    "<user/>": ["<system", "S", "</system", "<user", "U", "</user", "+<user", "+</user"],
}


@pytest.mark.parametrize(("body", "expected"), TURNS.items())
def test_turns_are_resolved(body: str, expected: list[str]) -> None:
    assert shorthand(resolved(CHAT, prompt(body))) == expected


def test_borders_of_turns_split_zones() -> None:
    assert resolve_problems(CHAT, prompt("<n/><m/>"), moves=True) == [
        "p.xml:1:24: <m/> stands after <n/>, but the schema has it before; write <m/> first"
    ]
    apart = '<schema name="s"><user><module name="m">M</module></user><user><module name="n">N</module></user></schema>'
    assert len(resolve_problems(apart, prompt("<n/><m/>"), moves=True)) == 1


def test_turns_are_located() -> None:
    result = resolved(TRAVEL, prompt("\n Hi.<user>x</user>", "travel"))
    starts = [item for item in result.items if isinstance(item, TurnStart)]
    assert [(start.own, str(start.place)) for start in starts] == [
        (False, "s.xml:2:3"),
        (False, "s.xml:5:3"),
        (False, "s.xml:26:3"),
        (True, "p.xml:2:2"),
        (True, "p.xml:2:5"),
    ]
    assert result.items[-1] == TurnEnd("user", True)


def test_prompt_turn_after_schema_text() -> None:
    assert shorthand(resolved(LEVELS, prompt("<b/>x<user>y</user>"))) == [
        "B",
        "Text.\n",
        "+x",
        "+<user",
        "+y",
        "+</user",
    ]


ALONE_TURNS = {
    "<user><a/>x</user>": ["+<user", "A", "+x", "+</user"],
    "<system>1<a/></system><user>2<b/>3</user>": [
        *("+<system", "+1", "A", "+</system"),
        *("+<user", "+2", "B", "+3", "+</user"),
    ],
    "<a/>x": ["A", "+x"],
}


@pytest.mark.parametrize(("body", "expected"), ALONE_TURNS.items())
def test_schema_of_modules_in_prompt_turns(body: str, expected: list[str]) -> None:
    assert shorthand(resolved(ALONE, prompt(body))) == expected


def test_imports_across_turns_follow_the_schema() -> None:
    body = "<system><b/></system><user><a/><a/></user>"
    assert resolve_problems(ALONE, prompt(body)) == [
        "p.xml:1:47: <a/> stands after <b/>, but the schema has it before; write <a/> first "
        "(with packed positions, their order is free)",
        "p.xml:1:51: <a/> is imported twice, first in line 1; keep one of them",
    ]
    moved = resolved(ALONE, prompt("<system><b/></system><user><a/></user>"), moves=True)
    assert shorthand(moved) == ["+<system", "B", "+</system", "+<user", "A", "+</user"]


LOOSE = {
    (CHAT, "<user><m/></user>"): [
        'p.xml:1:26: <m/> stands inside <user>, but schema "s" has chat turns of its own; '
        "write it outside <user>, before it"
    ],
    (LEVELS, "<user><b/></user>"): [
        'p.xml:1:26: <b/> stands inside <user>, but schema "s" has text of its own; write it outside <user>, before it'
    ],
    (CHAT, "<user>x</user>y<m/>"): [
        "p.xml:1:34: text stands after <user> and outside chat tags; write it before <user>, or inside a chat tag",
        "p.xml:1:35: <m/> stands after <user> and outside chat tags; write it before <user>, or inside a chat tag",
    ],
    (ALONE, "<a/><user><b/></user>"): [
        'p.xml:1:20: <a/> stands outside chat tags, and schema "s" is modules alone; '
        "write everything inside chat tags, or nothing"
    ],
    (ALONE, "x<user><a/></user>"): [
        'p.xml:1:20: text stands outside chat tags, and schema "s" is modules alone; '
        "write everything inside chat tags, or nothing"
    ],
}


@pytest.mark.parametrize(("schema", "body"), LOOSE.keys())
def test_misplaced_nodes_around_turns_are_rejected(schema: str, body: str) -> None:
    assert resolve_problems(schema, prompt(body)) == LOOSE[schema, body]


def test_missing_arguments_are_reported_together():
    schema = Schema.from_string(
        '<schema name="s"><module name="customer"><param name="name" len="4"/><param name="plan" len="4"/>'
        '<param name="city" len="4" default="Bravel"/></module></schema>'
    )
    with pytest.raises(PMLError) as caught:
        resolve(schema, Prompt.from_string('<prompt schema="s"><customer/></prompt>', source="p.xml"))
    assert [str(problem) for problem in caught.value.problems] == [
        'p.xml:1:20: <customer/> needs "name", "plan", which have no defaults; write <customer name="…" plan="…"/>'
    ]
