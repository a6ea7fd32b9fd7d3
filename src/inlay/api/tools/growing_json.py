"""JSON in a text that is still growing: where an object or a list of it ends, or that it is none."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from inlay.strict_json import read_json

_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_FIRST_LOOK = 64  # characters
_MAX_DEPTH = 200


class JSONEnd:
    """Looks for the end of the object or list that a text begins with. Each character is looked at once.

    ``broken``: that the text can no longer become JSON, noticed before it is twice as long as it was when it could.
    """

    def __init__(self) -> None:
        self.broken = False
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._next_look = _FIRST_LOOK

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
            self.broken = not _may_become_json(text[:stop])
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
    """The value of a JSON text; of a key that stands twice, the last. Raises JSONError."""
    return read_json(text.encode(errors="surrogatepass"), max_depth=_MAX_DEPTH, make_object=dict)


def _may_become_json(text: str) -> bool:
    try:
        from_json(text, allow_inf_nan=False)  # json's own parser does not tell what is wrong from what is not there yet
    except ValueError as error:
        # its mode for partial values would not do: that takes anything behind a value inside a list
        return str(error).startswith("EOF while parsing")
    return True
