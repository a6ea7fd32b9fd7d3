"""Models through torch.compile, on the CPU, where their weights are the stock ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from inlay import LLM, ParameterError, SamplingParams
from inlay.attention.plan import Part
from inlay.config import EngineConfig
from inlay.engine.allocation import Work
from inlay.models import compiling
from inlay.models.load import load_model
from inlay.models.weights import STOCK
from inlay.slots import SlotRange
from tests.conftest import tiny
from tests.model.equivalence.recorder import Recorder
from tests.model.equivalence.test_exact import check_whole_answer, ids
from tests.raising import raises

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_equal_the_stock_model(name):
    """Prefills in chunks and decode steps of one and several rows; the second run reads stored segments."""
    loaded = tiny(name)
    recorder = Recorder(loaded, compile=True, max_num_batched_tokens=24, reuse="exact")
    prompts = [ids(length, seed) for seed, length in enumerate((40, 5))]
    for _ in range(2):
        for prompt, (output, logits) in zip(prompts, recorder.greedy(prompts, 4), strict=True):
            check_whole_answer(loaded, prompt, output, logits)


@pytest.fixture
def counted(monkeypatch):
    """In place of the compiler: which models were compiled, and how often they ran. error, off: how they go wrong."""
    seen = {"models": [], "runs": 0, "error": None, "off": 0.0}

    def compiled(model):
        seen["models"].append(model)

        def run(**inputs):
            seen["runs"] += 1
            assert model.config._attn_implementation == compiling.OPAQUE
            if seen["error"] is not None:
                raise seen["error"]
            output = model(**inputs)
            output.logits = output.logits + seen["off"] * torch.linspace(0, 1, output.logits.shape[-1])
            return output

        return run

    monkeypatch.setattr(torch, "compile", lambda model, dynamic: compiled(model))
    return seen


def make(**settings) -> LLM:
    return LLM(tiny("llama"), kv_memory="4MiB", **settings)


def test_compiled_model_answers_after_a_comparison(counted):
    expected = make().generate("Hello", PARAMS)[0].outputs[0].token_ids
    assert not counted["models"]
    llm = make(compile=True)
    assert counted["models"] == [llm.loaded.model]
    checked = counted["runs"]
    assert checked >= 3, "it was compared with the stock model"
    assert llm.generate("Hello", PARAMS)[0].outputs[0].token_ids == expected
    assert counted["runs"] > checked


def test_compiler_failure_is_rejected(counted):
    counted["error"] = RuntimeError("no compiler was found\nand more")
    with pytest.raises(ParameterError) as error:
        make(compile=True)
    assert str(error.value) == (
        "compile is set, and torch.compile fails at this model: RuntimeError: no compiler was found; leave compile out"
    )


def test_compiled_model_with_other_logits_is_rejected(counted):
    counted["off"] = 0.5
    with raises("model.not_compilable", ParameterError):
        make(compile=True)


def test_models_that_cannot_be_compiled_are_rejected(counted):
    packed = load_model("random:tiny", device="cpu")
    with raises("model.not_compilable", ParameterError, names="stock"):
        LLM(packed, compile=True, kv_memory="4MiB")
    mpt = SimpleNamespace(config=AutoConfig.for_model("mpt"))
    with raises("model.not_compilable", ParameterError, names="mpt"):
        compiling.check_compilable(mpt, "a model", STOCK, adapters=False)
    with raises("model.not_compilable", ParameterError, names="adapters"):
        compiling.check_compilable(tiny("llama").model, "a model", STOCK, adapters=True)
    with raises("parameter.wrong_type", ParameterError, names="compile"):
        EngineConfig(compile=1)
    assert not counted["models"]


def test_passes_that_end_early_run_uncompiled(counted):
    """An exception ends those in the check layer, on its way out through the model's code."""
    llm = make(compile=True)
    before = counted["runs"]
    engine = llm.local.engine.runner
    work = Work(tuple(range(8)), Part.of(0, 8, (), (SlotRange(0, 8),)))
    engine.run_to_check([work])
    assert counted["runs"] == before
