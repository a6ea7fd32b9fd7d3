"""Input that is made to exhaust time or memory is refused, with a place and quickly. The bounds are generous."""

import time
from collections.abc import Callable, Iterator

import pytest

from inlay.pml import Prompt, Schema, resolve
from inlay.pml import nodes as limits
from inlay.pml.parser import settle
from tests.unit.pml.helpers import prompt_problems, schema_problems, sentences

MIB = 2**20


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < 30


def test_billion_laughs() -> None:
    entities = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(12))
    text = f'<!DOCTYPE schema [<!ENTITY e0 "ha">{entities}]><schema name="s">&e12;</schema>'
    (problem,) = schema_problems(text)
    assert problem.startswith("s.xml:1:1: a DOCTYPE is not allowed; delete it")


def test_parameter_and_external_entities() -> None:
    for subset in ('<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;', '<!ENTITY x SYSTEM "file:///etc/passwd">'):
        (problem,) = schema_problems(f'<!DOCTYPE schema [{subset}]><schema name="s">&x;</schema>')
        assert problem.startswith("s.xml:1:1: a DOCTYPE is not allowed; delete it")


def test_deep_nesting() -> None:
    assert prompt_problems('<prompt schema="s">\n' + "<a>" * 100_000) == [
        "p.xml:2:94: tags are nested more than 32 deep; nest less deeply"
    ]


def test_deepest_allowed_nesting_is_accepted() -> None:
    names = [f"m{level}" for level in range(limits.MAX_DEPTH - 1)]
    modules = "".join(f'<module name="{name}">{name}' for name in names) + "</module>" * len(names)
    schema = Schema.from_string(f'<schema name="s">{modules}</schema>')
    imports = "".join(f"<{name}>" for name in names) + "".join(f"</{name}>" for name in reversed(names))
    result = resolve(schema, Prompt.from_string(f'<prompt schema="s">{imports}</prompt>'))
    assert [item.owner for item in result.items] == [tuple(names[: level + 1]) for level in range(len(names))]
    assert "nested more than 32 deep" in schema_problems(f'<schema name="s">{modules.replace(">m30", "><user/>")}')[0]


def test_a_huge_attribute() -> None:
    assert prompt_problems(f'<prompt schema="s"><a b="{"x" * 10 * MIB}"/></prompt>') == [
        'p.xml:1:23: b="…" has more than 1048576 characters; write fewer'
    ]
    within = Prompt.from_string(f'<prompt schema="s"><a b="{"x" * MIB}"/></prompt>')
    assert len(within.children[0].arguments[0].value) == MIB


def test_a_huge_tag() -> None:
    (problem,) = schema_problems(f'<schema name="s"><{"m" * 10 * MIB}/></schema>')
    assert problem.startswith("s.xml:1:18: <" + "m" * 59 + "…> is not a tag of PML; ")
    assert len(problem) < 300


def test_many_attributes() -> None:
    attributes = " ".join(f'a{n}=""' for n in range(200_000))
    assert prompt_problems(f'<prompt schema="s"><m {attributes}/></prompt>') == [
        "p.xml:1:20: <m> has more than 1000 attributes; write fewer"
    ]


def test_many_elements() -> None:
    assert prompt_problems('<prompt schema="s">' + "<a/>\n" * 120_000) == [
        "p.xml:100000:1: there are more than 100000 tags; split this into several files"
    ]
    assert len(Prompt.from_string('<prompt schema="s">' + "<a/>" * 99_999 + "</prompt>").children) == 99_999


def test_many_problems_with_names_to_compare() -> None:
    modules = "".join(f'<module name="module-number-{n}"/>' for n in range(10_000))
    schema = Schema.from_string(f'<schema name="s">{modules}</schema>')
    imports = "".join(f'<modul-number-{n} x=""/>\n' for n in range(10_000))
    prompt = Prompt.from_string(f'<prompt schema="s">{imports}</prompt>', source="p.xml")
    problems = sentences(lambda: resolve(schema, prompt))
    assert len(problems) == 21
    assert problems[20] == "p.xml: 9980 more problems are not shown; correct these first"


def test_many_imports_and_many_texts() -> None:
    modules = "".join(f'<module name="m{n}">M</module>T' for n in range(8_000))
    schema = Schema.from_string(f'<schema name="s">{modules}</schema>')
    imports = "".join(f"<m{n}>n</m{n}>x" for n in range(8_000))
    result = resolve(schema, Prompt.from_string(f'<prompt schema="s">{imports}</prompt>'))
    assert len(result.items) == 32_000


LINES = 6 * MIB
WHITE: dict[str, Callable[[], str]] = {
    "line breaks alone": lambda: "\n" * LINES,
    "line breaks after a letter": lambda: "a" + "\n" * LINES,
    "spaces before a letter": lambda: " " * LINES + "a",
    "comments": lambda: "<!---->" * (LINES // 7) + "a",
    "references": lambda: "&#32;" * (LINES // 5) + "a",
    "deeper and deeper": lambda: "".join(f"\n{' ' * depth}a" for depth in range(5_000)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", WHITE.values(), ids=WHITE.keys())
def test_white_space(make: Callable[[], str]) -> None:
    text = make()
    schema = Schema.from_string(f'<schema name="s">{text}</schema>')
    plain = text.replace("<!---->", "").replace("&#32;", " ")
    assert [child.text for child in schema.children] == [settled for settled in [settle(plain)] if settled]


def test_many_lines_in_a_tag() -> None:
    breaks = "\n" * (10 * MIB)
    prompt = Prompt.from_string(f'<prompt schema="s"><m{breaks}a{breaks[:MIB]}=""/></prompt>')
    assert prompt.children[0].arguments[0].place.line == 10 * MIB + 1


def test_long_line_of_tags_is_located() -> None:
    text = '<prompt schema="s">' + "".join(f'<a x="{n:0100d}"/>' for n in range(90_000)) + "</prompt>"
    last = Prompt.from_string(text).children[-1].arguments[0]
    assert last.place.column == text.index(f'x="{89_999:0100d}"') + 1
