"""Tokens chosen on a device, here on tensors of the CPU: they equal the host's, and no step waits for the device.

Waits are found on ``meta``, whose tensors hold no numbers to look at.
"""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.errors import InlayError
from inlay.models.load import load_tokenizer
from inlay.sampling import plain, sampler
from inlay.sampling.params import SamplingParams
from inlay.sampling.plain import scaled_down
from inlay.sampling.row import Row
from inlay.sampling.sampler import Sampled, begin, sample
from inlay.sampling.structured import Grammars
from tests.generated import examples
from tests.model.sampling.test_compiled import PARAMS, WIDE, shapes, steps
from tests.unit.sampling.rows import normal, row

TYPICAL = [{"typical_p": 0.6}, {"typical_p": 0.2, "top_p": 0.9}, {"typical_p": 0.9, "top_k": 20, "min_p": 0.01}]


def check(logits: torch.Tensor, rows: list[Row]) -> None:
    """Check that a device chooses what the host does, finds the same damage, and gives the same probabilities."""
    before = logits.clone()
    expected = sample(logits, rows)
    with patch.object(sampler, "on_device", lambda logits: True):
        pending = begin(logits, rows)
    assert list(map(_shown, pending.wait())) == list(map(_shown, expected))
    assert pending.there is not None
    assert ((pending.there >= 0) & (pending.there < logits.shape[1])).all()  # a next step looks their embeddings up
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


def _shown(found: Sampled | InlayError) -> Sampled | str:
    return str(found) if isinstance(found, InlayError) else found


@pytest.mark.parametrize("shape", shapes(1))
def test_device_chooses_the_tokens_of_the_host(shape):
    rows = [made for changes in [*PARAMS, *TYPICAL] for made in steps(changes, 2)]
    check(shapes(2)[shape].repeat(len(rows) // 2, 1), rows)


def test_rows_that_fill_several_tiles(monkeypatch):
    monkeypatch.setattr(plain, "HOST_TILE", 2 * WIDE)
    rows = [made for changes in [*PARAMS, *TYPICAL] for made in steps(changes, 2)]
    check(shapes(2)["two values"].repeat(len(rows) // 2, 1), rows)


_ROW = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 0, 1, 30, 700]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3]),
    typical_p=st.sampled_from([1.0, 1.0, 0.4, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 9), st.floats(-100, 100, width=32), max_size=4),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 9), min_size=1),
    min_tokens=st.sampled_from([0, 9]),
    logprobs=st.sampled_from([None, 0, 3, 20]),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    params=st.lists(_ROW, min_size=1, max_size=6),
    vocabulary=st.integers(10, 3000),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.3, 3, 20]),
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    damage=st.none() | st.sampled_from([math.nan, math.inf]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_rows(params, vocabulary, seed, scale, holes, damage, dtype):
    logits = normal(len(params), vocabulary + 3, seed=seed, scale=scale)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < holes] = -math.inf
    if damage is not None:
        logits[seed % len(params), seed % vocabulary] = damage
    rows = [
        row(one, 4, seed + place, [place], stop_ids=[place + 1, 2**40], prompt_ids=range(place, min(300, vocabulary)))
        for place, one in enumerate(params)
    ]
    for made in rows:
        for token in (1, 1, 2):
            made.take(token)
    check(logits.to(dtype)[:, :vocabulary], rows)


@given(
    draws=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
    total=st.integers(0, 2**62) | st.sampled_from([0, 1, 2**31, 2**62]),
)
def test_draws_are_scaled_without_rounding(draws, total):
    parts = torch.tensor([[draw >> 16 * part & 0xFFFF for part in range(4)] for draw in draws])
    found = scaled_down(parts, torch.full((len(draws),), total))
    assert found.tolist() == [draw * total >> 64 for draw in draws]


def guided() -> tuple[int, list[Row]]:
    """A vocabulary, and rows of every kind, with grammars among them."""
    tokenizer = load_tokenizer("demo")
    vocabulary = len(tokenizer)
    grammars = Grammars(tokenizer, vocabulary, [tokenizer.eos_token_id])
    made = [SamplingParams(**changes) for changes in [*PARAMS, *TYPICAL, {"logprobs": 4, "repetition_penalty": 1.2}]]
    made += [SamplingParams(allowed_token_ids=range(5, 60), logit_bias={7: 3.0})]
    return vocabulary, [
        row(
            params, 2, 3, [5, 2**40], prompt_ids=range(9),
            guide=grammars.guide({"regex": "[a-f]{3}" if place % 2 else "[0-9]+"}) if place % 3 == 0 else None,
        )
        for place, params in enumerate(made)
    ]  # fmt: skip


def test_rows_with_a_grammar():
    vocabulary, rows = guided()
    check(normal(len(rows), vocabulary), rows)


def test_device_sampling_never_waits_and_copies_once(monkeypatch):
    """Tensors of ``meta`` refuse what would wait: to be looked at, to be copied to the host, to set a shape."""
    vocabulary, rows = guided()
    copied = []
    monkeypatch.setattr(sampler, "Download", copied.append)
    there = begin(torch.empty(len(rows), vocabulary, device="meta"), rows).there
    assert there is not None
    assert there.device.type == "meta"
    assert [each.device.type for each in copied] == ["meta"]
    assert copied[0].numel() == 3 * len(rows) + 3 + 2 * 4  # tokens, and the log-probabilities of one row
    for wait in (there.tolist, there.cpu, lambda: there[there > 0]):
        with pytest.raises(RuntimeError):
            wait()
