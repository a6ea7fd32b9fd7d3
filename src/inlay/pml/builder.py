"""Prompts written in Python: ``schema.prompt().use("plan", use("miami"), duration="3 days").text("…").build()``.

Builders are immutable: every call returns a new one, so that many prompts can grow from one beginning. Text and
arguments are taken as they are; the white-space rule is for XML. Names are checked when the prompt is resolved.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from inlay.errors import ParameterError, Place
from inlay.pml.nodes import Argument, Import, PromptTurn, Text
from inlay.pml.problems import lone_surrogate, quote, shown_path
from inlay.pml.prompt import Prompt


def use(name: str, /, *children: str | Import, **arguments: str) -> Import:
    """Import a module, with new text and imports inside it; raises ParameterError for what is no str.

    An argument whose name is no Python name goes in as ``use("trip", **{"days-left": "3"})``.
    """
    return _import(name, children, arguments)


@dataclass(frozen=True)
class PromptBuilder:
    """The prompt so far. Made by ``Schema.prompt()``."""

    schema: str
    place: Place
    children: tuple[Text | Import | PromptTurn, ...] = ()

    @classmethod
    def for_schema(cls, schema: str) -> PromptBuilder:
        """An empty prompt of the schema of this name."""
        return cls(schema, _caller())

    def use(self, name: str, /, *children: str | Import, **arguments: str) -> PromptBuilder:
        """Import a module, as the function ``use`` does."""
        return self._and(_import(name, children, arguments))

    def text(self, text: str) -> PromptBuilder:
        """Say something that is not in the schema."""
        return self._and(*_nodes("text", (_checked("text", text),)))

    def system(self, *parts: str | Import) -> PromptBuilder:
        """Add a system turn."""
        return self._and(PromptTurn("system", _nodes("system", parts), _caller()))

    def user(self, *parts: str | Import) -> PromptBuilder:
        """Add a user turn."""
        return self._and(PromptTurn("user", _nodes("user", parts), _caller()))

    def assistant(self, *parts: str | Import) -> PromptBuilder:
        """Add an assistant turn."""
        return self._and(PromptTurn("assistant", _nodes("assistant", parts), _caller()))

    def build(self) -> Prompt:
        """The prompt."""
        return Prompt(self.schema, self.children, self.place.source, self.place)

    def _and(self, *nodes: Text | Import | PromptTurn) -> PromptBuilder:
        return replace(self, children=(*self.children, *nodes))


def _import(name: str, children: tuple[str | Import, ...], arguments: Mapping[str, str]) -> Import:
    place = _caller()
    values = tuple(Argument(key, _checked(f"argument {quote(key)}", value), place) for key, value in arguments.items())
    return Import(_checked("a module's name", name), values, _nodes("use", children), place)


def _nodes(where: str, parts: tuple[str | Import, ...]) -> tuple[Text | Import, ...]:
    place = _caller()
    nodes: list[Text | Import] = []
    for part in parts:
        if isinstance(part, Import):
            nodes.append(part)
        elif not isinstance(part, str):
            raise ParameterError(f"{where} takes str and use(…), not {type(part).__name__}; convert it with str(…)")
        elif _checked("text", part):
            nodes.append(Text(part, place))
    return tuple(nodes)


def _checked(what: str, value: str) -> str:
    if not isinstance(value, str):
        raise ParameterError(f"{what} must be a str, not {type(value).__name__}; convert it with str(…)")
    if found := lone_surrogate(value):
        raise ParameterError(f"{what} holds {found}")
    return value


def _caller() -> Place:
    """The place of the first frame that is not inlay's own, with its file relative to the working folder."""
    frame = sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == "inlay":
        frame = frame.f_back
    return Place(shown_path(frame.f_code.co_filename), frame.f_lineno)
