"""Parses generated text: the wording of a sentence, and the meaning of a question."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from inlay_lab.eval.conversations import SYSTEM, Conversation, draw_conversation
from inlay_lab.eval.documents import FRAMES as STATEMENT_FRAMES
from inlay_lab.eval.documents import Attribute, Document, Kind, Wordings, kinds
from inlay_lab.eval.questions import FRAMES, INSTRUCTIONS, KIND_COUNTS
from inlay_lab.eval.words import Split

_MADE = r"(?=[A-Z])(?i:(?:(?:br|st|tr|kl|[bdfghklmnprstv])[aeiou]){2,3}[nrls]?)"
_NAMES = {
    "place": _MADE,
    "person": f"{_MADE} {_MADE}",
    "component": f"{_MADE}-[a-z]+",
    "product": f"{_MADE} (?:lamp|chair|drill|kettle|radio)",
    "event": f"{_MADE} (?:Fest|Week|Day|Run|Night)",
    "contract": rf"{_MADE}-\d\d",
    "dish": f"{_MADE} (?:soup|stew|pie|salad|bread)",
    "animal": f"{_MADE} (?:finch|toad|moth|bat|eel)",
    "ship": f"(?:Star|Queen|Moon|Wind) of {_MADE}",
}


@dataclass(frozen=True)
class Reading:
    """The meaning and wording of a question.

    Attributes:
        asks: "fact" (of one thing), "compare" (of two), "count" (of a value), "kinds" (of things of the kind).
        on: The names or the value in the question.
        held_out: Its wording is held out from inlay_lab.train.
    """

    asks: str
    kind: Kind
    attribute: Attribute | None
    on: tuple[str, ...]
    held_out: bool


def read_question(text: str) -> set[Reading]:
    """Every reading of a question; one if the question is unambiguous."""
    readings = set()
    for opening, pattern, asks, kind, attribute, held_out in _patterns():
        if text.startswith(opening) and (match := pattern.fullmatch(text)):
            readings.add(Reading(asks, kind, attribute, match.groups(), held_out))
    return readings


def read_document(document: Document) -> tuple[bool, list[tuple[str, bool]]]:
    """True if the opening's wording is held out; then for every statement its attribute and if it is held out."""
    kind, name = document.kind, document.name
    opening, *sentences = re.split(r"(?<=\.) ", document.text)
    (opened,) = [held_out for way, held_out in ways(kind.intros) if way.format(n=name) == opening]
    stated = []
    for sentence in sentences:
        (found,) = [
            (key, held_out)
            for key, value in document.facts.items()
            for way, held_out in statements(attribute_of(kind, key))
            for subject in (name, *kind.pronouns)
            if way.format(n=subject, v=value.text) == sentence
        ]
        stated.append(found)
    return opened, stated


def ways(wordings: Wordings) -> list[tuple[str, bool]]:
    """Every wording with whether it is held out."""
    return [(way, False) for way in wordings.of(Split.TRAIN)] + [(way, True) for way in wordings.of(Split.HELD_OUT)]


def attribute_of(kind: Kind, key: str) -> Attribute:
    (attribute,) = [attribute for attribute in kind.attributes if attribute.key == key]
    return attribute


def statements(attribute: Attribute) -> list[tuple[str, bool]]:
    """Every way to state {v} of {n}, with whether it is held out."""
    return ways(attribute.statements) + _framed(STATEMENT_FRAMES, attribute)


def fact_questions(attribute: Attribute) -> list[tuple[str, bool]]:
    """Every way to ask for an attribute of {n}, with whether it is held out."""
    return ways(attribute.questions) + _framed(FRAMES, attribute)


def _framed(frames: Wordings, attribute: Attribute) -> list[tuple[str, bool]]:
    return [(way.replace("{p}", phrase), kept) for way, kept in ways(frames) for phrase in attribute.phrases]


def made_words(text: str) -> set[str]:
    """The made-up words of a text, without words that kinds.toml or a wording contains."""
    words = {word.capitalize() for word in re.findall(r"[A-Z][A-Za-z]*", text)}
    return {word for word in words - _fixed_words() if re.fullmatch(_MADE, word)}


@cache
def _fixed_words() -> frozenset[str]:
    data = [
        files(package).joinpath(name).read_text(encoding="utf-8")
        for package, name in (("inlay_lab.eval", "kinds.toml"), ("inlay_lab.train", "more.toml"))
    ]
    wordings = (FRAMES, STATEMENT_FRAMES, KIND_COUNTS, *INSTRUCTIONS.values())
    lists = [way for each in wordings for way, _ in ways(each)]
    return frozenset(word.capitalize() for word in re.findall(r"[A-Za-z]+", " ".join((*data, *lists, *SYSTEM))))


@cache
def _patterns() -> list[tuple[str, re.Pattern[str], str, Kind, Attribute | None, bool]]:
    patterns = []

    def add(way: str, held_out: bool, asks: str, kind: Kind, attribute: Attribute | None, argument: str) -> None:
        parts = re.split(r"\{\w+\}", way)
        pattern = re.compile(f"({argument})".join(map(re.escape, parts)))
        patterns.append((parts[0], pattern, asks, kind, attribute, held_out))

    for kind in kinds():
        for way, held_out in ways(KIND_COUNTS):
            add(way.format(many=kind.many), held_out, "kinds", kind, None, "")
        for attribute in kind.attributes:
            for way, held_out in fact_questions(attribute):
                add(way, held_out, "fact", kind, attribute, _NAMES[kind.names])
            for way, held_out in ways(attribute.compare) if attribute.compare else ():
                add(way, held_out, "compare", kind, attribute, _NAMES[kind.names])
            for way, held_out in ways(attribute.count) if attribute.count else ():
                add(way, held_out, "count", kind, attribute, "|".join(attribute.value.split()[1:]))
    return patterns


@cache
def conversations(split: Split, count: int = 200) -> list[Conversation]:
    """Conversations of a split over one to twelve documents."""
    return [
        draw_conversation(random.Random(seed), split, documents=1 + seed % 12, questions=6) for seed in range(count)
    ]


def all_text(drawn: Conversation) -> str:
    questions = [text for question in drawn.questions for text in (question.text, question.answer)]
    return "\n".join([drawn.system, *(document.text for document in drawn.documents), *questions])
