"""The table of architectures: against the paper's figures, transformers' classes, and published parameter counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from inlay.authoring.memory import ARCHITECTURES, CODECS, shape_named, shape_of
from inlay.errors import ModelError
from inlay.models.shapes import SHAPES
from tests.raising import raises

BF16 = CODECS["bf16"]
MIB = 2**20

#: The public configurations, with the extra fields that a count of parameters needs, and the number of parameters.
#: The number is exact where it could be checked. Otherwise it is the size in the model's name, within 5%.
PUBLISHED: dict[str, tuple[dict[str, Any], int, float]] = {
    "bert-base": ({"model_type": "bert", "vocab_size": 30522}, 109_482_240, 0),
    "falcon-rw-1b": (
        {"model_type": "falcon", "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 24}
        | {"num_attention_heads": 32, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        1_311_625_216,
        0,
    ),
    "llama-2-7b": (SHAPES["llama-2-7b"], 6_738_415_616, 0),
    "llama-2-13b": (
        SHAPES["llama-2-7b"]
        | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40}
        | {"num_attention_heads": 40, "num_key_value_heads": 40},
        13_015_864_320,
        0,
    ),
    "mpt-30b": ({"model_type": "mpt", "d_model": 7168, "n_heads": 64, "n_layers": 48}, 30_000_000_000, 0.05),
    "falcon-40b": (
        {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128}
        | {"num_kv_heads": 8, "new_decoder_architecture": True},
        40_000_000_000,
        0.05,
    ),
    "llama-2-70b": (
        SHAPES["llama-2-7b"]
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "num_key_value_heads": 8},
        68_976_648_192,
        0,
    ),
    "falcon-180b": (
        {"model_type": "falcon", "hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232}
        | {"num_kv_heads": 8, "new_decoder_architecture": True},
        180_000_000_000,
        0.05,
    ),
}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_head_counted_gives_the_paper(name):
    """Prompt Cache, table 2: MiB at 16 bit, cut off after two decimals."""
    one = ARCHITECTURES[name]
    assert math.floor(one.every_head().bytes_per_token(BF16) / MIB * 100) / 100 == one.paper


def test_cache_bytes_of_known_architectures():
    kept = {name: one.shape().bytes_per_token(BF16) for name, one in ARCHITECTURES.items() if not one.encoder}
    assert kept == {
        "falcon-rw-1b": 196_608,
        "llama-2-7b": 524_288,
        "llama-2-13b": 819_200,
        "mpt-30b": 1_376_256,
        "falcon-40b": 122_880,
        "llama-2-70b": 327_680,
        "falcon-180b": 163_840,
    }


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_named_shapes_match_published_parameter_counts(name):
    """A model of these numbers has as many parameters as were published, and its configuration counts the same."""
    settings, parameters, tolerance = PUBLISHED[name]
    settings = dict(settings)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    build = AutoModel if name == "bert-base" else AutoModelForCausalLM
    with torch.device("meta"):
        model = build.from_config(config)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=tolerance, abs=0)
    one = ARCHITECTURES[name]
    assert one.kind == config.model_type
    assert (one.layers, one.heads) == (config.num_hidden_layers, config.num_attention_heads)
    assert one.width == config.hidden_size // config.num_attention_heads
    if not one.encoder:
        counted = shape_of(config)
        assert counted == one.shape()


def test_every_architecture_is_checked():
    assert set(PUBLISHED) == set(ARCHITECTURES)


def test_a_plain_name_and_a_random_model_count_the_same():
    assert shape_named("llama-2-7b").layers == shape_named("random:llama-2-7b").layers
    assert shape_named("llama-3.2-1b").layers == shape_named("random:llama-3.2-1b").layers


def test_reasons():
    reasons = {name: one.reason() for name, one in ARCHITECTURES.items()}
    assert reasons["llama-2-7b"] == reasons["falcon-rw-1b"] == ""
    assert reasons["falcon-180b"] == "8 KV heads serve 232 heads (grouped-query attention)"
    assert reasons["bert-base"].startswith("an encoder")


def test_an_encoder_has_no_cache():
    with raises("model.no_cache", ModelError, names="bert-base"):
        shape_named("bert-base")


def test_a_directory_needs_no_more_than_its_configuration(tmp_path):
    AutoConfig.for_model("qwen3", num_hidden_layers=2, num_key_value_heads=2, head_dim=16).save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert shape_named(str(tmp_path)).bytes_per_token(BF16) == 2 * 2 * 2 * 16 * 2


def test_error_starts_with_the_model_name(tmp_path):
    AutoConfig.for_model("mamba").save_pretrained(tmp_path)
    with raises("model.no_cache", ModelError, names="'mamba'") as caught:
        shape_named(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}: ")
