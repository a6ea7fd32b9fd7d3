"""Names of modules: made of the names and values of arguments, unique, and names of PML."""

import pytest

from inlay.pml import Schema
from inlay.pml.program.cases import (
    Case,
    CaseQuestion,
    Names,
    argument_label,
    both,
    holds,
    leaves,
    merged,
    possible,
    value_words,
    word,
)
from tests.unit.pml.programs_for_tests import define, program_of


def names(body: str, signature: str | None = None) -> list[str]:
    """The last names of all modules of a program with this body, in document order."""
    return last_names((program_of(body) if signature is None else program_of(body, signature)).schema)


def last_names(schema: Schema) -> list[str]:
    return [path.rpartition("/")[2] for path in schema.modules]


BRANCHES = {
    "flag": ["flag", "not-flag"],
    "not flag": ["not-flag", "flag"],
    "flag and other": ["flag-and-other", "not-flag-or-not-other"],
    "flag or other": ["flag-or-other", "not-flag-and-not-other"],
    "not (flag or other)": ["not-flag-and-not-other", "flag-or-other"],
    "place == 'miami'": ["place.miami", "place.not-miami"],
    "place != 'miami'": ["place.not-miami", "place.miami"],
    "place in ('miami', 'oslo')": ["place.not-tokyo", "place.tokyo"],
    "days == 1": ["days.1", "days.2"],
    "color is Color.DARK_GREEN": ["color.DARK_GREEN", "color.not-DARK_GREEN"],
    "color.value == 'red' and flag": ["color.RED-and-flag", "color.not-RED-or-not-flag"],
    "'search' in tools": ["tools.search", "tools.not-search"],
    "tools": ["tools", "not-tools"],
    "note": ["note", "not-note"],
    "place == 'oslo' or place == 'tokyo' and flag": [
        "place.oslo-or-place.tokyo-and-flag",
        "place.miami-or-place.tokyo-and-not-flag",
    ],
}


@pytest.mark.parametrize(("condition", "expected"), BRANCHES.items())
def test_branches(condition: str, expected: list[str]) -> None:
    assert names(f"if {condition}:\n    yield 'a'\nelse:\n    yield 'b'") == expected


def test_elif_name_omits_negated_conditions() -> None:
    body = "if flag:\n    yield 'a'\nelif other:\n    yield 'b'\n"
    body += "elif place == 'oslo':\n    yield 'c'\nelse:\n    yield 'd'"
    assert names(body) == ["flag", "other", "place.oslo", "not-flag-and-not-other-and-place.not-oslo"]


def test_match() -> None:
    body = "match place:\n    case 'miami' | 'tokyo':\n        yield 'a'\n"
    body += "    case _ if flag:\n        yield 'b'\n    case _:\n        yield 'c'"
    assert names(body) == ["place.not-oslo", "flag", "place.oslo-and-not-flag"]


def test_nested_branch_name_holds_only_the_new_condition() -> None:
    assert names("if place != 'oslo':\n    if place == 'miami' and flag:\n        yield 'a'") == [
        "place.not-oslo",
        "place.miami-and-flag",
    ]


def test_duplicate_names_are_numbered_in_program_order() -> None:
    assert names(
        "if flag:\n    yield 'a'\n    if other:\n        yield 'b'\nif other:\n    yield 'c'\nif flag:\n    yield 'd'"
    ) == [
        *("flag", "other", "other-2", "flag-2"),
    ]
    assert names("for x in TOOLS:\n    if flag:\n        yield x") == ["flag", "flag-2"]


def test_called_programs_prefix_names() -> None:
    outer = define(
        "@program\ndef inner(a: bool):\n    if a:\n        yield 'x'\n    if a:\n        yield 'y'\n"
        "@program\ndef middle(b: bool):\n    yield 'm'\n    yield from inner(b)\n"
        "    if b:\n        yield from inner(b)\n    yield 'n'\n"
        "@program\ndef p(c: bool):\n    yield from middle(c)\n    yield from middle(b=not c)\n    yield from inner(c)\n"
    )
    assert last_names(outer.schema) == [
        *("middle", "middle.inner", "middle.inner.c", "middle.inner.c-2", "middle.c", "middle.inner-2"),
        *("middle-2", "middle-2.inner", "middle-2.inner.not-c", "middle-2.inner.not-c-2", "middle-2.not-c"),
        *("middle-2.inner-2",),
        *("inner", "inner.c", "inner.c-2"),
    ]


