"""Lays out conversations with messages in parts, and finds the segments that these parts may be read from.

Every part is tokenized alone and stays one run of tokens. A marked part is a module. An unmarked part of a later turn
is read from the module of a marked part with the same text, if one is stored. Messages that the template rewrites have
no parts: tool calls, and results shown as JSON.

Under a modular policy, each tool and each block of a system prompt is a module without a mark. Then the anchor has no
tools, so that a module does not depend on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from inlay.errors import ModelError, ParameterError
from inlay.kv.identity import KeyMaker, SegmentSpec, owner_label, specify
from inlay.pml.nodes import MAX_SET
from inlay.prompt.anchors import Anchor
from inlay.prompt.chat import ChatTemplate, Cut, Tools, Trim, Turn
from inlay.prompt.free_order import NOT_CUT_OUT, NOT_IN_PARTS, FreeSet, Member
from inlay.prompt.inputs import ChatOptions, Conversation, is_marked, ttl_of
from inlay.prompt.placement import ContentPart, Placed, PromptLayout
from inlay.prompt.request import PromptPart
from inlay.prompt.seen_pieces import content_ranges, token_ranges
from inlay.prompt.tokens import TextEncoder, at_seams
from inlay.prompt.tool_texts import ToolTexts

_SYSTEM = ("system", "developer")
_THOUGHTS = ("reasoning_content", "reasoning")
_WAYS = 5  # ways to choose the bodies to cut out, from all of them to none


def has_pieces(messages: Conversation) -> bool:
    """True if a conversation has tools, or a system prompt of several blocks."""
    return bool(messages.tools) or bool(_system_blocks(messages, _leading(messages)).all)


def lay_out_conversation(
    messages: Conversation,
    encoder: TextEncoder,
    template: ChatTemplate,
    *,
    in_pieces: bool = False,
    ttls: Sequence[float | None] = (),
    find: bool = False,
) -> PromptLayout | None:
    """Return the token ids and positions of messages, with the parts of their contents.

    A part is ``{"type": "text", "text": …, "cache_control"?: …}``. The text of the layout equals the template's own
    rendering. A message that the template rewrites has no parts.

    Args:
        messages: the conversation.
        encoder: tokenizes each part.
        template: renders the text around the parts.
        in_pieces: if True, each tool and each block of the system prompt is a module.
        ttls: the lifetime of each tool in seconds. None for no limit.
        find: if True, the layout has its ``texts``.

    Returns:
        None if the template rewrites every message.

    Raises:
        ContextError: for more text than the model's context holds.
        ParameterError: for too many free parts.
    """
    texts = sum(len(message["content"]) for message in messages if not isinstance(message["content"], str))
    encoder.bound.check_count(texts, "parts of messages")
    bodies = _bodies(messages, template) or (_whole(messages, template) if in_pieces and messages.tools else None)
    if bodies is None:
        return None
    encoder.bound.check(chain((part.text for parts in bodies.parts.values() for part in parts), *bodies.texts))
    sets = [_FreeParts(message, number) for number, message in enumerate(messages)]
    leading = _leading(messages)
    blocks = _system_blocks(messages, leading) if in_pieces else _SystemBlocks()
    tools = _tools(bodies, template, messages.tools, ttls) if in_pieces and messages.tools else None
    rewritten = [_text(message) for number, message in enumerate(messages) if number not in bodies.parts]
    walk = _Walk(encoder, tools=tools, rewritten=rewritten if find else ())
    for number, piece in zip(bodies.cut.order, bodies.cut.pieces, strict=False):
        walk.template(piece)
        for index, part in enumerate(bodies.parts[number]):
            part.automatic = not part.marked and (number, index) in blocks.all
            sets[number].place(index, walk.at, walk.characters)
            walk.content(part, messages[number]["role"], leads=number < leading, message=number, index=index)
            sets[number].ended(index, walk.at, walk.characters)
    if not messages.options.continues or not bodies.parts:
        walk.template(bodies.cut.pieces[-1])
    free = tuple(each for one in sets for each in one.sets())
    system = messages[:leading], bodies.turns[:leading]
    shown = messages.tools if tools is None else None
    empty = _Walk(encoder, walk.known)
    anchor, own = _anchor(*system, template, shown, empty, blocks.of_anchor, closed=tools is None)
    pieces = tools is not None or bool(blocks.all)
    if anchor:
        own += _own_values(bodies.turns[:leading], shown, messages.options, encoder)
    return PromptLayout(
        None,
        tuple(walk.parts),
        "".join(walk.texts),
        sets=free,
        anchor=anchor,
        anchor_own=own,
        in_pieces=pieces,
        texts=tuple(walk.unmarked) if find else (),
    )


def _own_values(
    turns: Sequence[Turn], tools: Tools | None, options: ChatOptions, encoder: TextEncoder
) -> tuple[int, ...]:
    """Return the token ids of values that the template writes into an anchor by itself.

    Args:
        turns: those of the system turn, without the contents that are cut out.
        tools: those in the anchor. None if each is a part.
    """
    fields = (
        {name: value for name, value in turn.items() if name != "role"} for turn in turns if isinstance(turn, dict)
    )
    values = [*filter(None, fields), *(tools or ()), *filter(None, (options.variables, options.documents))]
    return encoder.text(json.dumps(values, default=str, ensure_ascii=False)) if values else ()


def _tools(bodies: _Bodies, template: ChatTemplate, tools: Tools, ttls: Sequence[float | None]) -> ToolTexts | None:
    """Return the texts of the tools in a rendering. If they are not one block there, warn and return None."""
    found = template.tool_texts(tools, ttls or [None] * len(tools))
    if found is None:
        template.warn_once(
            "the chat template does not write tools one after another in the order of the request, so a change of one "
            "tool recomputes the text behind it: use a template that lists them one by one"
        )
        return None
    if sum(piece.count(found.block) for piece in bodies.cut.pieces) != 1:
        template.warn_once(
            "the chat template does not show the tools once and alike in every conversation, so a change of one tool "
            "recomputes the text behind it: use a template that lists them one by one"
        )
        return None
    return found


def _whole(messages: Conversation, template: ChatTemplate) -> _Bodies:
    """Return a rendering without any body cut out. Raises ModelError."""
    turns, options = list(map(as_turn, messages)), messages.options
    rendered = template.render_with_seams(
        turns, tools=messages.tools, generation=options.generation, continues=options.continues
    )
    return _Bodies(turns, Cut((rendered,), ()), {})


@dataclass(frozen=True, slots=True)
class _SystemBlocks:
    """The blocks of a system prompt of at least two, as numbers of a message and of a part in it.

    Args:
        of_anchor: the blocks that count as marked in the anchor. Blocks behind the last marked one do not count,
            because they may change.
    """

    all: frozenset[tuple[int, int]] = frozenset()
    of_anchor: frozenset[tuple[int, int]] = frozenset()


def _system_blocks(messages: Sequence[Mapping[str, Any]], leading: int) -> _SystemBlocks:
    """Return the blocks of the ``leading`` system messages, except those with a free order."""
    found = [
        ((number, index), part.marked)
        for number, message in enumerate(messages[:leading])
        if message.get("order") is None
        for index, part in enumerate(_parts(message["content"]))
        if part.text.strip()
    ]
    if len(found) < 2:
        return _SystemBlocks()
    last = max((rank for rank, (_, marked) in enumerate(found) if marked), default=len(found) - 1)
    return _SystemBlocks(frozenset(place for place, _ in found), frozenset(place for place, _ in found[: last + 1]))


def as_turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for the chat template: its content as one text, its reasoning under both common names."""
    turn = {key: value for key, value in message.items() if key != "order"}
    turn["content"] = _text(message)
    thoughts = next((turn[name] for name in _THOUGHTS if isinstance(turn.get(name), str)), None)
    if thoughts is not None:
        turn |= {name: thoughts for name in _THOUGHTS if not isinstance(turn.get(name), str)}
    return turn


