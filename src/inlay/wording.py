"""How messages name things: texts in quotation marks, values in a few words, names in a row; short enough to read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from html import escape
from itertools import islice
from typing import Any

SHOWN = 60
"""How many characters a message shows of one text or value."""

_MAX_BITS = 200  # of a number, in 61 digits


def clip(text: str, most: int = SHOWN) -> str:
    """The text, shortened so that a message stays readable."""
    return text if len(text) <= most else text[: most - 1] + "…"


def quote(text: str) -> str:
    """The text in quotation marks, on one line, shortened where it is long."""
    return '"' + " ".join(clip(text).splitlines()) + '"'


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
        return clip(repr(value))
    if isinstance(value, str):
        return f"the text {quote(value)}" if len(value) <= SHOWN else f"a text of {len(value):,} characters"
    return f"the number {value}"


def shown_python(value: object, most: int = SHOWN) -> str:
    """A value as Python writes it, shortened; any mapping as a dict, and a member of an Enum by its name."""
    if isinstance(value, Enum):
        return clip(str(value), most)
    return clip(repr(dict(value) if isinstance(value, Mapping) else value), most)


def html_table(title: str, header: Iterable[str], rows: Iterable[Iterable[object]], most: int = 50) -> str:
    """A table as notebooks show it. rows: of values, which may be any text; ``most`` of them are shown."""
    listed = [list(row) for row in islice(rows, most + 1)]
    body = "".join(_html_row("td", row) for row in listed[:most]) + (
        _html_row("td", ["…"]) if len(listed) > most else ""
    )
    return f"<table><caption>{escape(title)}</caption>{_html_row('th', header)}{body}</table>"


def _html_row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"


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
