"""Earlier answers are found under their salt, and their number is bounded."""

from __future__ import annotations

import pytest

from inlay.engine.text_index import MOST_OF_ANSWER, MOST_OF_SALT, MOST_TOKENS, EarlierAnswers, GrowingIndex

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


def fill(answers: EarlierAnswers, salt: str, first: int = 0) -> None:
    """As many answers as a salt may have, each of other tokens than the last."""
    for number in range(first, first + MOST_OF_SALT, MOST_OF_ANSWER):
        answers.add(salt, range(number, number + MOST_OF_ANSWER), NONE)


def test_oldest_answers_of_a_salt_are_evicted_first():
    answers = EarlierAnswers()
    fill(answers, "")
    answers.add("", range(100_000, 100_000 + MOST_OF_ANSWER), NONE)
    assert answers.tokens == MOST_OF_SALT
    assert found(answers, "", [0, 1, 2]) is None
    second = MOST_OF_ANSWER
    assert found(answers, "", [second, second + 1, second + 2])[0] == second + 3


def test_salts_without_a_new_answer_are_evicted_first():
    answers, salts = EarlierAnswers(), [str(number) for number in range(MOST_TOKENS // MOST_OF_SALT)]
    for salt in (*salts, salts[0], "new"):
        fill(answers, salt)
    assert answers.tokens == MOST_TOKENS
    kept = {salt: found(answers, salt, [0, 1, 2]) is not None for salt in (*salts, "new")}
    assert kept == dict.fromkeys((*salts, "new"), True) | {salts[1]: False}


def test_a_long_answer_is_kept_at_its_end():
    answers = EarlierAnswers()
    answers.add("", range(100 + MOST_OF_ANSWER), NONE)
    assert answers.tokens == MOST_OF_ANSWER
    assert found(answers, "", [100, 101, 102])[0] == 103
    assert found(answers, "", [99, 100, 101]) is None


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


def test_forgotten_modules_of_many_salts_leave_no_tokens():
    answers = EarlierAnswers()
    for number in range(100):
        answers.add(f"salt {number}", [1, 2, 3, 4, 5], frozenset([b"x"]))
    answers.forget_modules(frozenset([b"x"]))
    assert answers.tokens == 0


def test_an_answer_has_the_lifetime_of_its_prompt(clock):
    answers = EarlierAnswers()
    answers.add("", [1, 2, 3, 4], NONE, 60.0)
    answers.add("", [5, 6, 7, 8], NONE)
    assert found(answers, "", [1, 2, 3]) == [4]
    clock.advance(61)
    assert found(answers, "", [1, 2, 3]) is None
    assert found(answers, "", [5, 6, 7]) == [8]
    answers.add("", [9, 9, 9, 9], NONE)
    assert answers.tokens == 8


@pytest.mark.parametrize("drop", ["forget", "forget_modules", "clear", "displace"])
def test_dropped_answer_is_marked_as_gone(drop):
    answers = EarlierAnswers()
    answers.add("", [1, 2, 3, 4], frozenset({b"key"}))
    match = answers.find("", GrowingIndex([1, 2, 3]))
    assert match is not None
    assert not match[0].gone
    match_of = {
        "forget": lambda: answers.forget_salt(""),
        "forget_modules": lambda: answers.forget_modules(frozenset({b"key"})),
        "clear": answers.clear,
        "displace": lambda: fill(answers, "", first=10),
    }
    match_of[drop]()
    assert match[0].gone
