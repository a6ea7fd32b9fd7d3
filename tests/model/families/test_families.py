"""Every family against stock transformers: a short form by default, the whole suite with ``make test-families``."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inlay.models.families import FAMILIES
from inlay.models.interface import attention_implementation
from inlay.models.load import as_loaded, load_model
from inlay.models.shapes import bytes_tokenizer
from inlay.models.unshared import REASONS, REFUSED
from tests.model.equivalence.recorder import Recorder, close
from tests.model.families.configs import ROWS, stock_model
from tests.model.families.oracle import stock_implementation, untouched
from tests.model.families.suite import CHECKS, claims_shifts, shifts_are_allowed

#: A row for each thing that sets families apart.
SHORT = (
    *("bloom", "deepseek_v2", "deepseek_v3", "falcon", "falcon alibi", "gemma3_text", "gemma3n_text", "gemma4_text"),
    *("gemma4_text moe", "glm4", "gpt_neox", "gpt_oss", "granitemoehybrid attention", "hunyuan_v1_dense"),
    *("llama4_text", "mixtral", "mpt", "nanochat", "opt", "phimoe", "smollm3", "stablelm"),
)
SHORT_CHECKS = ("prefill and decode", "shifts", "windows and sinks", "adapters")


def cases() -> list[object]:
    """Every row with every check; slow where it is not of the short form."""
    return [
        pytest.param(row, check, marks=() if row in SHORT and check in SHORT_CHECKS else pytest.mark.slow)
        for row in ROWS
        for check in CHECKS
    ]


@pytest.mark.parametrize(("row", "check"), cases())
def test_a_family(row, check):
    if check == "shifts" and not claims_shifts(row):
        assert not shifts_are_allowed(row)  # neither claimed nor given
        return
    CHECKS[check](row)


def test_no_family_is_forgotten():
    """Each causal family of transformers is served, refused with its reason, or known not to have been looked at."""
    assert not set(FAMILIES) & set(REFUSED)
    assert len(REFUSED) == sum(map(len, REASONS.values()))  # one reason each
    assert set(REFUSED) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("row", ["deepseek_v3", "falcon alibi", "gemma4_text", "llama4_text", "mpt", "stablelm"])
def test_loaded_model_with_replaced_attention_equals_stock(row):
    """Two engines on one model, and the stock calls of that model, are right."""
    model, prompt = stock_model(row), list(range(40))
    for _ in range(2):
        loaded = as_loaded(model, "auto", 0, None, None, bytes_tokenizer())
        ((output, logits),) = Recorder(loaded).greedy([prompt], 4)
        close(logits, untouched(row, prompt + list(output.outputs[0].token_ids)[:-1])[len(prompt) - 1 :])
    with torch.inference_mode(), attention_implementation(model, stock_implementation(row)):
        close(model(torch.tensor([prompt]), use_cache=False).logits[0], untouched(row, prompt))


@pytest.mark.parametrize("row", ["deepseek_v3", "falcon alibi", "mpt"])
def test_checkpoint_with_replaced_attention_equals_stock(row, tmp_path):
    """From a folder, packed as by default: the same answers and the same fingerprint as the stock model's."""
    model = stock_model(row)
    model.save_pretrained(tmp_path)
    bytes_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    prompt = list(range(40))
    ((output, logits),) = Recorder(loaded).greedy([prompt], 4)
    close(logits, untouched(row, prompt + list(output.outputs[0].token_ids)[:-1])[len(prompt) - 1 :])
    assert loaded.fingerprint == load_model(str(tmp_path), dtype="float32", weights="stock").fingerprint
