"""Checkpoints in the packings of AWQ, GPTQ, compressed-tensors and fp8, packed by hand from their descriptions.

Every number is packed separately, so these tests share no code with the reader.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from inlay import LLM, ModelError, SamplingParams
from inlay.models.formats.packings import PackQuantized
from inlay.models.load import load_model
from inlay.models.quantize import Int4Linear, Int8Linear
from inlay.models.shapes import bytes_tokenizer
from tests.raising import raises

pytestmark = pytest.mark.long

IDS = torch.tensor([[3, 77, 200, 41, 41, 9, 130, 18, 250, 6, 33, 90]])
GROUP = 64

#: A layer's weight → the tensors in the file, and the weight that they represent.
Packing = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def numbers_of(weight: Tensor, bits: int, group: int, *, symmetric: bool, order: Tensor | None = None):
    """Integers (out, in), scales and zeros (out, groups), by plain rounding, and the weight that they represent
    (out, in).
    """
    groups = torch.arange(weight.shape[1]) // group if order is None else order
    count, most = int(groups.max()) + 1, 2**bits - 1
    numbers, meant = torch.zeros(weight.shape, dtype=torch.int64), torch.zeros_like(weight)
    scales, zeros = torch.zeros(len(weight), count), torch.zeros(len(weight), count, dtype=torch.int64)
    for g in range(count):
        inside = groups == g
        part = weight[:, inside]
        if symmetric:
            scale, zero = part.abs().amax(1) / (most // 2), torch.full((len(weight),), most // 2 + 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = (high - low) / most
            zero = (-low / scale).round().clamp(1, most).long()
        scale = scale.half().float()
        numbers[:, inside] = (part / scale[:, None] + zero[:, None]).round().clamp(0, most).long()
        meant[:, inside] = (numbers[:, inside] - zero[:, None]) * scale[:, None]
        scales[:, g], zeros[:, g] = scale, zero
    return numbers, scales, zeros, meant


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack rows of numbers into rows of 32-bit words, number by number. order: which number lies at each place."""
    each = 32 // bits
    order = order or tuple(range(each))
    packed = torch.zeros(len(numbers), -(-numbers.shape[1] // each), dtype=torch.int64)
    for row in range(len(numbers)):
        for word in range(packed.shape[1]):
            for place, which in enumerate(order):
                if word * each + which < numbers.shape[1]:
                    packed[row, word] |= int(numbers[row, word * each + which]) << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def awq(weight: Tensor, group: int = GROUP):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    numbers, scales, zeros, meant = numbers_of(weight, 4, group, symmetric=False)
    return {
        "qweight": words(numbers.t(), 4, order),
        "qzeros": words(zeros.t(), 4, order),
        "scales": scales.t().contiguous().half(),
    }, meant


def gptq(
    weight: Tensor,
    bits: int = 4,
    less: int = 1,
    symmetric: bool = False,
    shuffled: bool = False,
    group: int = GROUP,
    said: bool = True,
):
    """said: True if the file has the group of each input."""
    order = torch.arange(weight.shape[1]) // group
    if shuffled:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(1))]
    numbers, scales, zeros, meant = numbers_of(weight, bits, group, symmetric=symmetric, order=order)
    tensors = {
        "qweight": words(numbers, bits).t().contiguous(),
        "qzeros": words((zeros - less).t(), bits),
        "scales": scales.t().contiguous().half(),
    }
    return tensors | ({"g_idx": order.int()} if said else {}), meant


def packed(weight: Tensor, bits: int = 4, symmetric: bool = True, shuffled: bool = False, group: int = GROUP):
    order = torch.arange(weight.shape[1]) // group
    if shuffled:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(1))]
    numbers, scales, zeros, meant = numbers_of(weight, bits, group, symmetric=symmetric, order=order)
    tensors = {
        "weight_packed": words(numbers, bits),
        "weight_shape": torch.tensor(weight.shape),
        "weight_scale": scales,
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    if shuffled:
        tensors["weight_g_idx"] = order.int()
    return tensors, meant


def whole_bytes(weight: Tensor, group: int | None = None, symmetric: bool = True, shuffled: bool = False):
    order = torch.arange(weight.shape[1]) // (group or weight.shape[1])
    if shuffled:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(1))]
    numbers, scales, zeros, meant = numbers_of(weight, 8, 0, symmetric=symmetric, order=order)
    tensors = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    if shuffled:
        tensors["weight_g_idx"] = order.int()
    return tensors, meant


