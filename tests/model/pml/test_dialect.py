"""The dialect that the authors of Prompt Cache publish: it loads, with the same meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from inlay import LLM
from inlay.pml import Module, Prompt, Schema, Turn, Union, resolve, use
from tests.conftest import tiny
from tests.unit.pml.helpers import faults, prompt_problems, resolve_problems, schema_problems, sentences, shorthand
from tests.unit.pml.node_strategies import bare

SHAPES = sorted((Path(__file__).parents[3] / "examples" / "prompt_cache").glob("*-prompt.xml"))


@pytest.mark.parametrize("file", SHAPES, ids=lambda file: file.stem)
def test_the_published_shapes(file: Path) -> None:
    schema, prompt = Schema.from_file(str(file).replace("-prompt", "")), Prompt.from_file(file)
    items = resolve(schema, prompt).items
    for form in (Schema.from_string(schema.to_pml()), Schema.from_json(schema.to_json())):
        assert bare(form) == bare(schema)
        written = (Prompt.from_string(prompt.to_pml()), Prompt.from_json(prompt.to_json()))
        for one in written:
            assert [type(item) for item in resolve(form, one).items] == [type(item) for item in items]


def unions(schema: Schema) -> list[Union]:
    holders = [*schema.modules.values(), *(child for child in schema.children if isinstance(child, Turn))]
    return [node for holder in holders for node in holder.children if isinstance(node, Union)]


@pytest.mark.parametrize(
    ("name", "count", "least", "most"), [("personas", 7, 6, 7), ("mbti", 4, 3, 3), ("tutor", 6, 3, 4)]
)
def test_their_unions(name: str, count: int, least: int, most: int) -> None:
    found = unions(Schema.from_file(SHAPES[0].with_name(f"{name}.xml")))
    sizes = [len(union.members) for union in found]
    assert (len(sizes), min(sizes), max(sizes)) == (count, least, most)


SCOPES = (
    '<schema name="s">\n<module name="age"><union scaffold="default"><module name="default"></module>'
    '<module name="young">Young.</module></union></module>\n<module name="home"><union><module name="default"/>'
    '<module name="age">Old house.</module></union></module></schema>'
)


def test_names_are_unique_in_their_scope() -> None:
    schema = Schema.from_string(SCOPES)
    assert list(schema.modules) == ["age", "age/default", "age/young", "home", "home/default", "home/age"]
    assert schema.modules["young"] is schema.modules["age/young"]
    assert schema.modules["age"].name == "age", "a name of the root wins"
    assert schema.modules.paths("default") == ("age/default", "home/default")
    assert "default" not in schema.modules
    assert schema.parents["home/age"] == ("home",)


NESTED = {
    '<prompt schema="s"><age><young/></age><home><age/></home></prompt>': ["Young.", "Old house."],
    '<prompt schema="s"><age><default/></age><home><default/></home></prompt>': [],
}


@pytest.mark.parametrize(("text", "said"), NESTED.items())
def test_imports_go_by_their_scope(text: str, said: list[str]) -> None:
    assert shorthand(resolve(Schema.from_string(SCOPES), Prompt.from_string(text))) == said


PROBLEMS = {
    "<default/>": [
        'p.xml:1:20: <default/> stands at the top level, where the schema has none; it has "age/default", '
        '"home/default"'
    ],
    "<home><young/></home>": [
        "p.xml:1:26: <young/> stands inside <home>, but the schema has it inside <age>; write <age><young/></age>"
    ],
    "<home><default/><age/></home>": ["p.xml:1:36: <age/> and <default/> are members of one union; keep one of them"],
    "<zzz/>": [
        'p.xml:1:20: schema "s" has no module "zzz"; its modules are age, age/default, age/young, home, home/default, '
        "home/age"
    ],
}


@pytest.mark.parametrize(("body", "expected"), PROBLEMS.items())
def test_errors_give_paths(body: str, expected: list[str]) -> None:
    assert resolve_problems(SCOPES, f'<prompt schema="s">{body}</prompt>') == expected


def test_paths_in_python_and_json() -> None:
    schema = Schema.from_string(SCOPES)
    built = schema.prompt().use("age/young", "new").use("home/age").build()
    short = Prompt.from_json({"schema": "s", "imports": ["age/young", {"name": "home/age"}]})
    assert shorthand(resolve(schema, built)) == ["Young.", "+new", "Old house."]
    assert shorthand(resolve(schema, short)) == ["Young.", "Old house."]
    assert bare(Prompt.from_json(short.to_json())) == bare(short)
    assert bare(Prompt.from_string(built.to_pml())) == bare(
        schema.prompt().use("age", use("young", "new")).use("home", use("age")).build()
    )


def test_sibling_paths_share_their_parents() -> None:
    text = '<schema name="s"><module name="a">A<param name="p" len="3"/><module name="b">B<module name="c">C</module>'
    schema = Schema.from_string(text + '</module><module name="d">D</module></module></schema>')
    prompt = schema.prompt().use("a", p="x").use("a/b/c", "!").use("a/b", "?").use("a/d")
    with pytest.raises(Exception, match="<b/> is imported twice"):
        resolve(schema, prompt.build())
    prompt = schema.prompt().use("a", p="x").use("a/b").use("a/b/c").use("a/d").build()
    assert shorthand(resolve(schema, prompt)) == ["A", "[x]", "B", "C", "D"]
    assert resolve(schema, prompt).imported == {"a", "a/b", "a/b/c", "a/d"}
    alone = sentences(lambda: resolve(schema, schema.prompt().use("a/b").build()))
    assert [problem.partition(": ")[2] for problem in alone] == [
        '<a/> needs "p", which has no default; write <a p="…"/>'
    ]


def scaffold(modules: str) -> str:
    return SCOPES.replace("</schema>", f'\n<scaffold modules="{modules}"/></schema>')


def test_scaffolds_name_paths_or_unambiguous_names() -> None:
    (found,) = Schema.from_string(scaffold("young home/age")).scaffolds
    assert found.modules == ("age/young", "home/age")
    (found,) = Schema.from_string(scaffold("age home")).scaffolds
    assert found.modules == ("age", "home")
    assert schema_problems(scaffold("young default")) == [
        's.xml:4:1: <scaffold> names "default", which may be "age/default", "home/default"; write the one that you mean'
    ]
    assert schema_problems(scaffold("age/young age/defualt")) == [
        's.xml:4:1: <scaffold> names "age/defualt", which is no module of this schema; did you mean "age/default"?'
    ]


WRONG = {
    '<union scaffold="b"><module name="a"/></union>': [
        's.xml:1:25: <union> has scaffold="b", which is no member of it; its members are a'
    ],
    '<union scaffold="defualt"><module name="default"/></union>': [
        's.xml:1:25: <union> has scaffold="defualt", which is no member of it; did you mean "default"?'
    ],
    '<module name="a" cache="no"/>': ['s.xml:1:35: cache="no" is unknown; write "true" or "false"'],
    '<module name="a" cache="false"/><module name="b"/>\n<scaffold modules="a b"/>': [
        's.xml:2:1: <scaffold> names "a", which is never cached; leave it out, or let it be cached'
    ],
    '<module name="meta"/><module name="set"/>': [
        's.xml:1:26: "meta" is a tag of PML; choose another name for the module',
        's.xml:1:47: "set" is a tag of PML; choose another name for the module',
    ],
    'text<meta name="a" value="b"/>': [
        "s.xml:1:22: <meta> stands behind other content of <schema>; move it to the front"
    ],
    '<meta name="a"/>': ['s.xml:1:18: <meta> has no value; write <meta name="…" value="…"/>'],
    '<meta name="a b" value=""/>': [
        's.xml:1:24: "a b" is not a name; write letters, digits, "_", "-" and ".", with a letter or "_" first'
    ],
    '<meta name="a" value="b">c</meta>': ['s.xml:1:18: <meta> is not empty; write <meta name="…" value="…"/>'],
    '<meta name="a" value=""/><meta name="a" value=""/>': [
        's.xml:1:43: metadata "a" stands here twice; keep one of them'
    ],
}


@pytest.mark.parametrize(("body", "expected"), WRONG.items())
def test_invalid_schemas_are_rejected(body: str, expected: list[str]) -> None:
    assert schema_problems(f'<schema name="s">{body}</schema>') == expected


JSON_WRONG = {
    "a member that is none": (
        {"union": [{"module": "a"}], "scaffold": "b"},
        "pml.unknown_member content[0].scaffold",
    ),
    "cache": ({"module": "a", "cache": "false"}, 'pml.wrong_type content[0].module "a".cache'),
    "meta": ({"module": "a", "meta": {"b": 1}}, 'pml.wrong_type content[0].module "a".meta "b"'),
    "a name of metadata": ({"module": "a", "meta": {"b c": ""}}, 'pml.invalid_name content[0].module "a".meta "b c"'),
}


@pytest.mark.parametrize(("node", "problem"), JSON_WRONG.values(), ids=JSON_WRONG.keys())
def test_invalid_json_is_rejected(node: dict, problem: str) -> None:
    assert faults(lambda: Schema.from_json({"name": "s", "content": [node]})) == [problem]


def test_a_path_of_many_names_is_refused_at_once() -> None:
    prompt = {"schema": "s", "imports": ["a/" * 10**6 + "a"]}
    assert faults(lambda: Prompt.from_json(prompt)) == ["pml.too_deep imports[0]"]


META = (
    '<schema name="s" xmlns:app="urn:app" app:version="3">\n  <meta name="author" value="A &amp; B"/>\n'
    '  <module name="m" app:id="7">\n    <meta name="source" value=""/>\n'
    '    Text <param name="p" len="2" app:hint="h"/>\n'
    "  </module>\n</schema>"
)


def test_metadata_is_kept_and_costs_no_tokens() -> None:
    schema = Schema.from_string(META)
    assert {one.name: one.value for one in schema.meta} == {
        "xmlns:app": "urn:app",
        "app:version": "3",
        "author": "A & B",
    }
    module = schema.modules["m"]
    assert isinstance(module, Module)
    assert [(one.name, one.value) for one in module.meta] == [("app:id", "7"), ("source", "")]
    assert shorthand(resolve(schema, schema.prompt().use("m", p="x").build())) == ["Text ", "[x]"]
    assert bare(Schema.from_json(schema.to_json())) == bare(schema) == bare(Schema.from_string(schema.to_pml()))
    assert '"meta": {"app:id": "7", "source": ""}' in schema.to_json()


README = """<!-- Schema is a root module. -->
<!-- scenario: 1 -->
<schema name="default">
  <!-- names in one scope are unique -->
  <module name="preface">
    Just text with a parameter: <parameter name="param-name" length="5" scaffold="[later]"/>
    <module name="nested">Nested</module>
    <system>
      <union scaffold="system1">
        <module name="system1">One.</module>
        <module name="system2" cache="false">Two.</module>
        <module name="system3">Three: <parameter name="message" length="10"/></module>
      </union>
      <parameter name="tone" length="4" default="kind"/>
    </system>
  </module>
  <module name="task"><union><module name="fast">Be fast.</module><module name="slow">Be slow.</module></union></module>
