"""The nodes of a parsed schema and a parsed prompt, and the limits on a document.

Nodes are plain, immutable data without a tokenizer or a model. Each node of a schema carries ``order``, its number
in document order, and later stages refer to it by this number. The limits at the end of the file reject hostile
input early, in bounded time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from inlay.errors import Place

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Meta:
    """Metadata of one part of a schema. The model never sees it, and it costs no tokens."""

    name: str
    value: str
    place: Place


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text between two tags, after the white-space rule. It is never empty."""

    text: str
    place: Place
    order: int = -1


@dataclass(frozen=True, slots=True)
class Param:
    """A hole of ``length`` tokens in a module, filled by an argument or by ``default``.

    ``scaffold`` is the placeholder text that fills it while its module is encoded.
    """

    name: str
    length: int
    default: str | None
    place: Place
    order: int = -1
    scaffold: str | None = None
    meta: tuple[Meta, ...] = ()


@dataclass(frozen=True, slots=True)
class Module:
    """A named piece of a schema that prompts import.

    With ``cache=False`` the module and its content are not kept: each request that imports it computes it.
    """

    name: str
    children: tuple[Text | Param | Module | Union | Turn, ...]
    place: Place
    order: int = -1
    cache: bool = True
    meta: tuple[Meta, ...] = ()


@dataclass(frozen=True, slots=True)
class Union:
    """Modules that exclude each other and start at the same position.

    ``scaffold`` names the member that Prompt Cache encodes when it encodes a whole schema at once. inlay ignores it.
    """

    members: tuple[Module, ...]
    place: Place
    order: int = -1
    scaffold: str | None = None
    meta: tuple[Meta, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat turn of a schema or of one of its modules.

    ``role`` is one of ROLES. Only a turn inside a module may hold parameters.
    """

    role: str
    children: tuple[Text | Param | Module | Union, ...]
    place: Place
    order: int = -1
    meta: tuple[Meta, ...] = ()


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Paths of modules that are encoded together, for prompts that import all of them."""

    modules: tuple[str, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Argument:
    """A value that a prompt gives to a parameter."""

    name: str
    value: str
    place: Place


@dataclass(frozen=True, slots=True)
class Import:
    """A module named by a prompt, with arguments, nested imports and new text inside it.

    ``name`` is a module's name or a path. A path also imports the modules around the last one.
    """

    name: str
    arguments: tuple[Argument, ...]
    children: tuple[Text | Import | ImportSet, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class ImportSet:
    """Imports in free order. The engine chooses the order by the modules that are stored (engine/order.py)."""

    imports: tuple[Import, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """A chat turn that a prompt adds."""

    role: str
    children: tuple[Text | Import | ImportSet, ...]
    place: Place


_Node = TypeVar("_Node", bound=Text | Param | Module | Union | Turn)


def numbered(children: tuple[Text | Module | Union | Turn, ...]) -> tuple[Text | Module | Union | Turn, ...]:
    """Return the children of a schema with ``order`` set on every node, from 0 in document order."""
    orders = count()

    def number(node: _Node) -> _Node:
        order = next(orders)
        if isinstance(node, Union):
            return replace(node, order=order, members=tuple(map(number, node.members)))
        if isinstance(node, Module):
            return replace(node, order=order, children=tuple(number(child) for child in node.children))
        if isinstance(node, Turn):
            return replace(node, order=order, children=tuple(number(child) for child in node.children))
        return replace(node, order=order)

    return tuple(number(child) for child in children)


MAX_BYTES = 16 * 2**20  # of one file or string, as UTF-8
MAX_SOURCE_BYTES = 64 * 2**20  # in total, of all files that one schema names in src
MAX_DEPTH = 32  # nested elements, including the outermost one
MAX_ELEMENTS = 100_000
MAX_ATTRIBUTES = 1_000  # of one element
MAX_ATTRIBUTE_CHARACTERS = 2**20  # of one attribute's value
MAX_NAME_CHARACTERS = 256
MAX_PARAM_LENGTH = 1_000_000  # tokens
MAX_SET = 64  # imports of one set; each of them may take each position of the set
MAX_PROBLEMS = 20  # shown in one error