def float8_groups(weight: Tensor, group: int):
    """A scale for each run of inputs of an output; the last run may be a part of one."""
    runs = weight.split(group, 1)
    scales = torch.stack([run.abs().amax(1) for run in runs], 1) / 448
    spread = scales.repeat_interleave(group, 1)[:, : weight.shape[1]]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * spread


def float8(weight: Tensor, name: str = "weight_scale", block: int | None = None):
    """A scale for each output, or for each block of outputs and inputs; the last block may be a part of one."""
    if block is None:
        scales = weight.abs().amax(1, keepdim=True) / 448
        spread = scales.expand_as(weight)
    else:
        counts = [-(-size // block) for size in weight.shape]
        scales = torch.zeros(counts)
        for i in range(counts[0]):
            for j in range(counts[1]):
                inside = weight[i * block : (i + 1) * block, j * block : (j + 1) * block]
                scales[i, j] = inside.abs().max() / 448
        spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": numbers, name: scales}, numbers.float() * spread


def one_scale(weight: Tensor):
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scale, "input_scale": torch.tensor(1.0)}, numbers.float() * scale


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"group_size": GROUP} | weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


#: name → (the configuration's entry, the function that packs a layer, the class of that layer in the model)
CASES: dict[str, tuple[dict[str, Any], Packing, type[nn.Module]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, Int4Linear),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq, Int4Linear),
    "gptq, second version": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, less=0),
        Int4Linear,
    ),
    "gptq, symmetric": (
        {"quant_method": "gptq", "bits": 4, "sym": True},
        lambda weight: gptq(weight, symmetric=True),
        Int4Linear,
    ),
    "gptq, in the order of activations": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        lambda weight: gptq(weight, shuffled=True),
        Int8Linear,
    ),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8}, lambda weight: gptq(weight, bits=8), Int8Linear),
    "gptq, 2 bits": ({"quant_method": "gptq", "bits": 2}, lambda weight: gptq(weight, bits=2), Int8Linear),
    "packed": (compressed("pack-quantized", num_bits=4, symmetric=True), packed, Int4Linear),
    "packed, with zeros": (
        compressed("pack-quantized", num_bits=4, symmetric=False),
        lambda weight: packed(weight, symmetric=False),
        Int4Linear,
    ),
    "packed, in the order of activations": (
        compressed("pack-quantized", num_bits=4, symmetric=True, actorder="group"),
        lambda weight: packed(weight, shuffled=True),
        Int8Linear,
    ),
    "packed, 8 bits": (
        compressed("pack-quantized", num_bits=8, symmetric=True),
        lambda weight: packed(weight, bits=8),
        Int8Linear,
    ),
    "bytes": (compressed("int-quantized", num_bits=8, symmetric=True, group_size=None), whole_bytes, Int8Linear),
    "bytes, in the order of activations": (
        compressed("int-quantized", num_bits=8, symmetric=True, actorder="group"),
        lambda weight: whole_bytes(weight, GROUP, shuffled=True),
        Int8Linear,
    ),
    "bytes, in the order of activations, with zeros": (
        compressed("int-quantized", num_bits=8, symmetric=False, actorder="group"),
        lambda weight: whole_bytes(weight, GROUP, symmetric=False, shuffled=True),
        Int8Linear,
    ),
    "bytes, a part of a group": (
        compressed("int-quantized", num_bits=8, symmetric=False, group_size=80),
        lambda weight: whole_bytes(weight, 80, symmetric=False),
        Int8Linear,
    ),
    "awq, a part of a group": (
        {"quant_method": "awq", "bits": 4, "group_size": 160, "version": "gemm"},
        lambda weight: awq(weight, 160),
        Int4Linear,
    ),
    "gptq, a part of a group": (
        {"quant_method": "gptq", "bits": 4, "group_size": 160},
        lambda weight: gptq(weight, group=160, said=False),
        Int4Linear,
    ),
    "packed, a part of a group": (
        compressed("pack-quantized", num_bits=4, symmetric=False, group_size=96),
        lambda weight: packed(weight, symmetric=False, group=96),
        Int4Linear,
    ),
    "packed, a part of a group that is no multiple of ours": (
        compressed("pack-quantized", num_bits=4, symmetric=False, group_size=80),
        lambda weight: packed(weight, symmetric=False, group=80),
        Int8Linear,
    ),
    "floats, in groups": (
        compressed("float-quantized", num_bits=8, type="float"),
        lambda weight: float8_groups(weight, GROUP),
        nn.Module,
    ),
    "floats, a part of a group": (
        compressed("float-quantized", num_bits=8, type="float", group_size=80),
        lambda weight: float8_groups(weight, 80),
        nn.Module,
    ),
    "floats": (compressed("float-quantized", num_bits=8, type="float"), float8, nn.Module),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 48], "activation_scheme": "dynamic"},
        lambda weight: float8(weight, "weight_scale_inv", 48),
        nn.Module,
    ),
    "fp8, one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, one_scale, nn.Module),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, float8, nn.Module),
}
#: Packings that our layout rounds again.
ROUNDED = (
    *("in the order of activations", "gptq, 8 bits", "gptq, 2 bits", "packed, 8 bits", "bytes, a part of a group"),
    "no multiple of ours",
)


