"""Schemas and prompts, read from PML or JSON. Prompts can also be built in Python.

``schema.prompt().use("plan", use("miami"), duration="3 days").text("…").build()`` builds a prompt. Builders are
immutable: each call returns a new one, so many prompts can start from one builder. Builders take text and arguments
unchanged, because the white-space rule is for XML. ``resolve`` checks the names.

The JSON modules are imported inside functions, because they import pydantic, which PML does not need.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from inlay.errors import ParameterError, Place
from inlay.pml.nodes import (
    MAX_SET,
    Argument,
    Import,
    ImportSet,
    Meta,
    Module,
    Param,
    PromptTurn,
    Scaffold,
    Text,
    Turn,
    Union,
)
from inlay.pml.readers import read_prompt, read_schema
from inlay.pml.rules import ByPath, NestingLevel, levels_of, opened, path_of
from inlay.pml.sources import Folder, document_from_file, document_from_string, is_json
from inlay.pml.writer import write_prompt, write_schema
from inlay.wording import clip, counted, html_table, lone_surrogate, quote, shown_path

_PromptNode = Text | Import | ImportSet | PromptTurn


@dataclass(frozen=True)
class Prompt:
    """A prompt as written; ``resolve`` checks it against its schema.

    Attributes:
        schema: The schema's name.
        source: The file or label that errors name.
        place: The place of the schema's name in the prompt, if known.
    """

    schema: str
    children: tuple[Text | Import | ImportSet | PromptTurn, ...]
    source: str = "<prompt>"
    place: Place | None = field(default=None, compare=False)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Prompt:
        """Read a prompt from a file in UTF-8: as JSON if its name ends in ``.json``, otherwise as PML.

        Raises PMLError.
        """
        source = os.fsdecode(path)
        if is_json(source):
            from inlay.pml.json_readers import read_prompt_json

            parts = read_prompt_json(document_from_file(path), source)
        else:
            parts = read_prompt(document_from_file(path), source, declaration_counts=True)
        return cls(parts.schema, parts.children, source, parts.place)

    @classmethod
    def from_string(cls, text: str, *, source: str = "<prompt>") -> Prompt:
        """Read a prompt from a PML string; errors name it ``source``. Raises PMLError."""
        parts = read_prompt(document_from_string(text, source), source, declaration_counts=False)
        return cls(parts.schema, parts.children, source, parts.place)

    @classmethod
    def from_json(cls, document: str | bytes | Mapping[str, Any], *, source: str = "<prompt>") -> Prompt:
        """Read a prompt in its JSON form; errors name it ``source``.

        Raises:
            PMLError: The document is wrong.
            ParameterError: It is not a str, bytes or mapping, or the mapping cannot be written as JSON.
        """
        from inlay.pml.json_form import document_from_json
        from inlay.pml.json_readers import read_prompt_json

        parts = read_prompt_json(document_from_json(document, source), source)
        return cls(parts.schema, parts.children, source, parts.place)

    def in_any_order(self) -> Prompt:
        """Return this prompt with neighbouring imports grouped into sets, unless they already belong to a set or
        hold one.
        """
        return replace(self, children=_with_sets(self.children))

    def to_pml(self) -> str:
        """Return the prompt as PML; raises ParameterError if PML cannot express it. See ``writer.write_prompt``."""
        return write_prompt(self.schema, self.children)

    def to_json(self) -> str:
        """Return the prompt in its JSON form; raises ParameterError for nodes that break the rules of PML."""
        from inlay.pml.json_writer import write_prompt_json

        return write_prompt_json(self.schema, self.children)


def use(name: str, /, *children: str | Import | ImportSet, **arguments: str) -> Import:
    """Import a module, with new text and imports inside it; raises ParameterError for a value that is not a str.

    A path also imports the enclosing modules: ``use("plan/miami")`` is ``use("plan", use("miami"))``.

    Pass an argument that is not a Python identifier as ``use("trip", **{"days-left": "3"})``.
    """
    return _import(name, children, arguments)


def any_order(*imports: str | Import) -> ImportSet:
    """Import modules in free order, as ``<set>`` does.

    Args:
        imports: Names of modules, or ``use(…)``.

    Raises:
        ParameterError: An import is neither a str nor ``use(…)``.
    """
    place = _caller()
    nodes = []
    for one in imports:
        if not isinstance(one, str | Import):
            raise ParameterError(
                f"any_order takes str and use(…), not {type(one).__name__}; write names of modules",
                code="parameter.wrong_type",
            )
        nodes.append(one if isinstance(one, Import) else _import(one, (), {}))
    return ImportSet(tuple(nodes), place)


def _with_sets(nodes: Iterable[_PromptNode]) -> tuple[_PromptNode, ...]:
    """Return the nodes with each run of movable imports as one set, or as several above MAX_SET. Nodes inside keep
    order.
    """
    made: list[_PromptNode] = []
    for may_move, group in groupby(opened(nodes), _may_move):
        members = list(group)
        imports = [one for one in members if isinstance(one, Import)]
        if may_move and len(imports) > 1:
            for first in range(0, len(imports), MAX_SET):
                made.append(ImportSet(tuple(imports[first : first + MAX_SET]), imports[first].place))
            continue
        for one in members:
            if isinstance(one, Import | PromptTurn):
                inside = tuple(each for each in _with_sets(one.children) if not isinstance(each, PromptTurn))
                made.append(replace(one, children=inside))
            else:
                made.append(one)
    return tuple(made)


def _may_move(node: _PromptNode) -> bool:
    """Return True for an import that holds no set, so that it may stand in one."""
    return isinstance(node, Import) and not _holds_set(node)


def _holds_set(node: Import) -> bool:
    return any(isinstance(one, ImportSet) or (isinstance(one, Import) and _holds_set(one)) for one in node.children)


@dataclass(frozen=True)
class PromptBuilder:
    """A prompt under construction. Made by ``Schema.prompt()``."""

    schema: str
    place: Place
    children: tuple[Text | Import | ImportSet | PromptTurn, ...] = ()

    @classmethod
    def for_schema(cls, schema: str) -> PromptBuilder:
        """Return an empty prompt of the schema of this name."""
        return cls(schema, _caller())

    def use(self, name: str, /, *children: str | Import | ImportSet, **arguments: str) -> PromptBuilder:
        """Import a module, like the function ``use``."""
        return self._and(_import(name, children, arguments))

    def any_order(self, *imports: str | Import) -> PromptBuilder:
        """Import modules in free order, like the function ``any_order``."""
        return self._and(any_order(*imports))

    def text(self, text: str) -> PromptBuilder:
        """Add text that is not in the schema."""
        return self._and(*_nodes("text", (_checked("text", text),)))

    def system(self, *parts: str | Import | ImportSet) -> PromptBuilder:
        """Add a system turn."""
        return self._and(PromptTurn("system", _nodes("system", parts), _caller()))

    def user(self, *parts: str | Import | ImportSet) -> PromptBuilder:
        """Add a user turn."""
        return self._and(PromptTurn("user", _nodes("user", parts), _caller()))

    def assistant(self, *parts: str | Import | ImportSet) -> PromptBuilder:
        """Add an assistant turn."""
        return self._and(PromptTurn("assistant", _nodes("assistant", parts), _caller()))

    def build(self) -> Prompt:
        """Return the finished prompt."""
        return Prompt(self.schema, self.children, self.place.source, self.place)

    def _and(self, *nodes: Text | Import | ImportSet | PromptTurn) -> PromptBuilder:
        return replace(self, children=(*self.children, *nodes))


def _import(name: str, children: tuple[str | Import | ImportSet, ...], arguments: Mapping[str, str]) -> Import:
    place = _caller()
    values = tuple(Argument(key, _checked(f"argument {quote(key)}", value), place) for key, value in arguments.items())
    return Import(_checked("a module's name", name), values, _nodes("use", children), place)


def _nodes(where: str, parts: tuple[str | Import | ImportSet, ...]) -> tuple[Text | Import | ImportSet, ...]:
    place = _caller()
    nodes: list[Text | Import | ImportSet] = []
    for part in parts:
        if isinstance(part, Import | ImportSet):
            nodes.append(part)
        elif not isinstance(part, str):
            raise ParameterError(
                f"{where} takes str and use(…), not {type(part).__name__}; convert it with str(…)",
                code="parameter.wrong_type",
            )
        elif _checked("text", part):
            nodes.append(Text(part, place))
    return tuple(nodes)


def _checked(what: str, value: str) -> str:
    if not isinstance(value, str):
        raise ParameterError(
            f"{what} must be a str, not {type(value).__name__}; convert it with str(…)", code="parameter.wrong_type"
        )
    if found := lone_surrogate(value):
        raise ParameterError(f"{what} holds {found}", code="parameter.invalid_text")
    return value


def _caller() -> Place:
    """Return the place of the first caller outside inlay, with its file relative to the working folder."""
    frame = sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == "inlay":
        frame = frame.f_back
    return Place(shown_path(frame.f_code.co_filename), frame.f_lineno)


@dataclass(frozen=True, repr=False)
class Schema:
    """A schema in document order. Each node has a unique ``order``, counted from 0.

    A caller that builds a schema from nodes must meet three conditions. Module names are unique in their scope.
    Scaffolds name modules by their paths. The children have passed through ``nodes.numbered``.
    """

    name: str
    children: tuple[Text | Module | Union | Turn, ...]
    scaffolds: tuple[Scaffold, ...] = ()
    source: str = "<schema>"
    meta: tuple[Meta, ...] = ()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Schema:
        """Read a schema from a file in UTF-8, with the files that it names in ``src``; raises PMLError.

        A file whose name ends in ``.json`` is read as JSON, and any other as PML.
        """
        source = os.fsdecode(path)
        data, folder = document_from_file(path), Folder(Path(source).parent)
        if is_json(source):
            from inlay.pml.json_readers import read_schema_json

            parts = read_schema_json(data, source, folder)
        else:
            parts = read_schema(data, source, folder, declaration_counts=True)
        return cls(parts.name, parts.children, parts.scaffolds, source, parts.meta)

    @classmethod
    def from_string(
        cls, text: str, *, source: str = "<schema>", folder: str | os.PathLike[str] | None = None
    ) -> Schema:
        """Read a schema from a PML string; raises PMLError.

        Args:
            source: The name of the document in errors.
            folder: The folder of the files that the schema names in ``src``. None allows no ``src``.
        """
        data = document_from_string(text, source)
        files = None if folder is None else Folder(folder)
        parts = read_schema(data, source, files, declaration_counts=False)
        return cls(parts.name, parts.children, parts.scaffolds, source, parts.meta)

    @classmethod
    def from_json(
        cls,
        document: str | bytes | Mapping[str, Any],
        *,
        source: str = "<schema>",
        folder: str | os.PathLike[str] | None = None,
    ) -> Schema:
        """Read a schema in its JSON form.

        Args:
            source: The name of the document in errors.
            folder: The folder of the files that the schema names in ``src``. None allows no ``src``.

        Raises:
            PMLError: The document is wrong.
            ParameterError: It is not a str, bytes or mapping, or the mapping cannot be written as JSON.
        """
        from inlay.pml.json_form import document_from_json
        from inlay.pml.json_readers import read_schema_json

        files = None if folder is None else Folder(folder)
        parts = read_schema_json(document_from_json(document, source), source, files)
        return cls(parts.name, parts.children, parts.scaffolds, source, parts.meta)

    def __repr__(self) -> str:
        return f"<Schema {quote(self.name)} of {self.source}: {counted(len(self.modules), 'module')}>"

    def _repr_html_(self) -> str:
        rows = (
            ("/".join((*self.parents[name], name)), ", ".join(self.levels[name].params), clip(_beginning(module)))
            for name, module in self.modules.items()
        )
        return html_table(f"schema {self.name}", ("module", "parameters", "text"), rows)

    @cached_property
    def modules(self) -> ByPath[Module]:
        """All modules by path, in document order."""
        return ByPath({path_of((*parents, module.name)): module for module, parents in _modules(self.children, ())})

    @cached_property
    def parents(self) -> ByPath[tuple[str, ...]]:
        """The names of the modules around each module, outermost first, by the module's path."""
        return ByPath({path_of((*parents, module.name)): parents for module, parents in _modules(self.children, ())})

    @cached_property
    def paths(self) -> Mapping[int, str]:
        """The path of each module, by its ``order``."""
        return {module.order: path for path, module in self.modules.items()}

    @cached_property
    def levels(self) -> Mapping[str | None, NestingLevel]:
        """The direct content of each module by its path, and the top level under None."""
        return levels_of(self.children, self.modules)

    @cached_property
    def has_turns(self) -> bool:
        """True if the schema has chat turns outside of modules."""
        return any(isinstance(child, Turn) for child in self.children)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal sha256 of the schema's JSON form. It does not depend on the file that the schema came from."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def prompt(self) -> PromptBuilder:
        """Start a prompt of this schema."""
        return PromptBuilder.for_schema(self.name)

    def to_pml(self) -> str:
        """Return the schema as PML; raises ParameterError if PML cannot express it. See ``writer.write_schema``."""
        return write_schema(self.name, self.children, self.scaffolds, self.meta)

    def to_json(self) -> str:
        """Return the schema in its JSON form; raises ParameterError for nodes that break the rules of PML."""
        from inlay.pml.json_writer import write_schema_json

        return write_schema_json(self.name, self.children, self.scaffolds, self.meta)


def _beginning(module: Module) -> str:
    return next((" ".join(child.text.split()) for child in module.children if isinstance(child, Text)), "")


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
