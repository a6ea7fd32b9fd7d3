"""What the text of an answer is made of once calls of tools are told apart, and who tells them in an answer that a
grammar holds to calls, or to calls or a form of its own: JSON in a known form, told piece by piece as it comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from inlay.api.tools.formats import KEYS
from inlay.api.tools.growing_json import JSONEnd, parsed
from inlay.strict_json import JSONError


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: of its text, or of a call.

    content: text; "" in a piece of a call.
    call: the number of the call, from 0; None in a piece of text.
    name: of the function, in the first piece of a call alone.
    arguments: JSON text, as far as it is there.
    """

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class AnswerParser(Protocol):
    """Tells calls from text while an answer grows. How it is cut into pieces changes nothing about the outcome."""

    def feed(self, text: str) -> list[Delta]:
        """What can be told now that this text has come."""

    def finish(self) -> list[Delta]:
        """What is left, now that no more text will come."""


def calls_in(text: str, names: Collection[str], key: str) -> list[tuple[str, str]]:
    """The calls that a JSON object or a list of objects is, each as a name and its arguments in JSON.

    names: the functions that there are. key: what arguments stand under; the other one of KEYS is taken as well.
    Empty for everything else: of a list, all must be calls.
    """
    try:
        value = parsed(text)
        made = [_call(one, names, key) for one in (value if isinstance(value, list) else [value])]
    except (JSONError, ValueError):  # it is no JSON, or holds a number that JSON has no form for
        return []
    return [call for call in made if call is not None] if None not in made else []


def _call(value: Any, names: Collection[str], key: str) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    given = [value[name] for name in (key, *KEYS) if value.get(name) is not None]
    arguments = given[0] if given else {}
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)


_BEHIND = r"[\s\]},]*"  # a call: what closes it and its list, and the comma of the next
_HEAD = re.compile(rf'{_BEHIND}\[?\s*\{{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:{"|".join(KEYS)})"\s*:\s*(?=\{{)')


# A call that ends behind its name and before its arguments.
_CUT = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[\w.-]*)(?P<closed>"\s*(?:,\s*(?:"\w*(?:"\s*:?\s*)?)?)?)?$')
_OPENING = '{"name":"'  # of a call, white space aside


class HeldParser:
    """See AnswerParser. An answer that ends too early ends in a call that is cut off, as at OpenAI.

    names: the functions that there are: a call that ends within its name is one of the only function that it can be of.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
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
        left, self._rest = self._rest, ""
        if self._calls:
            left = re.sub(f"^{_BEHIND}", "", left)
        cut = re.sub(r"^\s*\[?\s*", "", left)
        found = _CUT.match(cut)
        if found is None:
            # in front of its name, a call tells nothing; the only function that there is need not be named
            began = left != "" and _OPENING.startswith("".join(cut.split()))
            return self._named("", whole=False) if began else ([Delta(left)] if left else [])
        return self._named(found["name"], whole=found["closed"] is not None)

    def _named(self, name: str, *, whole: bool) -> list[Delta]:
        """The call of a function whose name begins so, or is this one; nothing where it may be one of several."""
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
    """See AnswerParser. An answer that a grammar holds to calls or to a form of its own: its beginning tells which.

    names: the functions that there are. key: what the arguments of a call stand under.
    """

    def __init__(self, names: Collection[str], key: str) -> None:
        # calls are written with the white space of Python's json, as ``calls_schema`` has it
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
        named = re.match(r'\[?\{"name": "[\w.-]+"', self._start)  # as much as tells a call from another form
        parser = HeldParser(self._names)
        told = [*parser.feed(self._start), *parser.finish()] if named else []
        return told or [Delta(self._start)]
