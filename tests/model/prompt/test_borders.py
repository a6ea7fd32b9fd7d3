"""Pieces of token ids: their sizes, their borders, and that equal text is cut alike anywhere."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from inlay.prompt.seen_pieces import LEAST, MOST, Borders
from tests.model.api.tool_templates import tool_tokenizer

WORDS = (
    "the",
    "lamp",
    "of",
    "a",
    "quiet",
    "harbour",
    "keeps",
    "seven",
    "ropes",
    "under",
    "grey",
    "stone",
    "and",
    "rain",
)


def prose(seed: int, sentences: int) -> str:
    """Return text with a blank line after some sentences."""
    rng = random.Random(seed)
    text = ""
    for _ in range(sentences):
        text += " ".join(rng.choices(WORDS, k=rng.randint(4, 14))).capitalize() + rng.choice((". ", ". ", ".\n\n"))
    return text


@pytest.fixture(scope="module")
def borders() -> Borders:
    return Borders(tool_tokenizer("qwen"))


def ids_of(text: str) -> np.ndarray:
    return np.array(tool_tokenizer("qwen").encode(text, add_special_tokens=False), np.uint32)


def texts(borders: Borders, ids: np.ndarray) -> list[str]:
    decode = tool_tokenizer("qwen").decode
    return [str(decode(ids[first:end].tolist())) for first, end in borders.pieces(ids)]


@pytest.mark.parametrize("seed", range(20))
def test_text_is_split_alike_after_any_text_except_near_its_ends(borders: Borders, seed: int) -> None:
    text, rng = prose(seed, 120), random.Random(seed)
    before, behind = prose(seed + 1000, rng.randint(1, 40)), prose(seed + 2000, rng.randint(0, 40))
    size, first = len(text), len(before)  # a token a byte
    alone = [piece for piece in borders.pieces(ids_of(text)) if piece[0] >= 320 and piece[1] <= size - 336]
    again = {(start - first, end - first) for start, end in borders.pieces(ids_of(before + text + behind))}
    assert len(alone) > 8
    assert set(alone) <= again


@pytest.mark.parametrize("text", [prose(3, 400), "a" * 5000, "x. " * 2000, "\n\n" * 900, "# a\n" * 900, ""])
def test_pieces_have_bounded_sizes_and_do_not_overlap(borders: Borders, text: str) -> None:
    ids = ids_of(text)
    pieces = borders.pieces(ids)
    assert all(LEAST <= end - first <= MOST for first, end in pieces)
    assert all(one[1] <= other[0] for one, other in pairwise(pieces))
    covered = sum(end - first for first, end in pieces)
    assert covered >= len(ids) - 2 * LEAST  # the short pieces at both ends are left out


def test_text_without_borders_is_split_from_the_border_before_it(borders: Borders) -> None:
    flat = "a" * 3000
    one, other = (
        texts(borders, ids_of(front + "# Title\n" + flat)) for front in (f"{prose(1, 30)}\n", f"{prose(2, 45)}\n")
    )
    assert one[-3:] == other[-3:]
    assert "".join(one[-3:]) == "# Title\n" + flat


def test_borders_are_at_headings_and_blank_lines(borders: Borders) -> None:
    sections = [f"# Part {n}\n{prose(n, 6).replace(chr(10), ' ')}\n" for n in range(12)]
    assert texts(borders, ids_of("".join(sections))) == sections
    pieces = texts(borders, ids_of(prose(5, 300)))
    ends = sum(piece.endswith("\n\n") for piece in pieces)
    assert ends >= 0.9 * (len(pieces) - 1)


def test_a_piece_has_no_special_token(borders: Borders) -> None:
    tokenizer = tool_tokenizer("qwen")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = np.concatenate([ids_of(prose(1, 40)), [end], ids_of(prose(2, 40))]).astype(np.uint32)
    at = int(np.flatnonzero(ids == end)[0])
    pieces = borders.pieces(ids)
    assert all(not first <= at < last for first, last in pieces)
    assert any(last == at for _, last in pieces)
    assert any(first == at + 1 for first, _ in pieces)


def test_unknown_ids_are_in_no_piece():
    """A model may have more ids than its tokenizer, and a prompt of token ids may have any of them."""
    tokenizer = tool_tokenizer("qwen")
    ids = np.array(tokenizer.encode(prose(1, 40), add_special_tokens=False), np.uint32)
    beyond = np.array([len(tokenizer), len(tokenizer) + 5], np.uint32)
    pieces = Borders(tokenizer).pieces(np.concatenate((ids, beyond, ids)))
    assert pieces
    assert all(end <= len(ids) or first >= len(ids) + 2 for first, end in pieces)
