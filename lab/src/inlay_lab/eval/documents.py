"""Generated documents. Each is about one thing and states a few of its facts, each in one of several wordings.

kinds.toml has the kinds of things, their attributes, and the wordings.
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
    """Two or more ways to say one thing. The last one is held out from inlay_lab.train.

    Attributes:
        more: Further wordings for training only, so that evaluations stay the same when more are added.
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
        """The wordings of first training, which evaluation mixes in."""
        return self.ways[:-1]


@dataclass(frozen=True)
class Attribute:
    """An attribute that documents of a kind may state.

    Attributes:
        key: Unique in its kind.
        value: The maker of its values (``inlay_lab.eval.words``).
        phrases: Noun phrases for it.
        statements: Wordings with {n} and {v}.
        compare: Questions on {a} and {b}, or None.
        greatest: Comparisons ask for the greater value.
        count: Questions on {v}, or None.
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
    """Give every kind further wordings for ``Split.TRAIN``. Training calls this at its start.

    Args:
        further: By the kind's name, lists under the keys of kinds.toml. An attribute's lists are under its key.
    """
    _further.update(further)
    kinds.cache_clear()


@cache
def kinds() -> tuple[Kind, ...]:
    """The kinds of kinds.toml, in its order, with all further wordings."""
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


FACTS = (3, 4)  # stated in a document; every kind has at least as many attributes
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
_FRAMED = 0.35  # share of statements in a frame, so that statements use every phrase for an attribute


@dataclass(frozen=True)
class Document:
    """One generated document.

    Attributes:
        name: Of its thing.
        facts: The stated values by attribute key.
        sentences: The sentence of each fact by attribute key.
    """

    kind: Kind
    name: str
    facts: dict[str, Value]
    sentences: dict[str, str]
    text: str


def write_documents(words: Words, count: int, facts: tuple[int, ...] = FACTS) -> list[Document]:
    """Documents about different things, of one to four kinds, so that comparing and counting make sense.

    Args:
        words: Sets the split of names and wordings. Held-out documents mix in trained wordings of statements.
        facts: The numbers of facts that a document may state.
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

    Args:
        words: Sets the split of wordings.
        pronoun: One of the kind's; may replace the name.
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
    """A wording of the split. Held-out documents take a trained one half of the time."""
    if words.split is Split.HELD_OUT and words.rng.random() < 0.5:
        return words.rng.choice(wordings.known)
    return words.rng.choice(wordings.of(words.split))
