"""A schema: the pieces of text that prompts are made of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from inlay.pml.builder import PromptBuilder
from inlay.pml.levels import Level, levels_of
from inlay.pml.nodes import Module, Param, Scaffold, Text, Turn, Union
from inlay.pml.schema_reader import read_schema
from inlay.pml.sources import Folder, document_from_file, document_from_string


@dataclass(frozen=True)
class Schema:
    """A schema in document order; every node in it has an ``order`` of its own, from 0.

    Whoever builds one from nodes gives unique module names and passes the children through ``nodes.numbered``.
    """

    name: str
    children: tuple[Text | Module | Union | Turn, ...]
    scaffolds: tuple[Scaffold, ...] = ()
    source: str = "<schema>"

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Schema:
        """Read a schema from a file in UTF-8, and the files that it names beside it; raises PMLError."""
        source = os.fsdecode(path)
        data = document_from_file(path)
        parts = read_schema(data, source, Folder(Path(source).parent), declaration_counts=True)
        return cls(parts.name, parts.children, parts.scaffolds, source)

    @classmethod
    def from_string(
        cls, text: str, *, source: str = "<schema>", folder: str | os.PathLike[str] | None = None
    ) -> Schema:
        """Read a schema from a string; errors call it ``source``, and ``src`` names files in ``folder``.

        Raises PMLError.
        """
        data = document_from_string(text, source)
        files = None if folder is None else Folder(folder)
        parts = read_schema(data, source, files, declaration_counts=False)
        return cls(parts.name, parts.children, parts.scaffolds, source)

    @cached_property
    def modules(self) -> Mapping[str, Module]:
        """All modules by name, in document order."""
        return {module.name: module for module, _ in _modules(self.children, ())}

    @cached_property
    def parents(self) -> Mapping[str, tuple[str, ...]]:
        """By module name, the names of the modules around it, outermost first."""
        return {module.name: parents for module, parents in _modules(self.children, ())}

    @cached_property
    def levels(self) -> Mapping[str | None, Level]:
        """By module name, what stands directly in it; under None, what stands in no module."""
        return levels_of(self.children, self.modules.values())

    @cached_property
    def has_turns(self) -> bool:
        """Whether the schema is written in chat turns."""
        return any(isinstance(child, Turn) for child in self.children)

    def prompt(self) -> PromptBuilder:
        """A builder for a prompt of this schema."""
        return PromptBuilder.for_schema(self.name)


def _modules(
    children: Iterable[Text | Param | Module | Union | Turn], parents: tuple[str, ...]
) -> Iterable[tuple[Module, tuple[str, ...]]]:
    for child in children:
        if isinstance(child, Module):
            yield child, parents
            yield from _modules(child.children, (*parents, child.name))
        elif isinstance(child, Union):
            yield from _modules(child.members, parents)
        elif isinstance(child, Turn):
            yield from _modules(child.children, parents)
