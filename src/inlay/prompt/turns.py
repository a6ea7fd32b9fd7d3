"""What stands between turns: the template's pieces, cut where text without a role goes between two of them.

A piece of a chat template closes one turn and opens the next. Text outside of turns that are beside it stands between
what closes and what opens; at the very front, between BOS and what opens the first turn. Turns may come with modules:
then what stands before a turn is known when a prompt is, and a schema is laid out by the turns that always stand there.
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
class Seen:
    """The turns that stand before a place of a schema wherever that place is part of a prompt.

    last: the number of the last of them. closed: whether what closes it stands already; with no turn, whether BOS does.
    """

    roles: tuple[str, ...] = ()
    last: int | None = None
    closed: bool = False


def has_turns(children: Iterable[_Node]) -> bool:
    """Whether there are turns among these nodes, at any depth."""
    return any(isinstance(child, Turn) or has_turns(_inside(child)) for child in children)


def speaks(node: _Node) -> bool:
    """Whether this can say something outside of turns."""
    if isinstance(node, Turn):
        return False
    return isinstance(node, Text | Param) or any(map(speaks, _inside(node)))


def _inside(node: _Node) -> Sequence[_Node]:
    if isinstance(node, Union):
        return node.members
    return node.children if isinstance(node, Module | Turn) else ()


def opening(template: ChatTemplate, roles: tuple[str, ...]) -> tuple[str, Trim] | None:
    """What the template puts before the last of these turns, and strips from its body; None where it refuses them."""
    try:
        return template.opening_pieces(roles)[-1], template.opening_trims(roles)[-1]
    except ModelError:
        return None


def openings(template: ChatTemplate, schema: Schema) -> tuple[str, ...]:
    """What a template that tells the time writes now in front of a schema's turns; nothing of any other template."""
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
    """What closes the last of these turns; nothing where the template refuses to end there."""
    try:
        return template.pieces(roles, generation=False)[-1]
    except ModelError:
        return ""


def split(piece: str, before: str) -> tuple[str, str]:
    """A piece as what closes and what opens. before: what closes the turn before it, if nothing follows; or BOS."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(piece, before, strict=False))
    cut = sum(1 for _ in alike)
    return piece[:cut], piece[cut:]


def bos_text(encoder: TextEncoder) -> str:
    """BOS as templates write it."""
    return "".join(encoder.name(token) or "" for token in encoder.bos)
