"""The registry of families, and the way in for those whose attention does not go through the AttentionInterface."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from inlay import LLM, ContextError, ModelError
from inlay.models import families
from inlay.models.families import FAMILIES, check_config, describe, register
from inlay.models.families.llama import Llama
from inlay.models.family import note_of, positions_of
from inlay.models.linear import FrozenLinear
from inlay.models.load import LoadedModel
from inlay.models.shapes import bytes_tokenizer
from inlay.models.weights import WeightForm, prepare
from tests.conftest import CONFIGS
from tests.model.equivalence.recorder import Recorder, close
from tests.model.families.configs import RECURRENT, ROWS, model_type, tiny, tiny_config
from tests.raising import raises


def test_every_file_has_a_family_and_tiny_models():
    files = {file.stem for file in Path(families.__path__[0]).glob("*.py")} - {"__init__"}
    assert {type(family).__module__.rpartition(".")[2] for family in FAMILIES.values()} == files
    tiny_models = {*(model_type for model_type, _ in CONFIGS.values()), *map(model_type, ROWS), *RECURRENT}
    assert set(FAMILIES) == tiny_models
    assert all(model_type in family.model_types for model_type, family in FAMILIES.items())


def test_model_type_has_only_one_family():
    class Other(Llama):
        model_types = ("llama",)

    with pytest.raises(ValueError, match="models of type 'llama' have a family already"):
        register(Other())
    register(FAMILIES["llama"])  # the one that it has
    assert type(FAMILIES["llama"]).__name__ == "Llama"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (AutoConfig.for_model("gpt2", reorder_and_upcast_attn=True), r"reorder_and_upcast_attn .*; set it to false"),
        (AutoConfig.for_model("gpt2", add_cross_attention=True), r"add_cross_attention .*; give a GPT-2 without it"),
        (AutoConfig.for_model("mpt", attn_config={"alibi": False}), r"without ALiBi .*; give an MPT with attn_config"),
        (
            AutoConfig.for_model("xlnet"),
            "models of type 'xlnet' are not supported: they are encoders",
        ),
    ],
)
def test_unsupported_configurations_are_rejected(config, reason):
    with pytest.raises(ModelError, match=reason):
        check_config(config)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_partial_rotation_is_rejected_where_stock_rotates_the_whole_head(kind):
    rotated = {"rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    with raises("model.unsupported_setting", ModelError, names=str(kind)):
        check_config(AutoConfig.for_model(kind, rope_parameters=rotated | {"rope_type": "linear"}))
    check_config(AutoConfig.for_model(kind, rope_parameters=rotated | {"rope_type": "default"}))  # which ignores it


def test_unknown_rope_scaling_is_rejected():
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": "spiral"}
    with raises("model.unsupported_setting", ModelError, names="spiral"):
        check_config(config)


def test_context_ends_where_scaling_changes_stored_frequencies():
    loaded = tiny("phi3 longrope")
    assert loaded.spec.max_positions == 4096
    assert (positions_of(tiny_config("llama dynamic")), note_of(tiny_config("llama dynamic"))) == (4096, None)
    module = loaded.model.base_model.rotary_emb
    before = module.inv_freq.clone()
    module(torch.zeros(1), torch.tensor([[4095]]))
    assert torch.equal(module.inv_freq, before)
    module(torch.zeros(1), torch.tensor([[4096]]))
    assert not torch.equal(module.inv_freq, before)
    module(torch.zeros(1), torch.tensor([[0]]))
    with raises("request.too_long", ContextError, names="4096"):
        LLM(loaded, kv_memory="16MiB").generate([[1] * 4096])


@pytest.mark.parametrize("weights", ["stock", "packed"])
def test_family_outside_the_attention_interface_uses_its_patch(weights):
    settings = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 262, "max_seq_len": 256}
    config = AutoConfig.for_model("mpt", **settings, initializer_range=0.25)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(stock.state_dict())
    form = WeightForm(weights)
    loaded = LoadedModel("tiny-mpt", model, bytes_tokenizer(), describe(model), prepare(model, form), form=form)
    kinds = {type(module) for module in model.transformer.blocks[0].ffn.modules()}
    assert any(issubclass(kind, FrozenLinear) for kind in kinds) == (weights == "packed")

    prompts = [[int(i) for i in torch.randint(0, 256, (length,))] for length in (40, 7)]
    for prompt, (output, logits) in zip(prompts, Recorder(loaded).greedy(prompts), strict=True):
        answer = list(output.outputs[0].token_ids)
        for ours in (stock, model):  # a patch leaves the classes that it replaces unchanged
            with torch.inference_mode():
                expected = ours(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
            close(logits, expected[len(prompt) - 1 :])
