"""A schema: the pieces of text that prompts are made of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from inlay.pml.builder import PromptBuilder
from inlay.pml.json_text import is_json
from inlay.pml.levels import Level, levels_of
from inlay.pml.nodes import Module, Param, Scaffold, Text, Turn, Union
from inlay.pml.schema_reader import read_schema
from inlay.pml.sources import Folder, document_from_file, document_from_string
from inlay.pml.writer import write_schema


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
        """Read a schema from a file in UTF-8, and the files that it names beside it; raises PMLError.

        A file whose name ends in ``.json`` is read as JSON, and any other as PML.
        """
        source = os.fsdecode(path)
        data, folder = document_from_file(path), Folder(Path(source).parent)
        if is_json(source):
            from inlay.pml.json_form import read_schema_json

            parts = read_schema_json(data, source, folder)
        else:
            parts = read_schema(data, source, folder, declaration_counts=True)
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

    @classmethod
    def from_json(
        cls,
        document: str | bytes | Mapping[str, Any],
        *,
        source: str = "<schema>",
        folder: str | os.PathLike[str] | None = None,
    ) -> Schema:
        """Read a schema in its JSON form; errors call it ``source``, and ``src`` names files in ``folder``.

        Raises PMLError, and ParameterError for a mapping that is no JSON.
        """
        from inlay.pml.json_form import document_from_json, read_schema_json

        files = None if folder is None else Folder(folder)
        parts = read_schema_json(document_from_json(document, source), source, files)
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

    def to_pml(self) -> str:
        """The schema as PML; raises ParameterError for what PML cannot express. See ``writer.write_schema``."""
        return write_schema(self)

    def to_json(self) -> str:
        """The schema in its JSON form; raises ParameterError for nodes that break the rules of PML."""
        from inlay.pml.json_form import write_schema_json

        return write_schema_json(self)


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
