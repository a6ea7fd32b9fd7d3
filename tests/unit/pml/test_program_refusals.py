"""Constructs that a program cannot have: each with its line and column, the reason and the remedy."""

import ast
import enum
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest

from inlay.pml.program import decorator, translate
from inlay.pml.program.source import EXPRESSIONS, OPERATORS, PATTERNS, REFUSED, STATEMENTS
from tests.unit.pml.programs_for_tests import budget, chat, define, program_of, refusals


@dataclass
class Tool:
    name: str
    rank: int = 1


class Opaque:
    color = "red"


class Broken(enum.Enum):
    A = 1

    def __format__(self, spec: str) -> str:
        raise ValueError("no format")


@dataclass
class BrokenBox:
    def __bool__(self) -> bool:
        raise ValueError("no truth")


OUTSIDE: dict[str, Any] = {
    "broken": Broken.A,
    "broken_box": BrokenBox(),
    "SET": {"a", "b"},
    "LIST": ["a"],
    "tool": Tool("x"),
    "Opaque": Opaque,
    "opaque": Opaque(),
    "surrogate": "\ud800",
    "print_it": print,
}

# body → "line:column message" of everything that is wrong, up to where it is cut short with …
STATEMENTS_REFUSED = {
    'while flag:\n    yield "a"': "1:1 a program cannot have while, which runs nobody knows how often; write for …",
    'try:\n    yield "a"\nexcept ValueError:\n    pass': "1:1 a program cannot have try; leave it out",
    'try:\n    yield "a"\nexcept* ValueError:\n    pass': "1:1 a program cannot have try; leave it out",
    'yield "a"\nraise ValueError': "2:1 a program cannot have raise; leave it out: arguments are checked by their t",
    'assert flag\nyield "a"': "1:1 a program cannot have assert; leave it out",
    'import os\nyield "a"': "1:1 a program cannot have an import inside it; do it outside, before the program is de",
    'from os import path\nyield "a"': "1:1 a program cannot have an import inside it; do it outside",
    'def f():\n    yield "b"\nyield "a"': "1:1 a program cannot have a function inside it; define it outside",
    'async def f():\n    pass\nyield "a"': "1:1 a program cannot have a function inside it; define it outside",
    'class A:\n    pass\nyield "a"': "1:1 a program cannot have a class inside it; define it outside",
    'del flag\nyield "a"': "1:1 a program cannot have del; leave it out",
    'global X\nyield "a"': "1:1 a program cannot have global; do it outside",
    "for x in CITIES:\n    if flag:\n        break\n    yield x": "3:9 a program cannot have break; loop over what",
    "for x in CITIES:\n    continue\n    yield x": "2:5 a program cannot have continue; put the rest of the loop un",
    'for x in CITIES:\n    yield x\nelse:\n    yield "a"': "4:5 else of a loop; write what it says behind the loop",
    'x = yield "a"': "1:5 a program cannot have the value of a yield; write yield as a statement of its own",
    'x = yield from LIST\nyield "a"': "1:5 a program cannot have the value of a yield from; write yield from as",
    'yield (yield "a")': "1:8 a program cannot have the value of a yield; write yield as a statement of its own",
    'yield "a"\nreturn "b"': "2:1 a return with a value, which is no text; yield it, and return nothing",
    "yield": '1:1 a yield without text; write yield "…"',
    '"text"\n"more"\nyield "a"': "2:1 text without yield, which Python drops; write yield before it, or # for a com",
    'f"{flag}"\nyield "a"': "1:1 text without yield, which Python drops; write yield before it, or # for a comment",
    'yield "a"\n...': "2:1 an expression alone, which says nothing; write yield or yield from before it if it is te",
    'budget(flag)\nyield "a"': "1:1 an expression alone, which says nothing; write yield or yield from before it",
    'print("a")\nyield "a"': "1:1 an expression alone, which says nothing; write yield or yield from before it",
    'with open("x"):\n    yield "a"': "1:6 this with is no chat turn; write with inlay.system():",
    'with user() as x:\n    yield "a"': "1:6 this with is no chat turn; write with inlay.system():",
    'with user, system:\n    yield "a"': "1:6 this with is no chat turn; write with inlay.system():",
    'with user(), assistant():\n    yield "a"': "1:6 this with is no chat turn; write with inlay.system():",
    'if flag:\n    with user():\n        yield "a"': "2:5 a chat turn is always there, and this one hangs on an arg",
    'with user():\n    if flag:\n        return\nwith user():\n    yield "a"': "4:1 a chat turn is always there, an",
    'with user():\n    with system():\n        yield "a"': "2:5 a chat turn inside another; close the outer one fir",
    'with user():\n    yield "a"\nyield "b"': "3:7 text outside the chat turns of this program; put it into with in",
    'if flag:\n    yield "a"\nwith system():\n    yield "b"': "2:5 text outside the chat turns of this program",
    'TOOLS["x"] = "a"\nyield "a"': "1:1 an assignment to a part of something; assign to a name",
    'TOOLS["x"] += "a"\nyield "a"': "1:1 an assignment to a part of something; assign to a name",
    'for TOOLS["x"] in CITIES:\n    yield "a"': "1:5 an assignment to a part of something; assign to a name",
    'x = LIST\nx += ["b"]\nyield x[0]': "2:1 x is changed in place; write x = x + …",
    "a, b = CITIES\nyield a": "1:1 2 names for another number of values; write a name for each",
    'a, b = ("x", "y") if flag else ("z", "w")\nyield a': "1:1 several names are assigned what hangs on an argument",
    'if flag:\n    x = "a"\nelse:\n    x = "b"\nyield x': "5:7 x is assigned in a branch that hangs on an argument;",
    "yield x\nx = 'a'": "1:7 x has no value here; assign it above",
}
EXPRESSIONS_REFUSED = {
    "yield (x := 'a')": "1:8 a program cannot have :=; write the assignment as a statement of its own",
    "yield (lambda: 'a')()": "1:8 a program cannot have lambda; compute it outside the program and use the result i",
    "yield ''.join([x for x in CITIES])": "1:15 a program cannot have a comprehension; compute it outside the progr",
    "yield ''.join(x for x in CITIES)": "1:14 a program cannot have a comprehension; compute it outside the program",
    "yield str({x for x in CITIES})": "1:11 a program cannot have a comprehension; compute it outside the program",
    "yield str({x: x for x in CITIES})": "1:11 a program cannot have a comprehension; compute it outside the program",
    "yield from budget(*LIST)": "1:19 a program cannot have a star in it; write the values one by one",
    "yield from budget(**TOOLS)": "1:12 ** in a call; write the arguments one by one",
    "yield 'a'.join(**TOOLS)": "1:7 ** in a call; write the arguments one by one",
    "yield {**TOOLS}['mail']": "1:7 ** in a dict; write its items one by one",
    "yield 'a' * 2 ** 3": "1:13 a program cannot have **; compute it outside",
    "if flag & other:\n    yield 'a'": "1:4 a program cannot have &; write and between conditions",
    "if flag | other:\n    yield 'a'": "1:4 a program cannot have |; write or between conditions",
    "if ~flag:\n    yield 'a'": "1:4 a program cannot have ~; write not before a condition",
    "yield 3": "1:7 3 is not text; write it into an f-string, or yield a str",
    "yield flag": "1:7 True is not text; write it into an f-string, or yield a str",
    "yield color": "1:7 Color.RED is not text; write it into an f-string, or yield a str",
    "yield LIST": "1:7 a list is not text; write it into an f-string, or yield a str",
    "yield tools": "1:7 the set argument 'tools' is not text; write it into an f-string, or yield a str",
    'yield f"{tools}"': "1:7 the set argument 'tools' has no text of its own; write its parts one by one",
    'yield f"{SET}"': "1:7 a set has no text of its own; write its parts one by one",
    'yield f"{CITIES}"': "1:7 a tuple has no text of its own; write its parts one by one",
    "yield str(LIST)": "1:7 str is asked of something that has no text of its own; write its parts one by one",
    "yield surrogate": "1:7 the text cannot be used: it holds a lone surrogate at index 0; decode the text properly",
    'yield f"{name!r}"': "1:7 a text argument is formatted; it goes into the text as it is: write {name} alone",
    'yield f"{name:>9}"': "1:7 a text argument is formatted; it goes into the text as it is: write {name} alone",
    'yield f"{days:{name}}"': "1:7 a text argument is a format; format constants with constants",
    'yield f"{days:q}"': "1:7 this fails (Unknown format code 'q' for object of type 'int'); correct it",
    "yield name.upper()": "1:7 a program cannot call .upper of the text argument 'name'; compute it outside the pro",
    "yield name[0]": "1:7 the text argument 'name' is subscripted; take elements of a constant str, tuple, list or",
    "yield TOOLS[name]": "1:7 the text argument 'name' is a key; make it a Literal[…], one of a few values",
    "yield name * 2": "1:7 an argument that only a call knows is reckoned with; text can be added to text alone",
    "yield name + 2": "1:7 an argument that only a call knows is reckoned with; text can be added to text alone",
    "yield -name": "1:7 an argument that only a call knows is reckoned with; text can be added to text alone",
    "yield '%s' % flag": "1:7 % on text; write an f-string",
    "yield ', '.join((name, 'b'))": "1:7 a text argument goes into a method; yield it, or write it into an f-string",
    "yield ', '.join(SET)": "1:7 the order of a set is not fixed; write sorted(…)",
    "yield str(len(name))": "1:11 an argument that only a call knows goes into len; a program uses it as it is",
    "if name == 'Bob':\n    yield 'a'": "1:4 the text argument 'name' is compared; a program sees no more of it tha",
    "if 'a' in (name, 'b'):\n    yield 'a'": "1:4 a tuple is compared; a program sees no more of it",
    "if name in tools:\n    yield 'a'": "1:4 the text argument 'name' is looked for in 'tools'; ask for one of its",
    "match name:\n    case 'Bob':\n        yield 'a'": "2:10 the text argument 'name' is compared; a program sees n",
    "if tools == SET:\n    yield 'a'": "1:4 the set argument 'tools' is compared; a program sees no more of it",
    "if place is CITIES[2]:\n    yield 'a'": "1:4 is compares objects, not values; write == or !=",
    "if days < 'a':\n    yield 'a'": "1:4 this fails ('<' not supported between instances of 'int' and 'str'); corr",
    "if print_it:\n    yield 'a'": "1:4 a condition hangs on print; write it with arguments and constants",
    "if opaque == 1:\n    yield 'a'": "1:4 an object of type Opaque is compared; compare arguments and constants",
    "for x in tools:\n    yield x": "1:10 the order of 'tools' is not fixed; loop over a tuple and ask of each whet",
    "for x in SET:\n    yield x": "1:10 the order of a set is not fixed; loop over a tuple, or over sorted(…)",
    "for x in tuple(SET):\n    yield x": "1:10 the order of a set is not fixed; loop over a tuple, or over sorted(…)",
    "for x in name:\n    yield x": "1:10 a loop runs over the text argument 'name'; loop over a constant tuple, lis",
    "for x in 3:\n    yield x": "1:10 a loop runs over 3; loop over a constant tuple, list, dict, str or range",
    "for x in range(10 ** 9):\n    yield 'a'": "1:16 a program cannot have **; compute it outside",
    "for x in range(1000000000):\n    yield 'a'": "1:10 the loop runs 1,000,000,000 times; the limit is 100,000",
    "yield from name": "1:12 yield from a text, one character at a time; write yield",
    "yield from 'abc'": "1:12 yield from a text, one character at a time; write yield",
    "yield from (1, 2)": "1:12 1 is not text; write it into an f-string, or yield a str",
    "yield CITIES[3]": "1:7 this fails (not there: tuple index out of range); correct it",
    "yield TOOLS['fax']": "1:7 this fails (not there: 'fax'); correct it",
    "x = TOOLS[place]\nyield 'a'": "1:5 this fails (not there: 'miami'); correct it",
    "yield Color.GREEN.name": "1:7 this fails (not there: GREEN); correct it",
    "yield opaque.color": "1:7 an object of type Opaque has attributes that a program does not read; compute it out",
    "yield tool.nothing": "1:7 an object of type Tool has attributes that a program does not read; compute it outsi",
    "yield sorted(CITIES, key=print_it)[0]": "1:7 print goes into sorted, which takes constants alone here; compute",
    "yield TOOLS.get('x', print_it)": "1:7 print goes into .get, which takes constants alone here; compute it outside",
    "yield f'{broken}'": "1:7 this fails (no format); correct it",
    "yield 'a' if broken_box else 'b'": "1:14 this fails (no truth); correct it",
    "yield UNKNOWN": "1:7 UNKNOWN is not defined when the program is decorated; define it above",
    "yield open('x').read()": "1:7 a program cannot call open; compute it outside the program and use the result in",
    "yield str(max(1, 2))": "1:11 a program cannot call max; compute it outside the program",
    "yield CITIES.index('oslo')": "1:7 a tuple has attributes that a program does not read; compute it",
    "yield 'a'.format(1)": "1:7 a program cannot call .format of 'a'; compute it outside the program",
    "yield str({name: 'a'})": "1:11 the text argument 'name' is a key; make it a Literal[…], one of a few values",
    "yield str({LIST: 'a'})": "1:11 this fails (unhashable type: 'list'); correct it",
    "if place == 'mimai':\n    yield 'a'": "1:13 'place' is never 'mimai'; it is 'miami', 'tokyo' or 'oslo'",
    "if place in ('miami', 'olso'):\n    yield 'a'": "1:23 'place' is never 'olso'; it is 'miami', 'tokyo' or 'oslo'",
    "for x in ('oslo', 'rome'):\n    if place == x:\n        yield x": "2:17 'place' is never 'rome'; it is 'miami'",
    "match place:\n    case 'rome':\n        yield 'a'": "2:10 'place' is never 'rome'; it is 'miami', 'tokyo' or '",
    "if 'fax' in tools:\n    yield 'a'": "1:4 'tools' never holds 'fax'; it is a set of 'search' and 'mail'",
    "for x in ('mail', 'fax'):\n    if x in tools:\n        yield x": "2:8 'tools' never holds 'fax'; it is a set of",
}
PATTERNS_REFUSED = {
    "case other:": "a program cannot have a name in a pattern; write case _ for all other values",
    "case 'miami' as city:": "a program cannot have a name in a pattern; write case _ for all other values",
    "case ['a', 'b']:": "a program cannot have a pattern of several values; match one argument against its values,",
    "case ['a', *rest]:": "a program cannot have a pattern of several values; match one argument against its values",
    "case {'a': 1}:": "a program cannot have a pattern of a mapping; match one argument against its values",
    "case str():": "a program cannot have a pattern of a class; match one argument against its values",
}
CALLS_REFUSED = {
    "yield budget(flag)": "1:7 program budget is called without yield from; write yield from budget(…)",
    "yield from budget": "1:12 program budget is not called; write yield from budget(…)",
    "yield from budget()": "1:12 missing a required argument: 'low'; call it as budget(low: True or False, level: '",
    "yield from budget(flag, low=True)": "1:12 multiple values for argument 'low'; call it as budget(",
    "yield from budget(place)": "1:19 'low' is 'miami'; it must be True or False",
    "yield from budget(name)": "1:19 'low' is the text argument 'name'; it must be True or False",
    "yield from budget(flag, level=place)": "1:31 'level' is 'miami'; it must be 'some', 'much' or 3",
    "yield from budget(flag, of=f'{name}!')": "1:28 'of' is a text with arguments in it; it must be a constant, or",
    "yield from budget(flag, of=3)": "1:28 'of' is 3; it must be a str of at most 20 tokens",
    "yield from budget(flag, of=long)": "1:28 'of' is the text argument 'long'; it may have 21 tokens, and must be",
    "yield from toolbox('mail')": "1:20 'tools' is 'mail'; it must be a set of 'search', 'mail' and 'shell'",
    "yield from toolbox(('mail', 'fax'))": "1:20 'tools' is ('mail', 'fax'); it must be a set of 'search', 'mail' a",
    "yield from toolbox(more)": "1:20 'tools' is the set argument 'more'; it may hold 'fax', and must be a set of '",
    "yield from chat(name)": "1:12 program chat has chat turns, which stand in no module; write the turns here, and",
}
NEVER = {
    'if flag:\n    if not flag:\n        yield "a"': "3:9",
    'if flag:\n    yield "a"\nelif flag:\n    yield "b"': "4:5",
    'match place:\n    case "miami" | "tokyo" | "oslo":\n        yield "a"\n    case _:\n        yield "b"': "5:9",
    'match place:\n    case "miami":\n        yield "a"\n    case "miami":\n        yield "b"': "5:9",
    'if flag:\n    return\nelse:\n    return\nyield "a"': "5:1",
    'yield "a"\nreturn\nyield "b"\nyield "c"': "3:1",
    'if days > 2:\n    yield "a"': "2:5",
    'if place in LIST:\n    yield "a"': "2:5",
}


