"""What the names in a program stand for, at one point of it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inlay.errors import Place
from inlay.pml.program.inputs import Input
from inlay.pml.program.source import Outside, Source


class Refused(Exception):  # noqa: N818  # carries a problem to the statement that it is in
    """An expression cannot be translated. ``message`` is None where the cause has been reported already."""

    def __init__(self, place: Place, message: str | None) -> None:
        self.place = place
        self.message = message


@dataclass(frozen=True, slots=True)
class Given:
    """A name stands for an argument of the program."""

    input: Input


@dataclass(frozen=True, slots=True)
class Settled:
    """A name stands for a value that is known."""

    value: Any


@dataclass(frozen=True, slots=True)
class Deferred:
    """A name stands for an expression that hangs on answers, seen from where it was written."""

    node: ast.expr
    frame: Frame


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A name has no one value here; None where the cause has been reported already."""

    message: str | None


Binding = Given | Settled | Deferred | Unsettled


@dataclass(frozen=True, slots=True)
class Frame:
    """What the names in a program stand for, at one point of it."""

    source: Source
    outside: Outside
    local_names: frozenset[str]
    scope: Mapping[str, Binding]

    def bound(self, name: str, binding: Binding) -> Frame:
        """The frame behind an assignment."""
        return replace(self, scope={**self.scope, name: binding})