def fixed_sets(messages: Conversation) -> tuple[FreeSet, ...]:
    """Return the messages' free sets as fixed, each with the reason."""
    return tuple(each for number, message in enumerate(messages) for each in _FreeParts(message, number).sets())


@dataclass(frozen=True, slots=True)
class _Bodies:
    """The bodies that are cut out of a rendering.

    Args:
        turns: all messages in the form that the template was given.
        parts: number of a message → the parts of its body.
    """

    turns: Sequence[Turn]
    cut: Cut
    parts: Mapping[int, list[_Text]]

    @property
    def texts(self) -> Iterator[list[str]]:
        """The texts around the bodies."""
        return map(at_seams, self.cut.pieces)


def _bodies(messages: Conversation, template: ChatTemplate) -> _Bodies | None:
    """Cut out as many bodies as the template shows unchanged; None if there are none."""
    before: list[Turn] | None = None
    for way in range(_WAYS):
        turns = [_turn(message, template, way) for message in messages]
        if messages.options.continues:
            turns[-1] = _without_content(messages[-1])
        if turns == before:
            continue
        before = turns
        found = _cut_out(messages, turns, template)
        if found is not None:
            return found if found.parts else None
    return None


def _cut_out(messages: Conversation, turns: list[Turn], template: ChatTemplate) -> _Bodies | None:
    """Cut out the bodies of these turns; None if pieces and bodies do not add up to the template's rendering."""
    options, tools = messages.options, messages.tools
    numbers = [n for n, turn in enumerate(turns) if isinstance(turn, str) or "content" not in turn]
    try:
        cut = template.cut(turns, generation=options.generation, tools=tools)
        trims = dict(zip(numbers, template.trims(turns, generation=options.generation, tools=tools), strict=True))
        bodies = {number: _text(messages[number]) for number in numbers}
        real = template.rendered(turns, list(bodies.values()), generation=options.generation, tools=tools)
    except ModelError:
        return None  # rendering the messages whole raises the error
    shown = [trims[number].start(trims[number].end(bodies[number])) for number in cut.order]
    built = "".join(
        text for pair in zip(cut.pieces, [*shown, ""], strict=True) for part in pair for text in at_seams(part)
    )
    if built != real or (options.continues and cut.order[-1] != len(turns) - 1):
        return None
    if options.continues:  # the model continues behind the last character
        trims[len(turns) - 1] = replace(trims[len(turns) - 1], right="")
    return _Bodies(turns, cut, {number: _settled(messages[number], trim) for number, trim in trims.items()})


