"""What is known of a program before it is translated: its source, what it takes, and what it sees around it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from inlay.pml.program.inputs import Input
from inlay.pml.program.source import Outside, Source


@dataclass(frozen=True, slots=True)
class Definition:
    """A program as its author wrote it.

    name: of the function, and of the modules that calls of it become.
    home: the module and the qualified name of the function, which tell whether a program calls itself.
    local_names: the names that are the function's own.
    inputs: what it takes, by argument; ``defaults`` the values of those that need not be given.
    """

    name: str
    home: tuple[str, str]
    source: Source
    node: ast.FunctionDef
    outside: Outside
    local_names: frozenset[str]
    signature: inspect.Signature
    inputs: Mapping[str, Input]

    @property
    def body(self) -> list[ast.stmt]:
        """The statements, without the docstring."""
        return self.node.body[1:] if ast.get_docstring(self.node, clean=False) is not None else self.node.body

    @property
    def usage(self) -> str:
        """How the program is called, for messages."""
        shown = [
            parameter.replace(
                annotation=_Shown(self.inputs[name].allowed),
                default=parameter.default
                if parameter.default is parameter.empty
                else _Shown(_written(parameter.default)),
            )
            for name, parameter in self.signature.parameters.items()
        ]
        return f"{self.name}{inspect.Signature(shown)}"


@dataclass(frozen=True, slots=True)
class _Shown:
    """Shows as a text without quotation marks."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _written(value: object) -> str:
    if isinstance(value, frozenset):
        # sets have no order of their own
        return f"{{{', '.join(sorted(map(repr, value)))}}}" if value else "frozenset()"
    return repr(value)
