"""Documents that a script writes: about one thing each, a few of its facts, each fact in one of several wordings.

What they are about stands in kinds.toml: kinds of things, their attributes, and the wordings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from inlay_lab.eval.words import Split, Value, Words


@dataclass(frozen=True)
class Wordings:
    """Two or more ways to say one thing; the last is held out from inlay_lab.train.

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

    key: unique in its kind. value: the maker of its values (``inlay_lab.eval.words``). phrases: noun phrases for it.
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


_further: dict[str, Any] = {}  # wordings by kind


def add_wordings(further: Mapping[str, Any]) -> None:
    """Give every kind further wordings, which documents of ``Split.TRAIN`` alone draw; training does so as it starts.

    further: by the kind's name, lists under the keys of kinds.toml, and by an attribute's key those of the attribute.
    """
    _further.update(further)
    kinds.cache_clear()


@cache
def kinds() -> tuple[Kind, ...]:
    """The kinds of kinds.toml, in its order, with the further wordings that there are."""
    entries = tomllib.loads(files("inlay_lab.eval").joinpath("kinds.toml").read_text(encoding="utf-8"))["kind"]
    return tuple(_kind(entry, _further.get(entry["name"], {})) for entry in entries)


def _kind(entry: dict[str, Any], more: Mapping[str, Any]) -> Kind:
    return Kind(
        entry["name"],
        entry["many"],
        entry["names"],
        tuple(entry["pronouns"]),
        _wordings("intros", entry, more),
        tuple(_attribute(attribute, more.get(attribute["key"], {})) for attribute in entry["attribute"]),
    )


def _attribute(entry: dict[str, Any], more: Mapping[str, Any]) -> Attribute:
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


def _wordings(what: str, entry: dict[str, Any], more: Mapping[str, Any]) -> Wordings:
    return Wordings(tuple(entry[what]), tuple(more.get(what, ())))


FACTS = (3, 4)  # stated in a document; every kind has more attributes than that or as many, so some stay unstated
FRAMES = Wordings(
    (
        "For {n}, the {p} is {v}.",
        "The {p} given for {n} is {v}.",
        "{n} is listed with the {p} {v}.",
        "Records give {v} as the {p} of {n}.",
        "Records give {n} the {p} {v}.",  # held out
    ),
    (
        "{v} is given as the {p} of {n}.",
        "As its {p}, {n} has {v}.",
        "The {p} that {n} has is {v}.",
        "{n} has one {p}, {v}.",
        "Records give the {p} of {n} as {v}.",
        "We list {n} with the {p} {v}.",
        "The {p} that records give for {n} is {v}.",
        "Of {n} we know the {p}: {v}.",
        "As {p} of {n}, {v} is listed.",
        "{v}: this is the {p} of {n}.",
        "{n}: the {p} is {v}.",
    ),
)
_FRAMED = 0.35  # the share of statements that take a frame, so that every phrase for an attribute is met in statements


@dataclass(frozen=True)
class Document:
    """One generated document: its kind, the name of its thing, the stated facts and their sentences by attribute key,
    and its text."""

    kind: Kind
    name: str
    facts: dict[str, Value]
    sentences: dict[str, str]
    text: str


def write_documents(words: Words, count: int, facts: tuple[int, ...] = FACTS) -> list[Document]:
    """Documents about different things, of one to four kinds, so that comparing and counting make sense.

    words: with them, the split of names and wordings; held-out documents mix in trained wordings of statements.
    facts: the numbers of facts that a document may state.
    """
    rng = words.rng
    among = rng.sample(kinds(), k=min(count, rng.randint(1, 4)))
    taken: set[str] = set()
    return [_write(words, rng.choice(among), taken, facts) for _ in range(count)]


def _write(words: Words, kind: Kind, taken: set[str], numbers: tuple[int, ...]) -> Document:
    rng = words.rng
    name = words.name(kind.names)
    while name in taken:
        name = words.name(kind.names)
    taken.add(name)
    pronoun = rng.choice(kind.pronouns)
    stated = rng.sample(kind.attributes, k=min(rng.choice(numbers), len(kind.attributes) - 1))
    return describe(words, kind, name, pronoun, {attribute.key: words.value(attribute.value) for attribute in stated})


def describe(words: Words, kind: Kind, name: str, pronoun: str, facts: dict[str, Value]) -> Document:
    """The document on a thing that states these facts, by attribute key, in their order.

    words: with them, the split of wordings. pronoun: what the name may give way to, one of the kind's.
    """
    rng = words.rng
    attributes = {attribute.key: attribute for attribute in kind.attributes}
    intro = _wording(words, kind.intros).format(n=name)
    sentences = {}
    for key, value in facts.items():
        way = _statement(words, attributes[key])
        if way.startswith("{n} ") and rng.random() < 0.4:
            way = pronoun + way.removeprefix("{n}")
        sentences[key] = way.format(n=name, v=value.text)
    return Document(kind, name, facts, sentences, " ".join((intro, *sentences.values())))


def _statement(words: Words, attribute: Attribute) -> str:
    if words.rng.random() < _FRAMED:
        return _wording(words, FRAMES).replace("{p}", words.rng.choice(attribute.phrases))
    return _wording(words, attribute.statements)


def _wording(words: Words, wordings: Wordings) -> str:
    """One of the split; held-out documents take one of training half of the time."""
    if words.split is Split.HELD_OUT and words.rng.random() < 0.5:
        return words.rng.choice(wordings.known)
    return words.rng.choice(wordings.of(words.split))
