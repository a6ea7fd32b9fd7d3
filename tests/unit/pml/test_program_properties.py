"""Generated programs: the resolved prompt of a call equals the text of the function run as plain Python."""

import ast
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from inlay.errors import PMLError
from inlay.pml import Module, Param, Prompt, Schema, Text
from inlay.pml import attributes as names
from inlay.pml.program import Program
from inlay.pml.program.runtime import as_messages
from tests.generated import examples
from tests.unit.pml import programs_for_tests
from tests.unit.pml.programs_for_tests import SIGNATURE, Color, define, messages_of, text_of

CONDITIONS = (
    *("flag", "not flag", "other", "tools", "not tools", "note", "not note", "name and flag", "color is Color.RED"),
    *('place == "miami"', 'place != "oslo"', 'place in ("miami", "oslo")', 'place not in ("tokyo",)', "days == 2"),
    *("color == Color.BLUE", "color is not Color.BLUE", "color in (Color.RED, Color.DARK_GREEN)", "days > 1"),
    *('"search" in tools', '"mail" not in tools', "place == CITIES[days]", "True", "days + 1 == 2", "1 < days < 3"),
    *('"o" in place', 'color.value == "red"', "(flag or other) == other", "flag is True"),
)
WORDS = (
    *(
        '"one "',
        '"Two.\\n"',
        '"   "',
        '""',
        '"<&> é😀"',
        "name",
        "note",
        "place",
        'f"{place} "',
        'f"[{name}]"',
        "CITIES[days]",
    ),
    *('"A" "B"', '"x" + place', 'f"{days:>3}{flag!r}"', 'f"{color.name} of {name} in {place}"', "TOOLS['mail']"),
    *('"yes " if flag else "no "', 'note or "nothing "', 'name and f"({name})"', '", ".join(CITIES)', "place.upper()"),
    *(
        'f"{name}{note}"',
        "f\"{TOOLS['search']}{other}\"",
        'f"{days * 2 - 1}"',
        '"ab" * days',
        "place[1:]",
        "color.value",
    ),
)
LOOPS = (
    *(
        "for x in CITIES:",
        "for x in ():",
        "for x in TOOLS:",
        'for x, y in (("p", name), ("q", "r")):',
        "for x in place:",
    ),
    *("for x in range(days):", "for x, y in enumerate(CITIES, 1):", "for x, (y, z) in zip(CITIES, TOOLS.items()):"),
)
CALLS = (
    *("budget(flag)", "budget(low=not other, level=days + 1 if days == 2 else 'much')", "budget(True, of=name)"),
    *("budget(flag and other, 'some', 'Bob')", "budget(place == 'oslo', of=note)", "toolbox(tools)", "TOOLS.values()"),
    *(
        "toolbox(tools, polite=flag)",
        "toolbox({'mail', 'shell'}, place != 'oslo')",
        "toolbox(('mail',) if flag else ())",
    ),
    *("(name, 'and ', note)", "budget(low=False, level={1: 'some', 2: 3}[days])"),
)
PATTERNS = {
    "place": ('"miami"', '"tokyo"', '"oslo"', '"tokyo" | "oslo"', "_"),
    "color": ("Color.RED", "Color.BLUE", "Color.DARK_GREEN | Color.RED", "_"),
    "days": ("1", "2", "_"),
    "flag": ("True", "False", "_"),
}


