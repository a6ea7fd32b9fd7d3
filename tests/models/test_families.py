"""The registry of families, and the way in for those whose attention does not go through the AttentionInterface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from inlay import ModelError
from inlay.models import families
from inlay.models.families import FAMILIES, check_config, describe, register
from inlay.models.family import Family
from inlay.models.interface import attend
from inlay.models.linear import FrozenLinear, joined
from inlay.models.load import LoadedModel
from inlay.models.random import bytes_tokenizer
from inlay.models.spec import LayerSpec, ModelSpec
from inlay.models.weights import WeightForm, prepare

from ..conftest import CONFIGS
from ..equivalence.recorder import Recorder, close


def test_every_file_is_a_family_and_every_family_has_tiny_models_to_be_compared_with():
    files = {file.stem for file in Path(families.__path__[0]).glob("*.py")} - {"__init__"}
    assert {type(family).__module__.rpartition(".")[2] for family in FAMILIES.values()} == files
    assert set(FAMILIES) == {model_type for model_type, _ in CONFIGS.values()}
    assert all(model_type in family.model_types for model_type, family in FAMILIES.items())


def test_a_model_type_has_one_family():
    class Other(Mpt):
        model_types = ("llama",)

    with pytest.raises(ValueError, match="models of type 'llama' have a family already"):
        register(Other())
    register(FAMILIES["llama"])  # the one that it has
    assert type(FAMILIES["llama"]).__name__ == "Llama"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (AutoConfig.for_model("gpt2", reorder_and_upcast_attn=True), "GPT-2 with reorder_and_upcast_attn or add_cross"),
        (AutoConfig.for_model("gpt2", add_cross_attention=True), "GPT-2 with reorder_and_upcast_attn or add_cross_at"),
        (
            AutoConfig.for_model("phi3"),
            "models of type 'phi3' are not supported: .* use one of gpt2, llama, mistral",
        ),
    ],
)
def test_configurations_that_are_refused(config, reason):
    with pytest.raises(ModelError, match=reason):
        check_config(config)


def test_a_scaling_that_nobody_has_verified_is_refused():
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": "spiral"}
    with pytest.raises(ModelError, match="rotary scaling 'spiral' is not supported; use one of default, linear, lla"):
        check_config(config)


class Mpt(Family):
    """A family for which transformers builds masks and biases itself, and drops ``position_ids`` and ``inlay``."""

    model_types = ("mpt",)

    def layers(self, model):
        heads = model.config.n_heads
        return (LayerSpec(heads, model.config.d_model // heads, rotary=None),) * model.config.n_layers

    def spec(self, model):
        config = model.config
        return ModelSpec("mpt", self.layers(model), max_positions=config.max_seq_len, vocab_size=config.vocab_size)

    def patch(self, model):
        stock = model.forward
        slopes = -build_mpt_alibi_tensor(model.config.n_heads, 2)[:, 0, 0]

        def attention(module: Any, hidden: torch.Tensor, inlay: Any) -> torch.Tensor:
            heads = module.Wqkv(hidden).view(1, -1, 3, module.n_heads, module.head_dim).permute(2, 0, 3, 1, 4)
            output, _ = attend(module, *heads, None, inlay=inlay, scaling=module.softmax_scale, slopes=slopes)
            return module.out_proj(output.flatten(2))

        def forward(*args: Any, inlay: Any = None, **kwargs: Any) -> Any:
            if inlay is None:
                return stock(*args, **kwargs)
            body = model.transformer
            hidden = body.wte(kwargs["input_ids"])
            for block in body.blocks:
                hidden = hidden + attention(block.attn, block.norm_1(hidden), inlay)
                hidden = block.ffn(block.norm_2(hidden), hidden)
            return CausalLMOutput(logits=model.lm_head(body.norm_f(hidden)[:, kwargs["logits_to_keep"]]))

        model.forward = forward

    def fuse(self, path, part, make):
        match path.split("."):
            case [*_, "blocks", _]:
                part.ffn.up_proj = joined([part.ffn.up_proj], make)
        return super().fuse(path, part, make)


@pytest.fixture
def mpt() -> Iterator[None]:
    register(Mpt())
    yield
    del FAMILIES["mpt"]


@pytest.mark.usefixtures("mpt")
@pytest.mark.parametrize("weights", ["stock", "packed"])
def test_a_family_beside_the_attention_interface_is_served_by_its_patch(weights):
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
        for ours in (stock, model):  # what a patch replaces is as it was for everybody else
            with torch.inference_mode():
                expected = ours(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
            close(logits, expected[len(prompt) - 1 :])
