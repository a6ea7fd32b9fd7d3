"""Prompt programs: a typed Python function that yields text is a schema, and a call of it is a prompt.

    @program
    def trip(place: Literal["miami", "tokyo"], vegetarian: bool = False) -> Iterator[str]:
        yield "Plan a trip.\\n"
        if vegetarian:
            yield "The traveller eats no meat.\\n"
        match place:
            case "miami":
                yield "Go to Miami.\\n"
            case "tokyo":
                yield "Go to Tokyo.\\n"

The function's syntax tree is translated once, when it is decorated; what cannot be translated is an error then, with
its place and a remedy. The function still runs as plain Python, and says the very text of the prompt. After the prompt
programs of Prompt Cache (arXiv 2311.04934, section 3.2).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, overload

from inlay.errors import ParameterError, Place, PMLError, Problem
from inlay.pml.problems import Problems
from inlay.pml.program.build import P, Program, build
from inlay.pml.program.signature import Definition, read_inputs
from inlay.pml.program.source import Outside, check_grammar, read_source
from inlay.pml.program.translate import translate
from inlay.pml.schema import Schema
from inlay.wording import shown_path


@overload
def program(function: Callable[P, Iterable[str]], /) -> Program[P]: ...
@overload
def program(*, name: str) -> Callable[[Callable[P, Iterable[str]]], Program[P]]: ...
def program(function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Make a schema of a function that yields text, and prompts of its calls.

    name: of the schema; the function's own name by default.
    Raises PMLError with everything in the function that cannot be translated, each with its place and a remedy, and
    ParameterError for what is no function.
    """
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise ParameterError(f"@program(name={name!r}): a schema's name is a str that is not empty")
    if function is None:
        return lambda decorated: _program(decorated, name)
    return _program(function, name)


def _program(function: Callable[P, Iterable[str]], name: str | None) -> Program[P]:
    definition, problems = _definition(_plain_function(function))
    try:
        flagged = check_grammar(definition.body, definition.source, problems)
        pieces = translate(definition, flagged, problems)
        problems.raise_any()
        built = build(pieces, problems)
    except RecursionError:
        problems.add(definition.source.place(definition.node), "the program nests too deeply; split it")
    problems.raise_any()
    schema = Schema(name or definition.name, built.children, (), definition.source.file)
    return Program(function, definition, schema, built.parts)


def _definition(function: FunctionType) -> tuple[Definition, Problems]:
    """The function as a program to be, and the problems of its signature."""
    source, node = read_source(function)
    outside = Outside.of(function)
    problems = Problems(source.file)
    if not inspect.isgeneratorfunction(function):
        problems.add(source.place(node), f'program {function.__name__} yields no text; write yield "…"')
    code = function.__code__
    definition = Definition(
        name=function.__name__,
        home=(function.__module__, function.__qualname__),
        source=source,
        node=node,
        outside=outside,
        local_names=frozenset(code.co_varnames + code.co_cellvars),
        signature=inspect.signature(function),
        inputs=read_inputs(function, node, source, outside, problems),
    )
    return definition, problems


def _plain_function(function: object) -> FunctionType:
    """The function, if it is one that a program can be made of."""
    if not isinstance(function, FunctionType):
        what = getattr(function, "__name__", None) or type(function).__name__
        raise ParameterError(f"@program stands over a function, not over {what}; write it directly over def")
    if objection := _objection(function):
        code = function.__code__
        raise PMLError([Problem(Place(shown_path(code.co_filename), code.co_firstlineno), objection)])
    return function


def _objection(function: FunctionType) -> str | None:
    name = function.__name__
    if name == "<lambda>":
        return "a lambda is no program; write def with yield"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return f"{name} is async; write a plain def, and have the texts ready before it is called"
    if hasattr(function, "__wrapped__"):
        return f"another decorator stands between @program and {name}; write @program directly over def"
    around = function.__qualname__.removesuffix(name)
    if around and not around.endswith("<locals>."):
        return f"{name} stands in a class; write it outside, as a plain function"
    return None
