"""Calls in an answer that nothing holds to a form: text and calls in the format of the model's family.

A call is told when all of it is there, as only then one knows that it is one: a known function with an object of
arguments. What begins like a call and is none is text, to the letter. White space around calls is dropped, as chat
templates put their own there; so a conversation that goes on finds its history in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from inlay.api.tools.formats import ModelTools
from inlay.api.tools.growing_json import JSONEnd
from inlay.api.tools.parsers import Delta, calls_in

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
