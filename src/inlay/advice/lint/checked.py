"""What rules look at, and what they say."""

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

#: Fewer tokens or positions than this are not worth a word of advice.
WORTH = 32


@dataclass(frozen=True, slots=True)
class Finding:
    """A piece of advice: ``file:line:column: rule: what; what to do instead``."""

    rule: str
    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class Passed:
    """What a prompt fills a parameter with. tokens: how long it is. is_default: whether the schema's default."""

    param: Param
    tokens: int
    is_default: bool
    place: Place


@dataclass(frozen=True)
class Checked:
    """A schema as it is laid out for one model, and how it is used.

    passed: the arguments and defaults of the prompts that were given.
    max_positions: the model's context, or None where it is not known.
    small: a module of fewer tokens is too small.
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
    def levels(self) -> list[Level]:
        """What stands side by side: in each turn, outside of modules and turns, and in each module."""
        levels = _levels((), None, self.schema.children)
        for path, module in self.schema.modules.items():
            levels += _levels(names_of(path), path, module.children)
        return levels

    def tokens(self, order: int) -> int:
        """How many tokens a text node has."""
        run = self.layout.entries[self.layout.run_of[order]] if order in self.layout.run_of else None
        return sum(len(part.ids) for part in run.parts if part.node == order) if isinstance(run, TextRun) else 0

    def displaced(self, entry: TextRun | Hole) -> bool:
        """Whether an entry is encoded behind other text, from which it can move away under ``packed`` positions."""
        owners = frozenset(entry.owner[:depth] for depth in range(len(entry.owner) + 1))
        return any(isinstance(before, TextRun) for before in self.layout.chain(entry.index, owners))

    @cached_property
    def specs(self) -> SchemaSpecs:
        """The segments under the default policy, ``anchored`` and ``packed``, but for the model's part of keys."""
        keys = KeyMaker(b"", "", "", b"", positioned=False)
        return SchemaSpecs(self.layout, anchored=True, packed=True, movable=True, keys=keys)


@dataclass(frozen=True, slots=True)
class Level:
    """Neighbours in a schema. module: the path of the one that they stand in, or None outside of modules."""

    owner: Owner
    module: str | None
    children: tuple[Text | Param | Module | Union, ...]


def _levels(owner: Owner, module: str | None, children: Sequence[Text | Param | Module | Union | Turn]) -> list[Level]:
    """What stands side by side in each turn among these children, and beside the turns."""
    levels = [Level(owner, module, child.children) for child in children if isinstance(child, Turn)]
    beside = tuple(child for child in children if not isinstance(child, Turn))
    return [*levels, Level(owner, module, beside)] if beside or not levels else levels


_Node = Text | Param | Module | Union | Turn


def _nodes(children: Sequence[_Node]) -> Iterator[_Node]:
    for child in children:
        yield child
        yield from _nodes(inside(child))


def inside(node: _Node) -> Sequence[_Node]:
    """The nodes directly in this one."""
    if isinstance(node, Union):
        return node.members
    return node.children if isinstance(node, Module | Turn) else ()


def has_parameter(node: _Node) -> bool:
    """Whether this is a parameter or holds one, at any depth."""
    return isinstance(node, Param) or any(map(has_parameter, inside(node)))
