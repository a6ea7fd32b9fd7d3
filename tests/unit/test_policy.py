"""A reuse policy is parsed once, has a written form, and is ordered by how much approximation it accepts."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import PolicyError
from inlay.policy import (
    BEST,
    CEILINGS,
    CONTEXTS,
    FIELDS,
    KEY,
    LEVELS,
    LOGGED,
    POSITIONS,
    WORDS,
    PolicyFields,
    ReusePolicy,
    check_schema_fields,
    default_policy,
    log_deprecated,
)
from inlay.tolerance import DEFAULT, Measured, Tolerance
from tests.raising import raises

REUSE = ("off", "exact", *CONTEXTS)

written = st.sampled_from(WORDS)


@given(written, st.sampled_from([None, *POSITIONS]))
def test_the_written_form_reads_as_the_same_policy(word, positions):
    policy = ReusePolicy.parse(word, positions)
    assert ReusePolicy.parse(str(policy), policy.positions) == policy
    assert str(policy) == word
    assert ReusePolicy.named(word) == ReusePolicy.parse(word)


def test_modular_is_the_most_exact_form():
    """It encodes missing modules as ``primed`` does, and by default reads more exact stored forms."""
    best, fixed = ReusePolicy.parse("modular"), ReusePolicy.parse("primed")
    assert best == BEST != fixed
    assert best.without_recompute() == fixed
    assert [ReusePolicy.parse(word).reads_promoted for word in WORDS] == [word == "modular" for word in WORDS]
    off = ReusePolicy.parse("modular+promote:off")
    assert not off.reads_promoted
    assert off.anchored
    assert off.without_recompute() == fixed
    assert [ReusePolicy.parse(word).modular for word in REUSE] == [False, False, True, True, True]
    assert [ReusePolicy.parse(word).reads_nothing for word in REUSE] == [True, False, False, False, False]
    assert [ReusePolicy.parse(word).anchored for word in REUSE] == [False, False, False, True, True]
    assert [ReusePolicy.parse(word).primed for word in REUSE] == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("word", "near"),
    [("exat", "exact"), ("Exact", "exact"), ("modlar+linked:16", "modular"), ("anchord", "anchored"), ("atuo", "auto")],
)
def test_misspelt_policy_is_rejected_with_the_nearest_name(word, near):
    with raises("policy.unknown", PolicyError, field="reuse", names=f"reuse='{near}'"):
        ReusePolicy.parse(word)


@pytest.mark.parametrize("word", ["", None, 3, ["off"]])
def test_invalid_policy_value_is_rejected(word):
    with raises("policy.unknown", PolicyError, names="off, exact, isolated, anchored, primed, modular, auto"):
        ReusePolicy.parse(word)
    with raises("policy.bad_positions", PolicyError, field="positions", names="schema, packed"):
        ReusePolicy.parse("off", word if word is not None else "")


def test_ceiling_limits_the_policy():
    for word, ceiling in product(WORDS, LEVELS):
        policy, most = ReusePolicy.parse(word), ReusePolicy.parse(ceiling)
        assert policy.within(most) == (LEVELS.index(policy.level) <= LEVELS.index(ceiling))
        allowed = policy.within(most)
        assert ReusePolicy.bounded(policy, BEST, most) == (policy if allowed else None)
        assert ReusePolicy.bounded(None, policy, most) == (policy if allowed else most)


@given(st.lists(written, min_size=1))
def test_least_of_several_policies_is_within_each(words):
    least = ReusePolicy.least(*words, None)
    assert str(least) in {str(ReusePolicy.parse(word)) for word in words}
    assert all(least.within(ReusePolicy.parse(word)) for word in words)


def test_positions_are_the_best_that_a_model_allows():
    assert [ReusePolicy.parse(word).settled(None).positions for word in REUSE] == ["packed"] * 5
    assert [ReusePolicy.parse(word).settled("it turns").positions for word in REUSE] == ["packed"] * 2 + ["schema"] * 3
    assert ReusePolicy.parse("off", "packed").settled("it turns").packed
    with raises("policy.unsupported", PolicyError, field="positions"):
        ReusePolicy.parse("isolated", "packed").settled("it turns")


SHARES = ["profiled", "query", "profiled*query", "blend"]


@pytest.mark.parametrize(
    ("asked", "safer", "without"),
    [
        ("modular", "modular+profiled:0.15", "exact"),
        ("modular+promote:off", "modular+profiled:0.15+promote:off", "exact"),
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


def test_default_policy_depends_on_modules():
    assert default_policy(modules=True) == BEST
    assert default_policy(modules=False) == ReusePolicy.parse("exact")


@given(
    st.sampled_from(["isolated", "anchored", "modular"]),
    st.integers(0, 9_999_999).map(lambda tokens: f"linked:{tokens}")
    | st.tuples(st.sampled_from(SHARES), st.integers(0, 10_000)).map(lambda some: f"{some[0]}:{some[1] / 10_000:.4f}"),
    st.sampled_from([None, *POSITIONS]),
)
def test_policy_with_recomputation_round_trips(word, recompute, positions):
    written = f"{word}+{recompute}"
    policy = ReusePolicy.parse(written, positions)
    assert re.fullmatch(KEY, written)
    assert ReusePolicy.parse(str(policy), positions) == policy
    assert re.fullmatch(KEY, str(policy))
    assert ReusePolicy.named(written) == ReusePolicy.parse(written)
    assert policy.without_recompute() == ReusePolicy.parse(word, positions).without_recompute()
    assert policy.reads_promoted == (word == "modular")
    assert policy.profiled == ("profiled" in recompute)
    assert policy.alone().recompute is None


def test_amounts_are_written_in_short_form():
    short = {"profiled:0.1500": "profiled:0.15", "profiled:1.0": "profiled:1", "linked:08": "linked:8"}
    for written, told in short.items():
        assert str(ReusePolicy.parse(f"modular+{written}")) == f"modular+{told}"


@pytest.mark.parametrize("recompute", ["", "+linked:16", "+profiled:0.15"])
def test_promotion_can_be_turned_off_in_the_key(recompute):
    written = f"modular{recompute}+promote:off"
    policy = ReusePolicy.parse(written)
    assert str(policy) == written
    assert re.fullmatch(KEY, written)
    assert not policy.reads_promoted
    assert ReusePolicy.parse(f"modular{recompute}").reads_promoted


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("exact+linked:8", "policy.conflict"),
        ("off+profiled:0.1", "policy.conflict"),
        ("exact+across", "policy.conflict"),
        ("off+across+linked:8", "policy.conflict"),
        ("anchored+promote:off", "policy.conflict"),
        ("exact+promote:off", "policy.conflict"),
        ("auto+linked:16", "policy.conflict"),
        ("auto:0.1+across", "policy.conflict"),
        ("modular+promote:off+promote:off", "policy.conflict"),
        ("anchored+linked:4+linked:4", "policy.conflict"),
        ("modular+profiled:0.1+linked:3", "policy.conflict"),
        ("anchored+across+across", "policy.conflict"),
        ("anchored+", "policy.bad_recompute"),
        ("anchored+first:8", "policy.bad_recompute"),
        ("modular+linked", "policy.bad_recompute"),
        ("anchored+linked:-1", "policy.bad_recompute"),
        ("anchored+linked:1.5", "policy.bad_recompute"),
        ("anchored+linked:٣", "policy.bad_recompute"),
        ("anchored+profiled:1.1", "policy.bad_recompute"),
        ("anchored+profiled:.1", "policy.bad_recompute"),
        ("anchored+profiled:1e-2", "policy.bad_recompute"),
        ("anchored+profiled:nan", "policy.bad_recompute"),
        ("anchored+query:16", "policy.bad_recompute"),
        ("anchored+query*profiled:0.1", "policy.bad_recompute"),
        ("anchored+profiled*query:", "policy.bad_recompute"),
        ("isolated+blend:2", "policy.bad_recompute"),
        ("modular+promote:on", "policy.bad_recompute"),
        ("anchored+acros", "policy.bad_recompute"),
        ("profiled:0.1", "policy.no_base"),
        ("some+linked:8", "policy.unknown"),
        ("across", "policy.unknown"),
        ("auto:much", "policy.bad_tolerance"),
        ("auto:-1", "policy.bad_tolerance"),
        ("auto:nan", "policy.bad_tolerance"),
        ("auto:", "policy.bad_tolerance"),
        ("auto:answers:2", "policy.bad_tolerance"),
        ("auto:answers:0", "policy.bad_tolerance"),
    ],
)
def test_wrong_key_is_refused(key, code):
    with raises(code, PolicyError, names=repr(key)):
        ReusePolicy.parse(key)
    assert ReusePolicy.named(key) is None
    assert not re.fullmatch(KEY, key) or key.startswith("auto:answers:")  # whose bounds a pattern does not have


def test_recomputation_does_not_change_the_ceiling_check():
    for ceiling in LEVELS:
        recomputed, plain = ReusePolicy.parse("anchored+linked:8"), ReusePolicy.parse("anchored")
        assert recomputed.within(ReusePolicy.parse(ceiling)) == plain.within(ReusePolicy.parse(ceiling))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (PolicyFields("exact"), "exact"),
        (PolicyFields("modular", "profiled:0.10", promote=False), "modular, recompute profiled:0.1, promote false"),
        (PolicyFields("auto", tolerance=0.05, find="content"), "auto, tolerance 0.05, find content"),
    ],
)
def test_people_read_a_policy_as_its_fields(fields, words):
    policy = fields.policy()
    assert policy is not None
    assert policy.in_words() == words


@given(
    st.sampled_from(["isolated", "anchored", "modular"]),
    st.sampled_from([None, "linked:8", "profiled:0.15"]),
    st.sampled_from([None, *POSITIONS]),
)
def test_a_policy_across_adapters_has_a_key(word, recompute, positions):
    key = f"{word}+across" if recompute is None else f"{word}+across+{recompute}"
    policy = ReusePolicy.parse(key, positions)
    assert policy.across_adapters
    assert re.fullmatch(KEY, key)
    assert str(policy) == key
    assert re.fullmatch(KEY, f"{key}+promote:off") is None or word == "modular"
    assert ReusePolicy.parse(str(policy), positions) == policy
    assert policy.without_recompute() == ReusePolicy.parse(word, positions).without_recompute()
    assert not policy.alone().across_adapters
    assert not ReusePolicy.parse(key.replace("+across", "")).across_adapters
    assert [policy.within(ReusePolicy.parse(most)) for most in LEVELS] == [False, False, True]


RECOMPUTES = [None, "linked:16", "profiled:0.15", "query:0.1", "profiled*query:0.15", "blend:0.15"]


@pytest.mark.parametrize(
    ("reuse", "recompute", "promote", "across_adapters", "positions"),
    list(product(WORDS, RECOMPUTES, [None, True, False], [None, True, False], [None, *POSITIONS])),
)
def test_fields_and_key_are_the_same_policy(reuse, recompute, promote, across_adapters, positions):
    fields = PolicyFields(reuse, recompute, promote, across_adapters)
    if (reuse in ("off", "exact") and (recompute or across_adapters)) or (promote is False and reuse != "modular"):
        with pytest.raises(PolicyError) as caught:
            fields.policy()
        assert caught.value.code == "policy.conflict"
        assert getattr(fields, caught.value.field) is not None
        return
    policy = fields.policy(positions)
    assert policy == ReusePolicy.parse(str(policy), positions)
    assert (policy.across_adapters, policy.promote) == (bool(across_adapters), promote is not False)
    assert (None if policy.recompute is None else str(policy.recompute)) == recompute
    if str(policy) not in WORDS:
        assert re.fullmatch(KEY, str(policy))
        with pytest.warns(DeprecationWarning, match=f"^reuse='{re.escape(str(policy))}' is deprecated. Write reuse="):
            assert PolicyFields(str(policy)).policy(positions) == policy


def test_a_tolerance_refines_auto():
    assert PolicyFields("auto", tolerance=0.02).policy() == ReusePolicy.parse("auto:0.02")
    assert PolicyFields("auto", tolerance="answers:0.9").policy() == ReusePolicy.parse("auto:answers:0.9")
    assert PolicyFields("auto").policy() == ReusePolicy.parse("auto")


def test_no_fields_give_no_policy_and_a_policy_is_unchanged():
    assert PolicyFields().policy("packed") is None
    policy = ReusePolicy.parse("modular+linked:3", "schema")
    assert PolicyFields(policy).policy() is policy
    assert PolicyFields(policy).policy("packed").positions == "packed"


def test_fields_without_reuse_refine_modular():
    assert str(PolicyFields(recompute="linked:3").policy()) == "modular+linked:3"
    assert str(PolicyFields(promote=False).policy()) == "modular+promote:off"
    assert str(PolicyFields(across_adapters=True).policy()) == "modular+across"
    assert str(PolicyFields(find="content").policy()) == "modular+content+profiled:0.1"


def test_former_key_without_promotion_is_still_read():
    assert ReusePolicy.parse("modular+linked:3+healing:off") == ReusePolicy.parse("modular+linked:3+promote:off")
    assert re.fullmatch(KEY, "modular+linked:3+healing:off")
    with raises("policy.conflict", PolicyError):
        ReusePolicy.parse("modular+healing:off+promote:off")


@pytest.mark.parametrize(
    "key",
    [
        "isolated+content+profiled:0.1",
        "modular+across+content+linked:3+promote:off",
        "auto+content",
        "auto:0.1+content",
    ],
)
def test_a_policy_that_finds_text_has_a_key(key):
    policy = ReusePolicy.parse(key)
    assert policy.finds
    assert str(policy) == key
    assert re.fullmatch(KEY, key)
    assert not policy.without_recompute().finds
    assert not policy.alone().finds


@pytest.mark.parametrize(
    ("key", "written", "options"),
    [
        ("modular+linked:3", "reuse='modular', recompute='linked:3'", "--reuse modular --recompute linked:3"),
        ("modular+promote:off", "reuse='modular', promote=False", "--reuse modular --no-promote"),
        (
            "anchored+across+profiled:0.15",
            "reuse='anchored', recompute='profiled:0.15', across_adapters=True",
            "--reuse anchored --recompute profiled:0.15 --across-adapters",
        ),
        ("auto:0.05", "reuse='auto', tolerance='0.05'", "--reuse auto --tolerance 0.05"),
    ],
)
def test_a_deprecated_key_is_shown_as_fields(key, written, options):
    with pytest.warns(DeprecationWarning, match=re.escape(f"{key}' is deprecated. Write {written}.")):
        PolicyFields(key).policy()
    messages: list[str] = []
    PolicyFields(key).policy(options=True, deprecated=messages.append)
    assert messages == [f"--reuse {key} is deprecated. Write {options}."]


@pytest.mark.parametrize(
    ("fields", "code", "names"),
    [
        (
            PolicyFields("linked:3"),
            "policy.no_base",
            "reuse='modular', recompute='linked:3'",
        ),
        (
            PolicyFields("modular+linked:3", recompute="linked:5"),
            "policy.conflict",
            "reuse='modular', recompute='linked:5'",
        ),
        (
            PolicyFields("modular+promote:off", promote=False),
            "policy.conflict",
            "reuse='modular', promote=False",
        ),
        (
            PolicyFields("auto:0.1", tolerance=0.2),
            "policy.conflict",
            "reuse='auto', tolerance=0.2",
        ),
        (
            PolicyFields("anchored", recompute="some"),
            "policy.bad_recompute",
            "linked, profiled, query, profiled*query, blend",
        ),
        (
            PolicyFields("anchored", recompute="linked:x"),
            "policy.bad_recompute",
            "linked:16",
        ),
        (
            PolicyFields("exact", recompute="linked:3"),
            "policy.conflict",
            "reuse='modular'",
        ),
        (
            PolicyFields("modular", tolerance=0.1),
            "policy.conflict",
            "reuse='auto'",
        ),
        (
            PolicyFields("auto", recompute="linked:3"),
            "policy.conflict",
            "reuse='auto'",
        ),
        (
            PolicyFields("anchored", promote=False),
            "policy.conflict",
            "reuse='anchored'",
        ),
        (PolicyFields(promote="no"), "policy.bad_promote", "true or false"),
        (
            PolicyFields("auto", tolerance="x"),
            "policy.bad_tolerance",
            "answers:0.98",
        ),
    ],
)
def test_wrong_fields_are_refused(fields, code, names):
    """names: a remedy, or the other field that does not go with this one."""
    with raises(code, PolicyError, names=names):
        fields.policy()


def test_messages_name_command_line_options():
    with raises("policy.conflict", PolicyError, field="recompute", names="--recompute linked:3"):
        PolicyFields("exact", recompute="linked:3").policy(options=True)
    with raises("policy.conflict", PolicyError, field="promote", names="--no-promote"):
        PolicyFields("anchored", promote=False).policy(options=True)


def test_deprecated_policies_are_logged_once(caplog):
    LOGGED.clear()
    for key in ("modular+linked:3", "modular+linked:4"):
        PolicyFields(key).policy(deprecated=log_deprecated)
    assert [record.message for record in caplog.records] == [
        "reuse='modular+linked:3' is deprecated. Write reuse='modular', recompute='linked:3'."
    ]


def test_schemas_take_no_fields_of_requests():
    check_schema_fields(["reuse", "tolerance"], "add_schema")
    for name in set(FIELDS) - {"tolerance"}:
        with raises("policy.not_for_schemas", PolicyError, field=name):
            check_schema_fields([name], "add_schema")


def test_every_field_has_a_description():
    assert all(PolicyFields.help(name) for name in ("reuse", *FIELDS))


@pytest.mark.parametrize("kind", SHARES)
def test_selection_pass_runs_only_for_partial_ratios(kind):
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
    assert re.fullmatch(KEY, written)
    for rows in (ROWS, ROWS[::-1]):
        assert str(policy.resolved(rows, None)) == taken


def test_auto_uses_only_measurements_for_its_positions():
    """Measurements with packed positions do not apply to modules at their schema's positions."""
    assert str(ReusePolicy.parse("auto:0.05").resolved(ROWS, "it turns")) == "isolated"
    at_schema = ReusePolicy.parse("auto:0.05", "schema").resolved(ROWS, None)
    assert (str(at_schema), at_schema.positions) == ("isolated", "schema")


