"""Text models out of multimodal checkpoints, against the stock multimodal class on texts."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from inlay import LLM, AsyncLLM, ModelError, SamplingParams
from inlay.authoring.memory import CODECS, shape_of
from inlay.cli.main import main
from inlay.models.families import check_config
from inlay.models.formats.reading import pieces_of
from inlay.models.linear import FrozenLinear
from inlay.models.load import as_loaded, check_model, load_model, load_tokenizer, read_config, stop_ids
from inlay.models.multimodal import MULTIMODAL, TextWeights, text_config
from inlay.models.random import bytes_tokenizer
from tests.adapters import write_adapter
from tests.model.equivalence.recorder import Recorder, close
from tests.model.models.multimodal import CASES, multimodal_model, save
from tests.raising import raises
from tests.server.server.conftest import running

#: The text model of each type, and the parts that are left out.
TEXT = {
    "gemma3": ("gemma3_text", {"multi_modal_projector", "vision_tower"}),
    "gemma3n": ("gemma3n_text", {"audio_tower", "embed_audio", "embed_vision", "vision_tower"}),
    "gemma4": ("gemma4_text", {"embed_vision", "vision_tower"}),
    "gemma4_unified": ("gemma4_unified_text", {"embed_vision", "vision_embedder"}),
    "idefics3": ("llama", {"connector", "vision_model"}),
    "llama4": ("llama4_text", {"multi_modal_projector", "vision_model"}),
    "mistral3": ("mistral", {"multi_modal_projector", "vision_tower"}),
    "qwen2_5_vl": ("qwen2", {"visual"}),
    "qwen2_vl": ("qwen2", {"visual"}),
    "qwen3_5": ("qwen3_5_text", {"visual"}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"visual"}),
    "qwen3_vl": ("qwen3", {"visual"}),
    "qwen3_vl_moe": ("qwen3_moe", {"visual"}),
    "smolvlm": ("llama", {"connector", "vision_model"}),
}


@cache
def whole(kind: str) -> PreTrainedModel:
    return multimodal_model(kind)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a checkpoint of each type, as the stock class saved it."""
    return {kind: save(whole(kind), tmp_path_factory.mktemp(kind)) for kind in CASES}


@torch.inference_mode()
def _expected(model: PreTrainedModel, prompt: list[int], output) -> Tensor:
    ids = prompt + list(output.outputs[0].token_ids)[:-1]
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 :]


def _ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_multimodal_type_is_checked():
    assert set(MULTIMODAL) == set(CASES) == set(TEXT)


@pytest.mark.parametrize("kind", CASES)
def test_text_answers_equal_the_stock_multimodal_class(kind, folders):
    loaded = load_model(folders[kind], dtype="float32")
    assert loaded.model.config.model_type == TEXT[kind][0]
    recorder = Recorder(loaded)
    prompt = _ids(40)
    for _ in range(2):  # the second time from the store, if the model has one
        ((output, logits),) = recorder.greedy([prompt], 4)
        close(logits, _expected(whole(kind), prompt, output))
    assert (output.usage.cached_tokens > 0) == (loaded.spec.unshared is None)


@pytest.mark.parametrize("kind", CASES)
def test_note_counts_unused_weights(kind, folders, caplog):
    with caplog.at_level(logging.WARNING):
        loaded = load_model(folders[kind], dtype="float32")
    names = [name for file in folders[kind].glob("*.safetensors") for name in load_file(file)]
    text = TextWeights(kind, loaded.model.config)
    others = [name for name in names if name not in text]
    assert {text.other_part(name) for name in others} == TEXT[kind][1]
    assert len(others) == sum(any(part in name.split(".") for part in TEXT[kind][1]) for name in names)
    assert TEXT[kind][0] in (loaded.note or "")
    assert f"{len(others)} weights of other parts" in (loaded.note or "")
    assert "LOAD REPORT" not in caplog.text