def stock(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 262,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
    }
    config = AutoConfig.for_model("qwen2", **sizes | settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def write(folder: Path, entry: dict[str, Any], packing: Packing, shards: int = 1) -> nn.Module:
    """Write a checkpoint. Returns the stock model of the weights that it means."""
    model = stock()
    model.save_pretrained(folder)
    bytes_tokenizer().save_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for path, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            tensors, meant = packing(module.weight.detach())
            module.weight.data = meant
            del state[f"model.layers.{path}.weight"]
            state |= {f"model.layers.{path}.{part}": tensor for part, tensor in tensors.items()}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    (folder / "model.safetensors").unlink()
    names, places = sorted(state), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        save_file({name: state[name] for name in names[i::shards]}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names[i::shards], file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS).logits[0]


@pytest.mark.parametrize("name", CASES)
def test_every_packing_equals_its_definition(tmp_path, name):
    entry, packing, kind = CASES[name]
    meant = write(tmp_path, entry, packing)
    unpacked = load_model(tmp_path, weights="stock")
    assert all(type(module) is nn.Linear for module in unpacked.model.modules() if isinstance(module, nn.Linear))
    torch.testing.assert_close(logits(unpacked.model), logits(meant), atol=1e-4, rtol=0)
    kept = load_model(tmp_path)
    assert isinstance(kept.model.model.layers[0].mlp.gate_up, kind)
    if any(word in name for word in ROUNDED):
        error = (logits(kept.model) - logits(meant)).norm() / logits(meant).norm()
        assert error < 0.03
    else:
        torch.testing.assert_close(logits(kept.model), logits(meant), atol=1e-4, rtol=0)


def test_shards_answers_and_fingerprints(tmp_path):
    entry, packing, _ = CASES["gptq"]
    whole, parts, other = (tmp_path / name for name in ("whole", "parts", "other"))
    for folder, shards in ((whole, 1), (parts, 3)):
        folder.mkdir()
        write(folder, entry, packing, shards)
    other.mkdir()
    write(other, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, packing)  # the same bytes
    first, second, third = (load_model(folder) for folder in (whole, parts, other))
    assert first.fingerprint == second.fingerprint != third.fingerprint
    assert load_model(whole, weights="stock").fingerprint != first.fingerprint
    llm = LLM(second, kv_memory="4MiB")
    (output,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=4))
    llm.shutdown()
    assert output.outputs[0].token_ids


def test_requested_bits_are_applied(tmp_path):
    meant = write(tmp_path, *CASES["awq"][:2])
    asked = load_model(tmp_path, quantization="int4").model
    assert isinstance(asked.model.layers[0].mlp.gate_up, Int4Linear)
    asked.lm_head = meant.lm_head  # which int4 keeps in 8 bits
    torch.testing.assert_close(logits(asked), logits(meant), atol=1e-4, rtol=0)
    wider = load_model(tmp_path, quantization="int8").model
    assert isinstance(wider.model.layers[0].mlp.gate_up, Int8Linear)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "weights quantized by 'bitsandbytes' are not read"),
        ({"quant_method": "hqq"}, "by 'hqq' are not read; inlay reads awq, gptq, compressed-tensors"),
        ({"quant_method": "mxfp4"}, "by 'mxfp4' are not read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "by awq in 4 bits, version 'gemv' are not read"),
        ({"quant_method": "gptq", "bits": 3}, "by gptq in 3 bits, format 'gptq' are not read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "by gptq in 4 bits, format 'marlin'"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "by compressed-tensors, format 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=3), "by compressed-tensors in 3 bits are not read"),
        (
            compressed("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "by compressed-tensors, sparsity 'sparse-24-bitmask' are not read",
        ),
    ],
)
def test_other_packings_are_rejected_with_a_remedy(tmp_path, entry, sentence):
    stock().save_pretrained(tmp_path)
    bytes_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    with pytest.raises(ModelError, match=sentence) as told:
        load_model(tmp_path)
    assert str(told.value).endswith("give the original weights, with quantization int8 or int4, or one of these")


