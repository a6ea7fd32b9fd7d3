"""Makes the diagnostics of a request: the engine's report of its prompt, compared with the owner's earlier prompts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from inlay import diagnostics
from inlay.diagnostics import Cause, Departure, Diagnostics, ModuleRead, SpanRead
from inlay.pml.rules import path_of
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.conversation import as_turn
from inlay.prompt.inputs import Conversation
from inlay.prompt.layout import Hole, TextRun
from inlay.prompt.placement import ContentPart, Placed, PromptLayout
from inlay.prompt.request import EngineRequest
from inlay.prompt.seen_prompts import (
    Compared,
    Decode,
    Owner,
    Section,
    SeenPrompt,
    SeenPrompts,
    common,
    compare,
    depart,
    packed,
    section_at,
)
from inlay.prompt.tokens import common_length

_PIECE = 64  # tokens

#: The name, the first token and the number of tokens of a part.
_Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """The part of a prompt that its most similar earlier prompt has stored.

    Attributes:
        first: the length of the common prefix of both prompts, in tokens.
        again: see Compared.
        kept: the number of its first tokens that may be stored.
        done: the number of its first tokens that are known to have been stored.
        same_policy: True if it has the prompt's reuse policy.
        expired: see SeenPrompt.
        other_adapter: the length of the common prefix with a prompt under another adapter, in tokens.
    """

    first: int
    again: np.ndarray
    kept: int
    done: int
    same_policy: bool
    expired: bool
    other_adapter: int


class NotedPrompt:
    """A prompt in the table of seen prompts.

    Args:
        table: gets its answer.
        owner: of the prompt.
        seen: its entry.
    """

    def __init__(self, table: SeenPrompts, owner: Owner, seen: SeenPrompt) -> None:
        self._table, self._owner, self._seen = table, owner, seen
        self._comparison: Comparison | None = None

    def answered(self, answer: Sequence[int]) -> None:
        """Record the prompt's answer."""
        self._table.answered(self._owner, self._seen, answer)

    def compare(self, comparison: Comparison) -> None:
        """Ask for the diagnostics."""
        self._comparison = comparison

    @property
    def stored_tokens(self) -> int:
        """The number of first tokens that an earlier prompt has. 0 for a request without diagnostics."""
        return 0 if self._comparison is None else self._comparison.stored_tokens

    def diagnostics(self, request: EngineRequest, reads: Sequence[SpanRead]) -> Diagnostics | None:
        """Return the diagnostics of an answered request. None if it asks for none."""
        return None if self._comparison is None else self._comparison.diagnostics(request, reads)


class Comparison:
    """A prompt, compared with the earlier prompts of its owner.

    Args:
        request: in its written order.
        seen: its entry in the table.
        earlier: the other entries of its owner.
        layout: the prompt's layout.
        sections: of its text.
        decode: returns the text of token ids.
        recurrent: True for a model with recurrent layers.
    """

    def __init__(
        self,
        request: EngineRequest,
        seen: SeenPrompt,
        earlier: Sequence[SeenPrompt],
        layout: PromptLayout,
        sections: Sequence[Section],
        decode: Decode,
        *,
        recurrent: bool,
    ) -> None:
        self._ids = request.ids
        self._seen = seen
        self._earlier = earlier
        self._names = [(part.ids, module_name(part)) for part in layout.parts]
        self._sections = sections
        self._decode = decode
        self._recurrent = recurrent
        self._compare(request.ids)

    @property
    def stored_tokens(self) -> int:
        """The number of first tokens that an earlier prompt has."""
        return self._stored.first

    def diagnostics(self, request: EngineRequest, reads: Sequence[SpanRead]) -> Diagnostics:
        """Return the diagnostics. ``request`` has its final order, and ``reads`` are the engine's report."""
        if request.ids != self._ids:  # the engine has put free sets into another order
            self._compare(request.ids)
        departure, spans, places = self._departure, _Spans(request, reads), self._places(request)
        own = _own_causes(spans, self._stored, departure, recurrent=self._recurrent)
        if departure is not None:
            lost = sum(tokens for kind, tokens, _ in own if kind == departure.kind != diagnostics.NEW)
            departure = replace(departure, lost_tokens=lost)
        found = [
            Cause(
                kind, tokens, departure.place if departure and kind == departure.kind else self._section_of(at, places)
            )
            for kind, tokens, at in own
        ]
        return Diagnostics(spans.modules(places), departure, _summed([*found, *spans.module_causes(places)]))

    def _section_of(self, token: int, places: Sequence[_Place]) -> str:
        """Return the name of the section with a token."""
        named = next((name for name, start, size in places if name and start <= token < start + size), None)
        if named is not None:
            return named
        piece = token // _PIECE
        rest = len(self._decode(list(self._ids[piece * _PIECE : token])))
        return section_at(self._sections, self._text, self._pieces[piece] + rest)[0]

    def _compare(self, ids: tuple[int, ...]) -> None:
        """Find the nearest earlier prompt, and the difference to it."""
        self._ids, self._text = ids, self._decode(ids)
        texts = (self._decode(ids[start : start + _PIECE]) for start in range(0, len(ids), _PIECE))
        self._pieces = list(accumulate(map(len, texts), initial=0))  # the first character of each piece, nearly
        mine = _array(packed(ids))
        own = [one for one in self._earlier if one.adapter == self._seen.adapter]
        others = [common(_array(one.ids), mine) for one in self._earlier if one.adapter != self._seen.adapter]
        best: SeenPrompt | None = None
        compared = Compared(0, np.zeros(len(mine), bool), ends=True)
        for one in reversed(own):
            each = compare(_array(one.ids), mine)
            if best is None or each.nearness > compared.nearness:
                best, compared = one, each
        self._stored = Stored(
            first=compared.first,
            again=compared.again,
            kept=0 if best is None else max(best.kept, best.stored),
            done=0 if best is None else best.stored,
            same_policy=best is None or best.policy == self._seen.policy,
            expired=best is not None and best.expired,
            other_adapter=max(others, default=0),
        )
        self._departure: Departure | None = None
        if best is not None:
            old, tools = _array(best.ids), best.tools != self._seen.tools
            texts_of = self._decode(old.tolist()), self._text
            self._departure = depart(old, mine, compared, self._sections, texts_of, tools=tools)

    def _places(self, request: EngineRequest) -> list[_Place]:
        """Return the name, the first token and the number of tokens of each part, by its place in the final order."""
        parts = self._names
        if tuple(token for ids, _ in parts for token in ids) != request.ids:
            names: dict[tuple[int, ...], list[str]] = {}
            for ids, name in parts:
                names.setdefault(ids, []).append(name)
            parts = [(part.ids, names[part.ids].pop(0) if names.get(part.ids) else "") for part in request.parts]
        starts = accumulate((len(ids) for ids, _ in parts), initial=0)
        return [(name, start, len(ids)) for (ids, name), start in zip(parts, starts, strict=False) if name]


