"""The recomputed tokens, and the composed prompts that follow from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.kv.identity import Context, KeyMaker, specify
from inlay.policy import Recompute
from inlay.prompt.composed import (
    CachedSpan,
    NewSpan,
    RecomputedSpan,
    choose_tokens,
    compose_parts,
    expected_deviations,
    open_end,
)
from inlay.prompt.request import PromptPart

KEYS = KeyMaker(fingerprint=b"model", kv_dtype="float32", codec="none", salt=b"", positioned=False)
FRONT = specify((1, 2), 0, (), KEYS)
A, B = (specify(tuple(range(n, n + 8)), 0, (), KEYS) for n in (10, 20))


def part(spec, start):
    return PromptPart(spec.ids, start, owned=False, candidates=(spec,), encode=True)


PARTS = [part(FRONT, 0), part(A, 2), part(B, 10), PromptPart((7, 7), 18)]
PLAIN = compose_parts(PARTS)


def profiles(**moved):
    return {{"a": A, "b": B}[name].key: np.array(values, dtype=np.float16) for name, values in moved.items()}


def test_linked_recomputes_the_first_tokens_of_each_module():
    choice = choose_tokens(Recompute("linked", 3), PLAIN, {})
    assert choice.offsets == {2: (0, 1, 2), 10: (0, 1, 2)}  # the prefix is exact
    assert (choice.tokens, choice.linked) == (6, 6)


def test_profiled_recomputes_the_largest_deviations():
    moved = profiles(a=[0, 0, 0, 9, 0, 0, 0, 1], b=[0, 2, 0, 3, 0, 3, 0, 0])
    choice = choose_tokens(Recompute("profiled", 0.25), PLAIN, moved)
    assert choice.offsets == {2: (3,), 10: (1, 3, 5)}
    assert (choice.tokens, choice.linked) == (4, 0)
    # no token with a small deviation
    assert choose_tokens(Recompute("profiled", 0.06), PLAIN, moved).offsets == {2: (3,)}


def test_expected_deviation_grows_with_preceding_text():
    """As the fourth root of how many tokens a module's encoding has not seen: 2 of text it has, or none at all."""
    moved = profiles(a=[4] * 8, b=[4] * 8)
    expected = expected_deviations(PLAIN, moved)
    assert expected[2].tolist() == pytest.approx([4 * 2**0.25] * 8)
    assert expected[10].tolist() == pytest.approx([4 * 10**0.25] * 8)
    seen = specify(A.ids, 2, (FRONT,), KEYS)
    behind = compose_parts([part(FRONT, 0), part(B, 2), part(seen, 10), PromptPart((7, 7), 18)])
    expected = expected_deviations(behind, {seen.key: moved[A.key]})
    assert expected[10].tolist() == pytest.approx([4 * 8**0.25] * 8), "it was encoded behind the text in front"
    assert choose_tokens(Recompute("profiled", 0.25), PLAIN, profiles(a=[5] * 8, b=[4] * 8)).offsets == {
        10: (0, 1, 2, 3)
    }
    assert choose_tokens(Recompute("profiled", 0.25), PLAIN, profiles(a=[7] * 8, b=[4] * 8)).offsets == {
        2: (0, 1, 2, 3)
    }


def test_module_without_a_profile_recomputes_its_first_tokens():
    choice = choose_tokens(Recompute("profiled", 0.25), PLAIN, profiles(a=[0, 0, 0, 9, 0, 0, 0, 1]))
    assert choice.offsets == {2: (3, 7), 10: (0, 1)}
    assert (choice.tokens, choice.linked) == (4, 2)


def test_nothing_is_recomputed_if_zero_or_all_exact():
    assert not choose_tokens(None, PLAIN, {}).offsets
    assert not choose_tokens(Recompute("linked", 0), PLAIN, {}).offsets
    assert not choose_tokens(Recompute("linked", 5), compose_parts(PARTS[:1]), {}).offsets


