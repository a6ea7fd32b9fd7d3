"""Parses tool calls in an answer without a grammar: text and calls in the format of the model's family.

White space around calls is dropped, because chat templates add their own. So the next turn of the conversation finds
its history in the cache. Text that looked like a call and is none is returned unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from inlay.api.tools.formats import Delta, ModelTools
from inlay.api.tools.readers import CallReader, Functions


class Marks:
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


class FreeParser:
    """An AnswerParser for answers without a grammar.

    Each step reads the pending text, and returns True if more can be done.

    Args:
        tools: the model's format of calls.
        functions: the known functions.
        parallel: the answer continues after its first call.
    """

    def __init__(self, tools: ModelTools, functions: Functions, *, parallel: bool) -> None:
        self._format = tools.format
        self._functions = functions
        self._parallel = parallel
        self._starts = frozenset(filter(None, (tools.format.section, tools.format.opens)))
        self._marks = Marks({*tools.ends, *self._starts})
        self._rest = ""
        self._white = ""  # white space before _rest; returned if text follows
        self._before = ""  # text before a possible call; returned if it is no call
        self._reader: CallReader | None = None
        self._begun = False  # True once the reader has begun a call
        self._calls = 0
        self._called = False  # True if the last returned piece is a call
        self._told: list[Delta] = []
        self._step: Callable[[bool], bool] = self._begin if tools.format.bare else self._text

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
        if found[0] in self._starts:
            self._say_up_to(found.start())
            self._rest = self._rest[len(found[0]) :]
            if found[0] == self._format.opens:
                self._open(found[0], self._rest)
            else:
                self._before, self._step = found[0], self._section
            return True
        if found.end() < len(self._rest):
            self._say_up_to(found.end())
            return True
        self._say_up_to(found.start())
        if final:
            self._rest = ""
        return False

    def _section(self, final: bool) -> bool:
        """Read the mark of a call behind the mark of a section of calls."""
        rest, opens = self._rest.lstrip(), self._format.opens or ""
        if rest.startswith(opens):
            self._open(self._before + self._rest[: len(self._rest) - len(rest)] + opens, rest[len(opens) :])
            return True
        if opens.startswith(rest) and not final:
            return False
        return self._refuse()

    def _say_up_to(self, index: int) -> bool:
        self._say(self._rest[:index])
        self._rest = self._rest[index:]
        return False

    def _open(self, before: str, rest: str) -> None:
        """Start a possible call. ``before`` is the text before it."""
        self._before, self._rest, self._begun = before, rest, False
        self._reader = self._format.syntax.reader(self._functions)
        self._step = self._call

    def _call(self, final: bool) -> bool:
        """Read calls after a mark, up to their end."""
        assert self._reader is not None, "it was opened"
        reading = self._reader.read(self._rest, final)
        self._rest = self._rest[reading.used :]
        for name, arguments in reading.pieces:
            if name is not None and self._begun and not self._parallel:
                self._step = self._over
                return True
            self._tell(name, arguments)
        if not reading.over:
            return False
        if not self._begun:
            return self._refuse()
        self._step = self._behind if self._parallel else self._over
        return True

    def _refuse(self) -> bool:
        """Return to text, which may hold marks, because this is no call."""
        self._step = self._text
        self._say(self._before)
        return True

    def _tell(self, name: str | None, arguments: str) -> None:
        if name is not None:
            self._calls += 1
            self._begun = self._called = True
            self._white = ""
            self._told.append(Delta(call=self._calls - 1, name=name))
        elif arguments:
            last = self._told[-1] if self._told else None
            if last is not None and last.call == self._calls - 1 and last.name is None:
                arguments = self._told.pop().arguments + arguments
            self._told.append(Delta(call=self._calls - 1, arguments=arguments))

    def _behind(self, final: bool) -> bool:
        """Read the closing marks or another call, after a call."""
        self._rest = self._rest.lstrip()
        closes = self._format.closes
        if found := next((mark for mark in closes if self._rest.startswith(mark)), None):
            self._rest = self._rest[len(found) :]
            return True
        if not final and (not self._rest or any(mark.startswith(self._rest) for mark in closes)):
            return False
        if self._format.bare and self._rest[:1] == ";":  # Llama separates calls so
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