def starts(found: list[str], expected: str) -> bool:
    return len(found) == 1 and found[0].startswith(expected)


@pytest.mark.parametrize(("body", "expected"), (STATEMENTS_REFUSED | EXPRESSIONS_REFUSED).items())
def test_unsupported_constructs_are_rejected(body: str, expected: str) -> None:
    found = refusals(body, **OUTSIDE)
    assert starts(found, expected), found


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS_REFUSED.items())
def test_patterns(pattern: str, expected: str) -> None:
    found = refusals(f"match place:\n    {pattern}\n        yield 'a'")
    assert starts(found, f"2:10 {expected}"), found


@pytest.mark.parametrize(("body", "expected"), CALLS_REFUSED.items())
def test_calls(body: str, expected: str) -> None:
    signature = (
        "place: Literal['miami', 'tokyo', 'oslo'], flag: bool, name: Annotated[str, Length(5)], "
        "long: Annotated[str, Length(21)], more: frozenset[Literal['mail', 'fax']]"
    )
    found = refusals(body, signature)
    assert starts(found, expected), found


@pytest.mark.parametrize(("body", "where"), NEVER.items())
def test_unreachable_code_is_rejected(body: str, where: str) -> None:
    found = refusals(body, **OUTSIDE)
    assert found == [
        f"{where} this never runs, whatever the arguments are; delete it, or correct the conditions before it"
    ]


