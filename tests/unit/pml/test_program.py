"""Prompt programs: the schema of a function, the prompt of a call, and refused calls."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import pytest

from inlay.errors import ParameterError
from inlay.pml import Module, Param, Prompt, Schema, Text, Turn, Union, resolve
from inlay.pml.program import Length, program, system, user
from inlay.prompt.inputs import as_prompt, is_several
from tests.raising import raises
from tests.unit.pml.helpers import shorthand
from tests.unit.pml.programs_for_tests import (
    Color,
    budget,
    chat,
    define,
    messages_of,
    program_of,
    text_of,
    toolbox,
)


@program
def trip(
    place: Literal["miami", "tokyo"],
    duration: Annotated[str, Length(5)] = "3 days",
    vegetarian: bool = False,
) -> Iterator[str]:
    """Plans a trip."""
    with system():
        yield "You plan trips.\n"
    with user():
        yield f"Plan a trip of {duration}.\n"  # here: duration
        if vegetarian:
            yield "The traveller eats no meat.\n"
        match place:
            case "miami":
                yield "Go to Miami.\n"
            case "tokyo":
                yield "Go to Tokyo.\n"
        yield from budget(low=vegetarian)


def bare(nodes: object) -> object:
    """Nodes as nested tuples, without places and numbers."""
    match nodes:
        case Text(text):
            return text
        case Param(name, length, default):
            return (name, length, default)
        case Module(name, children):
            return (name, bare(children))
        case Union(members):
            return ("union", bare(members))
        case Turn(role, children):
            return (role, bare(children))
        case tuple():
            return tuple(map(bare, nodes))
    raise AssertionError(nodes)


def level(body: str, **names: object) -> object:
    """The top level of the schema of a program with this body."""
    return bare(program_of(body, **names).schema.children)


def test_a_program_is_a_schema() -> None:
    assert isinstance(trip.schema, Schema)
    assert trip.schema.name == "trip"
    assert bare(trip.schema.children) == (
        ("system", ("You plan trips.\n",)),
        (
            "user",
            (
                ("duration", ("Plan a trip of ", ("duration", 5, "3 days"), ".\n")),
                ("vegetarian", ("The traveller eats no meat.\n",)),
                ("union", (("place.miami", ("Go to Miami.\n",)), ("place.tokyo", ("Go to Tokyo.\n",)))),
                (
                    "budget",
                    (
                        "Budget of Ada: ",
                        ("union", (("budget.vegetarian", ("little",)), ("budget.not-vegetarian", ("some",)))),
                        ".\n",
                    ),
                ),
            ),
        ),
    )
    orders = [node.order for node in trip.schema.children]
    assert orders == [0, 2]


def test_a_call_is_a_prompt() -> None:
    prompt = trip("tokyo", vegetarian=True, duration="a week")
    assert isinstance(prompt, Prompt)
    assert prompt.schema == "trip"
    assert shorthand(resolve(trip.schema, prompt)) == [
        *("<system", "You plan trips.\n", "</system", "<user", "Plan a trip of ", "[a week]", ".\n"),
        *("The traveller eats no meat.\n", "Go to Tokyo.\n", "Budget of Ada: ", "little", ".\n", "</user"),
    ]
    assert trip("tokyo") == trip(place="tokyo", duration="3 days", vegetarian=False) != prompt


def test_default_is_left_to_the_schema() -> None:
    for prompt in (trip("miami"), trip("miami", "3 days")):
        assert "(3 days)" in shorthand(resolve(trip.schema, prompt))
    assert "[]" in shorthand(resolve(trip.schema, trip("miami", "")))


def test_function_and_prompt_give_the_same_text() -> None:
    assert "".join(trip("miami")) == trip.text("miami") == text_of(trip.schema, trip("miami"))
    assert trip.messages("miami") == messages_of(trip.schema, trip("miami"))
    assert trip.messages("miami")[0] == {"role": "system", "content": "You plan trips.\n"}
    assert "".join(trip.function("miami")) == trip.text("miami")
    assert (trip.__name__, trip.__doc__) == ("trip", "Plans a trip.")


def test_messages_need_turns() -> None:
    with pytest.raises(ParameterError) as error:
        budget.messages(True)
    assert str(error.value) == "program budget has no chat turns; call text(…), or write with inlay.user():"


def test_engine_accepts_the_prompt_as_one() -> None:
    prompt = trip("miami")
    assert not is_several(prompt)
    assert as_prompt(prompt) is prompt


def test_text_can_be_appended_to_a_prompt() -> None:
    built = trip("miami").builder().text("Where can we surf?").build()
    assert shorthand(resolve(trip.schema, built))[-2:] == ["+Where can we surf?", "</user"]
    assert built.source == str(Path(__file__).relative_to(Path.cwd()))


def test_locations_are_lines_of_the_program_and_the_call() -> None:
    lines = Path(__file__).read_text().splitlines()
    file = str(Path(__file__).relative_to(Path.cwd()))
    module = trip.schema.modules["duration"]
    written = next(number for number, line in enumerate(lines, 1) if line.endswith("# here: duration"))
    assert [str(node.place) for node in (module, *module.children)] == [f"{file}:{written}:15"] * 4
    prompt = trip("miami", "x")  # here: call
    called = next(number for number, line in enumerate(lines, 1) if line.endswith("# here: call"))
    assert str(prompt.children[0].place) == str(prompt.place) == f"{file}:{called}"
    assert str(trip.schema.modules["budget.vegetarian"].place).split(":")[0].endswith("programs_for_tests.py")


def test_schema_name_can_be_set() -> None:
    named = define('@program(name="a trip")\ndef p(a: bool):\n    if a:\n        yield "A"\n')
    assert named.schema.name == named(True).schema == "a trip"
    for wrong in ("", " ", 3):
        with raises("parameter.invalid_name", ParameterError):
            program(name=wrong)  # type: ignore[call-overload]


def test_text_with_an_argument_becomes_a_module() -> None:
    assert level('yield "a"\nyield f"{name}, {note}"\nyield "b"\nyield name') == (
        "a",
        ("name-and-note", (("name", 5, "Ada"), ", ", ("note", 9, ""))),
        "b",
        ("name", (("name", 5, "Ada"),)),
    )


def test_argument_used_twice_is_two_parameters() -> None:
    twice = program_of('yield f"{name} and {name}{name}"')
    (module,) = twice.schema.children
    assert bare(module) == ("name", (("name", 5, "Ada"), " and ", ("name-2", 5, "Ada"), ("name-3", 5, "Ada")))
    assert text_of(twice.schema, twice(name="Bo")) == "Bo and BoBo"


def test_adjacent_texts_are_joined() -> None:
    assert level(
        'yield "a"\nyield "b" "c"\nfor x in CITIES:\n    yield f"{x} "\nyield ""\nif flag:\n    yield "d"'
    ) == (
        "abcmiami tokyo oslo ",
        ("flag", ("d",)),
    )


def test_branches_without_text_need_no_module() -> None:
    assert level('if flag:\n    pass\nelse:\n    yield "a"\nif other:\n    yield ""\nyield "b"') == (
        ("not-flag", ("a",)),
        "b",
    )
    only = program_of('match place:\n    case "miami":\n        pass\n    case _:\n        yield "b"')
    assert bare(only.schema.children) == (("place.not-miami", ("b",)),)
    assert (only.text("miami"), text_of(only.schema, only("miami"))) == ("", "")
    assert text_of(only.schema, only("oslo")) == "b"


def test_code_after_a_return_moves_into_the_other_branch() -> None:
    assert level('if flag:\n    yield "a"\n    return\nyield "b"\nif other:\n    return\nyield "c"') == (
        ("union", (("flag", ("a",)), ("not-flag", ("b", ("not-other", ("c",)))))),
    )


def test_code_after_several_returning_branches_is_written_once() -> None:
    assert level(
        'match place:\n    case "miami":\n        yield "a"\n    case "tokyo":\n        yield "b"\n'
        '    case _:\n        return\nyield "c"'
    ) == (
        ("union", (("place.miami", ("a",)), ("place.tokyo", ("b",)))),
        ("place.not-oslo", ("c",)),
    )


def test_choice_in_a_text_becomes_a_union() -> None:
    assert level('yield f"To {place}. "\nif place == "oslo":\n    yield f"{place}!"') == (
        ("union", (("place.miami", ("To miami. ",)), ("place.tokyo", ("To tokyo. ",)), ("place.oslo", ("To oslo. ",)))),
        ("place.oslo-2", ("oslo!",)),
    )
    assert level('yield "a" if place == "oslo" else "b"') == (
        ("union", (("place.not-oslo", ("b",)), ("place.oslo", ("a",)))),
    )
    assert level('yield "a" if flag else "a"') == ("a",)


def test_members_of_a_set_are_selected_separately() -> None:
    agent = program_of("for x in TOOLS:\n    if x in tools:\n        yield TOOLS[x]")
    assert bare(agent.schema.children) == (
        ("tools.search", ("Search the web.\n",)),
        ("tools.mail", ("Send mail.\n",)),
    )
    for tools in ({"mail", "search"}, ["mail", "search"], ("mail", "mail", "search"), {"mail": 1, "search": 2}.keys()):
        assert text_of(agent.schema, agent(tools=tools)) == "Search the web.\nSend mail.\n"
    assert text_of(agent.schema, agent()) == ""


def test_call_is_a_nested_module_with_its_arguments() -> None:
    calls = program_of(
        'yield from toolbox(tools, polite=False)\nyield from budget(True, of="me")\nyield from budget(flag)'
    )
    assert bare(calls.schema.children) == (
        (
            "toolbox",
            (
                ("toolbox.tools.search", ("Search the web.\n",)),
                ("toolbox.tools.mail", ("Send mail.\n",)),
                ("toolbox.not-tools", ("No tools.\n",)),
            ),
        ),
        ("budget", ("Budget of me: little.\n",)),
        (
            "budget-2",
            (
                "Budget of Ada: ",
                ("union", (("budget-2.flag", ("little",)), ("budget-2.not-flag", ("some",)))),
                ".\n",
            ),
        ),
    )
    assert text_of(calls.schema, calls(tools={"mail"}, flag=True)) == (
        "Send mail.\nBudget of me: little.\nBudget of Ada: little.\n"
    )


def test_a_text_argument_is_passed_through() -> None:
    passed = program_of("yield from budget(low=True, of=name)")
    assert bare(passed.schema.children) == (("budget", ("Budget of ", ("name", 5, "Ada"), ": little.\n")),)
    assert text_of(passed.schema, passed(name="Bo")) == "Budget of Bo: little.\n"


def test_program_can_be_picked_by_a_choice() -> None:
    first = define('@program\ndef first():\n    yield "1"\n', "first")
    second = define('@program\ndef second():\n    yield "2"\n', "second")
    picked = program_of(
        "yield from (FIRST if place == 'oslo' else OTHERS[flag])()", FIRST=first, OTHERS=[second, first]
    )
    assert text_of(picked.schema, picked("oslo")) == text_of(picked.schema, picked("miami", True)) == "1"
    assert text_of(picked.schema, picked("miami")) == picked.text("miami") == "2"


def test_loop_writes_example_turns() -> None:
    shots = program_of(
        "for x, y in (('2+2', '4'), ('3+3', '6')):\n"
        "    with user():\n        yield x\n    with assistant():\n        yield y\n"
        "with user():\n    yield name"
    )
    roles = [message["role"] for message in messages_of(shots.schema, shots())]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert shots.messages(name="4+4")[-1] == {"role": "user", "content": "4+4"}


def test_all_kinds_of_parameters() -> None:
    kinds = define(
        "@program\ndef p(a: bool, /, b: bool = True, *, c: bool, d: Literal[1] = 1):\n"
        "    if a and b and c:\n        yield f'{d}'\n"
    )
    assert kinds.text(True, c=True) == text_of(kinds.schema, kinds(True, c=True)) == "1"
    usage = "call it as p(a: True or False, /, b: True or False = True, *, c: True or False, d: 1 = 1)"
    with pytest.raises(ParameterError) as error:
        kinds(True, True, True)
    assert str(error.value) == f"program p: too many positional arguments; {usage}"


def test_arguments_may_have_any_name() -> None:
    odd = define("@program\ndef p(self: bool, function: bool, args: bool):\n    yield f'{self}{function}{args}'\n")
    assert text_of(odd.schema, odd(self=True, function=False, args=True)) == odd.text(
        self=True, function=False, args=True
    )
    assert odd.text(True, True, True) == "TrueTrueTrue"


def test_choice_types_are_checked() -> None:
    types = define(
        "Small = Literal['s', 1]\n"
        "@program\ndef p(\n"
        "    a: bool | None, b: Color | Literal['none'], c: Small | Literal[True, 2], d: Color | None = None,\n"
        "    e: Annotated[Literal['x'], 'a note'] = 'x', f: Set[Color] = (), g: Collection[Small] = frozenset()):\n"
        "    yield f'{a} {b} {c} {d} {e} {Color.RED in f} {1 in g}'\n",
        Set=set,
        Collection=frozenset,
    )
    for arguments in [
        (None, Color.RED, 1),
        (True, "none", True, Color.BLUE),
        (False, Color.BLUE, 2, None, "x", {Color.RED}, [1]),
    ]:
        assert text_of(types.schema, types(*arguments)) == types.text(*arguments)
    assert types.text(True, "none", True).startswith("True none True")
    for wrong in [(1, "none", 1), (None, "RED", 1), (None, "none", 1.0), (None, "none", 3), (0, "none", 1)]:
        with raises("parameter.wrong_type", ParameterError):
            types(*wrong)


WRONG_CALLS = {
    "an unknown choice": (lambda: trip("paris"), "program trip: 'place' is 'paris'; it must be 'miami' or 'tokyo'"),
    "no flag": (lambda: trip("miami", vegetarian=1), "program trip: 'vegetarian' is 1; it must be True or False"),
    "no text": (lambda: trip("miami", 3), "program trip: 'duration' is 3; it must be a str of at most 5 tokens"),
    "a lone surrogate": (
        lambda: trip("miami", "a\ud800"),
        "program trip: 'duration' is 'a\\ud800'; it holds a lone surrogate at index 1; "
        "decode the text properly or leave it out",
    ),
    "a missing argument": (
        lambda: trip(),
        "program trip: missing a required argument: 'place'; call it as trip(place: 'miami' or 'tokyo', "
        "duration: a str of at most 5 tokens = '3 days', vegetarian: True or False = False)",
    ),
    "too many": (
        lambda: budget(True, "some", "x", 1),
        "program budget: too many positional arguments; call it as budget(",
    ),
    "an unknown name": (
        lambda: chat(quest="x"),
        "program chat: missing a required argument: 'question'; call it as chat(",
    ),
    "one twice": (lambda: trip("miami", place="x"), "program trip: multiple values for argument 'place'; call it as "),
    "no set": (
        lambda: toolbox("mail"),
        "program toolbox: 'tools' is 'mail'; it must be a set of 'search', 'mail' and 'shell'",
    ),
    "an unknown element": (
        lambda: toolbox(["mail", "fax"]),
        "program toolbox: 'tools' is ['mail', 'fax']; it must be a set of 'search', 'mail' and 'shell', without 'fax'",
    ),
    "an iterator": (lambda: toolbox(iter(["mail"])), "it must be a set of 'search', 'mail' and 'shell'"),
}


@pytest.mark.parametrize(("call", "sentence"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_invalid_calls_are_rejected(call, sentence: str) -> None:
    with pytest.raises(ParameterError) as error:
        call()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokens", [0, -1, 1_000_001, 2.0, True, "5", None])
def test_length_is_checked(tokens: object) -> None:
    with pytest.raises(ParameterError) as error:
        Length(tokens)  # type: ignore[arg-type]
    assert str(error.value) == f"Length({tokens!r}): it takes a whole number of tokens from 1 to 1000000"
    assert Length(1_000_000).tokens == 1_000_000


def test_prompts_and_programs_are_copied_and_pickled_by_name() -> None:
    prompt = trip("tokyo", "x")
    for copied in (pickle.loads(pickle.dumps(prompt)), replace(prompt)):
        assert copied == prompt
        assert "".join(copied) == "".join(prompt)
        assert copied.program is trip
    assert repr(trip).startswith("<program trip(place: 'miami' or 'tokyo'")


def test_program_may_have_no_text_for_some_calls() -> None:
    quiet = program_of('if flag:\n    yield "a"')
    assert resolve(quiet.schema, quiet()).items == ()