def test_incomplete_checkpoints_are_refused(tmp_path):
    entry, packing, _ = CASES["awq"]
    write(tmp_path, entry, packing)
    from safetensors.torch import load_file

    state = load_file(tmp_path / "model.safetensors")
    lacking = copy.copy(state)
    del lacking["model.layers.0.mlp.up_proj.qzeros"]
    save_file(lacking, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises("model.missing_weights", ModelError, names="up_proj.qzeros"):
        load_model(tmp_path)
    for part in ("qweight", "qzeros", "scales"):
        state.pop(f"model.layers.0.mlp.up_proj.{part}")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises("model.missing_weights", ModelError, names="up_proj.weight"):
        load_model(tmp_path)
    stock().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    with raises("model.invalid_quantization", ModelError):
        load_model(tmp_path)


def changed(packing: Packing, **tensors: Tensor | None) -> Packing:
    """A packing with other tensors, or without some."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        found, meant = packing(weight)
        found |= {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        return {name: tensor for name, tensor in found.items() if tensors.get(name, tensor) is not None}, meant

    return pack


@pytest.mark.parametrize(
    ("name", "settings", "tensors", "sentence"),
    [
        ("bytes", {}, {"weight_bit_map": torch.ones(1)}, "is packed with a weight_bit_map, which inlay does not know"),
        ("awq", {}, {"g_idx": torch.zeros(1)}, "is packed with a g_idx, which inlay does not know"),
        ("gptq", {}, {"perm": torch.zeros(1)}, "is packed with a perm, which inlay does not know"),
        ("packed", {}, {"weight_global_scale": torch.ones(1)}, "is packed with a weight_global_scale, which"),
        (
            "fp8 blocks",
            {},
            {"weight_scale": torch.ones(1)},
            "has both a weight_scale and a weight_scale_inv, and nothing",
        ),
        (
            "floats",
            {},
            {"weight_scale": torch.ones(7, 2)},
            r"has scales or zeros of the shape \(7, 2\), which are not of",
        ),
        ("floats", {}, {"weight_zero_point": torch.ones(1)}, "has floats of 8 bits with zeros"),
        ("fp8 blocks", {"weight_block_size": [32, 48]}, {}, "has scales or zeros of the shape"),
        ("awq", {"group_size": 128}, {}, "has 3 groups for 192 inputs, and its configuration names 128 as"),
        ("awq", {"group_size": None}, {}, "has 3 groups for 192 inputs, and its configuration names none as"),
        ("gptq", {}, {"g_idx": torch.full((128,), 7)}, "has an order of activations that is not of 192 inputs in 3"),
        ("gptq", {"group_size": 32}, {"g_idx": None}, "has 3 groups for 192 inputs, and its configuration names 32 as"),
        (
            "packed",
            {},
            {"weight_shape": torch.tensor([128, 160])},
            r"has numbers of the shape \(128, 24\), where \(128, 40\) fits",
        ),
    ],
)
def test_tensors_of_wrong_shape_are_rejected_with_their_name(tmp_path, name, settings, tensors, sentence):
    entry, packing, _ = CASES[name]
    write(tmp_path, entry | settings, changed(packing, **tensors))
    with pytest.raises(ModelError, match=sentence) as told:
        load_model(tmp_path)
    assert str(told.value).startswith(f"{tmp_path / 'model.safetensors'}: model.layers.0.")
    assert str(told.value).endswith("; give the original weights, with quantization int8 or int4")


def test_activation_bounds_are_ignored(tmp_path):
    entry, packing, _ = CASES["fbgemm"]
    meant = write(tmp_path, entry, changed(packing, input_scale_ub=torch.tensor([1200.0]), bias=None))
    torch.testing.assert_close(logits(load_model(tmp_path).model), logits(meant), atol=1e-4, rtol=0)


def test_the_size_of_groups_is_in_the_fingerprint():
    """The same bytes with other runs are another model: 128 inputs in two groups may be 96 and 32, or 80 and 48."""
    tensors, _ = packed(torch.arange(8 * 128.0).reshape(8, 128))
    arguments = (tensors["weight_packed"], (8, 128), tensors["weight_scale"], None, None, 4)
    names = {frozenset(PackQuantized(*arguments, [size]).tensors()) for size in (96, 80, 64)}
    assert len(names) == 3
