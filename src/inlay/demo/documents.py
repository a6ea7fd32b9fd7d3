"""Documents that a script writes: one thing each, a few of its facts, each fact in one of several wordings."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.demo.kinds import Attribute, Kind, Wordings, kinds
from inlay.demo.words import Split, Value, Words

FACTS = (3, 4)  # stated in a document; every kind has more attributes than that or as many, so some stay unstated
_FRAMES = Wordings(
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
    facts = {attribute.key: words.value(attribute.value) for attribute in stated}
    intro = _wording(words, kind.intros).format(n=name)
    sentences = {}
    for attribute in stated:
        way = _statement(words, attribute)
        if way.startswith("{n} ") and rng.random() < 0.4:
            way = pronoun + way.removeprefix("{n}")
        sentences[attribute.key] = way.format(n=name, v=facts[attribute.key].text)
    return Document(kind, name, facts, sentences, " ".join((intro, *sentences.values())))


def _statement(words: Words, attribute: Attribute) -> str:
    if words.rng.random() < _FRAMED:
        return _wording(words, _FRAMES).replace("{p}", words.rng.choice(attribute.phrases))
    return _wording(words, attribute.statements)


def _wording(words: Words, wordings: Wordings) -> str:
    """One of the split; held-out documents take one of training half of the time."""
    if words.split is Split.HELD_OUT and words.rng.random() < 0.5:
        return words.rng.choice(wordings.known)
    return words.rng.choice(wordings.of(words.split))