def test_async_statements() -> None:
    for line, what in (("async for x in y:", "async for"), ("async with y:", "async with")):
        tree = ast.parse(f"async def f():\n    {line}\n        pass").body[0].body  # type: ignore[attr-defined]
        assert REFUSED[type(tree[0]).__name__][0] == what


def test_all_problems_at_once() -> None:
    assert refusals(
        """
        while flag:
            yield "a"
        x = UNKNOWN
        yield x
        if name == "b":
            yield 3
        for y in tools:
            yield f"{tools}"
        for z in CITIES:
            yield z.nothing
        """
    ) == [
        "1:1 a program cannot have while, which runs nobody knows how often; write for … in over a constant",
        "3:5 UNKNOWN is not defined when the program is decorated; define it above",
        "5:4 the text argument 'name' is compared; "
        "a program sees no more of it than whether it is empty: write if … or if not …",
        "6:11 3 is not text; write it into an f-string, or yield a str",
        "7:10 the order of 'tools' is not fixed; loop over a tuple and ask of each whether it is in 'tools'",
        "8:11 the set argument 'tools' has no text of its own; write its parts one by one",
        "10:11 'miami' has attributes that a program does not read; "
        "compute it outside the program and use the result in it",
    ]


def test_columns_count_characters() -> None:
    assert refusals('yield "äöü" + (x := "a")')[0].startswith("1:16 ")


