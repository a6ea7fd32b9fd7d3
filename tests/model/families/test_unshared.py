"""Models that are served without reuse, against stock transformers: all of them with ``make test-families``."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inlay import LLM, AsyncLLM, CapacityError, ModelError, ParameterError, SamplingParams, Schema
from inlay.engine import unshared_runner
from inlay.engine.unshared_runner import CacheShape, cache_keyword, returned_cache
from inlay.models.families import FAMILIES, family_of
from inlay.models.load import load_model
from inlay.models.multimodal import MULTIMODAL
from inlay.models.shapes import bytes_tokenizer
from inlay.models.unshared import REFUSED, WHY
from tests.model.families.configs import UNSHARED, stock_model
from tests.model.families.unshared import CHECKS, GREEDY, SCHEMA, tiny_unshared
from tests.raising import raises
from tests.server.server.conftest import running

#: States alone; states and attention; attention of its own. The first two run without reuse only here.
SHORT = ("mamba", "qwen3_next", "gptj")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in sorted({*UNSHARED, *SHORT})],
)
def test_a_model_without_reuse(name, check):
    CHECKS[check](name)


def test_unshared_models_are_causal_and_not_served_otherwise():
    kinds = [kind for of in WHY.values() for kind in of]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not set(kinds) & (set(MULTIMODAL) | set(REFUSED))
    assert not set(kinds) & set(FAMILIES)
    assert set(UNSHARED) - {"dbrx", "gpt_neo"} <= set(kinds)


def test_a_checkpoint_from_a_folder(tmp_path):
    model = stock_model("gptj")
    model.save_pretrained(tmp_path)
    bytes_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    assert "are served without reuse" in (loaded.note or "")
    expected = LLM(tiny_unshared("gptj"), seed=0).generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    assert LLM(loaded, seed=0).generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == expected
    with pytest.raises(ParameterError, match=r"quantization is 'int8', and models of type 'gptj' are served without"):
        load_model(str(tmp_path), quantization="int8")


@pytest.mark.parametrize("name", ["mamba", "gptj"])
@pytest.mark.parametrize("keyword", ["cache", "past_key_values", "cache_params"])
def test_cache_under_any_argument_name_is_carried_on(name, keyword):
    """Releases of transformers call it by different names."""
    loaded = tiny_unshared(name)
    model = copy.copy(loaded.model)
    given, stock = cache_keyword(model), model.forward

    def forward(self, input_ids, logits_to_keep, **said):
        if keyword in said:
            said[given] = said.pop(keyword)
        output = stock(input_ids=input_ids, logits_to_keep=logits_to_keep, **said)
        return SimpleNamespace(logits=output.logits, **{keyword: returned_cache(output)})

    named = inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=None)
    signature = inspect.signature(forward)
    forward.__signature__ = signature.replace(parameters=[*list(signature.parameters.values())[:3], named])
    model.__class__ = type("Renamed", (type(model),), {"forward": forward})
    expected = LLM(loaded, seed=0).generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    found = LLM(replace(loaded, model=model), seed=0).generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"reuse": "modular"}, "reuse is 'modular', and models of type 'mamba'"),
        ({"compile": True}, "compile is set, and"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8', and"),
        ({"attention_backend": "torch"}, "attention_backend is 'torch', and"),
    ],
)
def test_settings_without_effect_are_rejected(settings, said):
    with pytest.raises(ParameterError, match=said):
        LLM(tiny_unshared("mamba"), **settings)


def test_several_answers_release_their_states():
    llm = LLM(tiny_unshared("qwen3_next"), seed=0)
    alone = llm.generate([[5, 6, 7, 8]], GREEDY)[0].outputs[0].token_ids
    (output,) = llm.generate([[5, 6, 7, 8]], SamplingParams(top_k=1, max_tokens=8, ignore_eos=True, n=3))
    assert [one.token_ids for one in output.outputs] == [alone] * 3
    assert (llm.stats().used_chunks, llm.stats().running) == (0, 0)


def test_model_that_keeps_text_in_its_modules_is_detected():
    """As recurrent_gemma does, which is refused by name: texts in turns would see each other."""
    loaded = tiny_unshared("mamba")

    class Forgetful(type(loaded.model)):
        def forward(self, *args, cache_params=None, **said):
            return super().forward(*args, cache_params=None, **said)

    model = loaded.model
    kind = type(model)
    try:
        model.__class__ = Forgetful
        with raises("model.not_servable", ModelError):
            LLM(loaded)
    finally:
        model.__class__ = kind


def test_number_of_requests_that_fit_in_memory():
    assert CacheShape(0, 1000).room(10_000, 64, 500) == (10, 5000)
    assert CacheShape(10, 1000).room(10_000, 64, 500) == (5, 500)
    assert CacheShape(10, 0).room(10_000, 64, 500) == (64, 1000)
    assert CacheShape(0, 0).room(10_000, 2, 500) == (2, 1000)
    with raises("cache.pool_too_small", CapacityError, names="1000"):
        CacheShape(10, 1000).room(1500, 64, 500)


def test_models_without_a_causal_decoder_are_rejected():
    with raises("model.unknown_architecture", ModelError, names="t5"):
        family_of(AutoConfig.for_model("t5"))


def test_memory_equals_the_transformers_cache():
    runner = LLM(tiny_unshared("lfm2"), seed=0).client.engine.runner
    config = tiny_unshared("lfm2").model.config
    layers = config.layer_types.count("full_attention")
    assert runner.shape.bytes_per_token == layers * 2 * 2 * 8 * torch.float32.itemsize


def test_indivisible_prompt_runs_whole_with_stock_logprobs():
    loaded = tiny_unshared("mamba")
    llm = LLM(loaded, seed=0, max_num_batched_tokens=16, prefill_chunk=16)
    runner = llm.client.engine.runner
    assert runner.shape.in_steps
    calls: list[int] = []
    heard = loaded.model.register_forward_pre_hook(
        lambda model, args, said: calls.append(said["input_ids"].shape[1]), with_kwargs=True
    )
    ids = [3 * number % 200 for number in range(50)]
    llm.generate([ids], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    heard.remove()
    assert calls == [50, 1, 1]
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0))
    expected = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    told = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(told), expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])


def test_overlong_prompt_continues_token_by_token(monkeypatch):
    llm = LLM(tiny_unshared("mamba"), seed=0, max_num_batched_tokens=16, prefill_chunk=16)
    ids = [3 * number % 200 for number in range(50)]
    expected = llm.generate([ids], GREEDY)[0].outputs[0].token_ids
    monkeypatch.setattr(unshared_runner, "MOST_WHOLE", 40)
    calls: list[int] = []
    heard = llm.loaded.model.register_forward_pre_hook(
        lambda model, args, said: calls.append(said["input_ids"].shape[1]), with_kwargs=True
    )
    assert llm.generate([ids], GREEDY)[0].outputs[0].token_ids == expected
    heard.remove()
    assert calls == [32] + [1] * 25


def test_server_rejects_modules_and_serves_schemas_without_reuse():
    llm = AsyncLLM(tiny_unshared("mamba"), seed=0)
    with running(llm, [Schema.from_string(SCHEMA)]) as site:
        body = {"pml": '<prompt schema="trip"><hills/><user>Where to?</user></prompt>', "max_tokens": 2}
        assert site.post("/v1/completions", **body)["inlay"]["reuse"] == "off"
        status, error = site.refusal("/v1/completions", body | {"reuse": "modular"})
        assert status == 403
        assert "as models of type 'mamba' are served without reuse" in error["message"]
