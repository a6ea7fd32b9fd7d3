"""Splits the growing text of one answer into reasoning, content and tool calls, for all dialects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from inlay.api.call import Call
from inlay.api.harmony import HarmonyParser
from inlay.api.reasoning import EndMarks, ReasoningParser, Split, Thought
from inlay.api.tools import Delta
from inlay.types import CompletionOutput, RequestOutput

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
        """Return the new pieces of an answer that has grown, and the last ones once it is finished."""
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
        """Return the answer of all its pieces."""
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
