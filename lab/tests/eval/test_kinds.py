"""kinds.toml is complete and free of repetitions, and its held-out wordings do not occur in training."""

from __future__ import annotations

import random
import tomllib
from collections import Counter
from importlib.resources import files
from string import Formatter

import pytest

from inlay_lab.eval.documents import Attribute, Kind, Wordings, kinds
from inlay_lab.eval.words import Split, Words
from lab.tests.train.reading import FRAMES, KIND_COUNTS, STATEMENT_FRAMES, fact_questions, statements, ways

ATTRIBUTES = [(kind, attribute) for kind in kinds() for attribute in kind.attributes]
NAMED = pytest.mark.parametrize(
    ("kind", "attribute"), ATTRIBUTES, ids=[f"{kind.name}-{attribute.key}" for kind, attribute in ATTRIBUTES]
)


def placeholders(way: str) -> list[str]:
    return sorted(field for _, field, _, _ in Formatter().parse(way) if field is not None)


def every(wordings: Wordings | None) -> list[str]:
    return [way for way, _ in ways(wordings)] if wordings else []


def lists(kind: Kind) -> dict[str, list[Wordings]]:
    """The lists of wordings of a kind, by purpose."""
    return {
        "intros": [kind.intros],
        "statements": [attribute.statements for attribute in kind.attributes],
        "questions": [attribute.questions for attribute in kind.attributes],
        "compare": [attribute.compare for attribute in kind.attributes if attribute.compare],
        "count": [attribute.count for attribute in kind.attributes if attribute.count],
    }


def split_up(found: list[Wordings]) -> tuple[set[str], set[str]]:
    """The trained wordings of some lists, and the held-out ones."""
    pairs = [pair for wordings in found for pair in ways(wordings)]
    return {way for way, held_out in pairs if not held_out}, {way for way, held_out in pairs if held_out}


def test_kinds_are_many_and_distinct():
    assert len(kinds()) >= 8
    for of in (lambda kind: kind.name, lambda kind: kind.many, lambda kind: kind.names):
        assert len({of(kind) for kind in kinds()}) == len(kinds())
    for kind in kinds():
        assert kind.pronouns
        assert {tuple(placeholders(way)) for way in every(kind.intros)} == {("n",)}
        assert len({attribute.key for attribute in kind.attributes}) == len(kind.attributes)


@NAMED
def test_placeholders(kind: Kind, attribute: Attribute):
    assert all(placeholders(way) == ["n", "v"] for way in every(attribute.statements))
    assert all(placeholders(way) == ["n"] for way in every(attribute.questions))
    assert all(placeholders(way) == ["a", "b"] for way in every(attribute.compare))
    assert all(placeholders(way) == ["v"] for way in every(attribute.count))


def test_placeholders_of_questions_on_every_kind():
    assert all(placeholders(way) == ["n", "p"] for way in every(FRAMES))
    assert all(placeholders(way) == ["n", "p", "v"] for way in every(STATEMENT_FRAMES))
    assert all(placeholders(way) == ["many"] for way in every(KIND_COUNTS))


def test_at_least_three_wordings_and_no_repetition():
    everything = [
        FRAMES,
        KIND_COUNTS,
        STATEMENT_FRAMES,
        *(one for kind in kinds() for found in lists(kind).values() for one in found),
    ]
    for wordings in everything:
        said = every(wordings)
        assert len(wordings.ways) >= 3
        assert len(set(said)) == len(said)
        assert wordings.known == wordings.ways[:-1]
        assert wordings.of(Split.FIRST) == wordings.known
        assert wordings.of(Split.TRAIN) == (*wordings.known, *wordings.more)
        assert wordings.of(Split.HELD_OUT) == wordings.ways[-1:]


@NAMED
def test_comparing_needs_numbers_and_counting_a_short_list(kind: Kind, attribute: Attribute):
    maker, *arguments = attribute.value.split()
    words = Words(random.Random(0), Split.TRAIN)
    drawn = [words.value(attribute.value) for _ in range(20)]
    assert (attribute.compare is not None) == (maker in ("year", "number"))
    assert all((value.order is not None) == (attribute.compare is not None) for value in drawn)
    assert (attribute.count is not None) == (maker == "choice")
    if maker == "choice":
        assert len(set(arguments)) == len(arguments) >= 3


def test_entries_have_only_used_keys():
    keys = {"key", "value", "phrases", "statements", "questions", "compare", "pick", "count"}
    for entry in tomllib.loads(files("inlay_lab.eval").joinpath("kinds.toml").read_text(encoding="utf-8"))["kind"]:
        assert set(entry) == {"name", "many", "names", "pronouns", "intros", "attribute"}
        for attribute in entry["attribute"]:
            assert set(attribute) <= keys
            assert ("pick" in attribute) == ("compare" in attribute)
            assert attribute.get("pick", "least") in ("least", "greatest")


@pytest.mark.parametrize("what", ["intros", "statements", "questions", "compare", "count"])
def test_no_held_out_wording_is_trained_with_any_kind(what: str):
    trained, held_out = split_up([wordings for kind in kinds() for wordings in lists(kind)[what]])
    assert not trained & held_out


@pytest.mark.parametrize("wordings_of", [fact_questions, statements])
def test_no_held_out_wording_is_a_trained_frame(wordings_of):
    found = [pair for _, attribute in ATTRIBUTES for pair in wordings_of(attribute)]
    assert not {way for way, held_out in found if held_out} & {way for way, held_out in found if not held_out}


def test_no_wording_of_a_kind_means_two_attributes():
    for kind in kinds():
        asked = Counter(way for attribute in kind.attributes for way in {way for way, _ in fact_questions(attribute)})
        assert max(asked.values()) == 1
        stated = Counter(way for attribute in kind.attributes for way in {way for way, _ in statements(attribute)})
        assert max(stated.values()) == 1
        for what in ("statements", "compare", "count"):
            said = Counter(way for wordings in lists(kind)[what] for way in every(wordings))
            assert max(said.values(), default=1) == 1
