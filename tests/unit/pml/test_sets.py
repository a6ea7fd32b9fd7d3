"""Sets of imports in every form of a prompt: their members, their places, and their written form."""

from __future__ import annotations

import pytest

from inlay import ParameterError, Schema, any_order, use
from inlay.errors import PMLError
from inlay.pml import Import, ImportSet, MemberStart, Prompt, Resolved, SetEnd, SetStart, resolve
from tests.raising import raises
from tests.unit.pml.helpers import faults
from tests.unit.pml.node_strategies import bare

SCHEMA = Schema.from_string(
    '<schema name="s"><user>Always.<module name="a">A</module><module name="b">B<module name="x">X</module>'
    '<module name="y">Y <param name="p" len="4"/></module></module><union><module name="u">U</module>'
    '<module name="v">V</module></union></user></schema>'
)
PML = '<prompt schema="s">New <set><b><set><y p="1"/><x/></set></b></set> text <set><v/><a/></set>end</prompt>'


def shown(resolved: Resolved) -> str:
    """The text of a prompt, members of sets in brackets."""
    pieces = []
    for item in resolved.items:
        if isinstance(item, SetStart):
            pieces.append("[")
        elif isinstance(item, MemberStart):
            pieces.append("|")
        elif isinstance(item, SetEnd):
            pieces.append("]")
        elif hasattr(item, "node") and item.node is not None and hasattr(item.node, "text"):
            pieces.append(item.node.text)
        elif hasattr(item, "text"):
            pieces.append(item.text)
    return "".join(pieces)


def resolved(pml: str, *, moves: bool = True) -> Resolved:
    return resolve(SCHEMA, Prompt.from_string(f'<prompt schema="s">{pml}</prompt>'), moves=moves)


@pytest.mark.parametrize(
    ("pml", "said", "names"),
    [
        ("<set><v/><a/><b/></set>?", "Always.[|V|A|B]?", [("v", "a", "b")]),
        ("before <set><v/>\n<a/></set> behind", "Always.before [|V|A] behind", [("v", "a")]),
        ("<v/><set><b>new<x/></b> <a/></set>?", "Always.V[|BnewX|A]?", [("b", "a")]),
        ('<b><set><y p="1"/><x/></set> in</b><a/>', "Always.B[|Y 1|X] inA", [("b/y", "b/x")]),
        ('<b><set><y p="1"/><x/></set></b><set><v/><a/></set>', "Always.B[|Y 1|X][|V|A]", [("b/y", "b/x"), ("v", "a")]),
        ('<set xml:space="preserve"><a/></set>', None, []),
    ],
)
def test_sets_have_members_and_surrounding_text(pml, said, names):
    if said is None:
        with raises("pml.unknown_attribute", PMLError, names="<set>"):
            resolved(pml)
        return
    found = resolved(pml)
    assert shown(found) == said
    assert [each.names for each in found.sets] == names
    assert not any(each.why_fixed for each in found.sets)


def test_fixed_positions_keep_the_schemas_order():
    found = resolved("<set><v/><b/><a/></set>?", moves=False)
    assert shown(found) == "Always.ABV?"
    (only,) = found.sets
    assert only.names == ("a", "b", "v")
    assert only.why_fixed.startswith("under positions 'schema'")
    assert shown(resolved("<set><a/></set>?")) == "Always.A?"


def test_members_of_a_union_cannot_form_a_set():
    with raises("pml.union_conflict", PMLError):
        resolved("<set><u/><v/></set>")


def test_sets_round_trip_in_every_form():
    prompt = Prompt.from_string(PML)
    assert bare(Prompt.from_string(prompt.to_pml())) == bare(prompt)
    assert bare(Prompt.from_json(prompt.to_json())) == bare(prompt)
    built = (
        SCHEMA.prompt()
        .text("New ")
        .any_order(use("b", any_order(use("y", p="1"), "x")))
        .text(" text ")
        .any_order("v", "a")
        .text("end")
    )
    assert bare(built.build()) == bare(prompt)
    short = Prompt.from_json({"schema": "s", "imports": [{"set": ["v", {"name": "b", "imports": ["x"]}]}, "a"]})
    (first, second) = short.children
    assert isinstance(first, ImportSet)
    assert isinstance(second, Import)
    assert [one.name for one in first.imports] == ["v", "b"]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"imports": [{"set": []}]}, "pml.wrong_type imports[0].set"),
        ({"imports": [{"set": [3]}]}, "pml.wrong_type imports[0].set[0]"),
        ({"content": [{"set": ["text"]}]}, "pml.misplaced_text content[0].set[0]"),
        ({"content": [{"set": [{"set": [{"import": "a"}]}]}]}, "pml.nested_set content[0].set[0]"),
        ({"imports": [{"set": [{"set": ["a"]}]}]}, "pml.nested_set imports[0].set[0]"),
        ({"content": [{"set": [{"role": "user"}]}]}, "pml.misplaced_object content[0].set[0]"),
        ({"content": [{"set": [{"import": "a"}] * 65}]}, "pml.wrong_type content[0].set"),
        ({"content": [{"set": [{"import": "a"}], "order": 1}]}, "pml.unknown_key content[0]"),
    ],
)
def test_invalid_json_sets_are_rejected(document, problem):
    assert faults(lambda: Prompt.from_json({"schema": "s", **document})) == [problem]


def test_set_in_a_schema_is_rejected():
    with raises("pml.misplaced_object", PMLError, names="set"):
        Schema.from_json({"name": "s", "content": [{"set": []}]})


def test_a_whole_prompt_in_any_order():
    prompt = Prompt.from_string('<prompt schema="s"><a/><b><y p="1"/><x/></b>and <u/><user>?</user></prompt>')
    free = prompt.in_any_order()
    first, text, alone, _ = free.children
    assert isinstance(first, ImportSet)
    assert [one.name for one in first.imports] == ["a", "b"]
    assert free.children[1:] == prompt.children[2:]
    assert (text.text, alone.name) == ("and ", "u")
    inner = Prompt.from_string(PML).in_any_order()
    assert bare(inner) == bare(Prompt.from_string(PML)), "what has sets already stays"


def test_nested_set_is_rejected():
    with raises("parameter.wrong_type", ParameterError, names="any_order"):
        any_order(any_order("a"))
