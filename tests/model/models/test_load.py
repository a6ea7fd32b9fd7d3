"""Models by name, and the sentences for those that cannot be served."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from inlay import LLM, ModelError, ParameterError, SamplingParams
from inlay.models.load import fingerprint, load_model, load_tokenizer, stop_ids
from inlay.models.shapes import SHAPES
from tests.conftest import tiny
from tests.raising import raises


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A real checkpoint directory: configuration, safetensors, tokenizer with chat template."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny("qwen2").model.save_pretrained(folder)
    tiny("qwen2").tokenizer.save_pretrained(folder)
    return folder


def copy_of(checkpoint, folder, **changes):
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_local_directory(checkpoint):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (loaded,) = LLM(str(checkpoint), kv_memory="16MiB").generate("Hello", params)
    (made,) = LLM(tiny("qwen2"), kv_memory="16MiB").generate("Hello", params)
    assert loaded.outputs[0].token_ids == made.outputs[0].token_ids


def test_dtypes(checkpoint):
    assert load_model(str(checkpoint)).model.dtype == torch.float32
    assert load_model(str(checkpoint), dtype="bfloat16").model.dtype == torch.bfloat16
    with raises("parameter.unknown_choice", ParameterError, names="int8"):
        load_model(str(checkpoint), dtype="int8")


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16)],
)
@pytest.mark.parametrize("said", [True, False])
def test_a_checkpoint_is_loaded_in_the_dtype_of_its_weights(checkpoint, tmp_path, caplog, stored, loaded, said):
    """Whether its configuration says it or not."""
    name = str(stored).removeprefix("torch.")
    folder = copy_of(checkpoint, tmp_path, dtype=name if said else None)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {key: weight.to(stored) for key, weight in weights.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    model = load_model(folder, weights="stock").model
    assert {weight.dtype for weight in model.state_dict().values()} == {loaded}
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"].to(stored).to(loaded))
    told = [record.getMessage() for record in caplog.records if record.name == "inlay.models.load"]
    remedy = "dtype 'float32' keeps every bit of them"
    assert told == [f"{folder}: its weights are {name} and are loaded as bfloat16; {remedy}"] * (stored != loaded)
    assert load_model(folder, dtype="float32").model.dtype == torch.float32


def test_fingerprints_differ_between_weights(checkpoint):
    model = load_model(str(checkpoint))
    assert model.fingerprint == load_model(str(checkpoint)).fingerprint
    with torch.no_grad():
        changed = load_model(str(checkpoint), weights="stock")
        changed.model.lm_head.weight.mul_(1.001)
    assert fingerprint(changed.model) != model.fingerprint
    assert load_model("random:tiny", seed=1).fingerprint != load_model("random:tiny", seed=2).fingerprint


def test_demo_and_random_models_have_a_note():
    assert "knows nothing else" in load_model("demo").note
    assert "random weights" in load_model("random:tiny").note


def test_random_model_has_the_end_token_of_its_tokenizer():
    loaded = load_model("random:tiny")
    assert stop_ids(loaded) == {loaded.tokenizer.convert_tokens_to_ids("<|end|>")}


def test_random_weights_are_the_same_for_a_seed():
    one, other = (load_model("random:tiny", dtype="float32", seed=3) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    logits = one.model(torch.tensor([[1, 2, 3]]), use_cache=False).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.1


def test_the_first_layers_of_a_shape():
    whole, part = (
        load_model(name, dtype="float32", seed=3, weights="stock") for name in ("random:tiny", "random:tiny:2")
    )
    assert [len(each.spec.shapes) for each in (whole, part)] == [4, 2]
    assert part.model.config.hidden_size == whole.model.config.hidden_size
    assert part.fingerprint != whole.fingerprint


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_shapes_are_valid_configurations(shape):
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    known = {
        "qwen2.5-0.5b": 494,
        "llama-3.2-1b": 1236,
        "llama-2-7b": 6738,
        "llama-2-13b": 13016,
        "mha-0.4b": 436,
        "qwen3.5-0.8b": 752,
        "lfm2-350m": 354,
        "granite-4.0-h-350m": 340,
        "tiny": 3,
    }
    millions = known[shape]
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == pytest.approx(millions, rel=0.02)
    for key, value in SHAPES[shape].items():
        if key not in ("model_type", "rope_parameters"):
            assert getattr(config, key) == value


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("random:gpt-5", "random:gpt-5 is not a known shape; use one of granite-4.0-h-350m, lfm2-350m, llama-2-13b"),
        ("random:tiny:5", "random:tiny:5: tiny has layers 1 to 4; write how many of them, as in random:tiny:1"),
        ("random:tiny:", "random:tiny:: tiny has layers 1 to 4"),
        ("random:tiny:0", "random:tiny:0: tiny has layers 1 to 4"),
        ("./nowhere", "./nowhere: no such directory; give the folder of a Hugging Face checkpoint"),
    ],
)
def test_invalid_model_names_are_rejected(name, sentence):
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=sentence):
            load(name)


def test_unavailable_hub_name_is_rejected(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with raises("model.not_found", ModelError, names="nobody/nothing"):
        load_model("nobody/nothing")


def test_broken_directories(checkpoint, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with raises("model.no_config", ModelError, names="config.json"):
        load_model(str(empty))
    (empty / "config.json").write_text("{")
    with raises("model.unreadable_config", ModelError, names="config.json"):
        load_model(str(empty))


def test_missing_or_broken_weights(checkpoint, tmp_path):
    folder = copy_of(checkpoint, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with raises("model.unreadable_weights", ModelError):
        load_model(folder)
    (tmp_path / "model.safetensors").unlink()
    with raises("model.unreadable_weights", ModelError):
        load_model(folder)


def test_weights_missing_from_a_checkpoint_are_rejected(checkpoint, tmp_path):
    """transformers would fill missing weights with noise, and only log it."""
    folder = copy_of(checkpoint, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises("model.missing_weights", ModelError, names="up_proj.weight"):
        load_model(folder)


def test_a_missing_tokenizer(checkpoint, tmp_path):
    folder = copy_of(checkpoint, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with raises("model.no_tokenizer", ModelError, names="tokenizer.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "bert"}, "models of type 'bert' are not supported: they are encoders"),
        (
            {"quantization_config": {"quant_method": "hqq", "bits": 4}},
            "weights quantized by 'hqq' are not read; inlay reads",
        ),
    ],
)
def test_unsupported_models_are_rejected(checkpoint, tmp_path, changes, reason):
    with pytest.raises(ModelError, match=reason):
        load_model(copy_of(checkpoint, tmp_path, **changes))


def test_weights_drawn_part_by_part_have_the_fingerprint_of_the_whole():
    loaded = load_model("random:tiny", dtype="float32", weights="stock")
    assert loaded.fingerprint == fingerprint(loaded.model) == load_model("random:tiny", dtype="float32").fingerprint
