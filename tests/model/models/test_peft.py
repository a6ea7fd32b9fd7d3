"""PEFT itself, where it is installed, as the oracle: its own folders, and the logits of its models."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.conftest import tiny
from tests.model.equivalence.recorder import Recorder, close

peft = pytest.importorskip("peft", reason="PEFT is not installed; it is no dependency")

CASES = {
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8},
    "all": {"target_modules": "all-linear", "r": 3, "use_rslora": True, "exclude_modules": ["o_proj"]},
    "patterns": {
        "target_modules": ["q_proj", "down_proj"],
        "r": 2,
        "rank_pattern": {"layers.1.self_attn.q_proj": 5, "down_proj": 3},
        "alpha_pattern": {"q_proj": 7, "^model.layers.2.mlp.down_proj": 1},
        "layers_to_transform": [1, 2],
    },
    "regex": {"target_modules": r".*layers\.(0|2)\..*(gate|k)_proj", "r": 6},
    "head": {"target_modules": ["lm_head", "up_proj"], "r": 2},
    "c_attn": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "r": 4},
}


@pytest.mark.parametrize("case", list(CASES))
def test_logits_equal_peft(case, tmp_path):
    loaded = tiny("gpt2" if case == "c_attn" else "llama")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **CASES[case])
    model = peft.get_peft_model(copy.deepcopy(loaded.model), config).eval()
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    prompt = torch.randint(0, 256, (30,)).tolist()
    ((_, logits),) = Recorder(loaded, adapters={"theirs": tmp_path}).greedy([prompt], tokens=1, adapter="theirs")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1:]
        plain = loaded.model(input_ids=torch.tensor([prompt])).logits[0, -1:]
    assert (expected - plain).abs().max() > 1e-2  # there is something that could be missed
    close(logits, expected)


@pytest.mark.parametrize("change", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"lora_bias": True}])
def test_peft_features_without_support_are_rejected(change, tmp_path):
    from inlay import LLM
    from inlay.errors import ModelError

    loaded = tiny("llama")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **change)
    peft.get_peft_model(copy.deepcopy(loaded.model), config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"says {next(iter(change))} .*, which is not supported"):
        LLM(loaded, kv_memory="8MiB", adapters={"theirs": tmp_path})
