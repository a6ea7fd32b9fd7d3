"""What a prompt may import at one level of a schema, and between which always-present pieces it goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inlay.pml.nodes import Module, Param, Text, Turn, Union


@dataclass(frozen=True, slots=True)
class Border:
    """The start or the end of a turn of the schema."""

    turn: Turn
    start: bool


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Where a module goes: after how many fixed pieces of its level, and there at which place in schema order.

    Members of one union share their slot.
    """

    zone: int
    index: int


@dataclass(frozen=True, slots=True)
class Level:
    """The top level of a schema, turns opened up, or the inside of a module.

    ``fixed`` is what is always there once the level is; ``slots`` says where each importable module goes.
    """

    fixed: tuple[Text | Param | Border, ...]
    slots: dict[str, Slot]
    params: dict[str, Param]


def levels_of(children: Iterable[Text | Module | Union | Turn], modules: Iterable[Module]) -> dict[str | None, Level]:
    """The top level of a schema under None, and the inside of each module under its name."""
    levels: dict[str | None, Level] = {module.name: _level(module.children) for module in modules}
    levels[None] = _level(children)
    return levels


def _level(children: Iterable[Text | Param | Module | Union | Turn]) -> Level:
    fixed: list[Text | Param | Border] = []
    slots: dict[str, Slot] = {}
    for index, node in enumerate(_opened(children)):
        if isinstance(node, Module | Union):
            members = node.members if isinstance(node, Union) else (node,)
            slots.update((member.name, Slot(len(fixed), index)) for member in members)
        else:
            fixed.append(node)
    params = {node.name: node for node in fixed if isinstance(node, Param)}
    return Level(tuple(fixed), slots, params)


def _opened(
    children: Iterable[Text | Param | Module | Union | Turn],
) -> Iterable[Text | Param | Module | Union | Border]:
    for child in children:
        if isinstance(child, Turn):
            yield Border(child, start=True)
            yield from child.children
            yield Border(child, start=False)
        else:
            yield child
