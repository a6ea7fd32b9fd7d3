"""A reuse policy is parsed once, has a written form, and is ordered by how much approximation it accepts."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import ParameterError
from inlay.policy import (
    ACROSS,
    BEST,
    CEILINGS,
    CONTEXTS,
    LEVELS,
    POSITIONS,
    RECOMPUTED,
    TOLERANT,
    WORDS,
    ReusePolicy,
    default_policy,
)
from inlay.tolerance import DEFAULT, Measured, Tolerance

REUSE = ("off", "exact", *CONTEXTS)

written = st.sampled_from(WORDS)


@given(written, st.sampled_from([None, *POSITIONS]))
def test_the_written_form_reads_as_the_same_policy(word, positions):
    policy = ReusePolicy.parse(word, positions)
    assert ReusePolicy.parse(str(policy), policy.positions) == policy
    assert str(policy) == word
    assert ReusePolicy.named(word) == ReusePolicy.parse(word)


def test_modular_is_the_most_exact_form_there_is():
    """It encodes what is nowhere as ``anchored`` does, and reads what is stored more exactly, unless told not to."""
    best, fixed = ReusePolicy.parse("modular"), ReusePolicy.parse("anchored")
    assert best == BEST != fixed
    assert best.without_recompute() == fixed
    assert [ReusePolicy.parse(word).heals for word in WORDS] == [word == "modular" for word in WORDS]
    off = ReusePolicy.parse("modular+healing:off")
    assert not off.heals
    assert off.anchored
    assert off.without_recompute() == fixed
    assert [ReusePolicy.parse(word).modular for word in REUSE] == [False, False, True, True]
    assert [ReusePolicy.parse(word).reads_nothing for word in REUSE] == [True, False, False, False]
    assert [ReusePolicy.parse(word).anchored for word in REUSE] == [False, False, False, True]


@pytest.mark.parametrize(
    ("word", "near"),
    [("exat", "exact"), ("Exact", "exact"), ("modlar+linked:16", "modular"), ("anchord", "anchored"), ("atuo", "auto")],
)
def test_a_misspelt_policy_is_told_with_the_nearest_one(word, near):
    said = f"'{word.partition('+')[0]}' is no reuse policy; did you mean '{near}'?"
    with pytest.raises(ParameterError, match=f"^{re.escape(said)}$"):
        ReusePolicy.parse(word)


@pytest.mark.parametrize("word", ["", None, 3, ["off"]])
def test_what_is_no_policy_is_told_so(word):
    with pytest.raises(
        ParameterError, match=r"^reuse is .*; use one of off, exact, isolated, anchored, modular, auto$"
    ):
        ReusePolicy.parse(word)
    with pytest.raises(ParameterError, match=r"^positions is .*; use one of schema, packed$"):
        ReusePolicy.parse("off", word if word is not None else "")


def test_a_ceiling_bounds_what_is_asked_for():
    for word, ceiling in product(WORDS, LEVELS):
        policy, most = ReusePolicy.parse(word), ReusePolicy.parse(ceiling)
        assert policy.within(most) == (LEVELS.index(policy.level) <= LEVELS.index(ceiling))
        allowed = policy.within(most)
        assert ReusePolicy.bounded(policy, BEST, most) == (policy if allowed else None)
        assert ReusePolicy.bounded(None, policy, most) == (policy if allowed else most)


@given(st.lists(written, min_size=1))
def test_the_least_of_several_is_within_them_all(words):
    least = ReusePolicy.least(*words, None)
    assert str(least) in {str(ReusePolicy.parse(word)) for word in words}
    assert all(least.within(ReusePolicy.parse(word)) for word in words)


def test_positions_are_the_best_that_a_model_allows():
    assert [ReusePolicy.parse(word).settled(None).positions for word in REUSE] == ["packed"] * 4
    assert [ReusePolicy.parse(word).settled("it turns").positions for word in REUSE] == ["packed"] * 2 + ["schema"] * 2
    assert ReusePolicy.parse("off", "packed").settled("it turns").packed
    with pytest.raises(ParameterError, match="positions 'packed' with reuse 'isolated' reads segments at a shift"):
        ReusePolicy.parse("isolated", "packed").settled("it turns")


SHARES = ["profiled", "query", "profiled*query", "blend"]


@pytest.mark.parametrize(
    ("asked", "safer", "without"),
    [
        ("modular", "modular+profiled:0.15", "exact"),
        ("modular+healing:off", "modular+profiled:0.15+healing:off", "exact"),
        ("isolated", "isolated+profiled:0.15", "exact"),
        ("anchored+across", "anchored+across+profiled:0.15", "exact"),
        ("anchored+linked:64", "anchored+profiled:0.15", "exact"),
        ("modular+profiled:0.05", "modular+profiled:0.15", "exact"),
        ("modular+profiled:0.15", "exact", "exact"),
        ("modular+profiled:0.3", "exact", "exact"),
        ("anchored+query:0.05", "exact", "exact"),
        ("anchored+blend:0.05", "exact", "exact"),
        ("exact", "exact", "exact"),
        ("off", "off", "off"),
    ],
)
def test_the_next_safer_policy(asked, safer, without):
    policy = ReusePolicy.parse(asked, "packed")
    found = policy.safer(profiles=True)
    assert str(found) == safer
    assert str(policy.safer(profiles=False)) == without
    assert found.within(policy)
    gaps = ReusePolicy.parse(asked, "schema").safer(profiles=True)
    assert gaps.positions == ("packed" if safer == "exact" != asked else "schema"), "full prefill has no gaps"


def test_the_default_goes_by_whether_there_are_modules():
    assert default_policy(modules=True) == BEST
    assert default_policy(modules=False) == ReusePolicy.parse("exact")


@given(
    st.sampled_from(["isolated", "anchored", "modular"]),
    st.integers(0, 9_999_999).map(lambda tokens: f"linked:{tokens}")
    | st.tuples(st.sampled_from(SHARES), st.integers(0, 10_000)).map(lambda some: f"{some[0]}:{some[1] / 10_000:.4f}"),
    st.sampled_from([None, *POSITIONS]),
)
def test_a_repaired_policy_is_written_and_read(word, recompute, positions):
    written = f"{word}+{recompute}"
    policy = ReusePolicy.parse(written, positions)
    assert re.fullmatch(RECOMPUTED, written)
    assert ReusePolicy.parse(str(policy), positions) == policy
    assert re.fullmatch(RECOMPUTED, str(policy))
    assert ReusePolicy.named(written) == ReusePolicy.parse(written)
    assert policy.without_recompute() == ReusePolicy.parse(word, positions).without_recompute()
    assert policy.heals == (word == "modular")
    assert policy.profiled == ("profiled" in recompute)
    assert policy.alone().recompute is None


def test_amounts_are_written_as_short_as_they_can_be():
    short = {"profiled:0.1500": "profiled:0.15", "profiled:1.0": "profiled:1", "linked:08": "linked:8"}
    for written, told in short.items():
        assert str(ReusePolicy.parse(f"modular+{written}")) == f"modular+{told}"


@pytest.mark.parametrize("recompute", ["", "+linked:16", "+profiled:0.15"])
def test_healing_is_turned_off_in_writing(recompute):
    written = f"modular{recompute}+healing:off"
    policy = ReusePolicy.parse(written)
    assert str(policy) == written
    assert re.fullmatch(RECOMPUTED, written)
    assert not policy.heals
    assert ReusePolicy.parse(f"modular{recompute}").heals


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("exact+linked:8", "'exact' reads no modules that could be repaired; leave '+linked:8' out, or write it like"),
        ("off+profiled:0.1", "'off' reads no modules that could be repaired"),
        (
            "anchored+",
            "no repair is called ''; use one of linked, profiled, query, profiled*query, blend: write it like "
            "anchored+linked:16 or anchored+profiled:0.15",
        ),
        ("anchored+first:8", "no repair is called 'first'; use one of linked, profiled, query, profiled*query, blend"),
        (
            "modular+linked",
            "linked takes a whole number of tokens, of at most 7 digits: write it like modular+linked:16",
        ),
        ("anchored+linked:-1", "linked takes a whole number"),
        ("anchored+linked:1.5", "linked takes a whole number"),
        (
            "modular+linked:+3",
            "linked takes a whole number of tokens, of at most 7 digits: write it like modular+linked:16",
        ),
        ("anchored+linked:4+linked:4", "a policy has one repair; write it like anchored+linked:16"),
        ("modular+profiled:0.1+linked:3", "a policy has one repair; write it like modular+profiled:0.15"),
        ("anchored+linked:٣", "linked takes a whole number"),
        ("anchored+profiled:1.1", "profiled takes a share between 0 and 1 with at most 4 digits behind the point"),
        ("anchored+profiled:.1", "profiled takes a share"),
        ("anchored+profiled:1e-2", "profiled takes a share"),
        ("anchored+profiled:nan", "profiled takes a share"),
        ("anchored+query:16", "query takes a share between 0 and 1"),
        ("anchored+query*profiled:0.1", "no repair is called 'query*profiled'; use one of linked, pro"),
        ("anchored+profiled*query:", "profiled*query takes a share"),
        (
            "isolated+blend:2",
            "blend takes a share between 0 and 1 with at most 4 digits behind the point: write it like "
            "isolated+blend:0.15",
        ),
        ("anchored+healing:off", "'anchored' is the same whatever is stored; leave '+healing:off' out"),
        ("exact+healing:off", "'exact' is the same whatever is stored; leave '+healing:off' out"),
        ("modular+healing:off+blend:0.1", "'+healing:off' stands at its end, once; write it like modular+linked:16+"),
        ("modular+healing:off+healing:off", "'+healing:off' stands at its end, once; write it like"),
        ("modular+healing:on", "healing is 'off', or not written: write it like modular+healing:off"),
        ("modular+healing", "healing is 'off', or not written: write it like modular+healing:off"),
        ("profiled:0.1", "a repair of no policy; write it like modular+profiled:0.1"),
        ("some+linked:8", "use one of off, exact, isolated, anchored"),
    ],
)
def test_a_repair_that_is_none_is_told_so(written, sentence):
    with pytest.raises(ParameterError, match=f"^reuse is {re.escape(repr(written))}.*{re.escape(sentence)}"):
        ReusePolicy.parse(written)
    assert ReusePolicy.named(written) is None
    assert not re.fullmatch(RECOMPUTED, written)


def test_a_repair_is_within_what_its_level_is_within():
    for ceiling in LEVELS:
        recomputed, plain = ReusePolicy.parse("anchored+linked:8"), ReusePolicy.parse("anchored")
        assert recomputed.within(ReusePolicy.parse(ceiling)) == plain.within(ReusePolicy.parse(ceiling))


@given(
    st.sampled_from(["isolated", "anchored", "modular"]),
    st.sampled_from([None, "linked:8", "profiled:0.15"]),
    st.sampled_from([None, *POSITIONS]),
)
def test_a_policy_across_adapters_is_written_and_read(word, recompute, positions):
    written = f"{word}+across" if recompute is None else f"{word}+across+{recompute}"
    policy = ReusePolicy.parse(written, positions)
    assert policy.across
    assert re.fullmatch(ACROSS, written)
    assert not re.fullmatch(RECOMPUTED, written)
    assert str(policy) == written
    assert re.fullmatch(ACROSS, f"{written}+healing:off") is None or word == "modular"
    assert ReusePolicy.parse(str(policy), positions) == policy
    assert policy.without_recompute() == ReusePolicy.parse(word, positions).without_recompute()
    assert not policy.alone().across
    assert not ReusePolicy.parse(written.replace("+across", "")).across
    assert [policy.within(ReusePolicy.parse(most)) for most in LEVELS] == [False, False, True]


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("exact+across", "'exact' reads no modules that could be another adapter's; leave '+across' out, or write it"),
        ("off+across+linked:8", "'off' reads no modules that could be another adapter's; leave '+across' out"),
        ("anchored+linked:8+across", "'+across' stands before a repair; write it like anchored+across, or"),
        ("anchored+across+across", "'+across' stands before a repair"),
        ("anchored+across+", "no repair is called ''"),
        ("anchored+acros", "no repair is called 'acros'"),
        ("across", "use one of off, exact, isolated, anchored"),
    ],
)
def test_an_across_that_is_none_is_told_so(written, sentence):
    with pytest.raises(ParameterError, match=f"^reuse is {re.escape(repr(written))}.*{re.escape(sentence)}"):
        ReusePolicy.parse(written)
    assert not re.fullmatch(ACROSS, written)


@pytest.mark.parametrize("kind", SHARES)
def test_a_pass_chooses_where_something_is_left_to_choose(kind):
    selects = [ReusePolicy.parse(f"anchored+{kind}:{share}").recompute.selects for share in ("0", "0.5", "1")]
    assert selects == [False, kind != "profiled", False]


def measured(policy: str, kl_high: float, recomputed: float, **more) -> Measured:
    given = {"positions": "packed", "prompts": 40, "kl": kl_high / 2, "top1": 1.0, "same": 1.0, "same_low": 0.9}
    return Measured(policy=policy, kl_high=kl_high, recomputed=recomputed, ttft_ms=1.0, **given | more)


ROWS = (
    measured("exact", 0.0, 0.9),
    measured("modular", 1.2, 0.0, same_low=0.4),
    measured("modular+profiled:0.05", 0.06, 0.05, same_low=0.85),
    measured("modular+profiled:0.15", 0.03, 0.15, same_low=0.95),
    measured("modular+profiled:0.3", 0.01, 0.3, same_low=0.97),
    measured("isolated", 0.001, 0.0, positions="schema"),
)


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        ("auto:2", "modular"),
        ("auto:0.06", "modular+profiled:0.05"),
        ("auto:0.05", "modular+profiled:0.15"),
        ("auto:0.03", "modular+profiled:0.15"),  # a bound is within itself
        ("auto:0.0299", "modular+profiled:0.3"),
        ("auto:0.001", "exact"),
        ("auto:0", "exact"),
        ("auto:answers:0.3", "modular"),
        ("auto:answers:0.95", "modular+profiled:0.15"),
        ("auto:answers:0.99", "exact"),
    ],
)
def test_auto_is_the_cheapest_policy_that_was_measured_to_be_within_its_tolerance(written, taken):
    policy = ReusePolicy.parse(written)
    assert (policy.auto, str(policy)) == (True, written)
    assert re.match(TOLERANT, written)
    for rows in (ROWS, ROWS[::-1]):
        assert str(policy.resolved(rows, None)) == taken


def test_auto_goes_by_what_was_measured_where_modules_stand():
    """What was measured packed says nothing of modules at their schema's positions."""
    assert str(ReusePolicy.parse("auto:0.05").resolved(ROWS, "it turns")) == "isolated"
    at_schema = ReusePolicy.parse("auto:0.05", "schema").resolved(ROWS, None)
    assert (str(at_schema), at_schema.positions) == ("isolated", "schema")


