"""Which modules of a schema exclude each other."""

from __future__ import annotations

from collections.abc import Iterable

from inlay.pml.nodes import Module, Param, Text, Turn, Union

_Choices = dict[int, str]  # order of a union → the member of it that a prompt must import


class Exclusions:
    """Knows, of every module, which member of which union a prompt has to choose to import it."""

    def __init__(self, children: tuple[Text | Module | Union | Turn, ...]) -> None:
        self._choices: dict[str, _Choices] = {}
        self._visit(children, {})

    def between(self, names: Iterable[str]) -> tuple[str, str] | None:
        """The first two of these modules that no prompt can import together."""
        chosen: dict[int, tuple[str, str]] = {}
        for name in names:
            for union, member in self._choices.get(name, {}).items():
                other_member, other = chosen.setdefault(union, (member, name))
                if other_member != member:
                    return other, name
        return None

    def _visit(self, children: Iterable[Text | Param | Module | Union | Turn], choices: _Choices) -> None:
        for child in children:
            if isinstance(child, Union):
                for member in child.members:
                    self._visit([member], {**choices, child.order: member.name})
            elif isinstance(child, Module):
                self._choices[child.name] = choices
                self._visit(child.children, choices)
            elif isinstance(child, Turn):
                self._visit(child.children, choices)
