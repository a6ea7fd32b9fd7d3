"""The divergence of answers from full prefill, and the fallback to a safer policy."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from inlay import LLM, Schema
from inlay.engine.background.divergence import LOOK, MOST_KNOWN, AnswerComparison, DivergenceLog, Subject, divergences
from inlay.policy import ReusePolicy
from inlay.types import DIVERGENCE_BOUNDS
from tests.conftest import tiny

MODULAR, RECOMPUTED, EXACT = (
    ReusePolicy.parse(written, "packed") for written in ("modular", "modular+profiled:0.15", "exact")
)


def subject(policy: ReusePolicy = MODULAR, salt: str = "one", schema: str = "trip", digest: str = "1") -> Subject:
    return Subject(salt, schema, digest, policy)


def count(log: DivergenceLog, kl: float, times: int, of: Subject | None = None) -> None:
    for _ in range(times):
        log.add(of or subject(), AnswerComparison(kl, 4, 3), "ann")


def taken(
    log: DivergenceLog, policy: ReusePolicy = MODULAR, salt: str = "one", schema: str = "trip", digest: str = "1"
):
    return log.taken(policy, salt, schema, digest)


def test_policy_is_replaced_after_enough_diverging_answers(caplog):
    log = DivergenceLog(0.1, profiles=True)
    with caplog.at_level(logging.INFO):
        count(log, 0.2, LOOK - 1)
        assert taken(log) == MODULAR
        assert not caplog.records
        count(log, 0.2, 1)
    assert taken(log) == RECOMPUTED
    (told, warned) = caplog.records
    assert told.getMessage() == (
        "shadow: answers to schema 'trip' of ann under modular are 0.2 nats a token from full prefill (95% bounds 0.2 "
        "to 0.2, 32); 75.0% of likeliest tokens are the same"
    )
    assert warned.levelname == "WARNING"
    assert warned.getMessage().endswith(
        "which is beyond 0.1: its requests get modular+profiled:0.15 from now on, until the schema changes or this is "
        "lifted (DELETE /v1/divergence, LLM.lift_fallback)"
    )


def test_last_fallback_is_exact():
    log = DivergenceLog(0.1, profiles=True)
    count(log, 0.2, LOOK)
    count(log, 0.2, LOOK, subject(RECOMPUTED))
    assert taken(log) == taken(log, RECOMPUTED) == taken(log, EXACT) == EXACT


def test_fallback_without_profiles_is_exact():
    log = DivergenceLog(0.1, profiles=False)
    count(log, 0.2, LOOK)
    assert taken(log) == EXACT


def test_other_salts_schemas_and_policies_keep_their_policy():
    log = DivergenceLog(0.1, profiles=True)
    count(log, 9.0, LOOK)
    assert taken(log, salt="two") == MODULAR
    assert taken(log, salt="") == MODULAR
    assert taken(log, schema="other") == MODULAR
    assert taken(log, digest="2") == MODULAR, "the schema has changed"
    anchored = ReusePolicy.parse("anchored", "packed")
    assert taken(log, anchored) == anchored


def test_uncertain_mean_replaces_no_policy():
    log = DivergenceLog(0.1, profiles=True)
    for number in range(4 * LOOK):
        count(log, 6.0 if number % LOOK == 7 else 0.0, 1)  # 0.19 in the mean, by one answer of 32
    (one,) = log.of("one")
    assert one.kl > 0.1 > one.low
    assert taken(log) == MODULAR


def test_only_the_latest_answers_count():
    log = DivergenceLog(0.1, profiles=True)
    count(log, 0.0, 2000)
    count(log, 1.0, 4 * LOOK)
    assert taken(log) == RECOMPUTED


def test_without_a_threshold_divergence_is_only_reported():
    log = DivergenceLog(None, profiles=True)
    count(log, 9.0, 2 * LOOK)
    assert taken(log) == MODULAR
    assert log.of("one")[0].taken is None


def test_lifted_fallback_starts_fresh():
    log = DivergenceLog(0.1, profiles=True)
    count(log, 0.2, LOOK)
    count(log, 0.2, LOOK, subject(schema="other"))
    count(log, 0.2, LOOK, subject(salt="two"))
    assert log.lift("one", "absent") == 0
    assert log.lift("one", "trip") == 1
    assert taken(log) == MODULAR
    assert taken(log, schema="other") == RECOMPUTED
    count(log, 0.2, LOOK - 1)
    assert taken(log) == MODULAR
    assert log.lift("one") == 1
    assert log.of("one") == ()
    assert taken(log, salt="two") == RECOMPUTED


def test_divergence_is_reported_per_salt_and_in_total():
    log = DivergenceLog(0.1, profiles=True)
    log.add(subject(), AnswerComparison(0.05, 4, 4))
    (one,) = log.of("one")
    assert (one.schema, one.reuse, one.positions) == ("trip", "modular", "packed")
    assert (one.samples, one.kl, one.low, one.high, one.top1, one.taken) == (1, 0.05, 0.0, None, 1.0, None)
    log.add(subject(), AnswerComparison(0.15, 4, 1))
    log.add(subject(salt="two"), AnswerComparison(0.002, 6, 6))
    (one,) = log.of("one")
    assert one.kl == pytest.approx(0.1)
    assert one.high == pytest.approx(0.1 + 1.96 * 0.05)
    assert one.top1 == 5 / 8
    (total,) = log.totals()
    assert (total.schema, total.reuse, total.samples, total.steps, total.agreeing) == ("trip", "modular", 3, 14, 11)
    assert total.kl == pytest.approx(0.202)
    assert dict(zip(DIVERGENCE_BOUNDS, total.at_most, strict=True)) == {
        bound: sum(kl <= bound for kl in (0.05, 0.15, 0.002)) for bound in DIVERGENCE_BOUNDS
    }
    assert total.fallbacks == 0
    count(log, 5.0, LOOK - 2)
    assert log.totals()[0].fallbacks == 1


def test_divergence_log_is_bounded_and_keeps_other_salts_fallbacks():
    log = DivergenceLog(0.1, profiles=True)
    count(log, 5.0, LOOK)
    for number in range(2 * MOST_KNOWN):
        log.add(subject(salt="two", schema=f"s{number}"), AnswerComparison(0.1, 1, 1))
    assert taken(log) == RECOMPUTED
    assert len(log.of("two")) == MOST_KNOWN - 1
    assert len(log.totals()) <= 258
    assert sum(total.samples for total in log.totals()) == 2 * MOST_KNOWN + LOOK


def test_chance_rarely_replaces_a_policy():
    """500 answers each of 100 salts, with a mean of half the threshold and the long tail that divergence has."""
    randomly, log = random.Random(0), DivergenceLog(0.1, profiles=True)
    for salt in map(str, range(100)):
        for _ in range(500):
            kl = randomly.lognormvariate(0.0, 1.5) * 0.05 / 3.0802  # the mean of that is exp(1.125)
            log.add(subject(salt=salt), AnswerComparison(kl, 1, 1))
    assert sum(taken(log, salt=str(salt)) != MODULAR for salt in range(100)) <= 1


def test_divergences_are_of_each_token():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(3, 50, generator=generator).log_softmax(-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(other, one, log_target=True, reduction="none").sum(-1)
    assert torch.allclose(divergences(one, other).float(), expected, atol=1e-5)
    assert divergences(one, one).tolist() == [0, 0, 0]
    never = torch.full((1, 50), -torch.inf).index_fill(1, torch.tensor([7]), 0.0)  # one token is certain
    assert divergences(never, one[:1]).item() == pytest.approx(-float(one[0, 7]))
    for damaged in (torch.full_like(one, torch.nan), one), (one, torch.full_like(one, torch.nan)):
        assert divergences(*damaged).isnan().all()


SCHEMA = '<schema name="s">Always. <module name="a">A module{more}.</module><module name="b">Another.</module></schema>'


def test_changed_schema_has_its_own_divergence():
    llm = LLM(tiny("llama"), kv_memory="4MiB", shadow=1.0)
    first, other = (Schema.from_string(SCHEMA.format(more=more)) for more in ("", " that has changed"))
    found = []
    for schema in (first, other, first):
        llm.add_schema(schema, replace=True)
        prompt = schema.prompt().use("a").use("b").text("?")
        policy = llm.policy_for(prompt)
        name, digest = llm.processor.schemas.schema_of(prompt.build())
        found.append(digest)
        if len(found) == 1:
            count(llm.local.divergence_log, 5.0, LOOK, Subject("", name, digest, policy))
        taken = llm.policy_taken(prompt, policy)
        assert (taken != policy) == (digest == found[0])
        output = llm.generate([prompt])[0]
        assert (output.reuse, output.fell_back_from) == (str(taken), None if taken == policy else "modular")
        assert llm.policy_taken(prompt, policy, "one") == policy
    assert found[0] == found[2] != found[1]
    assert llm.lift_fallback("s") == 1
    assert llm.generate([prompt])[0].reuse == "modular"


def test_messages_in_parts_have_no_schema():
    llm = LLM(tiny("llama"), kv_memory="4MiB", shadow=1.0)
    part = {"type": "text", "text": "A document.", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "Well?"}]}]
    assert llm.chat(messages)[0].reuse == "modular"
    count(llm.local.divergence_log, 5.0, LOOK, Subject("", "", "", llm.policy_for(messages)))
    output = llm.chat(messages)[0]
    assert (output.reuse, output.fell_back_from) == ("modular+profiled:0.15", "modular")
    assert llm.lift_fallback("") == 1
