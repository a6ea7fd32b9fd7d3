"""In bfloat16, teacher-forced logits stay as close to the fp32 model as the stock model's own bfloat16 logits do."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from inlay import Schema
from tests.conftest import CONFIGS, tiny
from tests.model.equivalence.oracle import prefill
from tests.model.equivalence.recorder import Recorder

SCHEMA = Schema.from_string(
    '<schema name="s">Some words in front. <module name="a">The first module, with words.</module>'
    '<module name="b">Second module: more of them.</module></schema>'
)


def in_bf16(name: str):
    loaded = tiny(name)
    model = copy.deepcopy(loaded.model)
    for parameter in model.parameters():  # buffers, such as rotary frequencies, stay in fp32 as they do on loading
        parameter.data = parameter.data.bfloat16()
    return replace(loaded, model=model)


def error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", list(CONFIGS))
def test_no_worse_than_the_stock_model(name):
    loaded = in_bf16(name)
    recorder = Recorder(loaded, reuse="exact")
    recorder.llm.add_schema(SCHEMA)
    for _ in range(2):
        ((output, logits),) = recorder.greedy([SCHEMA.prompt().use("a").use("b").text("What then?")], tokens=12)
    assert output.usage.cached_tokens > 0
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    truth = prefill(tiny(name), ids)[-12:]
    with torch.inference_mode():
        stock = loaded.model(torch.tensor([ids]), use_cache=False).logits[0, -12:]
    assert error(logits, truth) < 1.5 * error(stock, truth) + 1e-3


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "gpt2"])
def test_a_shift_costs_no_precision(name):
    """The query is turned in fp32, so reading at a shift is as good as reading in place."""
    loaded = in_bf16(name)
    recorder = Recorder(loaded, reuse="isolated")
    recorder.llm.add_schema(SCHEMA)
    full = Recorder(tiny(name), reuse="isolated")
    full.llm.add_schema(SCHEMA)
    prompt = SCHEMA.prompt().use("a").use("b").text("What then?")
    ((_, logits),) = recorder.greedy([prompt], tokens=1)
    ((_, truth),) = full.greedy([prompt], tokens=1)
    in_place = Recorder(loaded, reuse="off")
    in_place.llm.add_schema(SCHEMA)
    ((output, plain),) = in_place.greedy([prompt], tokens=1)
    plain_truth = prefill(tiny(name), list(output.prompt_token_ids))[-1:]
    assert error(logits, truth) < 2 * error(plain, plain_truth) + 1e-3
