"""How messages name things: texts in quotation marks, values in a few words, names in a row; short enough to read."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping
from enum import Enum
from html import escape
from itertools import islice
from typing import Any

SHOWN = 60
"""How many characters a message shows of one text or value."""

_SHOWN_PYTHON = 100  # as above, of a value as Python writes it
_MAX_BITS = 200  # of a number, in 61 digits


def clip(text: str, most: int = SHOWN) -> str:
    """The text, shortened so that a message stays readable."""
    return text if len(text) <= most else text[: most - 1] + "…"


def quote(text: str) -> str:
    """The text in quotation marks, on one line, shortened where it is long."""
    return '"' + " ".join(clip(text).splitlines()) + '"'


def fault_in_words(error: BaseException) -> str:
    """An exception by its type and its message, for whoever may not know the paths of this machine."""
    if isinstance(error, OSError):  # whose text has the path
        return f"{type(error).__name__}: {error.strerror}" if error.strerror else type(error).__name__
    return f"{type(error).__name__}: {error}"


def counted(number: int, thing: str) -> str:
    """How many of something there are, as in ``1 module`` and ``2 modules``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """The first few names, separated by commas."""
    first = [clip(name) for name in islice(names, 9)]
    return ", ".join([*first[:8], "…"] if len(first) > 8 else first)


def shown(value: Any, *, kind: bool = False) -> str:
    """A value of JSON in a few words, as in ``a list of 3``.

    kind: whether to say what a text or a number is, as in ``the text "a"``, and of an object only that it is one.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | Mapping):
        what = "list" if isinstance(value, list) else "object"
        if kind and what == "object":
            return "an object"
        return f"{_article(what)} of {len(value):,}" if value else f"an empty {what}"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "a huge number"  # which Python may refuse to write
    if not kind:
        # no more of a text than is shown: a body may hold one of many megabytes
        return clip(repr(value[: SHOWN + 1] if isinstance(value, str) else value))
    if isinstance(value, str):
        return f"the text {quote(value)}" if len(value) <= SHOWN else f"a text of {len(value):,} characters"
    return f"the number {value}"


def shown_python(value: object, most: int = SHOWN) -> str:
    """A value as Python writes it, shortened; any mapping as a dict, and a member of an Enum by its name."""
    if isinstance(value, Enum):
        return clip(str(value), most)
    return clip(repr(dict(value) if isinstance(value, Mapping) else value), most)


class _Repr(reprlib.Repr):
    """Looks at the beginning of a value alone: writing 8 MB of text to show 100 characters of it would take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother = 4, _SHOWN_PYTHON + 1
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = (
            _SHOWN_PYTHON // 2
        )

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """In its own order, not sorted."""
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
        return repr(x) if x.bit_length() <= _MAX_BITS else "a huge number"  # which Python may refuse to write


def show(value: object) -> str:
    """A value as ``repr`` writes it, any mapping as a dict, on one line and in 100 characters, whatever its size."""
    text = _Repr().repr(dict(value) if isinstance(value, Mapping) else value).replace("\n", " ")
    return text if len(text) <= _SHOWN_PYTHON else f"{text[:_SHOWN_PYTHON]}…"


def html_table(title: str, header: Iterable[str], rows: Iterable[Iterable[object]], most: int = 50) -> str:
    """A table as notebooks show it. rows: of values, which may be any text; ``most`` of them are shown."""
    listed = [list(row) for row in islice(rows, most + 1)]
    body = "".join(_html_row("td", row) for row in listed[:most]) + (
        _html_row("td", ["…"]) if len(listed) > most else ""
    )
    return f"<table><caption>{escape(title)}</caption>{_html_row('th', header)}{body}</table>"


def _html_row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown. Cells are taken as they are."""
    names = list(header)
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows))


def shown_path(path: str) -> str:
    """A file as messages name it: relative to the working folder where it is inside."""
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:  # the working folder is gone
        return path


def lone_surrogate(text: str) -> str | None:
    """What keeps this text from being written in UTF-8, and the remedy; None if nothing does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate at index {error.start}; decode the text properly or leave it out"
    return None


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