def test_unused_weights_are_not_read_ahead(folders):
    files = sorted(folders["gemma3"].glob("*.safetensors"))
    text = TextWeights("gemma3", read_config(str(folders["gemma3"])))
    kept = pieces_of(files, text.__contains__)
    tensors = load_file(files[0])
    assert sum(piece.size for piece in kept) == sum(each.nbytes for name, each in tensors.items() if name in text)
    assert len(kept) < len(pieces_of(files))


def _without(folder: Path, to: Path, end: str) -> Path:
    """A copy of a checkpoint without the weights whose names end so."""
    to.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(end)}
    assert len(kept) < len(tensors)
    save_file(kept, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen2_5_vl", "smolvlm"])
def test_a_missing_weight_of_the_text_model_is_an_error(kind, folders, tmp_path):
    with raises("model.missing_weights", ModelError):
        load_model(_without(folders[kind], tmp_path / "lacking", "layers.1.self_attn.q_proj.weight"))


def test_missing_head_is_an_error_unless_tied(folders, tmp_path):
    with raises("model.missing_weights", ModelError):
        load_model(_without(folders["smolvlm"], tmp_path / "lacking", "lm_head.weight"))


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_configuration_decides_whether_the_head_is_tied(tied, tmp_path):
    """The text configuration of Mistral 3 says otherwise in one of the two cases."""
    model = multimodal_model("mistral3", tie_word_embeddings=tied)
    loaded = load_model(save(model, tmp_path), dtype="float32", weights="stock")
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied
    prompt = _ids(20)
    ((output, logits),) = Recorder(loaded).greedy([prompt], 2)
    close(logits, _expected(model, prompt, output))


def test_packed_and_rounded_weights_are_of_the_text_model_only(folders):
    for settings in ({}, {"quantization": "int8"}):
        loaded = load_model(folders["gemma4"], dtype="bfloat16", device="cpu", **settings)
        assert any(isinstance(module, FrozenLinear) for module in loaded.model.modules())
        assert len(LLM(loaded, kv_memory="16MiB").generate([_ids(9)], SamplingParams(max_tokens=3))) == 1


def test_a_quantized_checkpoint_keeps_the_numbers_of_its_text_model(folders, tmp_path):
    """int-quantized by compressed-tensors; its vision tower is not quantized."""
    folder = _without(folders["gemma3"], tmp_path / "int8", "mm_soft_emb_norm.weight")
    tensors, meant = load_file(folder / "model.safetensors"), whole("gemma3").state_dict()
    for name in [name for name in tensors if name.startswith("language_model") and name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        numbers = (tensors[name] / scale).round()
        meant[name.replace("language_model.model", "model.language_model")] = numbers * scale
        tensors |= {name: numbers.to(torch.int8), name.replace(".weight", ".weight_scale"): scale}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    rounded = multimodal_model("gemma3")
    rounded.load_state_dict(meant)
    prompt = _ids(20)
    ((output, logits),) = Recorder(load_model(folder, dtype="float32", weights="stock")).greedy([prompt], 2)
    close(logits, _expected(rounded, prompt, output))


@pytest.mark.parametrize("layout", ["inputs first", "single"])
def test_experts_in_the_layouts_of_published_checkpoints(layout, folders, tmp_path):
    """Qwen3-VL-MoE is published with the inputs of experts first. Quantizing tools write each expert alone."""
    folder = _without(folders["qwen3_vl_moe"], tmp_path / "published", "visual.pos_embed.weight")
    written: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." not in name:
            written[name] = tensor
        elif layout == "inputs first":
            written[name] = tensor.transpose(1, 2).contiguous()
        else:
            path, _, part = name.rpartition(".")
            parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
            for expert, weight in enumerate(tensor):
                for one, each in zip(parts, weight.chunk(len(parts)), strict=True):
                    written[f"{path}.{expert}.{one}.weight"] = each.contiguous()
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    before = get_checkpoint_conversion_mapping("qwen3_moe")
    loaded, prompt = load_model(folder, dtype="float32"), _ids(20)
    ((output, logits),) = Recorder(loaded).greedy([prompt], 2)
    close(logits, _expected(whole("qwen3_vl_moe"), prompt, output))
    assert len(get_checkpoint_conversion_mapping("qwen3_moe")) == len(before)


def test_experts_in_one_tensor_of_8_bits_are_refused(folders, tmp_path):
    folder = _without(folders["qwen3_vl_moe"], tmp_path / "fp8", "visual.pos_embed.weight")
    written: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        fused = name.endswith("experts.gate_up_proj")
        written[name] = tensor.to(torch.float8_e4m3fn) if fused else tensor
        if fused:
            written[f"{name}_scale_inv"] = torch.full((len(tensor), 1, 1), 2.0)
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with raises("model.invalid_quantization", ModelError, names="mlp.experts"):
        load_model(folder)


def test_the_fingerprint_does_not_depend_on_the_form_of_the_weights(folders):
    packed, stock = (load_model(folders["gemma4"], dtype="float32", weights=form) for form in ("packed", "stock"))
    assert packed.fingerprint == stock.fingerprint


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_adapter_of_the_whole_model_serves_its_text_model(prefix, folders, tmp_path):
    loaded = load_model(folders["gemma3"], dtype="float32", weights="stock")
    alone, trained = write_adapter(tmp_path / "alone", loaded), write_adapter(tmp_path / "whole", loaded)
    factors = load_file(trained / "adapter_model.safetensors")
    save_file(
        {name.replace(".model.model.", f".model.{prefix}", 1): factor for name, factor in factors.items()},
        trained / "adapter_model.safetensors",
    )
    recorder = Recorder(loaded, reuse="off", adapters={"alone": str(alone), "whole": str(trained)})
    (_, one), (_, other), (_, none) = recorder.greedy([_ids(20)] * 3, 2, adapter=["alone", "whole", None])
    close(one, other)
    assert (one - none).abs().max() > 0.1


def test_a_multimodal_model_in_memory_is_refused():
    with raises("model.unknown_architecture", ModelError):
        as_loaded(whole("gemma3"), "auto", 0, None, None, bytes_tokenizer())


@pytest.mark.parametrize("kind", CASES)
def test_a_configuration_is_checked_without_weights(kind, folders):
    config = check_model(folders[kind])
    check_config(config)
    assert config.model_type == read_config(str(folders[kind])).model_type == TEXT[kind][0]
    assert config.tie_word_embeddings == whole(kind).config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["gemma4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_memory_is_counted_for_the_text_model(kind, folders):
    predicted = shape_of(read_config(str(folders[kind]))).bytes_per_token(CODECS["fp32"])
    taken = LLM(load_model(folders[kind], dtype="float32"), kv_memory="16MiB").store.pool.bytes_per_token
    assert taken == predicted


def test_a_model_is_shown_by_its_text_model(folders, capsys):
    assert main(["models", "show", str(folders["qwen2_5_vl"])]) == 0
    assert "is of the family qwen2" in capsys.readouterr().out


def test_the_chat_template_of_the_processor_is_used_if_the_tokenizer_has_none(folders, tmp_path):
    folder = _without(folders["smolvlm"], tmp_path / "copy", "connector.modality_projection.proj.weight")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    assert load_tokenizer(folder).chat_template == bytes_tokenizer().chat_template
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template == "{{ messages[0]['content'] }}"


def test_end_tokens_come_from_the_whole_checkpoint(folders, tmp_path):
    folder = _without(folders["gemma3"], tmp_path / "copy", "mm_soft_emb_norm.weight")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 106]}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert {1, 106} <= stop_ids(load_model(folder))


def test_text_only_configurations_are_unchanged(folders):
    config = text_config(read_config(str(folders["gemma3"])))
    assert text_config(config) is config


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_server_rejects_non_text_parts_and_names_the_text_model(kind, folders):
    llm = AsyncLLM(load_model(folders["gemma3"], dtype="float32"), kv_memory="16MiB", seed=0)
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    with running(llm) as site:
        status, error = site.refusal("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    llm.shutdown()
    assert (status, error["code"], error["param"]) == (400, "unsupported_content", "messages[0].content[1].type")
    assert "gemma3_text" in error["message"]