def test_auto_without_a_measurement_is_exact():
    assert ReusePolicy.parse("auto:100").resolved((), None) == ReusePolicy.parse("exact")
    without_answers = [measured("modular", 0.1, 0.0, same=None, same_low=None)]
    assert ReusePolicy.parse("auto:answers:0.1").resolved(without_answers, None) == ReusePolicy.parse("exact")


def test_auto_takes_its_tolerance_from_the_engine_where_it_has_none():
    alone, own = ReusePolicy.parse("auto"), ReusePolicy.parse("auto:0.2")
    assert str(alone.tolerating(DEFAULT)) == "auto:0.05"
    assert own.tolerating(DEFAULT) == own
    assert ReusePolicy.parse("modular").tolerating(DEFAULT) == BEST


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            "auto:much",
            "the tolerance of reuse 'auto:much' is 'much'; write it like 0.05, in nats a token, or like answers:0.98",
        ),
        ("auto:-1", "the tolerance of reuse 'auto:-1' is '-1'"),
        ("auto:nan", "the tolerance of reuse 'auto:nan' is 'nan'"),
        ("auto:", "the tolerance of reuse 'auto:' is ''"),
        ("auto:answers:2", "the share is above 0 and at most 1"),
        ("auto:answers:0", "the share is above 0 and at most 1"),
        ("auto+linked:16", "what 'auto' is comes of what was measured; write 'auto' alone"),
        ("auto:0.1+across", "write 'auto:0.1' alone"),
    ],
)
def test_what_is_no_auto_is_told_so(written, told):
    with pytest.raises(ParameterError, match=re.escape(told)):
        ReusePolicy.parse(written)


