"""Splits the growing text of one answer into reasoning, content and tool calls, for all dialects.

The usage of an answer and the ``inlay`` object have the same form in all dialects. Turns of a conversation are joined
for chat templates that want roles to alternate.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inlay.api.call import Call
from inlay.api.reasoning import EndMarks, HarmonyParser, ReasoningParser, ReasoningUse, Split, Thought
from inlay.api.tools import Delta
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput

_COUNTED = (
    "exact_tokens",
    "module_tokens",
    "scaffold_tokens",
    "anchored_tokens",
    "isolated_tokens",
    "promoted_tokens",
    "shifted_tokens",
    "host_tokens",
    "disk_tokens",
    "shared_tokens",
    "duplicate_tokens",
    "recomputed_tokens",
    "linked_tokens",
    "selecting_tokens",
    "computed_tokens",
    "drafted_tokens",
    "accepted_tokens",
)
_NO_TIMES = RequestMetrics()
_TIMED = ("queue_s", "fetch_s", "compute_s", "ttft_s", "total_s")


@dataclass(frozen=True, slots=True)
class Counts:
    """The tokens of a request, summed over all prompts and answers.

    Args:
        prompt: tokens of the prompts.
        answer: tokens of the answers.
        thought: tokens of reasoning in the answers.
        cached: prompt tokens read from the cache.
        written: prompt tokens written to the cache.
        lasting: written tokens that stay for an hour or longer.
        accepted, rejected: draft tokens that the answers have, and those that were computed in vain.
    """

    prompt: int
    answer: int
    thought: int
    cached: int
    written: int
    lasting: int
    accepted: int
    rejected: int


def counts_of(outputs: Sequence[RequestOutput], reasoning: ReasoningUse | None = None) -> Counts:
    """Count the tokens of outputs. ``reasoning`` is the form of their reasoning."""
    thought = 0
    if reasoning is not None:
        said = [(output.prompt or "", answer.token_ids) for output in outputs for answer in output.outputs]
        thought = sum(reasoning.count(*each) for each in said)
    return Counts(
        prompt=sum(output.usage.prompt_tokens for output in outputs),
        answer=sum(len(answer.token_ids) for output in outputs for answer in output.outputs),
        thought=thought,
        cached=sum(output.usage.cached_tokens for output in outputs),
        written=sum(output.usage.written_tokens for output in outputs),
        lasting=sum(output.usage.lasting_tokens for output in outputs),
        accepted=sum(output.usage.accepted_tokens for output in outputs),
        rejected=sum(output.usage.drafted_tokens - output.usage.accepted_tokens for output in outputs),
    )


def inlay_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the ``inlay`` object: the origin of the prompt tokens, and the times of the slowest prompt.

    The tokens are summed over all prompts (types.Usage). ``repaired_tokens`` is a deprecated name of
    ``recomputed_tokens``. ``reuse`` is the policy of the prompts; several are joined with commas. ``misses``,
    ``across_tokens``, ``reanchored_tokens``, ``primed_tokens``, ``moved_tokens``, ``found_tokens``, ``fallbacks``,
    ``order`` and ``diagnostics`` are left out if empty. ``order`` lists the members of each set in their final order
    (types.SetOrder). ``diagnostics`` has one entry for each prompt (diagnostics.Diagnostics). ``timing`` is in seconds
    (types.RequestMetrics). Unknown times are null, for example in a waiting request.
    """
    slowest = max((output.metrics for output in outputs), key=lambda times: times.total_s or 0.0, default=_NO_TIMES)
    times = {name: getattr(slowest, name) for name in _TIMED}
    misses: Counter[str] = Counter()
    for output in outputs:
        misses.update(dict(output.usage.misses))
    across = sum(output.usage.across_tokens for output in outputs)
    reanchored = sum(output.usage.reanchored_tokens for output in outputs)
    primed = sum(output.usage.primed_tokens for output in outputs)
    moved = sum(output.usage.moved_tokens for output in outputs)
    found = sum(output.usage.found_tokens for output in outputs)
    order = [each.told for output in outputs for each in output.order]
    fallbacks = dict.fromkeys(
        (output.fell_back_from, output.reuse) for output in outputs if output.fell_back_from is not None
    )
    explained = [output.diagnostics.told for output in outputs if output.diagnostics is not None]
    return {
        "reuse": ", ".join(dict.fromkeys(output.reuse for output in outputs if output.reuse is not None)) or None,
        **{name: sum(getattr(output.usage, name) for output in outputs) for name in _COUNTED},
        "repaired_tokens": sum(output.usage.recomputed_tokens for output in outputs),
        **({"across_tokens": across} if across else {}),
        **({"reanchored_tokens": reanchored} if reanchored else {}),
        **({"primed_tokens": primed} if primed else {}),
        **({"moved_tokens": moved} if moved else {}),
        **({"found_tokens": found} if found else {}),
        **({"misses": dict(misses)} if misses else {}),
        **({"order": order} if order else {}),
        **({"fallbacks": [{"asked": asked, "taken": taken} for asked, taken in fallbacks]} if fallbacks else {}),
        **({"diagnostics": explained} if explained else {}),
        "timing": {name: None if seconds is None else round(seconds, 6) for name, seconds in times.items()},
    }


_BETWEEN = {"type": "text", "text": "\n\n"}
_PLAIN = {"role", "content"}