def test_auto_without_a_measurement_is_exact():
    assert ReusePolicy.parse("auto:100").resolved((), None) == ReusePolicy.parse("exact")
    without_answers = [measured("modular", 0.1, 0.0, same=None, same_low=None)]
    assert ReusePolicy.parse("auto:answers:0.1").resolved(without_answers, None) == ReusePolicy.parse("exact")


def test_auto_uses_the_engines_tolerance_by_default():
    alone, own = ReusePolicy.parse("auto"), ReusePolicy.parse("auto:0.2")
    assert str(alone.tolerating(DEFAULT)) == "auto:0.05"
    assert own.tolerating(DEFAULT) == own
    assert ReusePolicy.parse("modular").tolerating(DEFAULT) == BEST


@pytest.mark.parametrize("tolerance", [True, None, "x", float("nan"), -0.1, 1e9, [0.1], "answers:", "answers:1.01"])
def test_invalid_tolerance_is_rejected(tolerance):
    with raises("policy.bad_tolerance", PolicyError, field="tolerance"):
        Tolerance.parse(tolerance)


@given(st.floats(0, 1000), st.floats(0.001, 1))
def test_tolerance_round_trips(kl, answers):
    for tolerance in (Tolerance(kl=round(kl, 6)), Tolerance(answers=round(answers, 6))):
        assert Tolerance.parse(str(tolerance)) == tolerance
    assert Tolerance.parse(kl) == Tolerance(kl=kl)


def test_auto_ceiling_allows_policies_within_its_tolerance():
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


def test_schemas_are_encoded_for_the_policy_of_their_prompts():
    modular, auto = BEST, ReusePolicy.parse("auto")
    assert ReusePolicy.ahead(None, modular) == ReusePolicy.ahead(ReusePolicy.parse("exact"), modular) == BEST
    assert ReusePolicy.ahead(auto, modular) == ReusePolicy.ahead(None, auto) == auto


def test_equal_value_of_another_type_is_rejected():
    assert PolicyFields("modular", promote=False).policy() == PolicyFields("modular", promote=False).policy()
    with raises("policy.bad_promote", PolicyError):
        PolicyFields("modular", promote=0).policy()
    with raises("policy.unknown", PolicyError):
        PolicyFields(["modular"]).policy()  # a value without a hash


def test_every_use_of_a_deprecated_key_warns():
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="is deprecated"):
            assert PolicyFields("modular+linked:3").policy() == PolicyFields("modular", "linked:3").policy()
