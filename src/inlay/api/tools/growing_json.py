"""Finds the end of a JSON object or list in a growing text, or detects that it is not JSON."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from inlay.strict_json import JSONError, read_json

_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w.:,+-]')  # a mark, or a character that JSON has in strings alone
_IN_STRING = re.compile(r'["\\]')
_FIRST_LOOK = 64  # characters
_MAX_DEPTH = 200


class JSONEnd:
    """Finds the end of the object or list at the start of a text. It reads each character once.

    ``broken`` is True if the text can no longer become JSON. It is set at a character that JSON has in strings alone,
    and otherwise before the text has doubled since it was valid. ``at`` is the number of characters that were read.

    Args:
        first_look: the length in characters at the first check.
    """

    def __init__(self, first_look: int = _FIRST_LOOK) -> None:
        self.broken = False
        self.at = 0
        self._depth = 0
        self._in_string = False
        self._next_look = first_look

    def find(self, text: str) -> int | None:
        """Return the index after the last character, or None. ``text`` is everything so far, from its first brace."""
        while not self.broken:
            stop = min(len(text), self._next_look)
            while self.at < stop and not self.broken:
                if (end := self._step(text, stop)) is not None:
                    return end
            if stop < self._next_look:
                break
            self._next_look *= 2
            if not self.broken and not may_become_json(text[:stop]):
                self.at, self.broken = stop, True
        return None

    def _step(self, text: str, stop: int) -> int | None:
        """Read up to the next mark. Returns the end of the value if that mark ends it."""
        found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, self.at, stop)
        self.at = found.end() if found else stop
        if found is None:
            return None
        mark = found[0]
        if mark == "\\":
            self.at += 1  # the escaped character may not be there yet
        elif mark == '"':
            self._in_string = not self._in_string
        elif mark not in "{}[]":
            self.at, self.broken = found.start(), True
            return None
        else:
            self._depth += 1 if mark in "{[" else -1
        return self.at if self._depth == 0 and mark in "}]" else None


def parsed(text: str) -> Any:
    """Return the value of a JSON text. The last value of a repeated key wins. Raises JSONError."""
    return read_json(text.encode(errors="surrogatepass"), max_depth=_MAX_DEPTH, make_object=dict)


def object_in(text: str) -> dict[str, Any] | None:
    """Return the object in a JSON text. An empty text, which clients send for no arguments, is an empty object."""
    try:
        value = parsed(text) if text.strip() else {}
    except JSONError:
        return None
    return value if isinstance(value, dict) else None


def may_become_json(text: str) -> bool:
    try:
        from_json(text, allow_inf_nan=False)  # json's own parser does not separate invalid from incomplete text
    except ValueError as error:
        # its partial mode does not fit: it accepts any text after a value in a list
        return str(error).startswith("EOF while parsing")
    return True
