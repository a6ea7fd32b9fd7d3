"""Stored answers stay within their bounds of number, size and time, for each tenant and in all."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

from inlay.api.call import StoredAnswer
from inlay.server.stored_answers import Bounds, StoredAnswers
from tests.clock import ManualClock


def answer(size: int = 0) -> StoredAnswer:
    return StoredAnswer({"output": "x" * size}, ())


def stored_answers(clock: ManualClock | None = None, **bounds: float) -> StoredAnswers:
    wide: dict[str, Any] = {"answers": 100, "tenant_bytes": 2**20, "total_bytes": 2**20, "lifetime_s": 100.0}
    return StoredAnswers(Bounds(**{**wide, **bounds}), clock=clock or ManualClock())


def test_an_answer_belongs_to_its_tenant() -> None:
    stored = stored_answers()
    assert stored.keep("ann", "a", answer())
    assert stored.get("ann", "a") == answer()
    assert stored.get("bob", "a") is None
    assert not stored.delete("bob", "a")
    assert list(stored.of("ann")) == ["a"]
    assert list(stored.of("bob")) == []
    assert stored.delete("ann", "a")
    assert stored.get("ann", "a") is None


def test_the_oldest_answers_of_a_tenant_are_dropped_first() -> None:
    stored = stored_answers(answers=2)
    stored.keep("bob", "z", answer())
    for name in "abc":
        stored.keep("ann", name, answer())
    assert (list(stored.of("ann")), list(stored.of("bob"))) == (["b", "c"], ["z"])


def test_bytes_are_bounded_for_a_tenant_and_in_all() -> None:
    stored = stored_answers(tenant_bytes=300, total_bytes=400)  # two answers of a tenant, three in all
    for tenant in ("ann", "bob"):
        for name in "abc":
            assert stored.keep(tenant, name, answer(100))
    assert (list(stored.of("ann")), list(stored.of("bob"))) == (["c"], ["b", "c"])
    assert not stored.keep("ann", "large", answer(400))


def test_memory_is_as_large_as_the_counted_bytes() -> None:
    stored = stored_answers(tenant_bytes=2**22, total_bytes=2**22)
    part = {"role": "user", "content": [{"type": "input_text", "text": letter} for letter in "abcdefgh" * 8]}
    tracemalloc.start()
    try:
        stored.keep("ann", "a", StoredAnswer({}, tuple(json.loads(json.dumps([part] * 1_000)))))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stored.size("ann", "a") < taken < 1.2 * stored.size("ann", "a")
    assert (stored.size("bob", "a"), stored.size("ann", ["a"])) == (0, 0)


def test_answers_expire() -> None:
    clock = ManualClock()
    stored = stored_answers(clock, lifetime_s=10)
    stored.keep("ann", "a", answer())
    clock.now = 9
    stored.keep("ann", "b", answer())
    clock.now = 10
    assert list(stored.of("ann")) == ["b"]
    assert stored.get("ann", "a") is None


def test_answer_stored_twice_counts_once() -> None:
    stored = stored_answers(answers=2)
    for name in ("a", "b", "b"):
        stored.keep("ann", name, answer())
    assert list(stored.of("ann")) == ["a", "b"]


def test_random_operations_equal_a_plain_list() -> None:
    """Compared with a list of all answers, oldest first."""
    draw, clock = random.Random(0), ManualClock()
    stored = stored_answers(clock, answers=3, tenant_bytes=200, total_bytes=330, lifetime_s=9.0)
    expected: list[tuple[str, str, int, float]] = []
    for _ in range(3_000):
        tenant, name, size = draw.choice("abcd"), draw.choice("xyzuv"), draw.randrange(60)
        clock.now += draw.random()
        expected = [one for one in expected if one[3] > clock.now]
        kind = draw.random()
        if kind < 0.7:
            assert stored.keep(tenant, name, answer(size))
            size += len('{"output": ""}')
            expected = [one for one in expected if one[:2] != (tenant, name)]
            while len(mine := [one for one in expected if one[0] == tenant]) >= 3 or sum_of(mine) + size > 200:
                expected.remove(mine[0])
            while sum_of(expected) + size > 330:
                expected.pop(0)
            expected.append((tenant, name, size, clock.now + 9.0))
        elif kind < 0.9:
            known = [one for one in expected if one[:2] == (tenant, name)]
            assert stored.delete(tenant, name) == bool(known)
            expected = [one for one in expected if one not in known]
        assert stored.names(tenant) == [one[1] for one in expected if one[0] == tenant]


def sum_of(answers: list[tuple[str, str, int, float]]) -> int:
    return sum(size for _, _, size, _ in answers)
