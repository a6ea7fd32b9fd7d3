"""A laid-out prompt: its parts with token ids, positions and origins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

from inlay.errors import Place
from inlay.prompt.free_order import FreeSet
from inlay.prompt.layout import Hole, SchemaLayout, TextRun

_SHARED = 2**20  # above every vocabulary size and context length
_integers: list[int] = []
_growing = Lock()


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message's content.

    Args:
        marked: True if the request asks for a module.
        ttl_s: the module's lifetime in seconds. None for no limit.
        leads: True in the system turn in front of all others, and for a tool.
        automatic: True if it is a module without a mark: a tool, or a block of the system prompt.
        message, index: the number of its message, and of the part in it.
        tool: the number of its tool. None for a part of a message.
        found: True for a piece of text that was found by its content.
    """

    marked: bool
    ttl_s: float | None = None
    leads: bool = False
    automatic: bool = field(default=False, compare=False)
    message: int = field(default=0, compare=False)
    index: int = field(default=0, compare=False)
    tool: int | None = field(default=None, compare=False)
    found: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Placed:
    """Consecutive tokens of a prompt.

    Args:
        start: the position of the first one in this prompt.
        origin: the schema's run, the hole of a default, the part of a message, or None for other text.
        kept: True if its KV may be stored and looked up.
    """

    ids: tuple[int, ...]
    start: int
    origin: TextRun | Hole | ContentPart | None
    kept: bool = True

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def marked(self) -> bool:
        """True for a module, an argument or a marked part."""
        if isinstance(self.origin, ContentPart):
            return self.origin.marked
        return isinstance(self.origin, TextRun | Hole)


@dataclass(frozen=True)
class PromptLayout:
    """A prompt as parts in the order of their positions.

    Args:
        place: the prompt's source place, if it has a schema.
        public: True if that schema is shared by all salts.
        sets: in the order of the prompt.
        anchor: for a conversation in parts, the text from position 0 that all conversations with its system turn
            share. The prompt itself may begin with other text.
        in_pieces: True if its tools or the blocks of its system prompt are modules without marks.
        texts: its unmarked texts outside the chat template, as first and last-plus-one token. For a prompt without a
            schema.
    """

    schema: SchemaLayout | None
    parts: tuple[Placed, ...]
    text: str
    imported: frozenset[str] = frozenset()
    place: Place | None = None
    public: bool = False
    sets: tuple[FreeSet, ...] = ()
    anchor: tuple[Placed, ...] = ()
    in_pieces: bool = False
    texts: tuple[tuple[int, int], ...] = ()

    @cached_property
    def ids(self) -> tuple[int, ...]:
        if len(self.parts) == 1:
            return self.parts[0].ids  # the usual case, without a copy
        return tuple(token for part in self.parts for token in part.ids)

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return max((part.end for part in self.parts if part.ids), default=0)

    @property
    def marked_end(self) -> int:
        """The position behind the last schema text or marked part; 0 without one."""
        automatic = (isinstance(part.origin, ContentPart) and part.origin.automatic for part in self.parts)
        return max(
            (part.end for part, each in zip(self.parts, automatic, strict=True) if part.marked and not each), default=0
        )

    @cached_property
    def positions(self) -> tuple[int, ...]:
        return _shared([p for part in self.parts for p in range(part.start, part.end)])


def _shared(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers as int objects that all prompts share, because an int takes four times the memory of a
    reference.

    The objects are never freed, so the numbers must be known token ids or valid positions.
    """
    most = max(numbers, default=0)
    if most >= _SHARED:
        return tuple(numbers)
    if most >= len(_integers):
        with _growing:
            _integers.extend(range(len(_integers), most + 1))
    return tuple(map(_integers.__getitem__, numbers))


def lay_out_ids(ids: Sequence[int], text: str) -> PromptLayout:
    """Return a prompt of new tokens from position 0, without a schema."""
    return PromptLayout(None, (Placed(_shared(ids), 0, None),), text)