def test_reserved_names_are_changed() -> None:
    signature = "user: bool, module: Literal['x', 'y'], prompt: Annotated[str, Length(2)], param: bool = False"
    body = "if user:\n    yield 'a'\nyield f'{module}'\nyield prompt\nif param:\n    yield 'b'"
    assert names(body, signature) == ["user_", "module.x", "module.y", "prompt_", "param_"]


def test_values_without_a_name_are_numbered() -> None:
    values = "'New York', 'C', 'C++', '', ' ', '<&>', 'Köln', '東京', '😀', 'a/b:c', -1, 1, None, True"
    assert names("yield f'{x}'", f"x: Literal[{values}]") == [
        *("x.New-York", "x.C", "x.C-2", "x.value-5", "x.value-6", "x.Köln", "x.東京", "x.value-9"),
        *("x.a-b-c", "x.-1", "x.1", "x.None", "x.True"),
    ]


def test_long_names_are_truncated() -> None:
    long = "a" * 100
    found = names(
        f"if {long}:\n    yield 'a'\nif not {long}:\n    yield 'b'\nif {long}:\n    yield 'c'", f"{long}: bool"
    )
    assert found == ["a" * 60, "not-" + "a" * 56, "a" * 60 + "-2"]
    many = ", ".join(f"f{n}: bool" for n in range(6))
    assert names("yield f'" + "".join(f"{{f{n}}}" for n in range(6)) + "'", many)[0].startswith("f0-and-f1-and-f2")
    mixed = " or ".join(f"f{n} and f{n + 1}" for n in range(5))
    (cut,) = names(f"if {mixed}:\n    yield 'a'", many)
    assert (cut[:13], len(cut)) == ("f0-and-f1-or-", 60)


def test_identifiers_outside_of_ascii() -> None:
    assert names("if größe:\n    yield 'a'\nif ゔ_x:\n    yield 'b'", "größe: bool, ゔ_x: bool") == ["größe", "ゔ_x"]


def test_name_words_and_numbering() -> None:
    assert [word(value) for value in ("a b", "-a-", "a--b", "é.x", 1.5, "\ud800")] == [
        "a-b",
        "-a-",
        "a--b",
        "é.x",
        "1.5",
        "",
    ]
    assert value_words(["", "x", "😀"]) == ("value-1", "x", "value-3")
    assert argument_label(["a", "b", "a"]) == "a-and-b"
    given = Names()
    assert [given.unique(label) for label in ("a", "a-2", "a", "a", "union", "1", "", "")] == [
        *("a", "a-2", "a-3", "a-4", "union_", "_1", "_", "_-2"),
    ]
    assert len(given) == 8


def question(name: str, answers: int) -> CaseQuestion:
    return CaseQuestion(name, None, tuple(range(answers)), "", tuple(map(str, range(answers))))


A, B, C = question("a", 2), question("b", 3), question("c", 2)


def test_merged_cases_hold_for_the_same_points() -> None:
    """Every set of complete cases of three questions, by brute force."""
    points = [{A: a, B: b, C: c} for a in range(2) for b in range(3) for c in range(2)]
    known: Case = {B: frozenset((0, 1, 2))}
    for bits in range(1, 1 << len(points), 7):
        chosen = [point for number, point in enumerate(points) if bits >> number & 1]
        cases = merged([{q: frozenset((n,)) for q, n in point.items()} for point in chosen], known)
        assert [holds(cases, point) for point in points] == [point in chosen for point in points]
        assert len(cases) <= len(chosen)
    assert merged([{q: frozenset((n,)) for q, n in point.items()} for point in points], known) == ({},)


def test_leaves_depend_only_on_needed_questions() -> None:
    from inlay.pml.program.cases import Undecided

    def compute(at: Case) -> str:
        for one in (A, C):
            if len(possible(at, one)) > 1:
                raise Undecided(one)
            if possible(at, one) == {0}:
                return one.argument
        return "none"

    assert leaves(compute, {}) == [
        ({A: frozenset((0,))}, "a"),
        ({A: frozenset((1,)), C: frozenset((0,))}, "c"),
        ({A: frozenset((1,)), C: frozenset((1,))}, "none"),
    ]
    assert leaves(compute, {A: frozenset((0,))}) == [({}, "a")]


def test_both() -> None:
    first, second = ({A: frozenset((0,))},), ({A: frozenset((1,))}, {A: frozenset((0,)), B: frozenset((1,))})
    assert both(first, second) == ({A: frozenset((0,)), B: frozenset((1,))},)
    assert both(first, ({},)) == first
