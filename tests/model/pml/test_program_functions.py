"""Which functions can be programs, wherever and however they are defined, and which are refused."""

import functools
import subprocess
import sys
from collections.abc import Collection, Iterator
from enum import Enum, Flag
from pathlib import Path
from typing import Any, Literal

import pytest

from inlay.errors import ParameterError
from inlay.pml.program import Program, program
from tests.raising import raises
from tests.unit.pml.helpers import sentences
from tests.unit.pml.programs_for_tests import define, program_of, text_of

FILE = str(Path(__file__).relative_to(Path.cwd()))
GREETING = "Hello"


def decorate(function: Any) -> list[str]:
    """The problems of a function, without the file and the line of each."""
    return [sentence.split(": ", 1)[1] for sentence in sentences(lambda: program(function))]


def test_a_nested_function_sees_its_closure_and_its_module() -> None:
    def make(word: str) -> Program[[bool]]:
        @program
        def greet(loud: bool) -> Iterator[str]:
            """
                Text that is indented
            less than the function.
            """
            yield f"{GREETING} {word}"
            if loud:
                yield """
  !"""

        return greet

    for word in ("Ada", "Bob"):
        greet = make(word)
        assert text_of(greet.schema, greet(True)) == greet.text(True) == f"Hello {word}\n  !"


def test_annotations_may_be_strings() -> None:
    late = define(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from collections.abc import Iterator as Texts\n"
        "@program\ndef p(a: Literal['x', 'y'], b: Annotated[str, Length(3)] = 'z') -> Texts[str]:\n"
        "    yield f'{a}{b}'\n"
    )
    assert text_of(late.schema, late("y")) == "yz"


def test_a_string_annotation_sees_the_closure() -> None:
    def make(letters: Any) -> Program[...]:
        @program
        def p(a: "letters") -> Iterator[str]:  # type: ignore[valid-type]
            yield a
            if letters == "never":  # makes it a name of the closure
                yield "!"

        return p

    assert sentences(lambda: make(Literal["x", "y"]))[0].endswith(
        "Literal is compared; compare arguments and constants"
    )


class Place(Enum):
    HERE = "here"


class Bits(Flag):
    A = 1


class Empty(Enum):
    pass


WRONG_TYPES = {
    "a": "has no type; annotate it with bool, Literal[…] or an Enum, frozenset[Literal[…]], or Annotated[str, Length",
    "a: str": "is a str of any length; write Annotated[str, Length(…)] with the most tokens it may have",
    "a: 'str'": "is a str of any length; write Annotated[str, Length(…)] with the most tokens it may have",
    "a: Annotated[str, 5]": "is a str of any length; write Annotated[str, Length(…)] with one number of tokens",
    "a: Annotated[str, Length]": "is a str of any length; write Annotated[str, Length(…)] with one number of tokens",
    "a: Annotated[str, Length(1), Length(2)]": "is a str of any length; write Annotated[str, Length(…)] with one",
    "a: Annotated[bool, Length(1)]": "has a Length, which is for str alone; leave it out",
    "a: Annotated[str, Length(2)] | None = None": "has the type str, which has too many values; write bool, Literal[…]",
    "a: int": "has the type int, which has too many values; write bool, Literal[…] or an Enum, frozenset",
    "a: list[Literal['x']]": "has the type list[Literal['x']], which has too many values; write bool",
    "a: frozenset": "is a set of anything; write frozenset[Literal[…]]",
    "a: frozenset[str]": "has the type str, which has too many values; write bool",
    "a: Bits": "has the type Bits, which has too many values; write bool",
    "a: Empty": "has the type Empty, which has too many values; write bool",
    "a: 'Decimal'": "has a type that cannot be evaluated (name 'Decimal' is not defined); define or import what it "
    "names above the program, and not under TYPE_CHECKING alone",
    "a: 'Literal['": "has a type that cannot be evaluated",
    "a: 'Annotated[str, Length(0)]'": "has a type that cannot be evaluated (Length(0): it takes a whole number",
    "*a: bool": "stands for any number of arguments (*); write each argument with its type",
    "**a: bool": "stands for any number of arguments (**); write each argument with its type",
    "a: frozenset[Literal['x']] = set()": "has a default that can change; write frozenset(…) or a tuple",
    "a: Collection[Literal['x']] = []": "has a default that can change; write frozenset(…) or a tuple",
    "a: frozenset[Literal['x']] = ('y',)": "has the default ('y',); it must be a set of 'x', without 'y'",
    "a: bool = 1": "has the default 1; it must be True or False",
    "a: Literal['x', 1] = 'y'": "has the default 'y'; it must be 'x' or 1",
    "a: Place = 'here'": "has the default 'here'; it must be Place.HERE",
    "a: Annotated[str, Length(3)] = None": "has the default None; it must be a str of at most 3 tokens",
}