def described(composed):
    """Each part as (kind, first position, tokens)."""
    return [
        ("recomputed", each.positions[0], len(each.ids))
        if isinstance(each, RecomputedSpan)
        else ("new", each.start, len(each.ids))
        if isinstance(each, NewSpan)
        else ("cached", each.start, each.length - len(each.left_out))
        for each in composed
    ]


def test_recomputed_prefix_is_a_new_span():
    recomputed = compose_parts(PARTS, recomputed_offsets={2: (0, 1), 10: (0, 1, 4)})
    assert described(recomputed) == [
        ("cached", 0, 2),
        ("new", 2, 2),
        ("cached", 4, 6),
        ("new", 10, 2),
        ("cached", 12, 5),
        ("recomputed", 14, 1),
        ("new", 18, 2),
    ]


def test_wholly_recomputed_module_is_a_new_span():
    whole = compose_parts(PARTS, recomputed_offsets={2: tuple(range(8)), 10: tuple(range(8))})
    text = compose_parts([PARTS[0], PromptPart(A.ids + B.ids + (7, 7), 2)])
    assert described(whole) == described(text)
    assert whole[-1].run.digest == text[-1].run.digest


def test_module_at_the_end_keeps_its_last_token_new():
    ends = PARTS[:3]
    offsets = choose_tokens(Recompute("profiled", 1), open_end(compose_parts(ends)), profiles(b=[1] * 8)).offsets
    assert offsets[10] == tuple(range(7))
    composed_prompt = open_end(compose_parts(ends, recomputed_offsets={10: (2, 3)}))
    assert described(composed_prompt)[-3:] == [("cached", 10, 5), ("recomputed", 12, 2), ("new", 17, 1)]


choices = st.fixed_dictionaries({2: st.sets(st.integers(0, 7)), 10: st.sets(st.integers(0, 7))})


@given(choices, choices)
def test_following_text_depends_on_recomputed_tokens(one, other):
    ends = [
        compose_parts(PARTS, recomputed_offsets={start: tuple(sorted(some)) for start, some in each.items()})[-1].run
        for each in (one, other)
    ]
    digests = [run.after(len(run.ids)).digest(run.end) for run in ends]
    assert (digests[0] == digests[1]) == (one == other)


@given(choices)
def test_every_token_is_in_one_span(chosen):
    composed = compose_parts(PARTS, recomputed_offsets={start: tuple(sorted(some)) for start, some in chosen.items()})
    seen: dict[int, int] = {}
    for each in composed:
        if isinstance(each, CachedSpan):
            read = [n for n in range(each.first, each.first + each.length) if n not in each.left_out]
            seen |= {each.start + n - each.first: each.spec.ids[n] for n in read}
            assert each.read(5) == sum(n < 5 for n in read)
        elif isinstance(each, RecomputedSpan):
            seen |= dict(zip(each.positions, each.ids, strict=True))
        else:
            seen |= dict(zip(range(each.start, each.start + len(each.ids)), each.ids, strict=True))
    assert [seen[position] for position in sorted(seen)] == [token for each in PARTS for token in each.ids]
    assert len(seen) == sum(
        each.length - len(each.left_out) if isinstance(each, CachedSpan) else len(each.ids) for each in composed
    )


def test_recomputed_span_does_not_match_text():
    """Their ids follow each other in a run, which is no text: nothing that reads so is found there, or finds it."""
    (run,) = (
        each.run for each in compose_parts(PARTS, recomputed_offsets={10: (2, 5)}) if isinstance(each, RecomputedSpan)
    )
    behind = compose_parts([*PARTS[:3], PromptPart(run.ids, 18)], recomputed_offsets={10: (2, 5)})[-1]
    assert isinstance(behind, NewSpan)
    assert behind.run.digest != run.digest
    assert run.before == Context.from_bytes(run.before.to_bytes())


def test_recomputed_spans_are_kept_apart_by_salt():
    runs = [
        [
            each.run
            for each in compose_parts(PARTS, salt=salt, recomputed_offsets={2: (0,), 10: (2, 5)})
            if not isinstance(each, CachedSpan)
        ]
        for salt in (b"", b"one", b"two")
    ]
    assert len({run.digest for one in runs for run in one}) == 9