def joined(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns, with neighbouring texts of one role as one turn. An empty line separates them.

    Past answers are joined without an empty line, because a client may send one answer in several pieces.
    """
    made: list[dict[str, Any]] = []
    for turn in turns:
        before: dict[str, Any] = made[-1] if made else {"role": ""}
        if before["role"] != turn["role"] or set(before) - _PLAIN or set(turn) - _PLAIN or turn["role"] == "tool":
            made.append(dict(turn))
            continue
        answer = turn["role"] == "assistant"
        if answer and isinstance(before["content"], str) and isinstance(turn["content"], str):
            before["content"] += turn["content"]
            continue
        before["content"] = [*parts_of(before["content"]), *([] if answer else [_BETWEEN]), *parts_of(turn["content"])]
    return made


def parts_of(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content of a turn in parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


#: A new piece of an answer.
Piece = Thought | Delta


class AnswerPieces:
    """The pieces of one answer. They do not depend on how its text was divided into updates.

    Args:
        call: the request.
        output: any output of the answer's prompt.
    """

    def __init__(self, call: Call, output: RequestOutput) -> None:
        self._harmony = None
        if call.harmony:
            functions = {} if call.tools is None else call.tools.functions
            self._harmony = HarmonyParser(functions, parallel=call.tools is None or call.tools.parallel)
        self._tools = None if call.tools is None or call.harmony else call.tools.parser()
        self._thoughts: ReasoningParser | None = None
        self._ends: EndMarks | None = None
        if call.reasoning is not None and not call.harmony:
            self._thoughts = call.reasoning.parser(output.prompt or "")
            self._ends = EndMarks(call.reasoning.model.ends) if call.reasoning.model.ends else None
        self._split = call.reasoning is not None
        self._include = call.reasoning is not None and call.reasoning.include
        self._characters = 0
        self.calls = False
        """True once a tool is called."""

    @property
    def plain(self) -> bool:
        """True if every text of the answer is content."""
        return self._tools is None and self._thoughts is None and self._harmony is None

    def update(self, answer: CompletionOutput) -> list[Piece]:
        """Return the new pieces of an answer that has grown. Once it is finished, this includes all held-back text."""
        new = answer.text[self._characters :]
        self._characters += len(new)
        told = self.feed(new) if new else []
        return [*told, *self.finish()] if answer.finish_reason is not None else told

    def feed(self, text: str) -> list[Piece]:
        """Add text, and return the new pieces that are certain."""
        if self._harmony is not None:
            return list(self._of_harmony(self._harmony.feed(text)))
        return list(self._read(text if self._ends is None else self._ends.feed(text)))

    def finish(self) -> list[Piece]:
        """Return the rest at the end of the answer."""
        if self._harmony is not None:
            return list(self._of_harmony(self._harmony.finish()))
        told = [] if self._ends is None else list(self._read(self._ends.finish()))
        told += self._apart(Split() if self._thoughts is None else self._thoughts.finish())
        return told if self._tools is None else [*told, *self._noted(self._tools.finish())]

    def _read(self, text: str) -> Iterator[Piece]:
        return self._apart(Split(content=text) if self._thoughts is None else self._thoughts.feed(text))

    def _of_harmony(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield pieces. Reasoning is content for a request whose reasoning is not parsed."""
        for piece in pieces:
            if isinstance(piece, Delta):
                yield from self._noted([piece])
            elif not self._split:
                yield Delta(piece.text)
            elif self._include:
                yield piece

    def _apart(self, new: Split) -> Iterator[Piece]:
        if new.reasoning and self._include:
            yield Thought(new.reasoning)
        if self._tools is not None:
            yield from self._noted(self._tools.feed(new.content))
        elif new.content:
            yield Delta(new.content)

    def _noted(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            self.calls = self.calls or delta.call is not None
            yield delta


@dataclass
class CalledTool:
    """A tool call of a complete answer. ``arguments`` is JSON text, which may be cut."""

    number: int
    name: str
    arguments: str = ""


@dataclass
class WholeAnswer:
    """A complete answer.

    ``parts`` has its texts and calls in order: a Thought, a text or a CalledTool. Neighbouring texts are one.
    """

    parts: list[Thought | str | CalledTool] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> WholeAnswer:
        """Return the complete answer that consists of these pieces."""
        made = cls()
        for piece in pieces:
            made.add(piece)
        return made

    @property
    def calls(self) -> bool:
        """True if it calls a tool."""
        return any(isinstance(part, CalledTool) for part in self.parts)

    @property
    def text(self) -> str:
        """Its content, without reasoning and calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    def add(self, piece: Piece) -> None:
        """Add a new piece."""
        last = self.parts[-1] if self.parts else None
        if isinstance(piece, Thought):
            if isinstance(last, Thought):
                piece = Thought(last.text + piece.text)
                self.parts.pop()
            self.parts.append(piece)
        elif piece.call is None:
            if isinstance(last, str):
                self.parts[-1] = last + piece.content
            elif piece.content:
                self.parts.append(piece.content)
        elif piece.name is not None:
            self.parts.append(CalledTool(piece.call, piece.name, piece.arguments))
        else:
            called = next(part for part in reversed(self.parts) if isinstance(part, CalledTool))
            called.arguments += piece.arguments


def whole_answer(call: Call, output: RequestOutput, answer: CompletionOutput) -> WholeAnswer:
    """Return a complete answer in parts. ``output`` is its prompt's output."""
    pieces = AnswerPieces(call, output)
    return WholeAnswer.of([*pieces.feed(answer.text), *pieces.finish()])


def call_digest(response: str, choice: int, call: int) -> str:
    """Return the part of a tool call's id that is unique to it.

    Args:
        response: the unique name of the response.
        choice: the number of the answer.
        call: the number of the call in it.
    """
    return hashlib.sha256(f"{response} {choice} {call}".encode()).hexdigest()[:24]
