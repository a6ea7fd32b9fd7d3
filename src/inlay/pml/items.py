"""What a prompt says once it is resolved against its schema: a flat list of items, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inlay.errors import Place
from inlay.pml.nodes import Param, Text

if TYPE_CHECKING:
    from inlay.pml.schema import Schema


@dataclass(frozen=True, slots=True)
class SchemaText:
    """Text of the schema. ``owner`` names the modules around it, outermost first; none for always-present text."""

    node: Text
    owner: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """A parameter with the argument that the prompt gives, or with its default."""

    param: Param
    text: str
    is_default: bool
    owner: tuple[str, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class NewText:
    """Text that the prompt adds."""

    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class TurnStart:
    """A chat turn begins; ``own`` is True if the prompt adds it, False if it is the schema's."""

    role: str
    own: bool
    place: Place


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The chat turn ends."""

    role: str
    own: bool


Item = SchemaText | Filled | NewText | TurnStart | TurnEnd


@dataclass(frozen=True)
class Resolved:
    """A prompt that fits its schema: what it says, in order, and which modules it imports."""

    schema: Schema
    items: tuple[Item, ...]
    imported: frozenset[str]
    source: str