@pytest.mark.parametrize("tolerance", [True, None, "x", float("nan"), -0.1, 1e9, [0.1], "answers:", "answers:1.01"])
def test_what_is_no_tolerance_is_told_so(tolerance):
    with pytest.raises(
        ParameterError, match=r"^tolerance is .*write it like 0\.05, in nats a token, or like answers:0"
    ):
        Tolerance.parse(tolerance)


@given(st.floats(0, 1000), st.floats(0.001, 1))
def test_a_tolerance_reads_as_it_is_written(kl, answers):
    for tolerance in (Tolerance(kl=round(kl, 6)), Tolerance(answers=round(answers, 6))):
        assert Tolerance.parse(str(tolerance)) == tolerance
    assert Tolerance.parse(kl) == Tolerance(kl=kl)


def test_a_ceiling_of_auto_allows_what_was_measured_to_be_within_it():
    ceiling = ReusePolicy.parse("auto:0.05")

    def allowed(positions: str | None) -> list[str]:
        words = (*WORDS, *(row.policy for row in ROWS))
        return [word for word in dict.fromkeys(words) if ReusePolicy.parse(word, positions).within(ceiling, ROWS)]

    assert allowed("packed") == ["off", "exact", "modular+profiled:0.15", "modular+profiled:0.3"]
    assert allowed("schema") == ["off", "exact", "isolated"]
    assert allowed(None) == ["off", "exact"], "nothing is known of one whose positions are not settled"
    for word in ("isolated", "modular", "modular+profiled:0.15"):
        assert not ReusePolicy.parse(word).within(ceiling)  # nothing was measured
    for word, within in (("auto", True), ("auto:0.04", True), ("auto:0.06", False), ("auto:answers:0.99", False)):
        assert ReusePolicy.parse(word).within(ceiling, ROWS) == within
    assert ReusePolicy.bounded(None, BEST, ceiling, ROWS) == ceiling
    assert ReusePolicy.bounded(BEST, BEST, ceiling, ROWS) is None
    assert not ceiling.within(ReusePolicy.parse("exact"))
    assert ceiling.within(BEST)
    assert [ReusePolicy.least("modular", word) == ReusePolicy.parse(word) for word in CEILINGS] == [True] * 4


def test_schemas_are_encoded_ahead_for_what_their_prompts_get():
    modular, auto = BEST, ReusePolicy.parse("auto")
    assert ReusePolicy.ahead(None, modular) == ReusePolicy.ahead("exact", modular) == BEST
    assert ReusePolicy.ahead("auto", modular) == ReusePolicy.ahead(None, auto) == auto
