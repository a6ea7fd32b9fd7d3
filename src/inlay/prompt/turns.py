"""The chat template's text between turns, cut where text without a role stands between two turns.

A piece of a chat template closes one turn and opens the next. Text outside turns stands between these two halves. At
the front, such text stands between BOS and the opening of the first turn. Modules may contain turns, so the exact piece
is known only for a prompt. A schema is laid out by the turns that are always present.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from inlay.errors import ModelError
from inlay.pml import Module, Param, Schema, Text, Turn, Union
from inlay.prompt.chat import ChatTemplate, Trim
from inlay.prompt.tokens import TextEncoder

_Node = Text | Param | Module | Union | Turn


@dataclass(slots=True)
class PresentTurns:
    """The turns before a place of a schema that are present in every prompt with that place.

    Args:
        last: the number of the last of them.
        closed: True if the last turn is closed or, without a turn, if BOS is placed.
    """

    roles: tuple[str, ...] = ()
    last: int | None = None
    closed: bool = False


def has_turns(children: Iterable[_Node]) -> bool:
    """True if these nodes contain turns, at any depth."""
    return any(isinstance(child, Turn) or has_turns(_inside(child)) for child in children)


def speaks(node: _Node) -> bool:
    """True if the node can add text outside turns."""
    if isinstance(node, Turn):
        return False
    return isinstance(node, Text | Param) or any(map(speaks, _inside(node)))


def _inside(node: _Node) -> Sequence[_Node]:
    if isinstance(node, Union):
        return node.members
    return node.children if isinstance(node, Module | Turn) else ()


def opening(template: ChatTemplate, roles: tuple[str, ...]) -> tuple[str, Trim] | None:
    """Return the template's piece before the last of these turns and its trim; None if it refuses them."""
    try:
        return template.opening_pieces(roles)[-1], template.opening_trims(roles)[-1]
    except ModelError:
        return None


def openings(template: ChatTemplate, schema: Schema) -> tuple[str, ...]:
    """Return the current text in front of a schema's turns if the template tells the time, else ()."""
    if not template.tells_time:
        return ()
    always = [child.role for child in schema.children if isinstance(child, Turn)]
    in_modules = dict.fromkeys(_roles(child for child in schema.children if not isinstance(child, Turn)))
    asked = [tuple(always[: count + 1]) for count in range(len(always))] + [(role,) for role in in_modules]
    return tuple("" if found is None else found[0] for found in (opening(template, roles) for roles in asked))


def _roles(children: Iterable[_Node]) -> Iterator[str]:
    for child in children:
        if isinstance(child, Turn):
            yield child.role
        yield from _roles(_inside(child))


def closing(template: ChatTemplate, roles: tuple[str, ...]) -> str:
    """Return the text that closes the last of these turns; "" if the template refuses to end there."""
    try:
        return template.pieces(roles, generation=False)[-1]
    except ModelError:
        return ""


def split(piece: str, before: str) -> tuple[str, str]:
    """Split a piece into its closing and opening half. ``before`` is the closing text, or BOS."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(piece, before, strict=False))
    cut = sum(1 for _ in alike)
    return piece[:cut], piece[cut:]


def bos_text(encoder: TextEncoder) -> str:
    """Return BOS as templates write it."""
    return "".join(encoder.name(token) or "" for token in encoder.bos)
