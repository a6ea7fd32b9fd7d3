"""Chunks whose borders stay in place when text elsewhere changes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import ParameterError
from inlay.retrieval import chunks

WORDS = "ship harbour captain founded river machine garden minister letter winter copper bridge".split()  # noqa: SIM905


def article(seed: int, paragraphs: int = 60) -> list[str]:
    draw = random.Random(seed)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(6, 14))).capitalize() + "."

    return [" ".join(sentence() for _ in range(draw.randint(2, 7))) for _ in range(paragraphs)]


@given(st.text(alphabet="ab. \n", max_size=400), st.integers(1, 20), st.integers(2, 5))
def test_joined_chunks_are_the_text(text, least, times):
    assert "".join(chunks(text, least=least, most=least * times)) == text


def test_chunks_keep_their_bounds():
    found = chunks("\n\n".join(article(0)))
    assert all(len(chunk) <= 2_000 for chunk in found)
    assert all(len(chunk) >= 400 for chunk in found[:-1])


@pytest.mark.parametrize("edit", ["insert", "delete", "change"])
def test_an_edit_changes_few_chunks(edit):
    for seed in range(10):
        paragraphs = article(seed)
        before = set(chunks("\n\n".join(paragraphs)))
        middle = len(paragraphs) // 2
        if edit == "insert":
            paragraphs.insert(middle, "A new paragraph about a lighthouse. It stands on a rock.")
        elif edit == "delete":
            del paragraphs[middle]
        else:
            paragraphs[middle] = f"Now. {paragraphs[middle]}"
        after = chunks("\n\n".join(paragraphs))
        assert len([chunk for chunk in after if chunk not in before]) <= 4, seed


@pytest.mark.parametrize("sizes", [(0, 10), (6, 10)])
def test_wrong_sizes_are_rejected(sizes):
    with pytest.raises(ParameterError) as error:
        chunks("text", least=sizes[0], most=sizes[1])
    assert error.value.code == "retrieval.wrong_setting"
