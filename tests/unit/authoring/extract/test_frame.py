"""The text that nearly all prompts begin with."""

from __future__ import annotations

from inlay.authoring.extract.find import find, find_frame
from inlay.authoring.extract.runs import Corpus
from tests.unit.authoring.extract.helpers import chat, corpus_of, plain

SYSTEM = ("system", "You help.")


def texts(corpus: Corpus, *, least: int = 2, size: int = 5) -> list[tuple[str | None, str]]:
    frame = find_frame(corpus, least, size)
    if frame is None:
        return []
    *whole, last = frame.example
    front = corpus.cut(last, [corpus.places(last).start + frame.opening])[0]
    return [*((corpus.roles[turn], corpus.text(turn)) for turn in whole), (corpus.roles[last], front)]


def test_plain_prompts():
    assert texts(corpus_of(plain("Be kind and brief. One", "Be kind and brief. Two"))) == [(None, "Be kind and brief.")]


def test_short_prefix_of_plain_prompts_is_whole_lines():
    assert texts(corpus_of(plain("Task:\nThe cat", "Task:\nThe dog"))) == [(None, "Task:\n")]
    assert texts(corpus_of(plain("The cat", "The dog"))) == []


def test_short_prefix_never_excludes_a_prompt():
    prompts = plain(*["Task:\nThe cat"] * 9, "Something else")
    assert texts(corpus_of(prompts), size=9) == []


def test_whole_turns_and_the_prefix_of_the_user_turn():
    prompts = chat(*([SYSTEM, ("user", f"Read this text carefully: {number}")] for number in "123"))
    assert texts(corpus_of(prompts)) == [SYSTEM, ("user", "Read this text carefully:")]


def test_example_turns_are_in_the_frame():
    shots = [("user", "1+1"), ("assistant", "2")]
    prompts = chat(*([SYSTEM, *shots, ("user", question)] for question in ("a b", "c d")))
    assert texts(corpus_of(prompts)) == [SYSTEM, *shots, ("user", "")]


def test_frame_ends_in_a_user_turn():
    prompts = chat(*([SYSTEM, ("user", "Go on."), ("assistant", f"So far {number}")] for number in "12"))
    assert texts(corpus_of(prompts)) == [SYSTEM, ("user", "Go on.")]
    assert texts(corpus_of(chat(*([("system", f"Today is {day}")] for day in ("Monday", "Friday"))))) == []


def test_one_prompt_in_ten_may_lack_the_frame():
    one = [SYSTEM, ("user", "a")]
    other = [("system", "Else."), ("user", "b")]
    for others, expected in ((1, [SYSTEM, ("user", "")]), (2, [])):
        corpus = corpus_of(chat(*[[SYSTEM, ("user", f"q {number}")] for number in range(9)], *[other] * others, one))
        assert texts(corpus) == expected
    frame = find_frame(corpus_of(chat(*[one] * 9, other)), 2, 4)
    assert frame is not None
    assert frame.prompts.tolist() == [True] * 9 + [False]


def test_character_without_xml_form_ends_the_frame():
    assert texts(corpus_of(plain("One two three four five\0six A", "One two three four five\0six B"))) == [
        (None, "One two three four five")
    ]


def test_identical_prompts_are_all_frame():
    for text in ("Same.", "It is all the same, again and again."):
        assert texts(corpus_of(plain(text, text, text))) == [(None, text)]


def test_frame_is_dropped_if_modules_save_more():
    document = "".join(chr(0x4E00 + number) for number in range(30))
    later = [[SYSTEM, ("user", str(n)), ("assistant", "Yes?"), ("user", f"{n}{document}")] for n in range(5)]
    found = find(corpus_of(chat(*later)), size=4, least=2)
    assert found.frame is None
    assert [int(length) for length in found.runs.lengths[found.runs.ids]] == [30] * 5
    early = [[SYSTEM, ("user", f"{n}{document}"), ("assistant", "Yes?")] for n in range(5)]
    assert find(corpus_of(chat(*early)), size=4, least=2).frame is not None
