"""Which neighbouring runs become one candidate."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.authoring.extract.find import find
from inlay.authoring.extract.runs import END, Corpus, Runs, find_runs, join_runs, repeated_windows
from tests.unit.authoring.extract.helpers import corpus_of, plain

A = "一二三四五六七八九十百千"  # each character is a word
B = "甲乙丙丁戊己庚辛壬癸子丑"
C = "東西南北春夏秋冬日月火水"


def found(*texts: str, size: int = 4, least: int = 2) -> dict[str, int]:
    """Each run that is found, with the places where it stands."""
    corpus = corpus_of(plain(*texts))
    return occurrences(corpus, find(corpus, size=size, least=least).runs)


def occurrences(corpus: Corpus, runs: Runs) -> dict[str, int]:
    texts = corpus.spans(runs.starts, runs.stops)
    return {text: texts.count(text) for text in texts}


def test_document_is_one_run_at_any_position():
    assert found(f"x{A}y", f"{A}zz", f"w{B}v{A}", f"{B}q") == {A: 3, B: 2}


def test_texts_always_found_together_are_one_run():
    assert found(f"1{A}{B}2", f"3{A}{B}4") == {A + B: 2}


def test_overlaps_are_split_where_prompts_differ():
    assert found(f"1{A}{B}2", f"3{A}{B}4", f"5{B}{C}6", f"7{B}{C}8") == {A: 2, B: 4, C: 2}


def test_document_truncated_in_few_prompts_stays_whole():
    cut_off = [f"{number}{A[:-number]}!" for number in range(1, 6)]
    whole = [f"{number}{A}{number}" for number in range(60)]
    assert found(*whole, *cut_off, least=6)[A] == 60


def test_shared_heading_is_joined_with_the_following_text():
    texts = [f"{number}\n案{document}{number}" for number in range(5) for document in (A, B)]
    assert found(*texts) == {f"\n案{A}": 5, f"\n案{B}": 5}


def test_line_break_is_joined_with_the_preceding_line():
    texts = [f"{number}?{first}\n{second}\n?{number}" for number, (first, second) in enumerate([(A, B), (B, A)] * 3)]
    assert found(*texts) == {f"{A}\n": 6, f"{B}\n": 6}


def test_document_is_not_multiplied_by_its_neighbours():
    short = [f"{one}春夏" for one in "甲乙丙丁戊"]
    assert found(*[f"{number}{A}{after}{number}" for number in range(4) for after in short])[A] == 20


def test_short_run_does_not_lose_occurrences_of_a_document():
    followed = [f"{number}{A}春{number}" for number in range(22)]
    assert found(*followed, *[f"{number}{A}{number}" for number in (22, 23)])[A] == 24
    assert found(*followed)[f"{A}春"] == 22


@settings(deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=7),
    size=st.integers(1, 7),
    least=st.integers(2, 4),
    break_word=st.integers(0, 3),
)
def test_joining_preserves_every_word(prompts, size, least, break_word):
    words = np.array([word for prompt in prompts for word in (*prompt, END)], np.int32)
    ends = np.cumsum([len(prompt) + 1 for prompt in prompts])
    runs = find_runs(repeated_windows(words, size, least, ends), size)
    joined = join_runs(runs, words == break_word, size, least)
    covered = [place for start, stop in zip(joined.starts, joined.stops, strict=True) for place in range(start, stop)]
    assert covered == [
        place for start, stop in zip(runs.starts, runs.stops, strict=True) for place in range(start, stop)
    ]
    texts = {(run, tuple(words[a:b])) for run, a, b in zip(joined.ids, joined.starts, joined.stops, strict=True)}
    assert len(texts) == len({run for run, _ in texts})
    assert not any(END in text for _, text in texts)
