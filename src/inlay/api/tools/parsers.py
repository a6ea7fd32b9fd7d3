"""Splits an answer's text into content and tool calls, if a grammar forces it to be calls or JSON of a known form.

The calls are returned in pieces, as they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from inlay.api.tools.readers import KEYS, JSONEnd


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: of its text, or of a call.

    Args:
        content: text; "" in a piece of a call.
        call: the number of the call, from 0; None in a piece of text.
        name: of the function, only in the first piece of a call.
        arguments: a piece of JSON text.
    """

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class AnswerParser(Protocol):
    """Separates calls from text in a growing answer. The result does not depend on the division into pieces."""

    def feed(self, text: str) -> list[Delta]:
        """Add text, and return the new parts that are certain."""

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the text."""


_BEHIND = r"[\s\]},]*"  # after a call: the end of the call and its list, and the comma before the next
_HEAD = re.compile(rf'{_BEHIND}\[?\s*\{{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:{"|".join(KEYS)})"\s*:\s*(?=\{{)')


# A call that ends after its name starts and before its arguments.
_CUT = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[\w.-]*)(?P<closed>"\s*(?:,\s*(?:"\w*(?:"\s*:?\s*)?)?)?)?$')
_OPENING = '{"name":"'  # of a call, without white space


class HeldParser:
    """An AnswerParser for calls that a grammar enforces. A truncated answer ends in a truncated call, as at OpenAI.

    Args:
        names: the known functions. A call that ends within its name is returned if only one function fits.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self._rest = ""  # pending text
        self._arguments: str | None = None  # of the current call
        self._sent = 0
        self._end = JSONEnd()
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        told: list[Delta] = []
        self._rest += text
        while self._in_arguments(told) if self._arguments is not None else self._at_head(told):
            pass
        return told

    def finish(self) -> list[Delta]:
        left, self._rest = self._rest, ""
        if self._calls:
            left = re.sub(f"^{_BEHIND}", "", left)
        cut = re.sub(r"^\s*\[?\s*", "", left)
        found = _CUT.match(cut)
        if found is None:
            # The start of a call, before any name, counts as a call if there is only one function.
            began = left != "" and _OPENING.startswith("".join(cut.split()))
            return self._named("", whole=False) if began else ([Delta(left)] if left else [])
        return self._named(found["name"], whole=found["closed"] is not None)

    def _named(self, name: str, *, whole: bool) -> list[Delta]:
        """Return the call of the only function with this name or prefix; nothing if several fit."""
        fitting = [each for each in self._names if (each == name if whole else each.startswith(name))]
        return [Delta(call=self._calls, name=fitting[0])] if len(fitting) == 1 else []

    def _at_head(self, told: list[Delta]) -> bool:
        head = _HEAD.match(self._rest)
        if head is None:
            return False
        told.append(Delta(call=self._calls, name=head[1]))
        self._rest = self._rest[head.end() :]
        self._arguments, self._sent, self._end = "", 0, JSONEnd()
        return True

    def _in_arguments(self, told: list[Delta]) -> bool:
        assert self._arguments is not None, "a head was found"
        whole = self._arguments + self._rest
        end = self._end.find(whole)
        piece = whole[self._sent : end]
        if piece:
            told.append(Delta(call=self._calls, arguments=piece))
        if end is None:
            self._arguments, self._rest, self._sent = whole, "", len(whole)
            return False
        self._arguments, self._rest = None, whole[end:]
        self._calls += 1
        return True


class EitherParser:
    """An AnswerParser for calls or another form that a grammar enforces. The start of the answer decides.

    Args:
        names: the known functions.
        key: the key of a call's arguments.
    """

    def __init__(self, names: Collection[str], key: str) -> None:
        # ``calls_schema`` writes calls with the white space of Python's json
        self._names = names
        heads = [f'{{"name": {json.dumps(name)}, "{key}": {{' for name in names]
        self._heads = [*heads, *(f"[{head}" for head in heads)]
        self._start = ""
        self._calls: HeldParser | None = None
        self._text = False

    def feed(self, text: str) -> list[Delta]:
        if self._calls is not None:
            return self._calls.feed(text)
        if self._text:
            return [Delta(text)] if text else []
        self._start += text
        if self._start.startswith(tuple(self._heads)):
            self._calls = HeldParser(self._names)
            return self._calls.feed(self._start)
        if any(head.startswith(self._start) for head in self._heads):
            return []
        self._text = True
        return [Delta(self._start)]

    def finish(self) -> list[Delta]:
        if self._calls is not None:
            return self._calls.finish()
        if self._text or not self._start:
            return []
        named = re.match(r'\[?\{"name": "[\w.-]+"', self._start)  # enough to tell a call from another form
        parser = HeldParser(self._names)
        told = [*parser.feed(self._start), *parser.finish()] if named else []
        return told or [Delta(self._start)]
