"""A translated program: what it says, and which pieces hang on which answers. It becomes a schema in build.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from inlay.errors import Place
from inlay.pml.program.cases import ALWAYS, Cases
from inlay.pml.program.inputs import Words


@dataclass(frozen=True, slots=True)
class Said:
    """What one ``yield`` says: text, with holes for arguments."""

    parts: tuple[str | Words, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Section:
    """A module to be.

    label: its name, unless that is taken.
    cases: in which it is imported, where the section around it is.
    is_call: whether it is the call of another program, whose name stands in front of those of all sections in it.
    """

    label: str
    place: Place
    cases: Cases = ALWAYS
    is_call: bool = False
    body: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Either:
    """Sections that exclude each other: a union to be."""

    sections: tuple[Section, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Spoken:
    """A chat turn."""

    role: str
    place: Place
    body: list[Piece] = field(default_factory=list)


Piece = Said | Section | Either | Spoken


def says_anything(piece: Piece) -> bool:
    """Whether there is any text in it, or a chat turn."""
    if isinstance(piece, Said):
        return bool(piece.parts)
    if isinstance(piece, Spoken):
        return True
    return any(map(says_anything, piece.sections if isinstance(piece, Either) else piece.body))
