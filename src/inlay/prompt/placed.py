"""A prompt as numbers: its parts with their token ids and positions, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

from inlay.errors import Place
from inlay.prompt.free_order import FreeSet
from inlay.prompt.layout import Hole, SchemaLayout, TextRun

_SHARED = 2**20  # more tokens than vocabularies have, and more positions than prompts
_integers: list[int] = []
_growing = Lock()


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message's content.

    marked: whether the request asks that it be a module. ttl_s: for how many seconds that is kept; None for as long as
    there is room. leads: whether it is of the system turn in front of all others.
    """

    marked: bool
    ttl_s: float | None = None
    leads: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """Consecutive tokens of a prompt.

    start: the position of the first one in this prompt.
    origin: the run of a schema that it is, the hole whose default it is, the part of a message, or None for other text
        of the request.
    kept: whether what is computed of it may be kept for others, and found.
    """

    ids: tuple[int, ...]
    start: int
    origin: TextRun | Hole | ContentPart | None
    kept: bool = True

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class PromptLayout:
    """A prompt as parts in the order of their positions.

    place: where it was written, if it has a schema. public: whether that schema is everybody's. sets: members of it
    that change places, in the order of the prompt. anchor: of a conversation in parts, what it shares with all others
    of its system turn, from position 0 on; it may begin with other text itself.
    """

    schema: SchemaLayout | None
    parts: tuple[Placed, ...]
    text: str
    imported: frozenset[str] = frozenset()
    place: Place | None = None
    public: bool = False
    sets: tuple[FreeSet, ...] = ()
    anchor: tuple[Placed, ...] = ()

    @cached_property
    def ids(self) -> tuple[int, ...]:
        if len(self.parts) == 1:
            return self.parts[0].ids  # most are such, and some are long
        return tuple(token for part in self.parts for token in part.ids)

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return max((part.end for part in self.parts if part.ids), default=0)

    @property
    def marked_end(self) -> int:
        """The position behind the last of its parts that is a schema's text, or marked; 0 where there is none."""
        origins = ((part, part.origin) for part in self.parts)
        marked = (part.end for part, origin in origins if isinstance(origin, TextRun | Hole) or _is_marked(origin))
        return max(marked, default=0)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        return _shared([p for part in self.parts for p in range(part.start, part.end)])


def _is_marked(origin: object) -> bool:
    return isinstance(origin, ContentPart) and origin.marked


def _shared(numbers: Sequence[int]) -> tuple[int, ...]:
    """The same numbers, as objects that all prompts have in common: an int takes four times what points to it does.

    These objects stay, so numbers are to be ids that the model knows, or positions that it has.
    """
    most = max(numbers, default=0)
    if most >= _SHARED:
        return tuple(numbers)
    if most >= len(_integers):
        with _growing:
            _integers.extend(range(len(_integers), most + 1))
    return tuple(map(_integers.__getitem__, numbers))


def lay_out_ids(ids: Sequence[int], text: str) -> PromptLayout:
    """A prompt without a schema: nothing but new tokens from position 0."""
    return PromptLayout(None, (Placed(_shared(ids), 0, None),), text)