class Maker:
    """Makes the source of a program from a source of randomness."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.locals = 0
        self.returns = True

    def block(self, depth: int, names: tuple[str, ...]) -> list[str]:
        lines: list[str] = []
        for _ in range(self.random.randint(1, 3)):
            made, names = self.statement(depth, names)
            lines += made
        if self.returns and depth < 3 and self.random.random() < 0.25:
            lines.append("return")
        return lines

    def statement(self, depth: int, names: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
        kind = self.random.choice(
            ["yield", "yield", "call", "assign", *(["if", "if", "match", "for"] if depth else [])]
        )
        if kind == "yield":
            return [f"yield {self.words(names)}"], names
        if kind == "call":
            return [f"yield from {self.random.choice(CALLS)}"], names
        if kind == "if":
            return self.conditional(depth, names), names
        if kind == "match":
            return self.match(depth, names), names
        if kind == "for":
            return [self.random.choice(LOOPS), *indented(self.block(depth - 1, (*names, "f'{x}'")))], names
        self.locals += 1
        name = f"v{self.locals}"
        return [f"{name} = {self.words(names)}", *self.maybe(f"{name} += {self.words(names)}")], (*names, name)

    def words(self, names: tuple[str, ...]) -> str:
        return self.random.choice([*WORDS, *names * 3])

    def maybe(self, line: str) -> list[str]:
        return [line] if self.random.random() < 0.3 else []

    def condition(self) -> str:
        one, other = self.random.choice(CONDITIONS), self.random.choice(CONDITIONS)
        return self.random.choice([one, one, f"{one} and {other}", f"{one} or {other}", f"not ({one} or {other})"])

    def conditional(self, depth: int, names: tuple[str, ...]) -> list[str]:
        lines = [f"if {self.condition()}:", *indented(self.block(depth - 1, names))]
        for _ in range(self.random.choice([0, 0, 1, 2])):
            lines += [f"elif {self.condition()}:", *indented(self.block(depth - 1, names))]
        if self.random.random() < 0.5:
            lines += ["else:", *indented(self.block(depth - 1, names))]
        return lines

    def match(self, depth: int, names: tuple[str, ...]) -> list[str]:
        subject = self.random.choice(list(PATTERNS))
        lines = [f"match {subject}:"]
        for pattern in self.random.sample(PATTERNS[subject], self.random.randint(1, 3)):
            guard = f" if {self.condition()}" if pattern == "_" or self.random.random() < 0.2 else ""
            lines += indented([f"case {pattern}{guard}:", *indented(self.block(depth - 1, names))])
        return lines

    def turns(self) -> list[str]:
        lines: list[str] = []
        count = self.random.randint(1, 4)
        for number in range(count):
            self.returns = number + 1 == count  # after a return there is no turn
            role = self.random.choice(["system", "user", "assistant"])
            lines += [f"with {role}():", *indented(['yield "So: "', *self.block(2, ())])]
        return lines

    def arguments(self) -> dict[str, Any]:
        pick = self.random.choice
        return {
            "place": pick(["miami", "tokyo", "oslo"]),
            "flag": pick([True, False]),
            "other": pick([True, False]),
            "color": pick(list(Color)),
            "days": pick([1, 2]),
            "tools": pick([(), {"search"}, ["mail"], frozenset({"search", "mail"})]),
            "name": pick(["", "Ada", "Bob & <b>"]),
            "note": pick(["", "", "a note"]),
        }


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


HEAD = f"@program\ndef p({SIGNATURE}):\n"


def plain(source: str) -> Any:
    """The function as Python has it, without a schema."""
    names = vars(programs_for_tests) | {"program": lambda function: function}
    exec(source, names)
    return names["p"]


def made(source: str) -> Program[...]:
    """The program, without the statements that are reported as unreachable."""
    while True:
        try:
            return define(source)
        except PMLError as error:
            never = [problem.place for problem in error.problems if "this never runs" in problem.message]
            branches = [problem for problem in error.problems if "is assigned in a branch" in problem.message]
            if len(never) + len(branches) < len(error.problems):
                raise
            assume(not branches)
            source = without(source, {(place.line, place.column) for place in never})


def without(source: str, places: set[tuple[int | None, int | None]]) -> str:
    """The source with ``pass`` for the statements at some places."""

    class Remover(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, ast.stmt) and (node.lineno, node.col_offset + 1) in places:
                return ast.copy_location(ast.Pass(), node)
            return super().generic_visit(node)

    return ast.unparse(Remover().visit(ast.parse(source)))


def check(lines: list[str], maker: Maker) -> None:
    source = HEAD + "\n".join([*indented(lines), ""])
    program, function = made(source), plain(source)
    schema = program.schema
    check_names(schema)
    written = Schema.from_string(schema.to_pml())
    for _ in range(10):
        arguments = maker.arguments()
        prompt = program(**arguments)
        text = "".join(function(**arguments))
        assert text_of(schema, prompt) == program.text(**arguments) == "".join(prompt) == text
        assert text_of(written, Prompt.from_string(prompt.to_pml())) == text
        if schema.has_turns:
            assert messages_of(schema, prompt) == program.messages(**arguments) == as_messages(function(**arguments))


def check_names(schema: Schema) -> None:
    """Module names are unique, parameter names in a module, and PML takes them all; no texts are neighbours."""
    found = []
    for module in schema.modules.values():
        params = [child.name for child in module.children if isinstance(child, Param)]
        assert len(params) == len(set(params))
        assert all(names.objection(name) is None for name in (module.name, *params))
        assert module.name not in names.TAGS
        assert module.children
        for level in (module.children, schema.children):
            assert not any(isinstance(a, Text) and isinstance(b, Text) for a, b in pairwise(level))
        found.append(module.name)
    assert len(found) == len(set(found)) == count_modules(schema.children)


def count_modules(nodes: Any) -> int:
    return sum(
        isinstance(node, Module) + count_modules(getattr(node, "children", getattr(node, "members", ())))
        for node in nodes
    )


RANDOMS = st.randoms(use_true_random=False)


@settings(max_examples=examples(100), deadline=None)
@given(RANDOMS)
def test_prompt_equals_the_text_of_the_function(random: Random) -> None:
    maker = Maker(random)
    check(['yield "Begin. "', *maker.block(random.randint(1, 3), ())], maker)


@settings(max_examples=examples(40), deadline=None)
@given(RANDOMS)
def test_prompt_with_turns_equals_the_text_of_the_function(random: Random) -> None:
    maker = Maker(random)
    check(maker.turns(), maker)
