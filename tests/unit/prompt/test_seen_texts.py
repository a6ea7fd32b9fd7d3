"""The table of texts by hash: by salt, and bounded."""

from __future__ import annotations

import hashlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from inlay.prompt.seen_pieces import SeenTexts, is_hash, text_hash


def test_a_hash_is_the_sha256_of_the_utf8_bytes():
    assert text_hash("Zürich\n") == hashlib.sha256("Zürich\n".encode()).hexdigest()
    assert is_hash(text_hash("\ud800"))
    assert not any(map(is_hash, ["a" * 63, "A" * 64, "a" * 64 + "\n", 5, None]))


def test_texts_of_another_salt_are_unknown():
    table = SeenTexts()
    table.note("a", ["one", "two"])
    table.note("b", ["two"])
    hashes = [text_hash("one"), text_hash("two")]
    assert table.find("a", hashes) == ["one", "two"]
    assert table.find("b", hashes) == [None, "two"]
    table.forget("a")
    assert table.find("a", hashes) == [None, None]
    assert table.find("b", hashes) == [None, "two"]
    table.forget("b")
    assert table.bytes == 0


def test_a_full_table_keeps_the_texts_of_small_salts():
    table = SeenTexts(max_bytes=20_000)
    table.note("small", ["mine"])
    for number in range(200):
        table.note("large", [f"text {number}"])
    assert table.find("small", [text_hash("mine")]) == ["mine"]
    assert table.find("large", [text_hash("text 0"), text_hash("text 199")]) == [None, "text 199"]


def test_full_table_drops_several_texts_at_once():
    """Each time it compares all salts, so it must not do that for every text."""
    table, sizes = SeenTexts(max_bytes=400_000), [0]
    for number in range(4_000):
        table.note(f"salt {number}", ["text"])
        sizes.append(table.bytes)
    assert max(sizes) <= 400_000
    assert 0 < sum(after <= before for before, after in pairwise(sizes)) < 100


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "x", "y" * 100, "z" * 400]))), st.integers(0, 2_000)
)
def test_the_size_never_exceeds_the_bound(noted, most):
    table = SeenTexts(max_bytes=most)
    for salt, text in noted:
        table.note(salt, [text])
        assert 0 <= table.bytes <= most
    for salt in "ab":
        table.forget(salt)
    assert table.bytes == 0