def test_code_excluded_by_constants_is_accepted() -> None:
    for body in (
        "if 1 == 2:\n    yield 'a'",
        "for x in ():\n    yield x",
        "for x in CITIES:\n    if x == 'b':\n        yield x",
    ):
        assert program_of(body).schema.children == ()
    assert program_of("if flag:\n    return\n    return\nyield 'a'").text(flag=False) == "a"


def test_every_ast_node_is_handled() -> None:
    """A kind of statement, expression, pattern or operator that Python has is used, or refused with a remedy."""
    used = STATEMENTS | EXPRESSIONS | PATTERNS | OPERATORS
    bases = (ast.stmt, ast.expr, ast.pattern, ast.operator, ast.unaryop)
    kinds = {kind for kind in chain(*(base.__subclasses__() for base in bases)) if kind.__module__ == "ast"}
    decided = {kind.__name__ for kind in used} | set(REFUSED)
    deprecated = {"Num", "Str", "Bytes", "NameConstant", "Ellipsis", "AugLoad", "AugStore", "Param", "Index"}
    assert {kind.__name__ for kind in kinds} - deprecated - decided == set()
    assert not {kind.__name__ for kind in used} & set(REFUSED)


def test_too_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "MAX_ELEMENTS", 50)
    assert program_of("for x in range(49):\n    yield 'a'").text() == "a" * 49
    (found,) = refusals("for x in range(50):\n    yield 'a'")
    assert found.endswith("the program becomes more than 50 pieces; split it, or loop over less")