@pytest.mark.parametrize(("signature", "expected"), WRONG_TYPES.items())
def test_unsupported_parameter_types_are_rejected(signature: str, expected: str) -> None:
    names = {"Bits": Bits, "Empty": Empty, "Place": Place, "Collection": Collection}
    source = f"@program\ndef p({signature}):\n    yield 'a'\n    if a:\n        yield a\n"
    (found,) = sentences(lambda: define(source, **names))
    place, message = found.split(": ", 1)
    assert message.startswith(f"argument 'a' {expected}"), message
    assert place.endswith(f":2:{source.splitlines()[1].index('a') + 1}")


def test_a_lambda() -> None:
    assert decorate(lambda: (yield "a")) == ["a lambda is no program; write def with yield"]


def test_async_functions() -> None:
    async def waits(a: bool) -> None:
        pass

    async def waits_and_yields(a: bool) -> Any:
        yield "a"

    for function in (waits, waits_and_yields):
        name = function.__name__
        assert decorate(function) == [
            f"{name} is async; write a plain def, and have the texts ready before it is called"
        ]


def test_a_function_without_yield() -> None:
    def says_nothing(a: bool) -> str:
        return "a"

    assert decorate(says_nothing) == [
        'program says_nothing yields no text; write yield "…"',
        "a return with a value, which is no text; yield it, and return nothing",
    ]


def test_methods() -> None:
    class Prompts:
        def method(self, a: bool) -> Iterator[str]:
            yield "a"

    assert decorate(Prompts.method) == ["method stands in a class; write it outside, as a plain function"]
    assert sentences(lambda: program(Prompts.method))[0].startswith(f"{FILE}:")


def test_other_decorators() -> None:
    def wrapping(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    def plain(a: bool) -> Iterator[str]:
        yield "a"

    assert decorate(wrapping(plain)) == [
        "another decorator stands between @program and plain; write @program directly over def"
    ]

    @wrapping
    @program
    def below(a: bool) -> Iterator[str]:
        if a:
            yield "a"

    assert "".join(below(True)) == "a"


@pytest.mark.parametrize("thing", [functools.partial(print), 3, len, Place, None.__class__])
def test_objects_without_a_function_are_rejected(thing: Any) -> None:
    with raises("pml.not_a_function", ParameterError):
        program(thing)


def test_without_source() -> None:
    names: dict[str, Any] = {"program": program, "__name__": "elsewhere"}
    for file in ("<stdin>", "<string>", "nowhere.py"):
        code = compile("@program\ndef p(a: bool):\n    yield 'a'\n", file, "exec")
        (found,) = sentences(lambda code=code: exec(code, names))
        assert found == (
            f"{file}:1: program p: its source cannot be read, as in an interpreter or in exec; "
            "write the program into a file"
        )


def test_changed_source_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "programs.py"
    file.write_text("\n\ndef q(a: bool):\n    yield 'b'\n")
    code = compile("def q(b: bool):\n    yield 'a'\n", str(file), "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    (found,) = sentences(lambda: program(names["q"]))
    assert found == f"{file}:1: program q: its source does not match the running function; reload the file"


def test_constants_are_read_when_the_program_is_decorated() -> None:
    texts = ["a"]
    frozen = program_of("yield TEXTS[0]", TEXTS=texts)
    texts[0] = "b"
    assert text_of(frozen.schema, frozen()) == "a"


def test_names_defined_later_are_rejected() -> None:
    def early() -> None:
        @program
        def p(a: bool) -> Iterator[str]:
            yield later

        later = "x"
        assert p

    (found,) = sentences(early)
    assert found.endswith(": later is not defined when the program is decorated; define it above")


def test_the_schema_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Sets, dicts and hashes play no role: names, texts and order are those of the source."""
    script = tmp_path / "show.py"
    script.write_text(
        "import re\n"
        "from tests.unit.pml.programs_for_tests import program_of\n"
        'body = \'\'\'yield f"{place} {flag}"\nif tools and not (flag and other) or note:\n    yield "a"\n'
        "for x in sorted({'u', 'v', 'w', 'search'}):\n    yield x\n"
        "for x in TOOLS:\n    if x in tools or x in {'mail'}:\n"
        "        yield from toolbox(tools)\nif color in {Color.RED, Color.BLUE}:\n    yield name\n'''\n"
        "p = program_of(body)\n"
        "print(re.sub(r'Place\\([^)]*\\)', '', repr(p.schema.children)))\n"
        "print(re.sub(r'Place\\([^)]*\\)', '', repr(p(tools={'search', 'mail'}, flag=True).children)))\n"
    )
    shown = set()
    for seed in ("0", "1", "4242"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([*map(str, ("src", ".")), *sys.path])}
        words = [sys.executable, str(script)]
        shown.add(subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout)
    (only,) = shown
    assert "toolbox.tools.mail" in only
    assert str(Path.cwd()) not in only
