"""A checkpoint's generation configuration sets the sampling of requests that do not set it."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from inlay import LLM, AsyncLLM, ModelError, ParameterError, SamplingParams
from inlay.client.base import sampling_defaults
from inlay.models.load import LoadedModel, load_model
from tests.conftest import tiny

#: Answers that are the same every time, and are those of no other parameters.
SAID = {"temperature": 0.0, "repetition_penalty": 50.0, "max_new_tokens": 9}
DEFAULTS = {"temperature": 0.0, "repetition_penalty": 50.0, "max_tokens": 9}
PROMPT = "Hello"


def advised(**said: Any) -> LoadedModel:
    """A tiny model with this generation configuration."""
    model = copy.copy(tiny("llama").model)
    model.generation_config = GenerationConfig(**said)
    return replace(tiny("llama"), model=model)


def model(**settings: Any) -> LLM:
    return LLM(advised(**SAID), kv_memory="16MiB", seed=0, **settings)


def ids(*arguments: Any, **settings: Any) -> tuple[int, ...]:
    """The answer of a model that has answered nothing yet, so that its seeds are the first."""
    return model(**settings).generate(PROMPT, *arguments)[0].outputs[0].token_ids


def test_generation_config_sets_sampling_fields():
    said = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.05,
    }
    made = LLM(advised(**said, max_new_tokens=100, do_sample=True, eos_token_id=7, num_beams=3), kv_memory="16MiB")
    expected = {**said, "max_tokens": 100}
    assert made.sampling_defaults == expected
    assert made.get_default_sampling_params() == SamplingParams(**expected)
    off = LLM(advised(**said), kv_memory="16MiB", generation_config="off")
    assert off.sampling_defaults == {}
    assert off.get_default_sampling_params() == SamplingParams()


def test_request_without_parameters_gets_the_defaults():
    expected = ids(SamplingParams(**DEFAULTS))
    assert ids() == ids(None) == expected
    assert expected != ids(SamplingParams(temperature=0, max_tokens=9))
    (chat,) = model().chat([{"role": "user", "content": PROMPT}])
    (said,) = model().chat([{"role": "user", "content": PROMPT}], SamplingParams(**DEFAULTS))
    assert chat.outputs[0].token_ids == said.outputs[0].token_ids
    *_, last = model().stream(PROMPT)
    assert last.outputs[0].token_ids == expected

    async def answer() -> tuple[int, ...]:
        llm = AsyncLLM(advised(**SAID), kv_memory="16MiB", seed=0)
        try:
            *_, last = [output async for output in llm.generate(PROMPT)]
        finally:
            llm.shutdown()
        return last.outputs[0].token_ids

    assert asyncio.run(answer()) == expected


def test_given_parameters_ignore_the_generation_config():
    """Those that are left out of them have the defaults of SamplingParams, as in vLLM."""
    plain = LLM(tiny("llama"), kv_memory="16MiB", seed=0)
    expected = plain.generate(PROMPT, SamplingParams())[0].outputs[0].token_ids
    assert ids(SamplingParams()) == ids(generation_config="off") == expected
    assert len(expected) == 16


@pytest.mark.parametrize("do_sample", [False, True, None])
def test_do_sample_has_no_effect_without_other_fields(do_sample):
    assert sampling_defaults(advised(do_sample=do_sample)) == {}


def test_bundled_and_random_models_have_no_sampling_defaults():
    for name in ("demo", "random:tiny"):
        assert sampling_defaults(load_model(name)) == {}


def test_a_checkpoint(tmp_path: Path):
    tiny("qwen2").model.save_pretrained(tmp_path)
    tiny("qwen2").tokenizer.save_pretrained(tmp_path)
    assert LLM(str(tmp_path), kv_memory="16MiB").sampling_defaults == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({**SAID, "do_sample": True, "eos_token_id": [2, 5]}))
    made = LLM(str(tmp_path), kv_memory="16MiB")
    assert made.sampling_defaults == DEFAULTS
    assert LLM(str(tmp_path), kv_memory="16MiB", generation_config="off").sampling_defaults == {}


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be a number from 0 to 100"),
        ({"top_p": 7}, "top_p is 7; it must be a number above 0 and at most 1"),
        ({"top_k": "many"}, "top_k is 'many'; it must be a whole number"),
        ({"max_new_tokens": 0}, "max_tokens is 0; it must be"),
    ],
)
def test_invalid_generation_config_is_rejected(said, sentence):
    loaded = advised()
    for name, value in said.items():
        setattr(loaded.model.generation_config, name, value)
    with pytest.raises(ModelError) as caught:
        LLM(loaded, kv_memory="16MiB")
    assert str(caught.value).startswith(f"tiny-llama: in its generation configuration {sentence}")
    assert str(caught.value).endswith("; correct that, or leave it out with generation_config='off'")
    assert LLM(loaded, kv_memory="16MiB", generation_config="off").sampling_defaults == {}


def test_unknown_generation_config_option_is_rejected():
    with pytest.raises(ParameterError, match="generation_config is 'vllm'; use one of auto, off"):
        LLM(tiny("llama"), generation_config="vllm")