class _Spans:
    """The engine's report as one row per prompt token."""

    def __init__(self, request: EngineRequest, reads: Sequence[SpanRead]) -> None:
        tokens = len(request.ids)
        positions = np.asarray(request.positions)
        self.cached = np.zeros(tokens, bool)
        self.recomputed = np.zeros(tokens, bool)
        self.in_module = np.zeros(tokens, bool)
        self.kept = np.ones(tokens, bool)
        self._segment = np.full(tokens, -1)  # the number of the read of a module
        self._at: list[tuple[int, SpanRead]] = []
        for read in reads:
            start = int(np.searchsorted(positions, read.start))
            self._at.append((start, read))
            end = start + read.tokens
            self.in_module[start:end] = read.module
            if read.module:
                self._segment[start:end] = len(self._at) - 1
            self.kept[start:end] = read.kept
            again = np.searchsorted(positions, [read.start + offset for offset in read.recomputed])
            self.recomputed[again] = self.in_module[again] = True
            self.cached[start : start + read.cached] = True
        self.cached &= ~self.recomputed
        self.computed = ~self.cached & ~self.recomputed
        if tokens and not self.in_module[-1]:
            self.computed[-1] = False  # every prompt computes its last token, for the logits

    def modules(self, places: Sequence[_Place]) -> tuple[ModuleRead, ...]:
        """Return the source of each named part. Neighbouring parts of one module are one."""
        found: list[ModuleRead] = []
        for place in places:
            new = self._module(*place)
            last = found[-1] if found else None
            if last is None or (last.name, last.form, last.tier, last.reason) != (
                new.name,
                new.form,
                new.tier,
                new.reason,
            ):
                found.append(new)
                continue
            found[-1] = replace(
                last,
                tokens=last.tokens + new.tokens,
                computed_tokens=last.computed_tokens + new.computed_tokens,
                recomputed_tokens=last.recomputed_tokens + new.recomputed_tokens,
            )
        return tuple(found)

    def _module(self, name: str, start: int, tokens: int) -> ModuleRead:
        here = slice(start, start + tokens)
        segments = self._segment[here]
        among = segments[segments >= 0]
        read = self._at[int(among[0])][1] if len(among) else None
        computed = int(self.computed[here].sum())
        cached = bool(self.cached[here].any())
        if read is None:
            form, tier, shift, reason = diagnostics.NEW, "pool" if cached else "", 0, ""
            form = "exact" if cached else form
        else:
            form = read.form if cached else diagnostics.NEW
            tier, shift, reason = read.tier, read.shift if cached else 0, read.reason if computed else ""
        return ModuleRead(name, tokens, form, tier, shift, computed, int(self.recomputed[here].sum()), reason)

    def module_causes(self, places: Sequence[_Place]) -> list[Cause]:
        """Return the causes of computed modules."""
        found, starts = [], [start for _, start, _ in places]
        for at, read in self._at:
            tokens = int(self.computed[at : at + read.tokens].sum()) if read.module else 0
            if tokens:
                number = bisect_right(starts, at) - 1
                inside = number >= 0 and at < starts[number] + places[number][2]
                name = places[number][0] if inside else "template"
                found.append(Cause(_MISSED.get(read.reason, read.reason), tokens, name))
        return found


