"""Adjustments of logits before sampling: transformers' processors and OpenAI's formula as oracles."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from inlay.sampling.params import SamplingParams
from inlay.sampling.row import Row, adjust
from tests.generated import examples
from tests.unit.sampling.rows import choose, normal, row

VOCABULARY = 96
_TOKEN = st.integers(0, VOCABULARY - 1)
_PENALTY = st.floats(-2, 2, width=32)


def row_after(params: SamplingParams, prompt: list[int], answer: list[int]) -> Row:
    """A row whose answer holds these tokens."""
    made = Row(params, 0, prompt_ids=prompt)
    for token in answer:
        made.take(token)
    return made


@settings(max_examples=examples(60), deadline=None)
@given(
    penalty=st.floats(0.1, 10),
    prompt=st.lists(_TOKEN, min_size=1, max_size=200),
    answer=st.lists(_TOKEN, max_size=100),
    seed=st.integers(0, 1000),
)
def test_repetition_penalty_equals_transformers(penalty, prompt, answer, seed):
    logits = normal(1, VOCABULARY, seed=seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits.clone())
    found = adjust(logits, [row_after(SamplingParams(repetition_penalty=penalty), prompt, answer)], VOCABULARY)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@settings(max_examples=examples(60), deadline=None)
@given(
    presence=_PENALTY,
    frequency=_PENALTY,
    prompt=st.lists(_TOKEN, max_size=20),
    answer=st.lists(_TOKEN | st.integers(0, 3), max_size=200),
)
def test_presence_and_frequency_penalties_follow_openais_formula(presence, frequency, prompt, answer):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts the tokens of the answer."""
    logits = normal(1, VOCABULARY)
    counts = Counter(answer)
    expected = torch.tensor(
        [logits[0, j].item() - counts[j] * frequency - (counts[j] > 0) * presence for j in range(VOCABULARY)]
    )
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    found = adjust(logits, [row_after(params, prompt, answer)], VOCABULARY)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-4)


@settings(max_examples=examples(40), deadline=None)
@given(biases=st.dictionaries(_TOKEN, st.floats(-100, 100, width=32), min_size=1, max_size=20))
def test_biases_are_added(biases):
    logits = normal(1, VOCABULARY)
    expected = logits.clone()
    for token, bias in biases.items():
        expected[0, token] += bias
    found = adjust(logits, [Row(SamplingParams(logit_bias=biases), 0)], VOCABULARY)
    assert torch.equal(found, expected)


def test_adjustments_are_applied_in_vllms_order():
    """Forbidden, then the bias, then repetition, frequency and presence: by hand for one token."""
    params = SamplingParams(
        logit_bias={4: -5.0, 5: 3.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, min_tokens=9
    )
    made = Row(params, 0, prompt_ids=[4], stop_ids=[6])
    for token in (4, 4, 5):
        made.take(token)
    found = adjust(torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]), [made], 7)
    # 4: (4 - 5) * 2 - 2 * 0.5 - 0.25;  5: (5 + 3) / 2 - 0.5 - 0.25
    assert found.tolist() == [[0.0, 1.0, 2.0, 3.0, -3.25, 3.25, -math.inf]]


def test_rows_are_adjusted_independently():
    logits = normal(4, VOCABULARY)
    before = logits.clone()
    rows = [
        row_after(SamplingParams(frequency_penalty=1.0), [1], [2, 2]),
        row(SamplingParams()),
        row(SamplingParams(logit_bias={7: 2.0}), never=[9]),
        row_after(SamplingParams(repetition_penalty=3.0), [1], [2]),
    ]
    together = adjust(logits, rows, VOCABULARY)
    for place, one in enumerate(rows):
        assert torch.equal(together[place], adjust(logits[place : place + 1], [one], VOCABULARY)[0])
    assert torch.equal(together[1], logits[1])
    assert torch.equal(logits, before)
    assert adjust(logits, [row(SamplingParams())] * 4, VOCABULARY) is logits


def test_min_tokens_bans_end_tokens_at_first():
    logits = torch.tensor([[1.0, 2.0, 9.0, 8.0]])
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3])
    made = Row(params, 0, stop_ids=[2])
    said = []
    for _ in range(3):
        said.append(choose(logits, [made])[0].token_id)
        made.take(said[-1])
    assert said == [1, 1, 2]


def test_penalties_change_greedy_answers_and_not_their_log_probabilities():
    logits = torch.tensor([[3.0, 2.5, 0.0]])
    params = SamplingParams(temperature=0, presence_penalty=2.0, logprobs=1)
    (found,) = choose(logits, [row_after(params, [], [0])])
    assert found.token_id == 1
    assert found.logprob == pytest.approx(float(torch.log_softmax(logits[0], dim=0)[1]), abs=1e-6)
    assert [one.token_id for one in found.top] == [1, 0]


def test_infinite_ban_survives_other_adjustments():
    logits = torch.tensor([[-math.inf, 1.0, 0.0]])
    params = replace(SamplingParams(temperature=0), repetition_penalty=0.5, logit_bias={0: 100.0}, frequency_penalty=-2)
    (found,) = choose(logits, [row_after(params, [0], [0, 0])])
    assert found.token_id == 1
