"""A conversation whose messages come in parts, as numbers: every part is tokenized alone and stays one run of tokens.

To such a prompt its system turn is what text outside modules is to a schema: always present. A part that the request
marks is a module; another part of a later turn is looked up by its content. What templates write in ways of their own
(calls of tools, and results of these where they become JSON) has no parts.

Parts of a conversation as segments: what each attends to when it is encoded, and whether it is one at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inlay.errors import ParameterError
from inlay.kv.identity import KeyMaker, SegmentSpec, specify
from inlay.pml.nodes import MAX_SET
from inlay.prompt.chat import ChatTemplate, Trim, Turn
from inlay.prompt.free_order import NOT_CUT_OUT, NOT_IN_PARTS, FreeSet, Member
from inlay.prompt.inputs import Conversation, is_marked, ttl_of
from inlay.prompt.placed import ContentPart, Placed, PromptLayout
from inlay.prompt.request import PromptPart
from inlay.prompt.tokens import TextEncoder, at_seams


def lay_out_conversation(messages: Conversation, encoder: TextEncoder, template: ChatTemplate) -> PromptLayout:
    """Place messages, some of whose contents are lists of ``{"type": "text", "text": …, "cache_control"?: …}``.

    Raises ModelError where the template refuses the turns.
    """
    texts = sum(len(message["content"]) for message in messages if not isinstance(message["content"], str))
    encoder.bound.check_count(texts, "parts of messages")
    turns, tools, options = [_turn(message, template) for message in messages], messages.tools, messages.options
    numbers = [n for n, turn in enumerate(turns) if isinstance(turn, str) or "content" not in turn]
    pieces = template.pieces(turns, generation=options.generation, tools=tools)
    trims = template.trims(turns, generation=options.generation, tools=tools)
    if options.continues:  # what it ends with is not its end
        trims = (*trims[:-1], replace(trims[-1], right=""))
    walk = _Walk(encoder)
    sets = [_FreeParts(message, number) for number, message in enumerate(messages)]
    cut_out = [messages[number] for number in numbers]
    settled = [_settled(_parts(message["content"]), trim) for message, trim in zip(cut_out, trims, strict=True)]
    encoder.bound.check(part.text for parts in settled for part in parts)
    for number, message, piece, parts in zip(numbers, cut_out, pieces, settled, strict=False):
        walk.template(piece)
        for index, part in enumerate(parts):
            sets[number].place(index, walk.at, walk.characters)
            walk.content(part, system=message["role"] == "system")
            sets[number].ended(index, walk.at, walk.characters)
    if not options.continues:
        walk.template(pieces[-1])
    bodies = ["".join(part.text for part in parts) for parts in settled]
    template.verify(turns, bodies, pieces, generation=options.generation, tools=tools)
    free = tuple(each for one in sets for each in one.sets())
    return PromptLayout(None, tuple(walk.parts), "".join(walk.texts), sets=free)


def without_order(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates know it."""
    return {key: value for key, value in message.items() if key != "order"}


def _turn(message: Mapping[str, Any], template: ChatTemplate) -> Turn:
    """A message as the template is asked for it: without its content, or whole where that cannot be cut out."""
    message = without_order(message)
    if message.keys() == {"role", "content"} and message["role"] != "tool":
        return str(message["role"])
    if message.get("tool_calls") or (message["role"] == "tool" and not template.shows_results_verbatim):
        return {**message, "content": "".join(part.text for part in _parts(message["content"]))}
    return {key: value for key, value in message.items() if key != "content"}


@dataclass(slots=True)
class _Text:
    """A part of a message. whole: whether it is a part at all, not a message given as one text.

    marked, ttl_s: see ContentPart.
    """

    text: str
    whole: bool
    marked: bool
    ttl_s: float | None = None


def _parts(content: str | Sequence[Mapping[str, Any]]) -> list[_Text]:
    if isinstance(content, str):
        return [_Text(content, whole=False, marked=False)]
    return [_Text(part["text"], whole=True, marked=is_marked(part), ttl_s=ttl_of(part)) for part in content]


def _settled(parts: list[_Text], trim: Trim) -> list[_Text]:
    """The parts of a turn as its template leaves them. Those that are marked stay: they are shared."""
    for ordered, strip in ((parts, trim.start), (parts[::-1], trim.end)):
        for part in ordered:
            if part.marked:
                break
            part.text = strip(part.text)
            if part.text:
                break
    return parts