def _turn(message: Mapping[str, Any], template: ChatTemplate, way: int) -> Turn:
    """Return a message without its content, or whole if its content stays in the rendering."""
    own = bool(message.get("tool_calls")) or (message["role"] == "tool" and not template.shows_results_verbatim)
    unmarked = not any(part.marked for part in _parts(message["content"]))
    answer = message["role"] == "assistant"
    left = (False, answer and unmarked, answer, answer or unmarked, True)[way]
    return as_turn(message) if own or left or not _text(message) else _without_content(message)


def _without_content(message: Mapping[str, Any]) -> Turn:
    turn = as_turn(message)
    del turn["content"]
    plain = turn.keys() == {"role"} and turn["role"] != "tool"
    return str(turn["role"]) if plain else turn


def _leading(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of system messages in front of all others."""
    return next((n for n, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))


def _anchor(
    messages: Sequence[Mapping[str, Any]],
    turns: Sequence[Turn],
    template: ChatTemplate,
    tools: Tools | None,
    walk: _Walk,
    blocks: frozenset[tuple[int, int]] = frozenset(),
    *,
    closed: bool = True,
) -> tuple[tuple[Placed, ...], tuple[int, ...]]:
    """Return the text that all conversations with this system turn share, up to the first text of a user.

    The second result is the token ids of the contents in it.

    It ends behind the last marked part if unmarked text follows, because such text may change. It ends in front of
    parts with a free order.

    Args:
        messages: the messages of the system turn.
        turns: the same messages in the form that the template was given.
        walk: an empty one.
        blocks: parts that count as marked.
        closed: False to end it behind the last system text. Tools may follow there.
    """
    asked = [*turns, "user"]
    try:
        cut = template.cut(asked, generation=False, tools=tools)
        trims = template.trims(asked, generation=False, tools=tools)
    except ModelError:
        return (), ()
    by_number = dict(zip(sorted(cut.order), trims, strict=True))
    own: list[int] = []
    marked, loose = (0, 0), False  # parts and own tokens up to the last marked one; True if system text follows it
    for number, piece in zip(cut.order, cut.pieces, strict=False):
        if number == len(turns) and walk.parts and not closed:
            break
        walk.template(piece)
        if number == len(turns):
            break
        for index, part in enumerate(_settled(messages[number], by_number[number])):
            part.automatic = not part.marked and (number, index) in blocks
            part.marked |= part.automatic
            if part.marked and messages[number].get("order") is not None:
                return tuple(walk.parts), tuple(own)
            own += walk.content(part, messages[number]["role"], leads=True)
            if part.text:
                marked, loose = ((len(walk.parts), len(own)), False) if part.marked else (marked, marked[0] > 0)
    parts, tokens = marked if loose else (len(walk.parts), len(own))
    return tuple(walk.parts[:parts]), tuple(own[:tokens])


@dataclass(slots=True)
class _Text:
    """A part of a message. ``whole`` is False for a message given as one text. For the rest see ContentPart."""

    text: str
    whole: bool
    marked: bool
    ttl_s: float | None = None
    automatic: bool = False


def _parts(content: str | Sequence[Mapping[str, Any]]) -> list[_Text]:
    if isinstance(content, str):
        return [_Text(content, whole=False, marked=False)]
    return [_Text(part["text"], whole=True, marked=is_marked(part), ttl_s=ttl_of(part)) for part in content]


def _text(message: Mapping[str, Any]) -> str:
    return "".join(part.text for part in _parts(message["content"]))


def _settled(message: Mapping[str, Any], trim: Trim) -> list[_Text]:
    """Return the parts of a turn as the template strips them. Marked parts with a free order are not stripped."""
    parts, free = _parts(message["content"]), message.get("order") is not None
    for ordered, strip in ((parts, trim.start), (parts[::-1], trim.end)):
        for part in ordered:
            if part.marked and free:
                break
            part.text = strip(part.text)
            if part.text:
                break
    return parts


class _FreeParts:
    """The free sets of one message: neighbouring marked parts, if the message says that their order is free.

    Raises ParameterError for too many neighbours.
    """

    def __init__(self, message: Mapping[str, Any], number: int) -> None:
        """Take a message and its number in the request."""
        content = message["content"]
        free = message.get("order") is not None
        self._number = number
        self._says = free
        self._marked = (
            [] if isinstance(content, str) or not free else [n for n, p in enumerate(content) if is_marked(p)]
        )
        self._runs = [run for run in _neighbours(self._marked) if len(run) > 1]
        # of a part: first token, first character, tokens, characters
        self._placed: dict[int, tuple[int, int, int, int]] = {}
        longest = max(map(len, self._runs), default=0)
        if longest > MAX_SET:
            raise ParameterError(
                f"messages[{number}] has {longest} neighbouring marked parts, and its order is free; leave the order "
                f"out, or mark at most {MAX_SET} of them",
                code="prompt.set_too_large",
            )

    def place(self, index: int, token: int, character: int) -> None:
        """Record the start of a part."""
        self._placed[index] = (token, character, 0, 0)

    def ended(self, index: int, token: int, character: int) -> None:
        """Record the end of the same part."""
        first, begun, *_ = self._placed[index]
        self._placed[index] = (first, begun, token - first, character - begun)

    def sets(self) -> Iterator[FreeSet]:
        """Yield the free sets, or one fixed set with the reason."""
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
    """Split increasing numbers into runs of consecutive ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


@dataclass
class _Walk:
    """Places texts one after the other.

    ``known`` caches token ids. The first half of a key is True for text of messages. ``tools`` become parts.
    ``rewritten`` are contents to find in the template's text. ``unmarked`` are the unmarked texts of messages, as
    ranges of tokens.
    """

    encoder: TextEncoder
    known: dict[tuple[bool, str], tuple[int, ...]] = field(default_factory=dict)
    tools: ToolTexts | None = None
    rewritten: Sequence[str] = ()
    unmarked: list[tuple[int, int]] = field(default_factory=list)
    parts: list[Placed] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    at: int = 0
    characters: int = 0

    def template(self, piece: str) -> None:
        if self.tools is None or self.tools.block not in piece:
            self._template(piece, None)
            return
        tools, self.tools = self.tools, None
        before, behind = piece.split(tools.block, 1)
        self._template(before, None)
        for number, (text, ttl_s) in enumerate(zip(tools.texts, tools.ttls, strict=True)):
            self._template(tools.glue if number else "", None)
            self._template(text, ContentPart(True, ttl_s, leads=True, automatic=True, tool=number))
        self._template(behind, None)

    def _template(self, piece: str, origin: ContentPart | None) -> None:
        """Place a piece of the template. A piece with an origin is one part."""
        encoded, at = [], self.at
        for text in at_seams(piece):
            self._say(text)
            encoded.append(self._encoded(text, self.encoder.template))
            ranges = content_ranges(text, self.rewritten) if origin is None else []
            if ranges:
                offsets = self.encoder.template_offsets(text)
                self.unmarked += [(at + first, at + end) for first, end in token_ranges(offsets, ranges)]
            at += len(encoded[-1])
        for ids in encoded if origin is None else [tuple(chain.from_iterable(encoded))]:
            self._place(ids, origin)

    def _say(self, text: str) -> None:
        self.texts.append(text)
        self.characters += len(text)

    def content(self, part: _Text, role: str, *, leads: bool, message: int = 0, index: int = 0) -> tuple[int, ...]:
        """Place a part of a message. ``leads`` is True in the system turn in front of all others.

        Returns:
            Its token ids.
        """
        self._say(part.text)
        marked = part.marked or part.automatic
        found = marked or (part.whole and role not in _SYSTEM)
        origin = ContentPart(marked, part.ttl_s, leads, part.automatic, message, index) if found else None
        ids = self._encoded(part.text, self.encoder.text)
        if not marked:
            self.unmarked.append((self.at, self.at + len(ids)))
        self._place(ids, origin)
        return ids

    def _encoded(self, text: str, encode: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
        memo = (encode == self.encoder.text, text)
        if memo not in self.known:
            self.known[memo] = encode(text)
        return self.known[memo]

    def _place(self, ids: tuple[int, ...], origin: ContentPart | None) -> None:
        if ids:
            self.parts.append(Placed(ids, self.at, origin))
            self.at += len(ids)


#: Below this many tokens, computing an unmarked part is cheaper than approximating it.
_WORTH_FINDING = 16


@dataclass(frozen=True, slots=True)
class _AnchorPart:
    """Tokens of an anchor: a marked part, or the text between two marked parts."""

    ids: tuple[int, ...]
    origin: ContentPart | None


@dataclass(frozen=True, slots=True)
class _Anchor:
    """An anchor as a chain of segments, each of which attends to those before it.

    Args:
        specs: the segment of each part.
        first: the number of parts before the first marked one.
        primer: the primer behind all parts, for modules behind the system turn. None without a primer.
    """

    parts: tuple[_AnchorPart, ...]
    specs: tuple[SegmentSpec, ...]
    first: int
    primer: SegmentSpec | None = None

    def context(self, origin: ContentPart) -> tuple[SegmentSpec, ...]:
        """Return the segments that a part attends to. Parts of the anchor attend only to those before its first
        mark.
        """
        return self.specs[: self.first] if origin.leads else self.specs

    def primed(self, origin: ContentPart) -> tuple[SegmentSpec, ...]:
        """Return these segments and the primer behind them. Without a primer, the segments alone.

        Parts of the system turn have none: they stand in front of all documents, and instructions lose force behind it.
        """
        context = self.context(origin)
        return context if origin.leads or self.primer is None else (*context, self.primer)

    def begins(self, ids: tuple[int, ...]) -> bool:
        """True if a prompt begins with this anchor."""
        return tuple(token for part in self.parts for token in part.ids) == ids[: _end(self.specs)]


def _anchor_parts(placed: Sequence[Placed]) -> tuple[_AnchorPart, ...]:
    made: list[_AnchorPart] = []
    for part in placed:
        origin = part.origin if isinstance(part.origin, ContentPart) else None
        if made and origin is None and made[-1].origin is None:
            made[-1] = _AnchorPart(made[-1].ids + part.ids, None)
        else:
            made.append(_AnchorPart(part.ids, origin))
    return tuple(made)


def _earlier_parts(anchor: Anchor) -> tuple[_AnchorPart, ...]:
    return tuple(_AnchorPart(ids, ContentPart(True, leads=True) if marked else None) for ids, marked in anchor)


def anchor_of(prompt: PromptLayout) -> Anchor:
    """Return the anchor of a prompt in the form that is remembered across requests."""
    return tuple((part.ids, part.origin is not None) for part in _anchor_parts(prompt.anchor))


def _end(specs: Sequence[SegmentSpec]) -> int:
    return specs[-1].end if specs else 0


class ContentSpecs:
    """The segments of one conversation's parts, under one adapter or several (most exact first).

    Args:
        anchored: if True, a part attends to the layout's anchor.
        movable: if True, a segment may be encoded at a canonical start and read at a shift.
        salt: the conversation's cache_salt.
        adapters: their digests; b"" for the model alone.
        primer: tokens between the anchor and a part while the part is encoded. Empty for none.
        longest: the positions of the model. A part that would end behind them is encoded without the primer.
        only_exact: if True, the only marked part directly behind the anchor is encoded without the primer, which is
            exact there. If only the form with the primer is stored, it is read.
        base: an earlier version of the layout's anchor. Modules that are not stored behind the layout's anchor are read
            as stored behind this one, or alone. Modules that are stored nowhere are encoded behind this one.
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
        base: Anchor | None = None,
        primer: tuple[int, ...] = (),
        longest: int = 0,
        only_exact: bool = False,
    ) -> None:
        self._prompt = prompt
        self._movable = movable
        self._keys = keys
        self._salt = salt
        self._group = owner_label(salt)
        self._adapters = adapters
        self._primer = primer if movable else ()
        self._longest = longest
        self._form = "anchored" if anchored else "isolated"
        self._anchors = self._specified(_anchor_parts(prompt.anchor) if anchored else ())
        self._bases = () if base is None else self._specified(_earlier_parts(base))
        self._alone = () if base is None else self._specified((), primed=False)
        only = only_exact and sum(map(_is_document, prompt.parts)) == 1
        self._only_at = _end(self._anchors[0].specs) if only and self._anchors[0].begins(prompt.ids) else None

    def parts(self) -> tuple[PromptPart, ...]:
        """Return the conversation's parts. Those of its anchor are segments if the prompt begins with the anchor."""
        anchor = self._anchors[0]
        if not anchor.specs or not anchor.begins(self._prompt.ids):
            return tuple(map(self._part, self._prompt.parts))
        end = _end(anchor.specs)
        rest = (_behind(part, end) for part in self._prompt.parts if part.end > end)
        return (*map(self._of_anchor, range(len(anchor.parts))), *map(self._part, rest))

    def _specified(self, parts: tuple[_AnchorPart, ...], *, primed: bool = True) -> tuple[_Anchor, ...]:
        """Return an anchor under each adapter."""
        first = next((number for number, part in enumerate(parts) if part.origin is not None), len(parts))
        made = []
        for adapter in self._adapters:
            chain = self._chain(parts, adapter)
            made.append(_Anchor(parts, chain, first, self._primer_behind(chain, adapter) if primed else None))
        return tuple(made)

    def _primer_behind(self, context: tuple[SegmentSpec, ...], adapter: bytes) -> SegmentSpec | None:
        if not self._primer:
            return None
        return specify(self._primer, _end(context), context, self._keys, self._salt, adapter, group=self._group)

    def _chain(self, parts: Sequence[_AnchorPart], adapter: bytes) -> tuple[SegmentSpec, ...]:
        specs: list[SegmentSpec] = []
        made_with = self._keys, self._salt, adapter
        for part in parts:
            specs.append(specify(part.ids, _end(specs), specs[-1:], *made_with, group=self._group))
        return tuple(specs)

    def _of_anchor(self, number: int) -> PromptPart:
        """Return a part of the anchor. A marked part is also a module, found without the marked parts before it."""
        anchor = self._anchors[0]
        part, spec = anchor.parts[number], anchor.specs[number]
        behind = [each.specs[number] for each in self._anchors]
        if part.origin is not None:
            made = self._module(part.ids, spec.start, part.origin, encode=True)
            known = {each.key for each in made.candidates}
            return replace(made, candidates=(*(each for each in behind if each.key not in known), *made.candidates))
        if number > anchor.first + 1:
            return PromptPart(part.ids, spec.start)  # it is seldom read behind the same modules
        return PromptPart(part.ids, spec.start, True, tuple(behind), encode=True, form=self._form)

    def _part(self, part: Placed) -> PromptPart:
        """Return a part as a segment if it is marked. An unmarked part is read from a segment if one is stored."""
        origin = part.origin
        if not isinstance(origin, ContentPart) or not (
            origin.marked or origin.found or len(part.ids) >= _WORTH_FINDING
        ):
            return PromptPart(part.ids, part.start)
        return self._module(part.ids, part.start, origin, encode=origin.marked)

    def _module(self, ids: tuple[int, ...], start: int, origin: ContentPart, *, encode: bool) -> PromptPart:
        """Return a part with its candidate segments. ``start`` is its position in the prompt."""
        specs = self._specs(self._anchors, ids, start, origin)
        bases = self._specs(self._bases, ids, start, origin)
        alone = self._specs(self._alone, ids, start, origin)
        primed = any(self._is_primed(anchor, len(ids), origin) for anchor in self._anchors)
        form = "primed" if primed else self._form
        later = origin.found and not encode  # encoded in idle time, for prompts with other documents
        only = primed and start == self._only_at and not later
        exact = self._specs(self._anchors, ids, start, origin, primed=False) if only else ()
        near = self._specs(self._bases, ids, start, origin, primed=False) if only else ()
        encoded = (near or exact or bases) if encode or later else ()  # the last one is encoded if none is stored
        candidates = (*exact, *specs, *near, *bases, *alone, *encoded)
        here = {spec.digest for spec in specs}
        forms = [(spec.digest, self._form) for spec in exact] + [(spec.digest, "isolated") for spec in alone]
        forms += [(spec.digest, "reanchored") for spec in (*near, *bases)]
        others = tuple((digest, form) for digest, form in forms if digest not in here)
        return PromptPart(
            ids, start, True, candidates, encode, form=form, ttl_s=origin.ttl_s, forms=others, found=origin.found
        )

    def _specs(
        self,
        anchors: Sequence[_Anchor],
        ids: tuple[int, ...],
        start: int,
        origin: ContentPart,
        *,
        primed: bool = True,
    ) -> tuple[SegmentSpec, ...]:
        """Return the segments of a part behind an anchor, one for each adapter.

        Args:
            anchors: one for each adapter.
            ids: the tokens of the part.
            start: its position in the prompt.
            origin: of the part.
            primed: False for the form without the primer.
        """
        return tuple(
            self._behind(self._context(anchor, len(ids), origin, primed=primed), ids, start, adapter)
            for anchor, adapter in zip(anchors, self._adapters, strict=bool(anchors))
        )

    def _context(self, anchor: _Anchor, tokens: int, origin: ContentPart, *, primed: bool) -> tuple[SegmentSpec, ...]:
        primed = primed and self._is_primed(anchor, tokens, origin)
        return anchor.primed(origin) if primed else anchor.context(origin)

    def _is_primed(self, anchor: _Anchor, tokens: int, origin: ContentPart) -> bool:
        """True if a part of this length is encoded behind the primer."""
        primed = anchor.primed(origin)
        return len(primed) > len(anchor.context(origin)) and _end(primed) + tokens <= self._longest

    def _behind(
        self, context: tuple[SegmentSpec, ...], ids: tuple[int, ...], start: int, adapter: bytes
    ) -> SegmentSpec:
        if self._movable:
            start = _end(context)
        elif start < _end(context):
            context = ()  # here it stands in front of the anchor
        return specify(ids, start, context, self._keys, self._salt, adapter, group=self._group)


def _is_document(part: Placed) -> bool:
    """True for a marked part behind the system turn."""
    return isinstance(part.origin, ContentPart) and part.origin.marked and not part.origin.leads


def _behind(part: Placed, end: int) -> Placed:
    """Return a part without the tokens before a position."""
    return part if part.start >= end else Placed(part.ids[end - part.start :], end, part.origin, part.kept)
