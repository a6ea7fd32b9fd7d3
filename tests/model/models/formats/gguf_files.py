"""GGUF files of tiny models, as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CHAT = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"

_SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_ctx": 512}
_GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "num_hidden_layers": 6}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

#: llama.cpp's architecture → (model type, settings beside the common ones)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-5}),
    "qwen2": ("qwen2", {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "gemma2": ("gemma2", _GEMMA | {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", _GEMMA | {"tie_word_embeddings": True}),
    "phi3": ("phi3", {"rms_norm_eps": 1e-5}),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-5}),
    "stablelm": ("stablelm", {"use_qkv_bias": False}),
    "nemotron": ("nemotron", {}),
    "gpt2": ("gpt2", _GPT),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "qwen2moe": ("qwen2_moe", _EXPERTS | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
    "qwen3moe": ("qwen3_moe", _EXPERTS | {"head_dim": 16, "moe_intermediate_size": 64, "norm_topk_prob": True}),
}


def random_model(architecture: str, **settings: Any) -> PreTrainedModel:
    """A tiny stock model in fp32."""
    kind, own = MODELS[architecture]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_SIZES | own | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():  # norms of ones and biases of zeros would hide what is lost
        if weight.dim() == 1:
            weight.data.add_(torch.rand(weight.shape) * 0.2 + 0.1 * ("bias" in name))
    return model


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: str | Mapping[str, str] = "F32",
    *,
    tokens: bool = True,
    split: str | None = "llama-bpe",
    merges: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
    named: str | None = None,
    part: Callable[[str], bool] = lambda name: True,
) -> Path:
    """Write a model.

    kind: the type of its matrices, or a type by the end of their names. tokens: True to write a tokenizer.
    split: the tokenizer's way to split text. merges: further merges of it.
    more, extra: further metadata and tensors. named: the architecture in the file. part: the tensors to write.
    """
    import gguf
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    writer = gguf.GGUFWriter(path, named or architecture)
    for key, value in {**_metadata(model, architecture), **(more or {})}.items():
        _add(writer, key, value)
    if tokens:
        add_tokens(writer, model.config.vocab_size, split, merges)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    state = model.state_dict()
    names = get_gguf_hf_weights_map(model, processor)
    for name, target in names.items():
        if target in state and not (target == "lm_head.weight" and model.config.tie_word_embeddings):
            weight = _converted(model, architecture, name, state[target])
            name = name if "." in name[-7:] else f"{name}.weight"
            if part(name):
                _add_tensor(writer, name, weight, _kind_of(name, weight, kind))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokens(writer: Any, count: int, split: str | None, merges: Sequence[str] = ()) -> None:
    """A vocabulary of bytes with one merge and more, special tokens up to a count, and a chat template."""
    from tokenizers import pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "<bos>", "<eos>", "<pad>"]
    words += [merge.replace(" ", "") for merge in merges]
    special = count - len(words)
    words += [f"<more{i}>" for i in range(special)]
    writer.add_tokenizer_model("gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(words)
    writer.add_token_types([1] * 257 + [3] * 3 + [1] * len(merges) + [3] * special)
    writer.add_token_merges(["Ġ t", *merges])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(259)
    writer.add_chat_template(CHAT)


def _metadata(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    """The configuration under llama.cpp's names."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    config = model.config
    kind = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    found: dict[str, Any] = {}
    for key, attribute in GGUF_CONFIG_MAPPING[kind].items():
        if attribute == "rope_theta":
            rope = config.rope_parameters
            found[f"{architecture}.{key}"] = float(rope.get("full_attention", rope)["rope_theta"])
        elif attribute and getattr(config, attribute, None) is not None:
            found[f"{architecture}.{key}"] = getattr(config, attribute)
    if getattr(config, "head_dim", None):
        found[f"{architecture}.attention.key_length"] = config.head_dim
    for key, attribute in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        if getattr(config, attribute, None):
            found[f"{architecture}.{key}"] = getattr(config, attribute)
    return found


def _converted(model: PreTrainedModel, architecture: str, name: str, weight: torch.Tensor) -> np.ndarray[Any, Any]:
    """A weight as llama.cpp's converter changes it."""
    values, config = weight.numpy(), model.config
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        turned = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return turned.swapaxes(1, 2).reshape(values.shape)
    if architecture in ("gemma2", "gemma3", "nemotron") and "norm.weight" in name:
        return values + 1
    if architecture == "gpt2" and values.ndim == 2 and name.startswith("blk."):
        return np.ascontiguousarray(values.T)
    if "_exps" in name and "down" not in name:
        return np.ascontiguousarray(np.split(values, 2, 1)["up" in name])
    if "ffn_gate_inp_shexp" in name:
        return values[0]
    if architecture == "bloom" and "attn_qkv" in name:
        heads = values.reshape(config.n_head, 3, -1, *values.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(values.shape)
    return values


def _kind_of(name: str, weight: np.ndarray[Any, Any], kind: str | Mapping[str, str]) -> str:
    if weight.ndim < 2 or "norm" in name or "ffn_gate_inp" in name:
        return "F32"
    if isinstance(kind, str):
        return kind
    return next((own for end, own in kind.items() if end and name.endswith(f"{end}.weight")), kind[""])


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        add = writer.add_int32 if value < 0 else writer.add_uint32 if value < 1 << 32 else writer.add_uint64
        add(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: Any, name: str, weight: np.ndarray[Any, Any], kind: str) -> None:
    import gguf

    if kind in ("Q4_K", "Q6_K"):
        writer.add_tensor(name, blocks_near(weight, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
        return
    wanted = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(weight), wanted), raw_dtype=wanted)


def blocks_near(weight: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Blocks of 256 weights near to some, by one scale for a block: ``gguf`` unpacks these types and packs none."""
    blocks = weight.reshape(-1, 256)
    most = np.abs(blocks).max(1, keepdims=True).clip(1e-3)
    if kind == "Q6_K":
        scale = (most / 31 / 64).astype(np.float16)
        numbers = np.clip(np.round(blocks / (scale.astype(np.float32) * 64)) + 32, 0, 63).astype(np.uint8)
        halves = numbers.reshape(-1, 2, 4, 32)  # two halves of four stretches each
        low = np.concatenate([(halves[:, :, :2] & 15) | (halves[:, :, 2:] & 15) << 4], 2).reshape(-1, 128)
        high = (halves >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(2, dtype=np.uint8).reshape(-1, 64)
        scales = np.full((len(blocks), 16), 64, np.uint8)
        packed = np.concatenate([low, high, scales, scale.view(np.uint8)], 1)
    else:
        scale = (most / 7.5 / 32).astype(np.float16)  # the sub-blocks' scales are 32, and 30 · 8 is taken off
        step = scale.astype(np.float32) * 32
        numbers = np.clip(np.round(blocks / step + 7.5), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
        least = (step * 7.5 / 48).astype(np.float16)
        sixes = np.zeros((len(blocks), 12), np.uint8)
        sixes[:, :4], sixes[:, 4:8], sixes[:, 8:] = 32 | (32 >> 4) << 6, 48 | (48 >> 4) << 6, 0
        packed = np.concatenate(
            [
                scale.view(np.uint8),
                least.view(np.uint8),
                sixes,
                (numbers[:, :, 0] | numbers[:, :, 1] << 4).reshape(-1, 128),
            ],
            1,
        )
    return packed.reshape(*weight.shape[:-1], -1)
