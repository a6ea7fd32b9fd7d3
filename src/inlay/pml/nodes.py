"""The nodes of a parsed schema and of a parsed prompt: plain, immutable data; and how large such a document may be.

Nothing here knows a tokenizer or a model. Nodes of a schema carry ``order``, their number in document order, by which
later stages refer to them. Hostile input is refused early, by the limits, in bounded time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from inlay.errors import Place

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Meta:
    """Something that is told about a part of a schema and costs no tokens: no model sees it."""

    name: str
    value: str
    place: Place


@dataclass(frozen=True, slots=True)
class Text:
    """A run of text between two tags, white space already settled; never empty."""

    text: str
    place: Place
    order: int = -1


@dataclass(frozen=True, slots=True)
class Param:
    """A hole of ``length`` tokens in a module, filled by an argument or by ``default``.

    scaffold: what fills it while its module is encoded over placeholders.
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

    cache: whether it is encoded once and kept; otherwise each request that imports it computes it, with all in it.
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

    scaffold: the member that stands for it where Prompt Cache encodes a whole schema at once; without effect here.
    """

    members: tuple[Module, ...]
    place: Place
    order: int = -1
    scaffold: str | None = None
    meta: tuple[Meta, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat turn of a schema, or of one of its modules, which alone holds parameters; its role is one of ROLES."""

    role: str
    children: tuple[Text | Param | Module | Union, ...]
    place: Place
    order: int = -1
    meta: tuple[Meta, ...] = ()


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Modules that are encoded together, for prompts that import all of them; by their paths."""

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

    name: its own, or a path of names, which stands for imports of the modules around it as well.
    """

    name: str
    arguments: tuple[Argument, ...]
    children: tuple[Text | Import | ImportSet, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class ImportSet:
    """Imports whose order is free: the engine chooses it, by what is stored (engine/order.py)."""

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
    """The children of a schema with ``order`` set throughout, from 0 in document order."""
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
MAX_SOURCE_BYTES = 64 * 2**20  # of all the files that one schema names in src, together
MAX_DEPTH = 32  # elements inside elements, the outermost one counted
MAX_ELEMENTS = 100_000
MAX_ATTRIBUTES = 1_000  # of one element
MAX_ATTRIBUTE_CHARACTERS = 2**20  # of one attribute's value
MAX_NAME_CHARACTERS = 256
MAX_PARAM_LENGTH = 1_000_000  # tokens
MAX_SET = 64  # imports of one set: each of them may stand at each of its places
MAX_PROBLEMS = 20  # that one error shows
