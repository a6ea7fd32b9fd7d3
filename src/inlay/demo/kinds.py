"""What documents are about: the kinds, attributes and wordings of kinds.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from inlay.demo.words import Split


@dataclass(frozen=True)
class Wordings:
    """Two or more ways to say one thing; the last is held out from training."""

    ways: tuple[str, ...]

    def of(self, split: Split) -> tuple[str, ...]:
        """The wordings that a split draws from."""
        return self.ways[:-1] if split is Split.TRAIN else self.ways[-1:]


@dataclass(frozen=True)
class Attribute:
    """Something that documents of a kind may state.

    key: unique in its kind. value: the maker of its values (``inlay.demo.words``). phrases: noun phrases for it.
    statements: with {n} and {v}. compare: questions on {a} and {b}, or none; greatest: which of the two they ask for.
    count: questions on {v}, or none.
    """

    key: str
    value: str
    phrases: tuple[str, ...]
    statements: Wordings
    questions: Wordings
    compare: Wordings | None
    greatest: bool
    count: Wordings | None


@dataclass(frozen=True)
class Kind:
    """A kind of thing: its name, plural, maker of names, pronouns, first sentences and attributes."""

    name: str
    many: str
    names: str
    pronouns: tuple[str, ...]
    intros: Wordings
    attributes: tuple[Attribute, ...]


@cache
def kinds() -> tuple[Kind, ...]:
    """The kinds of kinds.toml, in its order."""
    text = files("inlay.demo").joinpath("kinds.toml").read_text(encoding="utf-8")
    return tuple(_kind(entry) for entry in tomllib.loads(text)["kind"])


def _kind(entry: dict[str, Any]) -> Kind:
    return Kind(
        entry["name"],
        entry["many"],
        entry["names"],
        tuple(entry["pronouns"]),
        Wordings(tuple(entry["intros"])),
        tuple(_attribute(attribute) for attribute in entry["attribute"]),
    )


def _attribute(entry: dict[str, Any]) -> Attribute:
    return Attribute(
        entry["key"],
        entry["value"],
        tuple(entry["phrases"]),
        Wordings(tuple(entry["statements"])),
        Wordings(tuple(entry["questions"])),
        Wordings(tuple(entry["compare"])) if "compare" in entry else None,
        entry.get("pick") == "greatest",
        Wordings(tuple(entry["count"])) if "count" in entry else None,
    )
