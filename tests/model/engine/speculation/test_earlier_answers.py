"""Earlier answers are found under their salt, and their number is bounded."""

from __future__ import annotations

import pytest

from inlay.engine import text_index
from inlay.engine.text_index import EarlierAnswers, GrowingIndex

NONE: frozenset[bytes] = frozenset()


def found(answers: EarlierAnswers, salt: str, text: list[int]) -> list[int] | None:
    """The tokens after the end of a text."""
    match = answers.find(salt, GrowingIndex(text))
    return None if match is None else list(match[0].ids[match[1].place :])


def test_answer_is_found_only_under_its_salt():
    answers = EarlierAnswers()
    answers.add("a", [1, 2, 3, 4, 5], NONE)
    assert found(answers, "a", [9, 1, 2, 3]) == [4, 5]
    assert found(answers, "", [9, 1, 2, 3]) is None
    assert found(answers, "b", [1, 2, 3]) is None
    assert found(answers, "a", [2, 3]) is None


def test_the_last_answer_counts():
    answers = EarlierAnswers()
    answers.add("", [1, 2, 3, 4], NONE)
    answers.add("", [1, 2, 3, 5], NONE)
    assert found(answers, "", [1, 2, 3]) == [5]


def test_oldest_answers_of_a_salt_are_evicted_first(monkeypatch):
    monkeypatch.setattr(text_index, "MOST_OF_SALT", 12)
    answers = EarlierAnswers()
    for number in range(10):
        answers.add("", [10 * number + token for token in range(5)], NONE)
    assert answers.tokens == 10
    assert found(answers, "", [70, 71, 72]) is None
    assert found(answers, "", [80, 81, 82]) == [83, 84]


def test_salts_without_a_new_answer_are_evicted_first(monkeypatch):
    monkeypatch.setattr(text_index, "MOST_TOKENS", 12)
    answers = EarlierAnswers()
    for salt in ("a", "b", "a", "c"):
        answers.add(salt, [1, 2, 3, 4], NONE)
    assert answers.tokens == 12
    assert [found(answers, salt, [1, 2, 3]) for salt in "abc"] == [[4], None, [4]]


def test_a_long_answer_is_kept_at_its_end(monkeypatch):
    monkeypatch.setattr(text_index, "MOST_OF_ANSWER", 5)
    answers = EarlierAnswers()
    answers.add("", list(range(100)), NONE)
    assert answers.tokens == 5
    assert found(answers, "", [95, 96, 97]) == [98, 99]
    assert found(answers, "", [93, 94, 95]) is None


@pytest.mark.parametrize("how", ["salt", "modules", "all"])
def test_forgotten_answers_are_not_found(how):
    answers = EarlierAnswers()
    answers.add("a", [1, 2, 3, 4], frozenset([b"x"]))
    answers.add("b", [1, 2, 3, 5], frozenset([b"y"]))
    if how == "salt":
        answers.forget_salt("a")
        answers.forget_salt("unknown")
    elif how == "modules":
        answers.forget_modules(frozenset([b"x", b"z"]))
    else:
        answers.clear()
    assert found(answers, "a", [1, 2, 3]) is None
    assert found(answers, "b", [1, 2, 3]) == (None if how == "all" else [5])
    assert answers.tokens == (0 if how == "all" else 4)


def test_a_salt_without_answers_takes_no_memory():
    answers = EarlierAnswers()
    for number in range(100):
        answers.add(f"salt {number}", [1, 2, 3, 4, 5], frozenset([b"x"]))
    answers.forget_modules(frozenset([b"x"]))
    assert (answers.salts, answers.tokens) == (0, 0)


def test_an_answer_has_the_lifetime_of_its_prompt(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(text_index.time, "monotonic", lambda: now[0])
    answers = EarlierAnswers()
    answers.add("", [1, 2, 3, 4], NONE, 60.0)
    answers.add("", [5, 6, 7, 8], NONE)
    assert found(answers, "", [1, 2, 3]) == [4]
    now[0] += 61
    assert found(answers, "", [1, 2, 3]) is None
    assert found(answers, "", [5, 6, 7]) == [8]
    answers.add("", [9, 9, 9, 9], NONE)
    assert answers.tokens == 8


@pytest.mark.parametrize("drop", ["forget", "forget_modules", "clear", "displace"])
def test_dropped_answer_is_marked_as_gone(drop, monkeypatch):
    monkeypatch.setattr(text_index, "MOST_OF_SALT", 6)
    answers = EarlierAnswers()
    answers.add("", [1, 2, 3, 4], frozenset({b"key"}))
    match = answers.find("", GrowingIndex([1, 2, 3]))
    assert match is not None
    assert not match[0].gone
    match_of = {
        "forget": lambda: answers.forget_salt(""),
        "forget_modules": lambda: answers.forget_modules(frozenset({b"key"})),
        "clear": answers.clear,
        "displace": lambda: answers.add("", [5, 6, 7, 8], NONE),
    }
    match_of[drop]()
    assert match[0].gone
