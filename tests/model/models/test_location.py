"""The forms of a model argument beside a checkpoint, and models that the caller has loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from inlay import LLM, ModelError, ParameterError, SamplingParams
from inlay.models.load import MODEL_DIRECTORY, load_model, load_tokenizer
from inlay.models.shapes import bytes_tokenizer
from tests.conftest import tiny
from tests.raising import raises

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def folder(path: Path, **files: str | bytes) -> str:
    for name, text in files.items():
        (path / name.replace("__", ".")).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_invalid_files_are_rejected_with_a_remedy(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
    places = {name: tmp_path / name for name in ("lora", "lfs", "file")}
    for place in places.values():
        place.mkdir()
    folder(places["file"], weights__safetensors=b"x")
    cases = {
        folder(places["lora"], adapter_config__json=json.dumps({"base_model_name_or_path": "big/base"})): (
            r"is an adapter \(LoRA\) of big/base, not a model; merge the two with PEFT's"
        ),
        folder(places["lfs"], config__json="{}", tokenizer__json="{}", model__safetensors=pointer): (
            r"model\.safetensors: is a Git LFS pointer, not the file itself; run git lfs pull in "
        ),
        str(places["file"] / "weights.safetensors"): "is a file; give the folder of a Hugging Face checkpoint",
    }
    for name, sentence in cases.items():
        with pytest.raises(ModelError, match=sentence):
            load_model(name)


@pytest.mark.parametrize("name", ["dmo", "Demo", "demos"])
def test_misspelt_demo_is_rejected_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)  # no configuration is read
    for load in (load_model, load_tokenizer):
        with raises("model.not_found", ModelError) as caught:
            load(name)
        assert "did you mean demo" in str(caught.value)


def test_path_is_a_model_and_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", str(MODEL_DIRECTORY.parent))
    by_path, by_home = load_model(MODEL_DIRECTORY), load_model("~/demo")
    assert by_path.fingerprint == by_home.fingerprint
    assert load_tokenizer("~/demo").get_vocab() == by_path.tokenizer.get_vocab()


def test_a_model_of_transformers_with_its_tokenizer():
    loaded = tiny("llama")
    own, theirs = LLM(loaded, kv_memory="4MiB"), LLM(loaded.model, tokenizer=loaded.tokenizer, kv_memory="4MiB")
    before = loaded.model.config._attn_implementation
    for llm in (own, theirs):
        (output,) = llm.generate("Hello", GREEDY)
        llm.shutdown()
    assert output.outputs[0].text == own_text(loaded)
    assert loaded.model.config._attn_implementation == before


def own_text(loaded) -> str:
    ids = torch.tensor([loaded.tokenizer.encode("Hello")])
    said = loaded.model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    return str(loaded.tokenizer.decode(said, skip_special_tokens=True))


@pytest.mark.parametrize(
    ("change", "arguments", "sentence"),
    [
        (None, {}, r"needs its tokenizer: write LLM\(model, tokenizer=AutoTokenizer"),
        ("train", {"tokenizer": bytes_tokenizer()}, r"it is being trained; call model\.eval\(\) first"),
        ("half", {"tokenizer": bytes_tokenizer()}, "its weights are float16; load it with dtype="),
        (
            None,
            {"tokenizer": bytes_tokenizer(), "dtype": "bfloat16"},
            "dtype is 'bfloat16' and its weights are float32",
        ),
        (None, {"tokenizer": bytes_tokenizer(), "quantization": "int8"}, "quantization is for a model given by name"),
    ],
)
def test_unsupported_transformers_models_are_rejected(change, arguments, sentence):
    made = AutoModelForCausalLM.from_config(tiny("llama").model.config, dtype=torch.float32).eval()
    if change is not None:
        getattr(made, change)()
    with pytest.raises(ParameterError, match=sentence):
        LLM(made, **arguments)


def test_wrong_model_arguments_are_rejected():
    with raises("parameter.wrong_type", ParameterError, names="model is"):
        LLM(3)  # type: ignore[arg-type]
    with raises("parameter.conflict", ParameterError, names="tokenizer"):
        LLM("demo", tokenizer=bytes_tokenizer())


def test_progress_bars_are_shown_on_terminals_only(capfd):
    load_model("demo")
    assert "Loading weights" not in capfd.readouterr().err


def test_tokenizer_loads_for_any_family(tmp_path):
    for file in MODEL_DIRECTORY.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    alone = load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert load_tokenizer(tmp_path).get_vocab() == alone.get_vocab()
