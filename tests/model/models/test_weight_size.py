"""The memory of weights, counted from a configuration, is within 1% of the memory after a load."""

from __future__ import annotations

import pytest
import torch

from inlay.errors import ParameterError
from inlay.models.compiled_weight import CompiledWeight
from inlay.models.linear import can_multiply
from inlay.models.load import load_model
from inlay.models.weight_size import weight_bytes
from tests.model.families.configs import tiny as tiny_family


def taken(model) -> int:
    """Bytes of everything that the modules of a model hold, but for tables of positions."""
    found: dict[int, int] = {}
    for module in model.modules():
        for held in (*module.parameters(recurse=False), *vars(module).values()):
            if isinstance(held, CompiledWeight):
                found[id(held)] = held.nbytes
            elif isinstance(held, torch.Tensor):
                found[held.data_ptr()] = held.nbytes
    return sum(found.values())


@pytest.mark.parametrize("name", ["random:tiny", "demo"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_counted_weight_bytes_equal_a_load(name, quantization):
    if quantization is None and not can_multiply(torch.zeros(1, dtype=torch.bfloat16)):
        pytest.skip("oneDNN does not say what it takes")
    model = load_model(name, dtype="bfloat16", quantization=quantization).model
    counted = weight_bytes(model.config, torch.bfloat16, quantization)
    assert counted == pytest.approx(taken(model), rel=0.01)


FAMILIES = (
    "bloom",
    "deepseek_v3",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "llama4_text",
    "mixtral",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantized_weight_bytes_equal_the_parameters(family):
    config = tiny_family(family).model.config
    numbers = sum(parameter.numel() for parameter in tiny_family(family).model.parameters())
    assert weight_bytes(config, torch.float32) == 4 * numbers


def test_unknown_quantization_is_rejected():
    with pytest.raises(ParameterError, match="use one of int8, int4"):
        weight_bytes(tiny_family("gpt2").model.config, torch.float32, "int3")
