"""The table of pieces: second sightings, its size, and its tenants."""

from __future__ import annotations

import random
import tracemalloc

from inlay.prompt.seen_pieces import ENTRY_BYTES, TAGS, Seen, SeenPieces

ONCE, TWICE, OFTEN = Seen


def flood(seen: SeenPieces, count: int, tenant: str = "", salt: str = "", seed: int = 0) -> None:
    """Note pieces that come once."""
    rng = random.Random(seed)
    for _ in range(count // 100):
        seen.note(tenant, salt, [(rng.getrandbits(62), rng.randrange(TAGS)) for _ in range(100)])


def test_the_second_and_the_third_text_before_a_piece_are_told_apart() -> None:
    seen = SeenPieces()
    assert seen.note("", "", [(5, 1)]) == [ONCE]
    assert seen.note("", "", [(5, 1)]) == [ONCE]  # the same prompt again
    assert seen.note("", "", [(5, 2), (6, 2)]) == [TWICE, ONCE]
    assert seen.note("", "", [(5, 3), (6, 3)]) == [OFTEN, TWICE]
    assert seen.note("", "", [(5, 3), (5, 1), (5, 2)]) == [OFTEN] * 3


def test_conversations_with_the_first_two_texts_continue_as_they_began() -> None:
    seen = SeenPieces()
    for tag, other in ((0, TAGS - 1), (TAGS - 1, 0), (7, 8)):
        piece = 100 + tag
        assert seen.note("", "", [(piece, tag), (piece, other)]) == [ONCE, TWICE]
        assert seen.note("", "", [(piece, tag), (piece, other)]) == [ONCE, ONCE]
        assert seen.note("", "", [(piece, 99)]) == [OFTEN]


def test_neither_salts_nor_tenants_share_pieces() -> None:
    seen = SeenPieces()
    seen.note("a", "x", [(5, 1)])
    assert seen.note("a", "y", [(5, 2)]) == [ONCE]
    assert seen.note("b", "x", [(5, 2)]) == [ONCE]
    seen.forget("x")
    assert seen.note("a", "x", [(5, 2)]) == [ONCE]
    assert seen.note("a", "y", [(5, 3)]) == [TWICE]


def test_endless_new_text_drops_no_known_piece() -> None:
    seen = SeenPieces(2000 * ENTRY_BYTES)
    known = [(n, 1) for n in range(500)]
    seen.note("", "", known)
    seen.note("", "", [(piece, 2) for piece, _ in known])
    flood(seen, 20_000)
    assert seen.bytes <= 2000 * ENTRY_BYTES
    assert seen.note("", "", [(piece, 3) for piece, _ in known]) == [OFTEN] * 500


def test_a_tenant_that_floods_the_table_drops_its_own_pieces() -> None:
    seen = SeenPieces(4000 * ENTRY_BYTES)
    seen.note("small", "", [(n, 1) for n in range(300)])
    for n in range(200):
        flood(seen, 100, "large", f"salt {n}", seed=n)
        twice = [(n * 1000 + k, 1) for k in range(100)]
        seen.note("large", f"salt {n}", twice)
        seen.note("large", f"salt {n}", [(piece, 2) for piece, _ in twice])
    assert seen.bytes <= 4000 * ENTRY_BYTES
    assert seen.note("small", "", [(n, 2) for n in range(300)]) == [TWICE] * 300


def test_new_pieces_are_learned_while_known_ones_fill_the_table() -> None:
    seen = SeenPieces(2000 * ENTRY_BYTES)
    for first in range(0, 10_000, 100):
        pieces = [(first + n, 1) for n in range(100)]
        seen.note("", "", pieces)
        assert seen.note("", "", [(piece, 2) for piece, _ in pieces]) == [TWICE] * 100


def test_the_table_takes_as_much_memory_as_it_says() -> None:
    seen = SeenPieces(8 << 20)
    tracemalloc.start()
    try:
        flood(seen, 150_000)
        once, _ = tracemalloc.get_traced_memory()
        for number in range(500):
            pieces = [(number << 40 | n, TAGS - 2) for n in range(100)]
            seen.note("", "", pieces)
            seen.note("", "", [(piece, TAGS - 1) for piece, _ in pieces])
        known, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen.bytes <= 8 << 20
    assert max(once, known) <= 1.25 * (8 << 20)
