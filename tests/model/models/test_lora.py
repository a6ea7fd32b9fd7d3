"""Adapters are read from PEFT's folders as PEFT reads them, or refused in one sentence with the remedy."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from inlay import LLM
from inlay.errors import ModelError, ParameterError
from inlay.models.few_rows import acts
from inlay.models.linear import joined, packed
from inlay.models.lora import Adapters, load_adapter, load_adapters, size_of
from inlay.models.lora.config import read_config
from inlay.models.lora.load import linear_places
from tests.adapters import ALL, linear_layers, updates, write_adapter
from tests.conftest import tiny
from tests.model.families.configs import tiny as tiny_family
from tests.model.models.prepared import prepared
from tests.raising import raises

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path):
    return write_adapter(tmp_path / "adapter", tiny("llama"))


def changed(folder, **config):
    """The same adapter with another configuration; None takes a field out."""
    file = folder / "adapter_config.json"
    said = json.loads(file.read_text()) | config
    file.write_text(json.dumps({name: value for name, value in said.items() if value is not None}))
    return folder


def reweighed(folder, change):
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    return folder


def refused(folder, sentence: str, model: str = "llama") -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        load_adapter(tiny(model).model, "mine", folder)
    assert str(caught.value).startswith(f"adapter 'mine' ({folder}): ")
    assert "\n" not in str(caught.value)


def test_loaded_update_equals_the_documented_product(tmp_path):
    settings = {"use_rslora": True, "ranks": {"o_proj": 5}, "alpha_pattern": {"up_proj": 1}}
    folder = write_adapter(tmp_path / "a", tiny("llama"), ALL, **settings)
    adapter = load_adapter(tiny("llama").model, "a", folder)
    expected = updates(folder)
    assert adapter.updates.keys() == expected.keys() == linear_layers(tiny("llama").model).keys()
    for path, low in adapter.updates.items():
        torch.testing.assert_close(low.up @ low.down, expected[path])
    assert (adapter.info.rank, adapter.info.layers) == (5, len(expected))
    assert adapter.info.nbytes == 4 * size_of("a", folder)
    assert str(adapter.info).startswith("adapter a: rank 5 in 21 layers, 0.0 MiB of weights")


@pytest.mark.parametrize(
    ("config", "adapted"),
    [
        ({"target_modules": ["q_proj"]}, lambda path: path.endswith(".q_proj")),
        ({"target_modules": [Q0]}, lambda path: path == Q0),
        ({"target_modules": r".*\.(q|k)_proj"}, lambda path: path.endswith((".q_proj", ".k_proj"))),
        ({"target_modules": r".*\.1\..*down_proj"}, lambda path: path == "model.layers.1.mlp.down_proj"),
        ({"target_modules": ALL}, lambda path: True),
        ({"target_modules": ALL, "exclude_modules": ["o_proj"]}, lambda path: not path.endswith(".o_proj")),
        ({"target_modules": ALL, "exclude_modules": r".*mlp.*"}, lambda path: "mlp" not in path),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
            lambda path: path.endswith(("0.self_attn.q_proj", "2.self_attn.q_proj")),
        ),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
            lambda path: path.endswith("1.self_attn.q_proj"),
        ),
    ],
)
def test_layers_are_named_by_ends_patterns_and_numbers(config, adapted, tmp_path):
    loaded = tiny("llama")
    paths = [path for path in linear_layers(loaded.model) if adapted(path)]
    folder = changed(write_adapter(tmp_path / "a", loaded, paths=paths), **config)
    assert sorted(load_adapter(loaded.model, "a", folder).updates) == sorted(paths)
    reweighed(folder, lambda weights: [weights.pop(key) for key in list(weights) if paths[0] in key])
    refused(folder, r"has no weights for .*, which target_modules names|holds no weights")


def test_digest_depends_only_on_the_computed_update(tmp_path):
    """Of numbers and scales: not of names, nor of how the scale is written."""
    loaded = tiny("llama")
    one = write_adapter(tmp_path / "one", loaded, rank=4, lora_alpha=8)
    digest = load_adapter(loaded.model, "one", one).digest
    assert len(digest) == 32
    assert (
        load_adapter(loaded.model, "two", changed(shutil.copytree(one, tmp_path / "b"), revision="x")).digest == digest
    )
    rslora = changed(shutil.copytree(one, tmp_path / "c"), use_rslora=True, lora_alpha=4)
    assert load_adapter(loaded.model, "one", rslora).digest == digest
    assert load_adapter(loaded.model, "one", changed(rslora, lora_alpha=5)).digest != digest

    def nudge(weights):
        weights[f"base_model.model.{Q0}.lora_A.weight"][0, 0] += 1e-3

    assert load_adapter(loaded.model, "one", reweighed(one, nudge)).digest != digest


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"use_dora": True}, r"says use_dora true, which is not supported \(DoRA scales .*; merge it into its model"),
        ({"modules_to_save": ["lm_head"]}, "says modules_to_save a list of 1, which is not supported .whole modules"),
        ({"bias": "all"}, "says bias 'all', which is not supported .biases of the model"),
        ({"lora_bias": True}, "says lora_bias true, which is not supported"),
        ({"target_parameters": ["w"]}, "says target_parameters a list of 1, which is not supported .*experts"),
        ({"trainable_token_indices": [1]}, "says trainable_token_indices a list of 1, which is not supported"),
        ({"layer_replication": [[0, 1]]}, "says layer_replication a list of 1, which is not supported"),
        ({"alora_invocation_tokens": [1]}, "says alora_invocation_tokens a list of 1, which is not supported"),
        ({"use_what": {"a": 1}}, "says use_what an? .*, which is not supported .this version of inlay does not know"),
        ({"init_lora_weights": "pissa"}, "says init_lora_weights 'pissa', which takes a part out of the model's own"),
        ({"peft_type": "IA3"}, "says peft_type 'IA3', and adapters are LORA here; merge it"),
        ({"target_modules": []}, "names no target_modules"),
        ({"target_modules": [3]}, "says target_modules a list of 1, which must be names, or one pattern"),
        ({"target_modules": "q_(proj"}, "has 'q_.proj', which is no regular expression"),
        ({"target_modules": ["k_proj"]}, "has no weights for .*k_proj, which target_modules names"),
        ({"target_modules": ["q_proj"]}, "has weights for .*v_proj, which target_modules does not name"),
        ({"r": 0}, "says r 0, which must be a whole number above 0"),
        ({"r": 5}, "has rank 4 and adapter_config.json says 5; copy both files again"),
        ({"rank_pattern": {"q_proj": 3}}, "q_proj has rank 4 and adapter_config.json says 3"),
        ({"rank_pattern": {"q_proj": "3"}}, "says rank_pattern an? .*which must be patterns with a number each"),
        ({"lora_alpha": "many"}, "says lora_alpha 'many', which must be a number above 0"),
        ({"layers_to_transform": ["0"]}, "says layers_to_transform that are no whole numbers"),
    ],
)
def test_unsupported_configurations_are_rejected(config, sentence, folder):
    refused(changed(folder, **config), sentence)


def test_settings_without_effect_on_the_update_are_accepted(folder):
    said = {
        "lora_dropout": 0.1,
        "inference_mode": True,
        "init_lora_weights": "gaussian",
        "loftq_config": {},
        "new": None,
    }
    config = read_config(changed(folder, **said, megatron_config=None, alpha_pattern={}, lora_bias=False))
    assert (config.rank, config.alpha) == (4, 8)
    assert load_adapter(tiny("llama").model, "mine", folder).updates


def test_missing_or_damaged_files_are_rejected(folder, tmp_path):
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    refused(tmp_path / "nowhere", "no such directory; give the folder that PEFT's save_pretrained wrote")
    refused(weights, "is a file; give the folder")
    whole = weights.read_bytes()
    for damaged in (whole[:-9], whole[:40], b"", b"\xff" * 99):
        weights.write_bytes(damaged)
        refused(folder, r"adapter_model.safetensors is damaged \(.*\); copy it again")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n")
    refused(folder, "is a Git LFS pointer, not the file itself; run git lfs pull")
    weights.unlink()
    refused(folder, "it holds no adapter_model.safetensors; give the folder")
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    refused(folder, "adapter_model.bin is a pickle, which could run code when it is read; load it with PEFT where")
    config.write_text("{")
    refused(folder, "adapter_config.json is no JSON; copy it again")
    config.write_text("[]")
    refused(folder, "adapter_config.json is an empty list, not an object")
    config.unlink()
    refused(folder, "it holds no adapter_config.json; give the folder")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda w: w.update({f"base_model.model.{Q0}.lora_A.weight": torch.full((4, 32), float("nan"))}),
            "infinite or",
        ),
        (lambda w: w.update({f"base_model.model.{Q0}.lora_B.weight": torch.full((32, 4), torch.inf)}), "infinite or"),
        (
            lambda w: w.update({f"base_model.model.{Q0}.lora_A.weight": torch.zeros(4, 32).int()}),
            "in torch.int32; save",
        ),
        (lambda w: w.update({f"base_model.model.{Q0}.lora_A.weight": torch.zeros(3, 32)}), "which do not fit; copy it"),
        (
            lambda w: w.update({f"base_model.model.{Q0}.lora_A.weight": torch.zeros(4)}),
            "are 4 and 32 × 4, which do not",
        ),
        (
            lambda w: w.update({f"base_model.model.{Q0}.lora_A.weight": torch.zeros(4, 48)}),
            "it is for another model: its update of .*q_proj is from 48 to 32 numbers, and the layer from 32 to 32",
        ),
        (lambda w: w.pop(f"base_model.model.{Q0}.lora_A.weight"), f"lacks lora_A of {Q0}"),
        (lambda w: w.pop(f"base_model.model.{Q0}.lora_B.weight"), f"lacks lora_B of {Q0}"),
        (lambda w: w.clear() or w.update({"x": torch.zeros(1)}), "holds x, which is no part of a LoRA"),
        (
            lambda w: w.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 9)}),
            "it adapts an embedding .*embed_tokens.*, which is not supported",
        ),
        (
            lambda w: w.update({"base_model.model.lm_head.base_layer.weight": torch.zeros(9, 9)}),
            "holds all of a layer's own weights .*; save the adapter with PEFT and save_embedding_layers=False",
        ),
        (
            lambda w: w.update({f"base_model.model.{Q0}.lora_magnitude_vector.weight": torch.zeros(32)}),
            "it is a DoRA .*, which is not supported",
        ),
        (
            lambda w: w.update({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)}),
            "it adapts model.layers.9.mlp.up_proj, which is no linear layer of this model; give it with the model that",
        ),
    ],
)
def test_unsupported_weights_are_rejected(change, sentence, folder):
    refused(reweighed(folder, change), sentence)


def test_adapter_of_another_model_is_rejected(folder):
    refused(folder, "it adapts model.layers.0.self_attn.q_proj, which is no linear layer of this model", "gpt2")
    with raises("adapter.wrong_model", ModelError, names="q_proj"):
        load_adapter(tiny("qwen3").model, "mine", folder)


def test_invalid_names_and_folders_are_rejected(folder):
    model = tiny("llama").model
    for name in ("", " ", "a\nb", "x" * 201, 3):
        with raises("adapter.invalid_name", ParameterError, names="200"):
            load_adapters(model, "tiny", {name: folder})
    with raises("adapter.invalid_name", ParameterError, names="tiny"):
        load_adapters(model, "tiny", {"tiny": folder})
    with raises("parameter.wrong_type", ParameterError, names="adapters"):
        load_adapters(model, "tiny", [folder])
    with pytest.raises(ParameterError, match="adapter 'mine' is 3; give the folder that PEFT's"):
        load_adapters(model, "tiny", {"mine": 3})


def test_linear_layers_are_found_inside_joined_layers():
    stock, fused = linear_places(tiny("llama").model), linear_places(prepared("llama").model)
    assert stock.keys() == fused.keys()
    for path, place in stock.items():
        assert (fused[path].inputs, fused[path].outputs, fused[path].head) == (place.inputs, place.outputs, place.head)
    qkv = [fused[f"model.layers.1.self_attn.{name}"] for name in ("q_proj", "k_proj", "v_proj")]
    assert len({place.module for place in qkv}) == 1
    assert [place.first for place in qkv] == [0, 32, 48]
    assert [path for path, place in stock.items() if place.head] == ["lm_head"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [packed, None])
def test_scattered_rows_use_their_own_adapters(dtype, make, tmp_path):
    """In one layer, every row gets the output of its own adapter, to rounding in its dtype."""
    loaded = tiny("llama")
    folders = [write_adapter(tmp_path / str(seed), loaded, ALL, seed=seed, rank=3 + seed) for seed in range(2)]
    layer = loaded.model.get_submodule(Q0)
    weight = layer.weight.detach().to(dtype)
    model = prepared("llama", dtype=dtype).model if make else tiny("llama").model.__class__(tiny("llama").model.config)
    if make is None:
        model.load_state_dict(loaded.model.state_dict())
        model.to(dtype)
    adapters = [load_adapter(model, str(number), folder) for number, folder in enumerate(folders)]
    before = sum(len(module._forward_hooks) for module in model.modules())  # of others who use this model
    applied, place = Adapters(model, adapters), linear_places(model)[Q0]
    x = torch.randn(1, 7, 32, dtype=dtype)
    owners = [b"", adapters[1].digest, adapters[0].digest, adapters[1].digest, b"", adapters[0].digest, b""]
    with torch.inference_mode(), applied.applied([(owner, 1) for owner in owners], []):
        found = place.module(x)[0, :, place.first : place.first + place.outputs]
    for row, owner in enumerate(owners):
        expected = x[0, row].float() @ weight.float().t()
        for adapter, folder in zip(adapters, folders, strict=True):
            if adapter.digest == owner:
                expected = expected + x[0, row].float() @ updates(folder)[Q0].t()
        tolerance = 1e-4 if dtype is torch.float32 else 0.03 * float(expected.abs().max())
        torch.testing.assert_close(found[row].float(), expected, atol=tolerance, rtol=0)
    applied.remove()
    assert sum(len(module._forward_hooks) for module in model.modules()) <= before


def test_an_idle_adapter_adds_no_operation_to_a_pass(folder):
    """A pass without rows of an adapter runs the same operations as without adapters; one with them runs more."""
    model = prepared("llama").model
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    adapter = load_adapter(model, "a", folder)
    alone = operations(model, ids)
    adapters = Adapters(model, [adapter])
    with adapters.applied([(b"", 5)], [4]):
        assert operations(model, ids) == alone
    with adapters.applied([(b"", 4), (adapter.digest, 1)], [4]):
        assert operations(model, ids).total() > alone.total()
    adapters.remove()


def test_adapter_hooks_act_only_in_passes_with_its_rows(folder):
    """Layers of few rows go the fast way elsewhere, also those of another engine over the same model."""
    model = prepared("llama").model
    adapter = load_adapter(model, "a", folder)
    mine, others = Adapters(model, [adapter]), Adapters(model, [adapter])
    adapted = [module for module in model.modules() if any(hasattr(h, "acts") for h in module._forward_hooks.values())]

    def acting() -> int:
        return sum(hook.acts for module in adapted for hook in module._forward_hooks.values() if hasattr(hook, "acts"))

    assert (acting(), any(map(acts, adapted))) == (0, False)
    with mine.applied([(b"", 5)], [4]):
        assert (acting(), any(map(acts, adapted))) == (0, False)
    with mine.applied([(b"", 4), (adapter.digest, 1)], [4]):
        assert (acting(), all(map(acts, adapted))) == (len(adapted), True), "the other engine's do not"
    mine.remove()
    others.remove()


def operations(model, ids) -> Counter[str]:
    """How often each of PyTorch's operations runs in a pass."""
    counted: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            counted[str(operation)] += 1
            return operation(*args, **(kwargs or {}))

    with torch.no_grad(), Counting():
        model(input_ids=ids, use_cache=False)
    return counted


def test_layers_called_without_pass_rows_are_rejected(tmp_path):
    """Latent attention reads the weights that would expand the latent, and calls no layer with them."""
    loaded = tiny_family("deepseek_v3")
    before = sum(len(module._forward_hooks) for module in loaded.model.modules())
    folder = write_adapter(tmp_path / "a", loaded, ("kv_b_proj",))
    with raises("adapter.unsupported_layer", ModelError, names="kv_b_proj"):
        LLM(loaded, kv_memory="8MiB", adapters={"a": folder})
    assert sum(len(module._forward_hooks) for module in loaded.model.modules()) == before
    good = write_adapter(tmp_path / "b", loaded, ("o_proj",))
    LLM(loaded, kv_memory="8MiB", adapters={"b": good}).shutdown()


def test_joined_layer_lists_its_original_layers():
    layers = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)]
    assert joined(layers, packed).stands_for == (("", 3), ("", 2))
