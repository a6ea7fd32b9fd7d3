"""The check of a model: its prompts, figures and recommendation, and the models that it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inlay import LLM, ParameterError, Prompt, SamplingParams, Schema
from inlay.check.prompts import KINDS, draw_batches, draw_prompts, pieces
from inlay.check.run import AGAINST, QUICK, CheckSetting, check_model, compare, divergence
from inlay.check.statistics import mean_bound, mean_interval
from inlay.pml import resolve
from inlay.policy import ReusePolicy
from inlay.tolerance import Tolerance
from tests.model.check.models import small_model
from tests.model.families.configs import tiny as tiny_family
from tests.raising import raises

pytestmark = pytest.mark.long

TRIP = Schema.from_string(
    """
    <schema name="trip">
      <system>You plan trips.</system>
      <user>
        <module name="plan">A trip of <param name="days" len="4"/> days.
          <module name="train">By train.</module>
        </module>
        <union><module name="miami">Miami has beaches.</module><module name="oslo">Oslo has fjords.</module></union>
        <module name="budget">There is a budget of <param name="sum" len="4" default="nine"/>.</module>
      </user>
    </schema>
    """
)


def make(**settings) -> LLM:
    return LLM(small_model(), kv_memory="128MiB", promotion_memory=0, **settings)


def setting(**more) -> CheckSetting:
    return CheckSetting(**{"quick": True, "tokens": 4} | more)


def test_generated_prompts_are_of_every_kind_and_the_same_every_time():
    for turns in (True, False):
        drawn, again, others = (draw_batches(number, 7, turns=turns) for number in (1, 1, 2))
        assert list(dict.fromkeys(batch.kind for batch in drawn)) == list(KINDS)
        assert drawn == again != others
        for batch in drawn:
            assert batch.schema.has_turns == turns
            assert len(set(map(repr, batch.prompts))) == len(batch.prompts) > 1
            for prompt in batch.prompts:
                resolve(batch.schema, prompt)
    lengths = {len(draw_batches(number, 0, turns=True)[0].schema.modules) for number in range(3)}
    assert len(lengths) == 3
    assert min(len(pieces(kind)) for kind in ("code", "prose")) > 30


def test_prompts_of_a_schema_import_compatible_modules():
    prompts = draw_prompts(TRIP, 24, 0)
    assert prompts == draw_prompts(TRIP, 24, 0)
    assert len(set(map(repr, prompts))) == 24
    for prompt in prompts:
        assert resolve(TRIP, prompt).items
    imported = {str(prompt.children[:-1]) for prompt in prompts}
    assert len(imported) > 5
    assert any("train" in one for one in imported)


def test_divergence_of_a_mode():
    reference = torch.log_softmax(torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]]), dim=-1)
    other = torch.log_softmax(torch.tensor([[2.0, 1.0, 0.5], [0.0, 1.0, 3.0]]), dim=-1)
    found = compare(reference, other, [0, 1])
    assert (found.kl, found.top1, found.same) == (divergence(reference, other), 0.5, False)
    assert compare(reference, reference, [0, 1]) == replace(found, kl=0.0, top1=1.0, same=True)


def test_the_bound_of_a_mean_counts_groups_not_values():
    values = [0.1, 0.2, 0.1, 0.4, 0.1, 0.1, 0.2, 0.1]
    mean, spread = 0.1625, math.sqrt(sum((value - 0.1625) ** 2 for value in values) / 7)
    alone = mean_bound([values])
    assert alone == pytest.approx(max(mean + 2.365 * spread / math.sqrt(8), mean_interval(values)[1]))
    assert mean_bound([[value] * 100 for value in values]) == pytest.approx(alone)
    assert mean_bound([values[:4], values[4:]]) > alone
    assert mean_bound([[0.3]]) == math.inf
    many = [float(number % 5) for number in range(100)]
    assert mean_bound([many]) == pytest.approx(2 + 1.984 * 1.4213 / 10, abs=1e-3)


def test_rows_of_every_policy():
    told = []
    llm = make()
    found = check_model(llm, setting(against=("exact", "modular", "modular+linked:4")), lambda *at: told.append(at))
    exact, modular, recomputed = found.rows
    assert [row.policy for row in found.rows] == ["exact", "modular", "modular+linked:4"]
    assert {row.positions for row in found.rows} == {"packed"}
    assert exact.kl < 1e-6 < 1e-3 < modular.kl < modular.kl_high
    assert (exact.same, exact.top1) == (1, 1)
    assert (modular.recomputed, exact.recomputed > 0.3) == (0, True)
    assert 0 < recomputed.recomputed < exact.recomputed
    assert min(row.ttft_ms for row in found.rows) > 0
    assert sum(count for count, _ in found.kinds.values()) == exact.prompts
    assert list(found.kinds) == list(KINDS)
    assert told[-1][0] == told[-1][1]
    assert [at for at, _ in told] == sorted(at for at, _ in told)
    assert found.recommended == "exact"
    assert "no policy that computes less is surely within 0.05 nats a token" in found.reason
    assert not len(llm.store) or llm.stats().running == 0


def test_divergence_is_that_of_distributions():
    llm = make()
    prompts = [
        Prompt.from_string(f'<prompt schema="trip"><{name}/><budget/>Where?</prompt>') for name in ("miami", "oslo")
    ]
    found = check_model(llm, setting(schema=TRIP, prompts=prompts, against=("modular",)))
    llm.add_schema(TRIP, replace=True)
    params = SamplingParams(temperature=0, max_tokens=4)
    said = [output.outputs[0].token_ids for output in llm.generate(prompts, params, reuse="off")]
    wanted, seen = (llm.distributions(prompts, said, reuse=reuse) for reuse in ("off", "primed"))
    divergences = [divergence(*pair) for pair in zip(wanted, seen, strict=True)]
    assert found.rows[0].kl == pytest.approx(sum(divergences) / 2, rel=1e-3)
    assert found.rows[0].kl_high == pytest.approx(mean_bound([divergences]), rel=1e-3)
    assert found.kinds == {"trip": (2, 1)}


def test_recommended_policy_is_the_choice_of_auto():
    llm = make()
    for tolerance, taken in ((Tolerance(kl=100.0), "modular"), (Tolerance(answers=1.0), "exact")):
        found = check_model(llm, setting(schema=TRIP, against=("exact", "modular"), tolerance=tolerance))
        assert found.recommended == found.as_json()["recommended"] == taken
        assert str(ReusePolicy.parse(f"auto:{tolerance}").resolved(found.rows, None)) == taken
        assert ("it computes least" in found.reason) == (taken == "modular")


def test_model_with_keys_normalised_after_rotation_is_not_shifted():
    llm = LLM(tiny_family("hunyuan_v1_dense"), kv_memory="128MiB", promotion_memory=0)
    why = llm.client.model.why_not_shift
    found = check_model(llm, setting(schema=TRIP, against=("exact", "isolated", "modular")))
    assert [(one.policy, one.positions, one.reason) for one in found.refused] == [
        ("isolated", "packed", why),
        ("modular", "packed", why),
    ]
    assert "keys are normed after their rotation" in why
    assert [(row.policy, row.positions) for row in found.rows] == [
        ("exact", "packed"),
        ("isolated", "schema"),
        ("modular", "schema"),
    ]


def test_cheapest_policy_is_measured_even_without_time():
    found = check_model(make(), setting(schema=TRIP, against=("exact", "modular+linked:4", "modular"), seconds=1e-9))
    assert [(row.policy, row.prompts) for row in found.rows] == [("modular", 1)]
    assert (found.missing, found.complete, found.interrupted) == (("exact", "modular+linked:4"), False, False)


def test_an_interruption_keeps_the_measurements_so_far():
    def interrupt(done: int, total: int) -> None:
        if done >= 4:  # a prompt in full prefill and in two modes, and the next one in full prefill
            raise KeyboardInterrupt

    found = check_model(make(), setting(schema=TRIP, against=("exact", "modular")), interrupt)
    assert [(row.policy, row.prompts) for row in found.rows] == [("exact", 1), ("modular", 1)]
    assert (found.missing, found.interrupted) == ((), True)
    with pytest.raises(KeyboardInterrupt):  # nothing was measured
        check_model(make(), setting(schema=TRIP, against=("exact",)), lambda *_: interrupt(4, 4))


def test_every_row_is_of_the_same_prompts():
    ended = []

    def stop(done: int, total: int) -> None:
        ended.append(done)
        if len(ended) == 8:
            raise KeyboardInterrupt

    found = check_model(make(), setting(schema=TRIP, against=("exact", "modular", "modular+linked:4")), stop)
    assert {row.prompts for row in found.rows} == {1}


def test_of_random_weights_only_distributions_are_compared():
    llm = LLM(replace(small_model(), name="random:small"), kv_memory="128MiB", promotion_memory=0)
    found = check_model(llm, setting(schema=TRIP, against=("exact", "modular")))
    assert found.meaningless == "the weights are random, so that answers mean nothing"
    assert [row.same for row in found.rows] == [None, None]
    assert found.reason.endswith(f"{found.meaningless}, and only distributions were compared")
    assert found.as_json()["rows"][0]["same_answers"] is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"against": ("auto",)}, "against names 'auto', which is what comes of this check"),
        ({"against": ("sometimes",)}, "reuse='sometimes' is not a reuse policy"),
        ({"prompts": [Prompt.from_string('<prompt schema="x">a</prompt>')]}, "there are prompts and no schema"),
        ({"prompts": [[{"role": "user", "content": "Who?"}]]}, "messages have no marked part"),
        ({"schema": TRIP, "prompts": ()}, "there are no prompts"),
        ({"schema": TRIP, "prompts": [Prompt.from_string('<prompt schema="x">a</prompt>')]}, "is of schema 'x'"),
    ],
)
def test_invalid_check_settings_are_rejected(wrong, told):
    with pytest.raises(ParameterError, match=told):
        CheckSetting(**wrong)


def test_a_schema_without_modules_asks_for_prompts():
    with raises("schema.too_long", ParameterError, names="'bare'"):
        check_model(make(), setting(schema=Schema.from_string('<schema name="bare">Text.</schema>')))


def test_policy_names_are_normalised():
    for name in (*AGAINST, *QUICK):
        assert str(ReusePolicy.parse(name)) == name
    assert CheckSetting(against=("modular", "modular+profiled:0.10", "modular")).policies == (
        "modular",
        "modular+profiled:0.1",
    )


def test_model_too_small_for_generated_prompts_needs_a_schema():
    with raises("schema.too_long", ParameterError, names="96"):
        check_model(make(max_model_len=96), setting())
