"""docs/reference/programs.md: its Python runs, its PML is the programs' output, and each row of its tables is tried."""

import linecache
import re
from pathlib import Path
from typing import Any

import pytest

from inlay.errors import PMLError
from tests.unit.pml import programs_for_tests
from tests.unit.pml.programs_for_tests import define, program_of, text_of

PAGE = (Path(__file__).parents[3] / "docs/reference/programs.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def rows(heading: str) -> list[list[str]]:
    """The rows of the table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_python_examples_and_their_pml(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    pml = []
    for number, code in enumerate(blocks("python")):
        file = f"<docs/reference/programs.md, block {number}>"
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        exec(compile(code, file, "exec"), names)
        if "def trip" in code or "def agent" in code:
            pml.append(names["agent" if "def agent" in code else "trip"].schema.to_pml())
        if number == 1:
            pml.append(names["prompt"].to_pml())
    assert blocks("xml") == pml
    assert blocks("text") == [capsys.readouterr().out]
    agent = names["agent"]
    assert text_of(agent.schema, names["prompt"]) == agent.text(
        {"search", "clock"}, "find out when the sun sets in Oslo"
    )


WORKS = {
    '`yield "a" "b"`': 'yield "a" "b"\nyield f"{name}" + place',
    "`yield from other(…)`": "yield from budget(flag)\n"
    "yield from {'miami': toolbox, 'tokyo': toolbox, 'oslo': toolbox}[place](tools)",
    "`yield from TEXTS`": "yield from CITIES\nyield from TOOLS\nyield from list(CITIES)",
    "`if`, `elif`, `else`": "if flag and days < 2 or not other:\n    yield 'a'\n"
    "elif name and place != 'oslo':\n    yield 'b'\n"
    "elif 'mail' in tools and color is Color.RED:\n    yield 'c'\nelse:\n    yield 'd'",
    "`match`": "match place:\n    case 'miami' | 'oslo' if flag:\n        yield 'a'\n    case _:\n        yield 'b'",
    "`for x in CONSTANT`": "for a, (b, c) in enumerate(zip(CITIES, TOOLS.items())):\n    yield f'{a}{b}{c[0]}'\n"
    "for x in reversed(sorted(CITIES)):\n    yield x\n"
    "for x in 'ab':\n    yield x\nfor x in range(days):\n    yield '.'",
    "`return`": "if flag:\n    return\nyield 'a'",
    "`title = …`": "title = 'a'\ntitle += name\na, b = 'x', 'y'\nc: str = place\nyield title + a + b + c",
    "`a if flag else b`": "yield 'a' if flag else 'b'\nyield note or 'nothing'",
    "`TEXTS[place]`": "yield {'miami': 'a', 'tokyo': 'b', 'oslo': 'c'}[place]\nyield CITIES[days]\n"
    "for x in CITIES[1:]:\n    yield x[:2]",
    "`Color.RED.value`": "yield Color.RED.value\nyield color.name",
    '`f"{days:>3}{flag!r}"`': 'yield f"{days:>3}{flag!r}"',
    '`", ".join(NAMES)`': "yield ', '.join(CITIES).upper().replace('O', '0')\n"
    "yield str(len(CITIES)) + TOOLS.get('x', '-')",
    "`with inlay.user():`": "with system():\n    yield 'a'\nfor x in CITIES:\n"
    "    with user():\n        yield x\n    with assistant():\n        yield '!'",
    "`pass`": "if flag:\n    pass\nelse:\n    yield 'a'",
    '`"""…"""`': '"""Documentation."""\nyield "a"',
}
# each is a body, or all of a source where it begins at the left with @program or a comment
REFUSED = {
    "`while`": ["while flag:\n    yield 'a'"],
    "`break`, `continue`, `else` of a loop": [f"for x in CITIES:\n    yield x\n    {x}" for x in ("break", "continue")]
    + ["for x in CITIES:\n    yield x\nelse:\n    yield 'a'"],
    "`try`, `raise`, `assert`": [
        "try:\n    yield 'a'\nfinally:\n    pass",
        "yield 'a'\nraise ValueError",
        "assert flag\nyield 'a'",
    ],
    "`import`, `def`, `class`, `lambda`, `del`, `global`, `nonlocal`": [
        *(
            f"{x}\nyield 'a'"
            for x in ("import os", "def f(): pass", "class A: pass", "x = lambda: 1", "del flag", "global Y")
        ),
        "# \ndef f():\n    y = 1\n    @program\n    def p():\n        nonlocal y\n        yield 'a'\nf()",
    ],
    "comprehensions, `:=`, `*` and `**` in calls": [
        "yield ''.join([x for x in CITIES])",
        "yield (x := 'a')",
        "yield from budget(*CITIES)",
        "yield from budget(**TOOLS)",
    ],
    "`await`, `async for`, `async with`": ["@program\nasync def p():\n    await x\n    yield 'a'"],
    "`with` of anything but a chat turn": ["with open('x'):\n    yield 'a'"],
    "a chat turn in a branch, in a module, in another turn": [
        "if flag:\n    with user():\n        yield 'a'",
        "with user():\n    with user():\n        yield 'a'",
    ],
    "a call of any other function": ["yield input()", "yield open('x').read()"],
    "`yield other(…)`, `other(…)` alone": ["yield budget(flag)", "budget(flag)\nyield 'a'"],
    "a program that calls itself, or one with chat turns": ["yield from p()", "yield from chat(name)"],
    "text without `yield`": ["yield 'a'\n'b'"],
    "`return` with a value, `x = yield …`": ["yield 'a'\nreturn 'b'", "x = yield 'a'"],
    "methods, formats and comparisons of a text argument": [
        "yield name.upper()",
        "yield f'{name:>9}'",
        "if name == 'a':\n    yield 'b'",
    ],
    "a loop over a set, or over a set argument": ["for x in {'a', 'b'}:\n    yield x", "for x in tools:\n    yield x"],
    "patterns with names, of sequences, mappings or classes": [
        f"match place:\n    case {x}:\n        yield 'a'" for x in ("other", "['a']", "{'a': 1}", "str()")
    ],
    "`is` between texts or numbers": ["if place is CITIES[0]:\n    yield 'a'"],
    "`x += […]`": ["x = list(CITIES)\nx += ['a']\nyield from x"],
    "a name that is assigned in a branch and read behind it": ["if flag:\n    x = 'a'\nelse:\n    x = 'b'\nyield x"],
    "a comparison with a value that the argument never has; a branch that never runs": [
        "if place == 'rome':\n    yield 'a'",
        "if flag and not flag:\n    yield 'a'",
    ],
    "arguments without a type, `str` without `Length`, `int`, `float`, …": [
        f"@program\ndef p({x}):\n    yield 'a'" for x in ("a", "a: str", "a: int", "a: float")
    ],
    "`*args`, `**kwargs`, a `list`, `dict` or `set` as default": [
        f"@program\ndef p({x}):\n    yield 'a'" for x in ("*a: bool", "**a: bool", "a: frozenset[Literal['x']] = set()")
    ],
    "async functions, lambdas, methods, `functools.partial`, a decorator below `@program`": [
        "@program\nasync def p():\n    yield 'a'",
        "# \np = program(lambda: (yield 'a'))",
        "# \nclass A:\n    @program\n    def p(self: bool):\n        yield 'a'",
        "# \nimport functools\np = program(functools.partial(print))",
        "# \nimport functools\n@program\n@functools.wraps(print)\ndef p():\n    yield 'a'",
    ],
    "a program in an interpreter or in `exec`, without source": ["# \nexec(\"@program\\ndef p():\\n    yield 'a'\")"],
    "a `yield` that hangs on more than 4,096 combinations of arguments; more than 32 modules in each other": [
        "@program\ndef p(" + ", ".join(f"f{n}: bool" for n in range(13)) + "):\n"
        "    yield f'" + "".join(f"{{f{n}}}" for n in range(13)) + "'",
        "@program\ndef p("
        + ", ".join(f"f{n}: bool" for n in range(32))
        + "):\n"
        + "".join(f"{'    ' * (n + 1)}if f{n}:\n" for n in range(32))
        + "    " * 33
        + "yield 'a'\n",
    ],
}


def test_every_table_row_is_tried() -> None:
    assert [row[0] for row in rows("What works")] == list(WORKS)
    assert [row[0] for row in rows("What is refused")] == list(REFUSED)


@pytest.mark.parametrize("body", WORKS.values(), ids=WORKS.keys())
def test_supported_constructs_work(body: str) -> None:
    works = program_of(body)
    for flag in (True, False):
        for place in ("miami", "tokyo", "oslo"):
            for arguments in ({}, {"tools": {"mail"}, "note": "n", "name": "", "days": 2}):
                prompt = works(place, flag, **arguments)
                assert text_of(works.schema, prompt) == works.text(place, flag, **arguments)


@pytest.mark.parametrize("source", [source for sources in REFUSED.values() for source in sources])
def test_unsupported_constructs_are_rejected(source: str) -> None:
    with pytest.raises((PMLError, programs_for_tests.ParameterError)):
        define(source) if source.startswith(("@program", "# ")) else program_of(source)


def test_the_names() -> None:
    signature = (
        "vegetarian: bool, place: Literal['miami', 'tokyo', 'oslo', 'rome'], tools: frozenset[Literal['search']], "
        "note: Annotated[str, Length(9)]"
    )
    inner = define("@program\ndef budget(low: bool):\n    if low:\n        yield 'a'\n", "budget")
    shown = {row[0]: re.findall(r"`([^`]*)`", row[1]) for row in rows("Names")}
    conditions = {
        "`vegetarian`": "vegetarian",
        '`place == "miami"`, `case "miami"`': "place == 'miami'",
        '`place in ("miami", "tokyo")`': "place in ('miami', 'tokyo')",
        '`place != "miami"`, of three or more': "place != 'miami'",
        '`"search" in tools`': "'search' in tools",
        "`if note:` of a text": "note",
        '`vegetarian and place == "miami"`': "vegetarian and place == 'miami'",
    }
    for key, condition in conditions.items():
        found = program_of(f"if {condition}:\n    yield 'a'\nelse:\n    yield 'b'", signature).schema.modules
        assert shown.pop(key) == list(found)[: 2 if key == "`vegetarian`" else 1]
    (calls,) = shown.values()
    paths = program_of("yield from budget(vegetarian)", signature, budget=inner).schema.modules
    assert [path.rpartition("/")[2] for path in paths] == calls
