"""Lifetimes: the claim that ends last counts, each end is reported once, and claims are bounded."""

from __future__ import annotations

import hashlib
import math
import weakref

import pytest

from inlay.errors import ParameterError
from inlay.kv import lifetimes
from inlay.kv.identity import Context, TokenRun
from inlay.kv.lifetimes import Lifetimes, Passage
from inlay.prompt.inputs import parse_ttl
from tests.raising import raises
from tests.unit.kv.offload.segments import KEYS, spec_of


def over(lives: Lifetimes, now: float, most: int = 64) -> list[list[object]]:
    return [[claim.thing for claim in claims] for claims in lives.expired(now, most)]


def run_of(tokens: int) -> TokenRun:
    return TokenRun(tuple(range(tokens)), 0, Context().keep_private(b"ann"))


def passages(parts: int, tokens: int = 10, more: int = 0) -> list[Passage]:
    """Of a prompt of so many parts, and ``more`` tokens after them."""
    run = run_of(parts * tokens + more)
    return Passage.all_of(run, [(at, at + tokens) for at in range(0, parts * tokens, tokens)], KEYS)


def test_the_claim_that_ends_last_counts():
    lives, spec = Lifetimes(), spec_of(1)
    assert lives.claim(spec, 300, now=0)
    assert not lives.claim(spec, 60, now=100)
    assert lives.claim(spec, 3600, now=100)
    assert over(lives, 3699) == []
    assert over(lives, 3700) == [[spec]]
    assert over(lives, 9999) == []
    lives.claim(spec, math.inf, now=0)
    lives.claim(spec, 5, now=0)
    assert over(lives, 1e15) == []
    lives.forget(spec)
    assert (len(lives), lives.tokens) == (0, 0)


def test_claim_on_a_read_segment_ends_later():
    lives, spec = Lifetimes(), spec_of(1)
    lives.claim(spec, 5, now=0)
    assert over(lives, 5) == [[spec]]
    lives.again(spec, 5)
    assert over(lives, 5.5) == []
    assert over(lives, 7) == [[spec]]


def test_expired_claims_are_returned_in_batches():
    lives, specs = Lifetimes(), [spec_of(number) for number in range(5)]
    for number, spec in enumerate(specs):
        lives.claim(spec, 5 + number, now=0)
    assert over(lives, 99, most=3) == [[spec] for spec in specs[:3]]
    assert over(lives, 99, most=3) == [[spec] for spec in specs[3:]]


def test_passage_key_depends_only_on_text_and_prefix():
    alone = Passage.all_of(run_of(30), [(10, 20)], KEYS)[0]
    first, second, third = passages(3, more=7)
    assert (first.first, second.end, second.run) == (0, 20, third.run)
    assert alone.key == second.key
    assert len({first.key, second.key, third.key, Passage.all_of(run_of(30), [(5, 20)], KEYS)[0].key}) == 4
    assert len(alone.run.ids) == 20, "of what stands behind it nothing is kept"


@pytest.mark.parametrize("parts", [500, 2000])
def test_parts_of_a_prompt_are_hashed_and_counted_once(monkeypatch, parts):
    hashed = []

    class Counting:
        def __init__(self, said=b"", inner=None):
            self.inner = sha256(said) if inner is None else inner

        def update(self, said):
            hashed.append(len(said))
            self.inner.update(said)

        def copy(self):
            return Counting(inner=self.inner.copy())

        def digest(self):
            return self.inner.digest()

    sha256 = hashlib.sha256
    monkeypatch.setattr(lifetimes.hashlib, "sha256", Counting)
    made = passages(parts)
    assert sum(hashed) < 4 * 10 * parts + 16 * parts, "4 bytes of each token, and where each part begins"
    assert len({id(passage.run) for passage in made}) == 1, "nothing is copied"
    lives = Lifetimes()
    for passage in made:
        lives.claim(passage, 5, now=0)
    assert lives.tokens == parts * (10 + lifetimes.CLAIM_TOKENS)
    assert over(lives, 5) == [made], "they are over together"
    assert lives.tokens == 0


def test_renewed_claims_outlive_the_rest_of_the_prompt():
    lives, earlier, later = Lifetimes(), passages(4), passages(2)
    for passage in earlier:
        lives.claim(passage, 5, now=0)
    for passage in later:
        lives.claim(passage, 5, now=3)
    assert over(lives, 5) == [earlier[2:]]
    assert lives.tokens == 2 * (10 + lifetimes.CLAIM_TOKENS), "the longer run is held no more"
    assert over(lives, 8) == [later]


def test_oldest_claims_of_the_largest_salt_are_dropped(monkeypatch):
    monkeypatch.setattr(lifetimes, "MOST_TOKENS", 40 * (40 + lifetimes.CLAIM_TOKENS))
    lives, bobs, anns = Lifetimes(), [spec_of(1), spec_of(2)], [spec_of(3 + number) for number in range(100)]
    for spec in bobs:
        lives.claim(spec, 5, now=0, salt="bob")
    for spec in anns:
        lives.claim(spec, 3600, now=0, salt="ann")
        assert lives.tokens <= lifetimes.MOST_TOKENS
    assert [lives.left_s(spec, now=0) for spec in bobs] == [5, 5]
    left = [lives.left_s(spec, now=0) for spec in anns]
    dropped = left.count(math.inf)
    assert 60 <= dropped < 70
    assert left == [math.inf] * dropped + [3600] * (100 - dropped)
    assert over(lives, 5) == [[spec] for spec in bobs], "what is dropped is not over"
    assert over(lives, 3600, most=100) == [[spec] for spec in anns[dropped:]]
    assert (len(lives), lives.tokens) == (0, 0)


def test_renewed_claims_leave_no_memory():
    """A run is as long as a prompt, and its lifetime may be a year."""

    class Run(TokenRun):
        """One that can be referred to weakly."""

    lives, runs = Lifetimes(), []
    for now in range(50):
        run = Run(tuple(range(100)), 0, Context())
        runs.append(weakref.ref(run))
        lives.claim(Passage(run, 0, 100, b"key"), 3e7, now=now)
    del run
    assert sum(run() is not None for run in runs) == 1
    assert lives.tokens == 100 + lifetimes.CLAIM_TOKENS


@pytest.mark.parametrize(
    ("said", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("2d", 172_800), ("inf", math.inf)]
)
def test_valid_lifetimes_are_parsed(said, seconds):
    assert parse_ttl(said) == seconds


@pytest.mark.parametrize("said", ["", "5", "0m", "-5m", "5 m", "1w", "367d", "forever", 300, None, "5m\n"])
def test_invalid_lifetimes_are_rejected(said):
    with raises("parameter.invalid_lifetime", ParameterError):
        parse_ttl(said)
