from pathlib import Path

import pytest

from inlay import pml
from inlay.errors import InlayError, ParameterError
from inlay.pml import Prompt, PromptBuilder, Schema, resolve, use
from tests.raising import raises
from tests.unit.pml.helpers import ALONE, LEVELS, TRAVEL, resolved, sentences, shorthand


def builder(schema: str = LEVELS) -> PromptBuilder:
    return Schema.from_string(schema).prompt()


def test_the_same_prompt_as_in_xml() -> None:
    built = builder(TRAVEL).use("travel-plan", use("overseas", use("miami"), "Hot."), duration="3 days").text("Surf?")
    xml = (
        '<prompt schema="travel"><travel-plan duration="3 days"><overseas><miami/>Hot.</overseas></travel-plan>'
        "Surf?</prompt>"
    )
    assert shorthand(resolved(TRAVEL, built)) == shorthand(resolved(TRAVEL, xml))


def test_turns_are_built() -> None:
    built = builder(ALONE).system("Be kind.").user(use("a"), "x").assistant("Yes.").user(use("b"))
    assert shorthand(resolved(ALONE, built)) == [
        *("+<system", "+Be kind.", "+</system", "+<user", "A", "+x", "+</user"),
        *("+<assistant", "+Yes.", "+</assistant", "+<user", "B", "+</user"),
    ]


def test_builders_are_immutable() -> None:
    base = builder().use("b")
    one, two = base.text("1"), base.text("2")
    assert shorthand(resolved(LEVELS, base)) == ["B", "Text.\n"]
    assert shorthand(resolved(LEVELS, one)) == ["B", "Text.\n", "+1"]
    assert shorthand(resolved(LEVELS, two)) == ["B", "Text.\n", "+2"]


def test_text_is_verbatim_and_empty_text_is_dropped() -> None:
    built = builder().use("b", "").text("\n  a\n  ").text("").text(" \n ")
    assert shorthand(resolved(LEVELS, built)) == ["B", "Text.\n", "+\n  a\n  ", "+ \n "]


def test_names_that_are_no_identifiers_are_accepted() -> None:
    params = '<param name="days-left" len="3"/><param name="name" len="3"/>'
    text = f'<schema name="s"><module name="m">{params}</module></schema>'
    built = builder(text).use("m", **{"days-left": "3"}, name="n")
    assert shorthand(resolved(text, built)) == ["[3]", "[n]"]


def line_of(marker: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


def test_locations_are_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    built = (
        builder()
        .use("zzz")  # here: use
        .user(
            use("b"),  # here: nested
        )
        .build()
    )
    assert sentences(lambda: resolve(Schema.from_string(LEVELS), built)) == [
        f'test_builder.py:{line_of("here: use")}: schema "s" has no module "zzz"; '
        "its modules are a, a/a1, a/a2, a/a3, b, u1, u2, c",
        f'test_builder.py:{line_of("here: nested")}: <b/> stands inside <user>, but schema "s" has text of its own; '
        "write it outside <user>, before it",
    ]
    monkeypatch.chdir("/")
    assert builder().text("x").build().source == str(Path(__file__).relative_to("/"))


def test_a_file_outside_the_working_folder_keeps_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert builder().build().source == __file__
    tmp_path.rmdir()
    assert builder().build().source == __file__


def test_a_prompt_without_a_schema_name_in_common() -> None:
    built = builder(ALONE.replace('name="s"', 'name="t"')).build()
    assert isinstance(built, Prompt)
    (sentence,) = sentences(lambda: resolve(Schema.from_string(ALONE), built))
    assert sentence.endswith('the prompt is for schema "t", not for "s"; write <prompt schema="s">')


WRONG = {
    "a number as argument": (
        lambda b: b.use("a", p=3),
        'argument "p" must be a str, not int; convert it with str(…)',
    ),
    "None as text": (lambda b: b.text(None), "text must be a str, not NoneType; convert it with str(…)"),
    "a module as text": (lambda b: b.text(use("a")), "text must be a str, not Import; convert it with str(…)"),
    "a number as child": (
        lambda b: b.use("a", 3),
        "use takes str and use(…), not int; convert it with str(…)",
    ),
    "a list in a turn": (
        lambda b: b.user(["x"]),
        "user takes str and use(…), not list; convert it with str(…)",
    ),
    "a number as name": (lambda b: b.use(3), "a module's name must be a str, not int; convert it with str(…)"),
    "a lone surrogate": (
        lambda b: b.system("ab\ud800"),
        "text holds a lone surrogate at index 2; decode the text properly or leave it out",
    ),
    "a lone surrogate in an argument": (
        lambda b: b.use("a", p="\udfff"),
        'argument "p" holds a lone surrogate at index 0; decode the text properly or leave it out',
    ),
}


@pytest.mark.parametrize(("call", "expected"), WRONG.values(), ids=WRONG.keys())
def test_non_string_arguments_are_rejected(call, expected: str) -> None:
    with pytest.raises(ParameterError) as error:
        call(builder())
    assert str(error.value) == expected
    assert isinstance(error.value, InlayError)


def test_function_use_makes_the_same_checks() -> None:
    with raises("parameter.wrong_type", ParameterError, names="bytes"):
        use("a", p=b"x")


def test_public_names_are_sorted_and_exist() -> None:
    assert pml.__all__ == sorted(pml.__all__)
    assert all(hasattr(pml, name) for name in pml.__all__)
