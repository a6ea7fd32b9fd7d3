"""Shared by the tests of prompt programs: nested programs, programs from source text, and the text of a prompt."""

import linecache
from collections.abc import Iterator
from enum import Enum
from itertools import count
from textwrap import dedent, indent
from typing import Annotated, Any, Literal

from inlay.errors import ParameterError, PMLError
from inlay.pml import Filled, NewText, Prompt, Schema, SchemaText, TurnStart, resolve
from inlay.pml.program import Length, Program, assistant, program, system, user


class Color(Enum):
    RED = "red"
    BLUE = "blue"
    DARK_GREEN = "green"


TOOLS = {"search": "Search the web.\n", "mail": "Send mail.\n"}
CITIES = ("miami", "tokyo", "oslo")
SIGNATURE = """place: Literal["miami", "tokyo", "oslo"] = "miami", flag: bool = False, other: bool = False,
    color: Color = Color.RED, days: Literal[1, 2] = 1, tools: frozenset[Literal["search", "mail"]] = frozenset(),
    name: Annotated[str, Length(5)] = "Ada", note: Annotated[str, Length(9)] = "",
"""
"""Arguments of all kinds, for programs that are generated or written in one line."""


@program
def budget(
    low: bool, level: Literal["some", "much", 3] = "some", of: Annotated[str, Length(20)] = "Ada"
) -> Iterator[str]:
    yield "Budget of "
    yield f"{of}: "
    if low:
        yield "little"
    else:
        yield f"{level}"
        if level == 3:
            return
    yield ".\n"


@program
def toolbox(tools: frozenset[Literal["search", "mail", "shell"]], polite: bool = True) -> Iterator[str]:
    for name, description in TOOLS.items():
        if name in tools:
            yield description
            if polite:
                yield f"Ask before {name}.\n"
    if not tools:
        yield "No tools.\n"


@program
def chat(question: Annotated[str, Length(30)]) -> Iterator[str]:
    with system():
        yield "Be brief.\n"
    with user():
        yield question


_files = count()


def define(source: str, name: str = "p", **names: Any) -> Program[...]:
    """Compile the program of that name from a source text, whose lines inspect can find."""
    file = f"<program {next(_files)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    known = {key: value for key, value in globals().items() if not key.startswith("_") and key not in ("define", "Any")}
    known |= {"__name__": "programs", **names}
    exec(compile(source, file, "exec"), known)
    found = known[name]
    assert isinstance(found, Program)
    return found


def program_of(body: str, signature: str = SIGNATURE, **names: Any) -> Program[...]:
    """A program with this body; its first line is line 1 of the source with the standard signature."""
    head = f"@program\ndef p({signature}):\n"
    return define(head + indent(dedent(body).strip("\n"), "    ") + "\n", **names)


def refusals(body: str, signature: str = SIGNATURE, **names: Any) -> list[str]:
    """The problems of the program with this body, as "line:column message"; the body starts in line 1."""
    before = signature.count("\n") + 2
    try:
        program_of(body, signature, **names)
    except PMLError as error:
        return [
            f"{problem.place.line - before}:{problem.place.column - 4} {problem.message}" for problem in error.problems
        ]
    raise AssertionError("the program is accepted")


def text_of(schema: Schema, prompt: Prompt) -> str:
    """The text that a prompt resolves to, arguments filled in."""
    return "".join(message["content"] for message in messages_of(schema, prompt))


def messages_of(schema: Schema, prompt: Prompt) -> list[dict[str, str]]:
    """The chat messages that a prompt resolves to; one without a role for all text of a schema without turns."""
    messages = [] if schema.has_turns else [{"role": "", "content": ""}]
    for item in resolve(schema, prompt).items:
        match item:
            case SchemaText(node):
                messages[-1]["content"] += node.text
            case Filled() | NewText():
                messages[-1]["content"] += item.text
            case TurnStart(role):
                messages.append({"role": role, "content": ""})
    return messages


__all__ = ["ParameterError", "assistant", "user"]