#: Reason for a miss → kind of cause, if the names differ.
_MISSED = {"never seen": diagnostics.NEW, "": diagnostics.NEW}


def _own_causes(
    spans: _Spans, stored: Stored, departure: Departure | None, *, recurrent: bool
) -> list[tuple[str, int, int]]:
    """Return why tokens outside modules were computed: kind, number of tokens and first token of each cause."""
    computed = spans.computed & ~spans.in_module
    at = np.arange(len(computed))
    known = at < stored.first
    not_stored = known & ((at >= stored.kept) | (not stored.same_policy))
    policy = computed & (not_stored | (~spans.kept & (known | stored.again)))
    left = computed & ~policy
    seen = left & known & (at < stored.done)
    kinds = [(diagnostics.POLICY, policy)]
    before = diagnostics.EXPIRED if stored.expired else diagnostics.STATE if recurrent else diagnostics.EVICTED
    kinds.append((before, seen))
    other = left & ~known & (at < stored.other_adapter)
    kinds.append((diagnostics.ADAPTER, other))
    left &= ~seen & ~other
    if departure is not None and departure.kind != diagnostics.NEW:
        lost = left & stored.again
        kinds.append((departure.kind, lost))
        left &= ~lost
    kinds.append((diagnostics.NEW, left))
    return [(kind, int(mask.sum()), int(mask.argmax())) for kind, mask in kinds if mask.any()]


def _summed(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """Join causes of one kind, most expensive first."""
    found: dict[str, Cause] = {}
    for cause in causes:
        known = found.get(cause.kind)
        found[cause.kind] = cause if known is None else replace(known, tokens=known.tokens + cause.tokens)
    return tuple(sorted(found.values(), key=lambda cause: -cause.tokens))


def seen_prompt(request: EngineRequest, tools: int) -> SeenPrompt:
    """Return a request's entry for the table."""
    kept = 0
    if not request.policy.reads_nothing:
        lengths = accumulate(len(part.ids) for part in request.parts)
        ends = [end for part, end in zip(request.parts, lengths, strict=True) if not part.kept]
        kept = len(request.ids) if not ends else ends[0] - len(next(p for p in request.parts if not p.kept).ids)
    lifetimes = [part.ttl_s for part in request.parts if part.ttl_s is not None]
    return SeenPrompt(
        packed(request.ids),
        len(request.ids),
        adapter=request.adapter,
        policy=str(request.policy),
        kept=kept,
        tools=tools,
        ttl_s=min(lifetimes, default=None),
    )


def tools_digest(prompt: Any) -> int:
    """Return a hash of a conversation's tools. 0 for none, and for other prompts."""
    return hash(repr(prompt.tools)) if isinstance(prompt, Conversation) and prompt.tools else 0


def module_name(part: Placed) -> str:
    """Return the name of a marked part, a tool, a found piece or a schema's module; "" for other text."""
    origin = part.origin
    if isinstance(origin, ContentPart):
        if origin.tool is not None:
            return f"tools[{origin.tool}]"
        if origin.found:
            return f"tokens[{part.start}:{part.end}]"
        return f"messages[{origin.message}].content[{origin.index}]" if origin.marked else ""
    return path_of(origin.owner) if isinstance(origin, TextRun | Hole) and origin.owner else ""


def sections_of(prompt: Any, layout: PromptLayout, template: ChatTemplate, decode: Decode) -> list[Section]:
    """Return the named sections of a prompt, in order: messages and their parts, tools, or a schema's modules.

    Args:
        prompt: the prompt as the caller gave it.
        layout: its token ids and positions.
        template: the chat template.
        decode: returns the text of token ids.
    """
    if layout.schema is not None:
        return [Section(module_name(part) or "template", "module", decode(list(part.ids))) for part in layout.parts]
    if not isinstance(prompt, Conversation):
        return [Section("prompt", "prompt", layout.text or decode(list(layout.ids)))]
    sections = _tools_of(prompt, template)
    for number, message in enumerate(prompt):
        kind = "system" if message["role"] in ("system", "developer") else "message"
        for name in ("reasoning_content", "reasoning"):
            if isinstance(message.get(name), str):
                sections.append(Section(f"messages[{number}].reasoning", kind, message[name]))
                break
        content = message["content"]
        if isinstance(content, str):
            sections.append(Section(f"messages[{number}]", kind, content))
        else:
            names = [f"messages[{number}].content[{index}]" for index in range(len(content))]
            sections += [Section(name, kind, part["text"]) for name, part in zip(names, content, strict=True)]
    return sections


def _tools_of(messages: Conversation, template: ChatTemplate) -> list[Section]:
    """Return the section of the tools: the text that a rendering without tools lacks."""
    if not messages.tools:
        return []
    options, turns = messages.options, list(map(as_turn, messages))
    given, none = (
        template.told(options).render(turns, tools=tools, generation=options.generation)
        for tools in (messages.tools, None)
    )
    first = common_length(given, none)
    last = common_length(given[first:][::-1], none[first:][::-1])
    return [Section("tools", "tools", given[first : len(given) - last])]


def _array(ids: bytes) -> np.ndarray:
    return np.frombuffer(ids, "<u4")