class _FreeParts:
    """The parts of one message that change places, where it says that their order is free: neighbours with a mark.

    Raises ParameterError where there are too many.
    """

    def __init__(self, message: Mapping[str, Any], number: int) -> None:
        """number: the message's, in the request."""
        content = message["content"]
        free = message.get("order") is not None
        self._number = number
        self._says = free
        self._marked = (
            [] if isinstance(content, str) or not free else [n for n, p in enumerate(content) if is_marked(p)]
        )
        self._runs = [run for run in _neighbours(self._marked) if len(run) > 1]
        self._placed: dict[int, tuple[int, int, int, int]] = {}  # of a part, its first token and character, and lengths
        longest = max(map(len, self._runs), default=0)
        if longest > MAX_SET:
            raise ParameterError(
                f"messages[{number}] has {longest} neighbouring marked parts, and its order is free; leave the order "
                f"out, or mark at most {MAX_SET} of them"
            )

    def place(self, index: int, token: int, character: int) -> None:
        """A part begins."""
        self._placed[index] = (token, character, 0, 0)

    def ended(self, index: int, token: int, character: int) -> None:
        """The same part ends."""
        first, begun, *_ = self._placed[index]
        self._placed[index] = (first, begun, token - first, character - begun)

    def sets(self) -> Iterator[FreeSet]:
        """What changes places, or why nothing does."""
        if not self._says:
            return
        if not self._placed or not self._runs:
            why = NOT_CUT_OUT if self._runs else NOT_IN_PARTS
            yield replace(why, members=tuple(Member(self._name(index)) for index in self._marked))
            return
        for run in self._runs:
            placed = [self._placed[index] for index in run]
            members = tuple(
                Member(self._name(index), tokens, characters)
                for index, (_, _, tokens, characters) in zip(run, placed, strict=True)
            )
            yield FreeSet(members, placed[0][0], placed[0][1])

    def _name(self, index: int) -> str:
        return f"messages[{self._number}].content[{index}]"


def _neighbours(numbers: Sequence[int]) -> list[list[int]]:
    """Increasing numbers as runs in which each follows the one before."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


@dataclass
class _Walk:
    encoder: TextEncoder
    parts: list[Placed] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    at: int = 0
    characters: int = 0

    def template(self, piece: str) -> None:
        for text in at_seams(piece):
            self._say(text)
            self._place(self.encoder.template(text), None)

    def _say(self, text: str) -> None:
        self.texts.append(text)
        self.characters += len(text)

    def content(self, part: _Text, *, system: bool) -> None:
        self._say(part.text)
        origin = ContentPart(part.marked, part.ttl_s) if part.marked or (part.whole and not system) else None
        self._place(self.encoder.text(part.text), origin)

    def _place(self, ids: tuple[int, ...], origin: ContentPart | None) -> None:
        if ids:
            self.parts.append(Placed(ids, self.at, origin))
            self.at += len(ids)


#: Of a part that nobody marked, fewer tokens than this are cheaper computed than approximated.
_WORTH_FINDING = 16


class ContentSpecs:
    """The specs of one conversation's parts, under one adapter, or under several: most exact first.

    anchored: whether a part sees not only itself, but also what stands before the first part of all: the system turn,
        to which the template's opening belongs.
    movable: whether a segment may be encoded at a canonical start and read at a shift.
    salt: whose the conversation is. adapters: their digests; b"" for the model alone.
    """

    def __init__(
        self,
        prompt: PromptLayout,
        *,
        anchored: bool,
        movable: bool,
        keys: KeyMaker,
        salt: bytes,
        adapters: Sequence[bytes] = (b"",),
    ) -> None:
        first = next(number for number, part in enumerate(prompt.parts) if part.origin is not None)
        self._anchors: tuple[SegmentSpec, ...] = ()
        self._by_start: dict[int, tuple[SegmentSpec, ...]] = {}
        if anchored and first:
            ids = tuple(token for part in prompt.parts[:first] for token in part.ids)
            self._anchors = tuple(specify(ids, 0, (), keys, salt, adapter) for adapter in adapters)
        behind = self._anchors[0].end if self._anchors else 0
        for part in prompt.parts[first:]:
            if isinstance(part.origin, ContentPart):
                start = behind if movable else part.start
                self._by_start[part.start] = tuple(
                    specify(part.ids, start, self._anchors[number : number + 1], keys, salt, adapter)
                    for number, adapter in enumerate(adapters)
                )
        self._parts = prompt.parts
        self._form = "anchored" if anchored else "isolated"

    def parts(self) -> tuple[PromptPart, ...]:
        """The conversation's parts, the anchor as one."""
        if not self._anchors:
            return tuple(map(self._part, self._parts))
        anchor = self._anchors[0]
        rest = (part for part in self._parts if part.start >= anchor.end)
        first = PromptPart(anchor.ids, 0, True, self._anchors, encode=True, form=self._form)
        return (first, *map(self._part, rest))

    def _part(self, part: Placed) -> PromptPart:
        """A part that is marked is a segment; one that is not is read from one where that is stored."""
        origin = part.origin
        if not isinstance(origin, ContentPart) or not (origin.marked or len(part.ids) >= _WORTH_FINDING):
            return PromptPart(part.ids, part.start)
        specs = self._by_start[part.start]
        return PromptPart(part.ids, part.start, True, specs, encode=origin.marked, form=self._form, ttl_s=origin.ttl_s)