</schema>
"""


def test_turns_inside_modules_and_at_the_end_of_the_prompt() -> None:
    schema = Schema.from_string(README)
    text = (
        "<prompt schema='default'><preface param-name='test'><nested/><system3 message='hi'/></preface>\n"
        "<task><fast/></task><user>What next?</user><assistant>This.</assistant><user>And then?</user></prompt>"
    )
    assert shorthand(resolve(schema, Prompt.from_string(text))) == [
        *("Just text with a parameter: ", "[test]", "Nested"),
        *("<system", "Three: ", "[hi]", "(kind)", "</system"),
        *("Be fast.", "+<user", "+What next?", "+</user", "+<assistant", "+This.", "+</assistant"),
        *("+<user", "+And then?", "+</user"),
    ]
    assert schema.levels["preface"].params.keys() == {"param-name", "tone"}


def test_schema_text_between_turns_is_kept() -> None:
    text = '<schema name="s"> <system>A</system> between <user>B</user>\n<module name="m">C</module> \n</schema>'
    schema = Schema.from_string(text)
    assert shorthand(resolve(schema, schema.prompt().use("m").text("Q").build())) == [
        *("<system", "A", "</system", " between ", "<user", "B", "</user", "C"),
        *("+<user", "+Q", "+</user"),
    ]
    assert bare(Schema.from_string(schema.to_pml())) == bare(schema)


def test_nothing_of_an_uncached_module_is_stored() -> None:
    llm = LLM(tiny("llama"), max_num_seqs=2)
    schema = Schema.from_string(
        '<schema name="s">Always. <module name="m" cache="false">Changing words.<module name="n">N</module></module>'
        '<module name="o">Others.</module></schema>'
    )
    llm.add_schema(schema, reuse="anchored")
    specs = llm.processor.schemas.module_specs("s", llm.policy("anchored"))
    assert set(specs) == {"", "o"}
    prompt = schema.prompt().use("m/n").use("o").text("Why?")
    for _ in range(2):
        (output,) = llm.generate([prompt], reuse="anchored")
    usage = output.usage
    assert usage.prompt_tokens - usage.cached_tokens >= len("Changing words.N")
    assert usage.module_tokens == len("Others.")


def test_text_that_fills_a_hole_during_encoding() -> None:
    """In the placeholder variant alone, and never as a part of the answer's context."""
    loaded = tiny("llama")
    fills = {
        None: '<param name="p" len="6" default="abc"/>',
        "xyz": '<param name="p" len="6" default="abc" scaffold="xyz"/>',
    }
    keys: dict[tuple[str, str | None], bytes] = {}
    for placeholders in ("none", "unk"):
        llm = LLM(loaded, placeholders=placeholders)
        for fill, hole in fills.items():
            schema = Schema.from_string(f'<schema name="s{fill}"><module name="m">A{hole}B</module></schema>')
            layout = llm.processor.schemas.lay_out(schema)
            specs = llm.processor.schemas.all_specs(layout, llm.policy("isolated"))
            keys[placeholders, fill] = specs[-1].digest
    assert keys["none", None] == keys["none", "xyz"]
    assert len({keys["unk", None], keys["unk", "xyz"], keys["none", None]}) == 3


def test_reserved_tag_in_a_prompt_is_rejected() -> None:
    assert prompt_problems('<prompt schema="s"><meta name="a" value="b"/></prompt>') == [
        "p.xml:1:20: <meta> is a tag of schemas; to import a module write its name as a tag, as in <miami/>"
    ]


def test_use_takes_a_path_inside_a_turn() -> None:
    schema = Schema.from_string(SCOPES)
    prompt = schema.prompt().user(use("home/age"), "Why?").build()
    assert shorthand(resolve(schema, prompt)) == ["+<user", "Old house.", "+Why?", "+</user"]
