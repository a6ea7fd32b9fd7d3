"""Helpers for messages: shortened texts, values and lists."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from enum import Enum
from html import escape
from itertools import islice
from typing import Any

SHOWN = 60
"""The most characters that a message shows of one text or value."""

_SHOWN_PYTHON = 100  # the same for a Python repr
#: Characters that steer a terminal: controls without tab and line break, and those that reverse the writing direction.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MAX_BITS = 200  # of a number, 61 digits


def clip(text: str, most: int = SHOWN) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= most else text[: most - 1] + "…"


def printable(text: str) -> str:
    """Return a text with the characters that steer a terminal as escapes. Tabs and line breaks stay."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def quote(text: str) -> str:
    """Return the text in quotation marks, on one line, shortened if it is long."""
    return '"' + " ".join(clip(text).splitlines()) + '"'


def fault_in_words(error: BaseException) -> str:
    """The type and message of an exception, without paths of this machine."""
    if isinstance(error, OSError):  # its text has the path
        return f"{type(error).__name__}: {error.strerror}" if error.strerror else type(error).__name__
    return f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without a full stop. Its type if it has no message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].strip().rstrip(".")


def counted(number: int, thing: str) -> str:
    """Return a count with its noun, as in ``1 module`` and ``2 modules``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """Return the first few names, separated by commas."""
    first = [clip(name) for name in islice(names, 9)]
    return ", ".join([*first[:8], "…"] if len(first) > 8 else first)


def shown(value: Any, *, kind: bool = False) -> str:
    """Describe a JSON value in a few words, as in ``a list of 3``.

    ``kind`` adds the type of a text or number, as in ``the text "a"``, and shortens an object to its type.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | Mapping):
        what = "list" if isinstance(value, list) else "object"
        if kind and what == "object":
            return "an object"
        return f"{_article(what)} of {len(value):,}" if value else f"an empty {what}"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "a huge number"  # Python may refuse to convert it
    if not kind:
        # Cut first, because a text may have many megabytes.
        return clip(repr(value[: SHOWN + 1] if isinstance(value, str) else value))
    if isinstance(value, str):
        return f"the text {quote(value)}" if len(value) <= SHOWN else f"a text of {len(value):,} characters"
    return f"the number {value}"


def shown_python(value: object, most: int = SHOWN) -> str:
    """Return a shortened repr, with any mapping as a dict and an Enum member by name."""
    if isinstance(value, Enum):
        return clip(str(value), most)
    return clip(repr(dict(value) if isinstance(value, Mapping) else value), most)


class _Repr(reprlib.Repr):
    """Reads only the beginning of a value, because the repr of 8 MB of text would be slow."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother = 4, _SHOWN_PYTHON + 1
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = (
            _SHOWN_PYTHON // 2
        )

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """Keep the dict's own order."""
        if level <= 0:
            return "{…}"
        first = islice(x.items(), self.maxdict)
        return (
            "{" + ", ".join(f"{self.repr1(key, level)}: {self.repr1(inner, level - 1)}" for key, inner in first) + "}"
        )

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: _SHOWN_PYTHON + 1])

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: _SHOWN_PYTHON + 1])

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= _MAX_BITS else "a huge number"  # Python may refuse to convert it


def show(value: object) -> str:
    """Return a repr on one line of at most 100 characters, with any mapping as a dict."""
    text = _Repr().repr(dict(value) if isinstance(value, Mapping) else value).replace("\n", " ")
    return text if len(text) <= _SHOWN_PYTHON else f"{text[:_SHOWN_PYTHON]}…"


def html_table(title: str, header: Iterable[str], rows: Iterable[Iterable[object]], most: int = 50) -> str:
    """Return an HTML table for notebooks. At most ``most`` rows are shown; their values may be any text."""
    listed = [list(row) for row in islice(rows, most + 1)]
    body = "".join(_html_row("td", row) for row in listed[:most]) + (
        _html_row("td", ["…"]) if len(listed) > most else ""
    )
    return f"<table><caption>{escape(title)}</caption>{_html_row('th', header)}{body}</table>"


def _html_row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table. Cells are not escaped."""
    names = list(header)
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows))


def shown_path(path: str) -> str:
    """Return a path relative to the working folder if it is inside."""
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:  # the working folder no longer exists
        return path


def lone_surrogate(text: str) -> str | None:
    """Return the reason why a text cannot be encoded as UTF-8, with the remedy; None if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate at index {error.start}; decode the text properly or leave it out"
    return None


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
