"""A model's shape as a GGUF file of random bf16 weights, which llama.cpp reads. Needs the ``gguf`` package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

#: model_type → llama.cpp's name of the architecture.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}


def write_gguf(config: PretrainedConfig, path: Path) -> None:
    """Write the file. config: of a model type in ARCHITECTURES."""
    import gguf

    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    _describe(writer, config)
    shapes = dict(_tensors(config))
    bf16, fp32 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), shape[0] * 4, fp32)
        else:  # given as bytes, since numpy has no bf16
            in_bytes = (shape[0], shape[1] * 2)
            writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), in_bytes[0] * in_bytes[1], bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    noise = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    block = noise.view(torch.uint8).numpy()
    for shape in shapes.values():
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            writer.write_tensor_data(np.resize(block, (shape[0], shape[1] * 2)))
    writer.close()


def _describe(writer: Any, config: PretrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")  # token ids in, token ids out


def _tensors(config: PretrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes (output features first), in llama.cpp's names."""
    width, inner = config.hidden_size, config.intermediate_size
    query, keys = config.num_attention_heads * _head_dim(config), config.num_key_value_heads * _head_dim(config)
    yield "token_embd.weight", (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", (width,)
        for name, features in (("q", query), ("k", keys), ("v", keys)):
            yield f"{block}.attn_{name}.weight", (features, width)
            if config.model_type == "qwen2":
                yield f"{block}.attn_{name}.bias", (features,)
        yield f"{block}.attn_output.weight", (width, query)
        yield f"{block}.ffn_norm.weight", (width,)
        yield f"{block}.ffn_gate.weight", (inner, width)
        yield f"{block}.ffn_up.weight", (inner, width)
        yield f"{block}.ffn_down.weight", (width, inner)
    yield "output_norm.weight", (width,)
    if not config.tie_word_embeddings:
        yield "output.weight", (config.vocab_size, width)


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
