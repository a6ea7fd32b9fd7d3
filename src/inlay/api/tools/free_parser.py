"""Parses tool calls in an answer without a grammar: text and calls in the format of the model's family.

A call is returned when it is complete, because only then it is certain: a known function with an object of arguments.
An incomplete or invalid call is returned as unchanged text. White space around calls is dropped, because chat templates
add their own. So the next turn of the conversation finds its history in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from inlay.api.tools.formats import ModelTools
from inlay.api.tools.growing_json import JSONEnd
from inlay.api.tools.parsers import Delta, calls_in

_LONGEST_HEAD = 256  # characters of a call before its object


class FreeParser:
    """An AnswerParser for answers without a grammar.

    Each step reads the pending text, and returns True if more can be done.

    Args:
        tools: the model's format of calls.
        names: the known functions.
        parallel: the answer continues after its first call.
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
        self._white = ""  # white space before _rest; returned if text follows
        self._before = ""  # text before a possible call; returned if it is no call
        self._name: str | None = None  # the name of the call, if it is before the object
        self._end = JSONEnd()
        self._calls = 0
        self._called = False  # True if the last returned piece is a call
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
        """Read the start of an answer that may be a call without a mark."""
        start = self._rest.lstrip()
        if not start and not final:
            return False
        if start[:1] in ("{", "["):
            self._open(self._rest[: len(self._rest) - len(start)], start)
        else:
            self._step = self._text
        return True

    def _text(self, final: bool) -> bool:
        """Read text up to the next mark. A special token that is no mark of a call may be the end of the answer."""
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
        """Start a possible call. ``before`` is the text before it."""
        self._before, self._rest, self._name, self._end = before, rest, None, JSONEnd()
        self._step = self._call

    def _call(self, final: bool) -> bool:
        """Read an object or a list after a mark, up to its end."""
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
        """Read a name before the object. Refuses any other text."""
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
        """Return to text, which may hold marks, because this is no call."""
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
        """Read the closing mark or another call, after a call."""
        self._rest = self._rest.lstrip()
        closes = self._format.closes or ""
        if not self._rest or (len(self._rest) < len(closes) and closes.startswith(self._rest)):
            self._step = self._text if final else self._step
            return final and bool(self._rest)
        if closes and self._rest.startswith(closes):
            self._rest = self._rest[len(closes) :]
        elif self._format.bare and self._rest[0] == ";":  # Llama separates calls so
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
    """Finds marks in a growing text."""

    def __init__(self, marks: Iterable[str]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {mark[:length] for mark in longest_first for length in range(1, len(mark))}
        self._longest = max(map(len, longest_first), default=1) - 1

    def find(self, text: str, final: bool) -> re.Match[str] | None:
        """Return the first mark in a text; None if it may be the start of a longer one."""
        found = self._any.search(text)
        unsure = found is not None and found.end() == len(text) and found[0] in self._beginnings and not final
        return None if unsure else found

    def held(self, text: str) -> int:
        """Return the number of last characters that may be the start of a mark."""
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)
