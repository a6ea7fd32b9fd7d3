"""The input of the rules (``Checked``) and their output (``Finding``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from inlay.errors import Place
from inlay.kv.identity import KeyMaker
from inlay.pml import Module, Param, Schema, Text, Turn, Union
from inlay.pml.scopes import names_of
from inlay.prompt.contexts import SchemaSpecs
from inlay.prompt.layout import Hole, Owner, SchemaLayout, TextRun

#: Smaller savings, in tokens or positions, get no advice.
WORTH = 32


@dataclass(frozen=True, slots=True)
class Finding:
    """A piece of advice. Its text is ``file:line:column: rule: fault; remedy``."""

    rule: str
    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class Passed:
    """The text that a prompt puts into a parameter, by its number of tokens. ``is_default``: it is the schema's
    default.
    """

    param: Param
    tokens: int
    is_default: bool
    place: Place


@dataclass(frozen=True)
class Checked:
    """A schema laid out for one model, with its use by prompts.

    Attributes:
        passed: The arguments and defaults of the given prompts.
        max_positions: The model's context, or None if unknown.
        small: A module of fewer tokens is too small.
    """

    layout: SchemaLayout
    passed: Sequence[Passed] = ()
    max_positions: int | None = None
    small: int = 16

    @property
    def schema(self) -> Schema:
        return self.layout.schema

    @cached_property
    def texts(self) -> dict[int, Text]:
        """The text nodes by their order."""
        return {node.order: node for node in _nodes(self.schema.children) if isinstance(node, Text)}

    @cached_property
    def unions(self) -> list[Union]:
        return [node for node in _nodes(self.schema.children) if isinstance(node, Union)]

    @cached_property
    def levels(self) -> list[Neighbours]:
        """The groups of neighbours: the content of each turn, the top level outside of turns, and the content of
        each module.
        """
        levels = _levels((), None, self.schema.children)
        for path, module in self.schema.modules.items():
            levels += _levels(names_of(path), path, module.children)
        return levels

    def tokens(self, order: int) -> int:
        """Return the number of tokens of a text node."""
        run = self.layout.entries[self.layout.run_of[order]] if order in self.layout.run_of else None
        return sum(len(part.ids) for part in run.parts if part.node == order) if isinstance(run, TextRun) else 0

    def displaced(self, entry: TextRun | Hole) -> bool:
        """Return True if an entry is encoded after other text and can move away from it under ``packed`` positions."""
        owners = frozenset(entry.owner[:depth] for depth in range(len(entry.owner) + 1))
        return any(isinstance(before, TextRun) for before in self.layout.chain(entry.index, owners))

    @cached_property
    def specs(self) -> SchemaSpecs:
        """The segments under ``anchored`` and ``packed``. A primer changes no advice. Keys lack the model's part."""
        keys = KeyMaker(b"", "", "", b"", positioned=False)
        return SchemaSpecs(self.layout, anchored=True, packed=True, movable=True, keys=keys)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Neighbours in a schema. ``module`` is the path of their module, or None outside of modules."""

    owner: Owner
    module: str | None
    children: tuple[Text | Param | Module | Union, ...]


def _levels(
    owner: Owner, module: str | None, children: Sequence[Text | Param | Module | Union | Turn]
) -> list[Neighbours]:
    """Return the groups of neighbours: the content of each turn, and the children outside of turns."""
    levels = [Neighbours(owner, module, child.children) for child in children if isinstance(child, Turn)]
    beside = tuple(child for child in children if not isinstance(child, Turn))
    return [*levels, Neighbours(owner, module, beside)] if beside or not levels else levels


_Node = Text | Param | Module | Union | Turn


def _nodes(children: Sequence[_Node]) -> Iterator[_Node]:
    for child in children:
        yield child
        yield from _nodes(inside(child))


def inside(node: _Node) -> Sequence[_Node]:
    """Return the nodes directly inside this one."""
    if isinstance(node, Union):
        return node.members
    return node.children if isinstance(node, Module | Turn) else ()


def has_parameter(node: _Node) -> bool:
    """Return True if this is a parameter or holds one, at any depth."""
    return isinstance(node, Param) or any(map(has_parameter, inside(node)))
