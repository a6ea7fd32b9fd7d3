"""Calls in an answer that a grammar holds to them: JSON in a known form, told piece by piece as it comes."""

from __future__ import annotations

import re

from inlay.openai.tools_calls import Delta
from inlay.openai.tools_formats import KEYS
from inlay.openai.tools_json import JSONEnd

_BEHIND = r"[\s\]},]*"  # a call: what closes it and its list, and the comma of the next
_HEAD = re.compile(rf'{_BEHIND}\[?\s*\{{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:{"|".join(KEYS)})"\s*:\s*(?=\{{)')


class HeldParser:
    """See AnswerParser. An answer that ends too early ends in a call that is cut off, as at OpenAI."""

    def __init__(self) -> None:
        self._rest = ""  # has come and is not told
        self._arguments: str | None = None  # of the call that is under way
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
        left = re.sub(f"^{_BEHIND}", "", self._rest) if self._calls else self._rest
        self._rest = ""
        return [Delta(left)] if left else []

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
