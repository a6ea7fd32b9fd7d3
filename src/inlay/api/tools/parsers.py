"""Where a JSON object or list ends in a text that is still growing, or that it is none.

What the text of an answer is made of once calls of tools are told apart: pieces, and who finds them.

Calls in an answer that a grammar holds to them: JSON in a known form, told piece by piece as it comes.

Calls in an answer that nothing holds to a form: text and calls in the format of the model's family.

A call is told when all of it is there, as only then one knows that it is one: a known function with an object of
arguments. What begins like a call and is none is text, to the letter. White space around calls is dropped, as chat
templates put their own there; so a conversation that goes on finds its history in the cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import from_json

from inlay.api.tools.formats import KEYS, ModelTools

_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_FIRST_LOOK = 64  # characters


class JSONEnd:
    """Looks for the end of the object or list that a text begins with. Each character is looked at once.

    ``broken``: that the text can no longer become JSON, noticed before it is twice as long as it was when it could.
    first_look: after how many characters that is looked at first.
    """

    def __init__(self, first_look: int = _FIRST_LOOK) -> None:
        self.broken = False
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._next_look = first_look

    def find(self, text: str) -> int | None:
        """The index behind the last character, once it is there. text: all of it so far, from its first brace on."""
        while not self.broken:
            stop = min(len(text), self._next_look)
            while self._at < stop:
                if (end := self._step(text, stop)) is not None:
                    return end
            if stop < self._next_look:
                break
            self._next_look *= 2
            self.broken = not may_become_json(text[:stop])
        return None

    def _step(self, text: str, stop: int) -> int | None:
        """Go on to the next mark; returns where the value ends if that one ends it."""
        found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, self._at, stop)
        self._at = found.end() if found else stop
        if found is None:
            return None
        mark = found[0]
        if mark == "\\":
            self._at += 1  # whatever it escapes, which may not be there yet
        elif mark == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if mark in "{[" else -1
        return self._at if self._depth == 0 and mark in "}]" else None


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for NaN and for what nests more than 200 deep."""
    return from_json(text, allow_inf_nan=False)


def may_become_json(text: str) -> bool:
    """Whether a text is JSON, or the beginning of JSON."""
    try:
        parsed(text)
    except ValueError as error:
        # its mode for partial values would not do: that takes anything behind a value inside a list
        return str(error).startswith("EOF while parsing")
    return True


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
    except ValueError:
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


_LONGEST_HEAD = 256  # characters of a call in front of its object


