"""The source of a decorated function: its syntax tree, and the place of everything in it."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

from inlay.errors import Place, PMLError, Problem
from inlay.pml.problems import shown_path


@dataclass(frozen=True, slots=True)
class Source:
    """The file that a program stands in. ``lines`` are as written, line breaks included."""

    file: str
    lines: tuple[str, ...]

    def place(self, node: ast.AST) -> Place:
        """File, line and column of a node, relative to the working folder where it is inside; columns in characters."""
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)  # the offset counts bytes
        before = self.lines[line - 1].encode()[:offset] if line <= len(self.lines) else b""
        return Place(self.file, line, len(before.decode(errors="replace")) + 1)


def read_source(function: FunctionType) -> tuple[Source, ast.FunctionDef]:
    """The source of the function and its definition in it. Raises PMLError where there is none."""
    file = shown_path(function.__code__.co_filename)
    try:
        lines = tuple(inspect.findsource(function)[0])
        tree = _parsed("".join(lines))
    except (OSError, SyntaxError, ValueError):
        reason = "its source cannot be read, as in an interpreter or in exec; write the program into a file"
        raise _unreadable(function, file, reason) from None
    definition = next(_definitions(tree, function), None)
    if definition is None:
        raise _unreadable(function, file, "its source is not what is running; load the file anew")
    return Source(file, lines), definition


def _definitions(tree: ast.AST, function: FunctionType) -> Iterator[ast.FunctionDef]:
    code = function.__code__
    takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if first == code.co_firstlineno and tuple(argument.arg for argument in arguments) == takes:
                yield node


@lru_cache(maxsize=16)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _unreadable(function: FunctionType, file: str, reason: str) -> PMLError:
    place = Place(file, function.__code__.co_firstlineno)
    return PMLError([Problem(place, f"program {function.__name__}: {reason}")])


@dataclass(frozen=True, slots=True)
class Outside:
    """The names that a function sees around it: its closure, its module, the builtins."""

    cells: Mapping[str, Any]
    names: Mapping[str, Any]

    @classmethod
    def of(cls, function: FunctionType) -> Outside:
        """What the function sees."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return cls(dict(cells), function.__globals__)

    def find(self, name: str) -> Any:
        """The object of that name. Raises NameError where there is none (yet)."""
        if name in self.cells:
            try:
                return self.cells[name].cell_contents
            except ValueError:  # an empty cell
                raise NameError(name) from None
        if name in self.names:
            return self.names[name]
        try:
            return getattr(builtins, name)
        except AttributeError:
            raise NameError(name) from None

    def closed(self) -> dict[str, Any]:
        """The names of the closure that have a value."""
        found = {}
        for name in self.cells:
            try:
                found[name] = self.find(name)
            except NameError:
                continue
        return found
