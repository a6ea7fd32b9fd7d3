"""Names for pieces of text: readable, unique, and the same for the same log."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from inlay.pml.names import TAGS, objection

_HEADING = re.compile(r"^\s*(?:#{1,6}\s+\S|<[A-Za-z]|\*\*\S|=+\s*\S)")
_WORDS = re.compile(r"[^\W_]+")
_MOST_WORDS = 4
_MOST_CHARACTERS = 32
_LINES = 4  # at the front of a text that are searched for a heading


def names_for(texts: Iterable[str]) -> list[str]:
    """A name for each text, from its first heading or else its first words: ``company-policy``; unique by numbers."""
    taken: set[str] = set(TAGS)
    names = []
    for text in texts:
        wanted = _slug(_title(text))
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}-{number}"
        taken.add(name)
        names.append(name)
    return names


def schema_name(stem: str) -> str:
    """A name for the schema of a log, from the name of its file without endings."""
    return _slug(stem)


def _title(text: str) -> str:
    lines = [line for line in text[:2000].splitlines() if _WORDS.search(line)][:_LINES]
    return next((line for line in lines if _HEADING.match(line)), lines[0] if lines else "")


def _slug(title: str) -> str:
    words = _WORDS.findall(unicodedata.normalize("NFC", title).lower())[:_MOST_WORDS]
    name = "-".join(words)[:_MOST_CHARACTERS].strip("-")
    if name and not (name[0].isalpha() or name[0] == "_"):
        name = f"text-{name}"
    if not name or objection(name):  # letters that the XML parser does not take in names
        name = re.sub("-+", "-", re.sub("[^a-z0-9-]", "", name)).strip("-")
        name = f"text-{name}".strip("-")
    return name