class FreeParser:
    """See AnswerParser. names: the functions that there are. parallel: whether an answer goes on behind its first call.

    Each step looks at the text that has come and is not told; it returns whether there is more to do with it.
    """

    def __init__(self, tools: ModelTools, names: Collection[str], *, parallel: bool) -> None:
        self._format = tools.format
        self._names = names
        self._parallel = parallel
        self._marks = _Marks({*tools.ends, *filter(None, [tools.format.opens])})
        self._head = re.compile(
            "".join(["([\\w.-]+)", *(f"(?:{re.escape(m)}[^\\s\\[{{]*)?" for m in tools.format.inside)])
        )
        self._rest = ""
        self._white = ""  # in front of it; told if text follows
        self._before = ""  # what stands in front of the object that may be a call: text if it is none
        self._name: str | None = None  # of the call, where it stands in front of the object
        self._end = JSONEnd()
        self._calls = 0
        self._called = False  # whether the last that was told is a call
        self._told: list[Delta] = []
        self._step = self._begin if tools.format.bare else self._text

    def feed(self, text: str) -> list[Delta]:
        self._rest += text
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        told = self._run(final=True)
        return told if self._called or not self._white else [*told, Delta(self._white)]

    def _run(self, *, final: bool) -> list[Delta]:
        while self._step(final):
            pass
        told, self._told = self._told, []
        return told

    def _begin(self, final: bool) -> bool:
        """The start of an answer that may be a call without a mark."""
        start = self._rest.lstrip()
        if not start and not final:
            return False
        if start[:1] in ("{", "["):
            self._open(self._rest[: len(self._rest) - len(start)], start)
        else:
            self._step = self._text
        return True

    def _text(self, final: bool) -> bool:
        """Text, up to the next mark. A special token that is no mark of a call may be the end of it all."""
        found = self._marks.find(self._rest, final)
        if found is None:
            return self._say_up_to(len(self._rest) - (0 if final else self._marks.held(self._rest)))
        if found[0] == self._format.opens:
            self._say_up_to(found.start())
            self._open(found[0], self._rest[len(found[0]) :])
            return True
        if found.end() < len(self._rest):
            self._say_up_to(found.end())
            return True
        self._say_up_to(found.start())
        if final:
            self._rest = ""
        return False

    def _say_up_to(self, index: int) -> bool:
        self._say(self._rest[:index])
        self._rest = self._rest[index:]
        return False

    def _open(self, before: str, rest: str) -> None:
        """What follows may be a call. before: what makes it so."""
        self._before, self._rest, self._name, self._end = before, rest, None, JSONEnd()
        self._step = self._call

    def _call(self, final: bool) -> bool:
        """Behind a mark: up to the end of an object or a list."""
        value = self._rest.lstrip()
        if value[:1] not in ("{", "["):
            return self._named_call(value, final)
        self._before += self._rest[: len(self._rest) - len(value)]
        self._rest = value
        end = self._end.find(value)
        if end is None:
            return self._refuse() if final or self._end.broken else False
        named = f'{{"name": "{self._name}", "{self._format.key}": {value[:end]}}}' if self._name else value[:end]
        calls = calls_in(named, self._names, self._format.key)
        if not calls:
            return self._refuse()
        self._tell(calls)
        self._rest = value[end:]
        return True

    def _named_call(self, value: str, final: bool) -> bool:
        """A name in front of the object, or nothing yet, or no call."""
        start = value.find("{")
        if start > _LONGEST_HEAD or (start < 0 and len(value) > _LONGEST_HEAD):
            return self._refuse()
        if start < 0:
            return self._refuse() if final or (value and not self._format.inside) else False
        head = self._head.fullmatch(value[:start].rstrip()) if self._format.inside else None
        if head is None:
            return self._refuse()
        self._name = head[1]
        self._before += self._rest[: self._rest.index("{")]
        self._rest = value[start:]
        return True

    def _refuse(self) -> bool:
        """It was no call: text, which may hold marks."""
        self._step = self._text
        self._say(self._before)
        return True

    def _tell(self, calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls if self._parallel else calls[:1]:
            self._told += [Delta(call=self._calls, name=name), Delta(call=self._calls, arguments=arguments)]
            self._calls += 1
        self._white, self._called = "", True
        self._step = self._behind if self._parallel else self._over

    def _behind(self, final: bool) -> bool:
        """Behind a call: its closing mark, or another call."""
        self._rest = self._rest.lstrip()
        closes = self._format.closes or ""
        if not self._rest or (len(self._rest) < len(closes) and closes.startswith(self._rest)):
            self._step = self._text if final else self._step
            return final and bool(self._rest)
        if closes and self._rest.startswith(closes):
            self._rest = self._rest[len(closes) :]
        elif self._format.bare and self._rest[0] == ";":  # Llama writes several calls so
            following = self._rest[1:].lstrip()
            if not following and not final:
                return False
            if following[:1] in ("{", "["):
                self._open(self._rest[: len(self._rest) - len(following)], following)
                return True
        self._step = self._text
        return True

    def _over(self, final: bool) -> bool:
        self._rest = ""
        return False

    def _say(self, text: str) -> None:
        if self._called:
            text = text.lstrip()
        text = self._white + text
        said = text.rstrip()
        self._white = text[len(said) :]
        if not said:
            return
        self._called = False
        if self._told and self._told[-1].call is None:
            said = self._told.pop().content + said
        self._told.append(Delta(said))


class _Marks:
    """Texts to look for in a text that grows."""

    def __init__(self, marks: Iterable[str]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {mark[:length] for mark in longest_first for length in range(1, len(mark))}
        self._longest = max(map(len, longest_first), default=1) - 1

    def find(self, text: str, final: bool) -> re.Match[str] | None:
        """The first mark in a text; not yet where it may be the beginning of a longer one."""
        found = self._any.search(text)
        unsure = found is not None and found.end() == len(text) and found[0] in self._beginnings and not final
        return None if unsure else found

    def held(self, text: str) -> int:
        """How many of the last characters may be the beginning of a mark."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)