def test_too_many_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decorator, "MAX_ELEMENTS", 50)
    assert len(program_of("for x in range(49):\n    if flag:\n        yield 'a'").schema.modules) == 49
    (found,) = refusals("for x in range(70):\n    if flag:\n        yield 'a'")
    assert found.endswith("the program becomes more than 50 modules; split it")


def test_too_many_cases() -> None:
    flags = ", ".join(f"f{n}: bool" for n in range(14))
    body = 'yield f"' + "".join(f"{{f{n}}}" for n in range(14)) + '"'
    assert refusals(body, flags) == [
        "1:1 this hangs on more than 4,096 combinations of arguments; split it into several statements"
    ]


def test_too_deep() -> None:
    flags = ", ".join(f"f{n}: bool" for n in range(30))
    deep = "\n".join(f'if f{n}:\n    yield "{n}"\n    return' for n in range(30)) + '\nyield "x"'
    assert refusals(deep, flags)[0].endswith(
        "the program nests more than 32 deep; write if … elif … in place of returns, or fewer calls"
    )
    chain_of = "if f0:\n    yield '0'\n" + "\n".join(f'elif f{n}:\n    yield "{n}"' for n in range(1, 30))
    assert program_of(chain_of, flags).schema.to_pml()
    long = "yield " + " + ".join(['"a"'] * 900)
    assert "nests too deeply" in refusals(long)[0]


def test_recursive_calls_are_rejected() -> None:
    source = '@program\ndef p(a: bool):\n    yield "a"\n    yield from p(a)\n'
    with pytest.raises(Exception, match="p is not defined when the program is decorated; define it above"):
        define(source)
    again = define('@program\ndef p(a: bool):\n    yield "a"\n')
    with pytest.raises(Exception, match="program p calls itself; write a for loop over a constant"):
        define(source, p=again)


def test_example_programs_work() -> None:
    assert budget.text(True) == "Budget of Ada: little.\n"
    assert chat.schema.has_turns
