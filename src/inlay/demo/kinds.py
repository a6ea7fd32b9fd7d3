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
    """Two or more ways to say one thing; the last is held out from training.

    more: further ones that training alone draws, so that what is evaluated stays the same however many there are.
    """

    ways: tuple[str, ...]
    more: tuple[str, ...] = ()

    def of(self, split: Split) -> tuple[str, ...]:
        """The wordings that a split draws from."""
        match split:
            case Split.FIRST:
                return self.known
            case Split.TRAIN:
                return (*self.known, *self.more)
            case Split.HELD_OUT:
                return self.ways[-1:]

    @property
    def known(self) -> tuple[str, ...]:
        """The wordings that training begins with, and that evaluation mixes in."""
        return self.ways[:-1]


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
    """The kinds of kinds.toml, in its order, with the further wordings of more.toml."""
    more = _read("more.toml")
    return tuple(_kind(entry, more[entry["name"]]) for entry in _read("kinds.toml")["kind"])


def _read(file: str) -> dict[str, Any]:
    return tomllib.loads(files("inlay.demo").joinpath(file).read_text(encoding="utf-8"))


def _kind(entry: dict[str, Any], more: dict[str, Any]) -> Kind:
    return Kind(
        entry["name"],
        entry["many"],
        entry["names"],
        tuple(entry["pronouns"]),
        _wordings("intros", entry, more),
        tuple(_attribute(attribute, more[attribute["key"]]) for attribute in entry["attribute"]),
    )


def _attribute(entry: dict[str, Any], more: dict[str, Any]) -> Attribute:
    return Attribute(
        entry["key"],
        entry["value"],
        tuple(entry["phrases"]),
        _wordings("statements", entry, more),
        _wordings("questions", entry, more),
        _wordings("compare", entry, more) if "compare" in entry else None,
        entry.get("pick") == "greatest",
        _wordings("count", entry, more) if "count" in entry else None,
    )


def _wordings(what: str, entry: dict[str, Any], more: dict[str, Any]) -> Wordings:
    return Wordings(tuple(entry[what]), tuple(more[what]))
