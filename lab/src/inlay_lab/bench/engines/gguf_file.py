"""Writes GGUF files of a model's shape with random weights, in bf16 or quantized to as many bits as ours."""

from __future__ import annotations

import importlib.util
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from inlay_lab.bench.stock import weight_bytes

#: model_type → llama.cpp's name of the architecture.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "lfm2": "lfm2"}

#: Our quantization → llama.cpp's format with as many bits.
FORMATS = {None: "BF16", "int8": "Q8_0", "int4": "Q4_0"}
_BLOCK = 32  # numbers that share one scale in these formats


def write_gguf(config: PretrainedConfig, path: Path, quantization: str | None = None) -> None:
    """Write the file. The output head has 8 bits in both quantizations, as ours; llama.cpp's own files use 6 or 8.

    Args:
        config: Its model type is in ARCHITECTURES.
        quantization: Of the matrices; a key of FORMATS.
    """
    import gguf

    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    _describe(writer, config)
    _add_words(writer, config.vocab_size)
    shapes = dict(_tensors(config))
    fp32 = gguf.GGMLQuantizationType.F32
    kinds = {name: gguf.GGMLQuantizationType[_format(config, name, quantization)] for name in shapes}
    sizes = gguf.GGML_QUANT_SIZES  # numbers of a block, and its bytes
    for name, shape in shapes.items():
        if _is_fp32(name, shape):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(shape) * 4, fp32)
        else:  # given as bytes
            in_bytes = _in_bytes(shape, *sizes[kinds[name]])
            writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), in_bytes[0] * in_bytes[1], kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    noise = torch.randn(1 << 12, 1 << 10, generator=torch.Generator().manual_seed(0)) * 0.02
    blocks = {
        kind: gguf.quants.quantize(noise.numpy(), kind).view(np.uint8).reshape(-1) for kind in set(kinds.values())
    }
    for name, shape in shapes.items():
        if _is_fp32(name, shape):
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            writer.write_tensor_data(np.resize(blocks[kinds[name]], _in_bytes(shape, *sizes[kinds[name]])))
    writer.close()


def bytes_read(config: PretrainedConfig, quantization: str | None) -> int:
    """Weight bytes of the file that one decode step reads; see ``write_gguf``."""
    import gguf

    total = 0
    for name, shape in _tensors(config):
        if _is_fp32(name, shape):
            total += math.prod(shape) * 4
        elif name != "token_embd.weight" or config.tie_word_embeddings:
            numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[_format(config, name, quantization)]]
            total += shape[0] * shape[1] // numbers * size
    return total


def _is_fp32(name: str, shape: tuple[int, ...]) -> bool:
    """True for norms, biases and kernels of convolutions."""
    return len(shape) == 1 or name.endswith("shortconv.conv.weight")


def _format(config: PretrainedConfig, name: str, quantization: str | None) -> str:
    """The GGUF format of a matrix."""
    head = "token_embd.weight" if config.tie_word_embeddings else "output.weight"
    return FORMATS["int8" if quantization and name == head else quantization]


def _in_bytes(shape: tuple[int, ...], numbers: int, size: int) -> tuple[int, int]:
    """The shape of a matrix in bytes, given the numbers in a block and the block's size in bytes."""
    return shape[0], shape[1] // numbers * size


def _describe(writer: Any, config: PretrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(_inner_width(config))
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "lfm2":
        attends = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads if each else 0 for each in attends])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.norm_eps if config.model_type == "lfm2" else config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_words(writer: Any, count: int) -> None:
    """Add a vocabulary of SentencePiece: the bytes, and other tokens by number."""
    import gguf

    control, byte, normal = gguf.TokenType.CONTROL, gguf.TokenType.BYTE, gguf.TokenType.NORMAL
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    texts += [f"w{number}" for number in range(len(texts), count)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts[:count])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([control if n < 3 else byte if n < 259 else normal for n in range(count)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _tensors(config: PretrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes (output features first), in llama.cpp's names."""
    width, inner = config.hidden_size, _inner_width(config)
    query, keys = config.num_attention_heads * _head_dim(config), config.num_key_value_heads * _head_dim(config)
    convolves = config.model_type == "lfm2"
    yield "token_embd.weight", (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", (width,)
        if convolves and config.layer_types[layer] != "full_attention":
            yield f"{block}.shortconv.conv.weight", (width, config.conv_L_cache)
            yield f"{block}.shortconv.in_proj.weight", (3 * width, width)
            yield f"{block}.shortconv.out_proj.weight", (width, width)
        else:
            for name, features in (("q", query), ("k", keys), ("v", keys)):
                yield f"{block}.attn_{name}.weight", (features, width)
                if config.model_type == "qwen2":
                    yield f"{block}.attn_{name}.bias", (features,)
            if convolves:
                yield f"{block}.attn_q_norm.weight", (_head_dim(config),)
                yield f"{block}.attn_k_norm.weight", (_head_dim(config),)
            yield f"{block}.attn_output.weight", (width, query)
        yield f"{block}.ffn_norm.weight", (width,)
        yield f"{block}.ffn_gate.weight", (inner, width)
        yield f"{block}.ffn_up.weight", (inner, width)
        yield f"{block}.ffn_down.weight", (width, inner)
    yield "token_embd_norm.weight" if convolves else "output_norm.weight", (width,)
    if not config.tie_word_embeddings:
        yield "output.weight", (config.vocab_size, width)


def _inner_width(config: PretrainedConfig) -> int:
    """The width inside of an MLP. LFM2 adjusts the configured one."""
    inner = int(config.intermediate_size)
    if config.model_type == "lfm2" and config.block_auto_adjust_ff_dim:
        inner = int(config.block_ffn_dim_multiplier * (2 * inner // 3))
        inner = -(-inner // config.block_multiple_of) * config.block_multiple_of
    return inner


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


#: The reason to measure no llama.cpp beside a quantized file.
OTHER_WEIGHTS = "it would run a random model in other bits; `inlay bench peers --gguf FILE` runs the file itself"


def why_not(
    config: PretrainedConfig,
    dtype: str,
    quantization: str | None = None,
    packages: Sequence[str] = ("llama-cpp-python", "gguf"),
) -> str | None:
    """The reason that llama.cpp cannot be measured here, or None.

    Args:
        dtype, quantization: Of our model.
        packages: That the measurement needs, by their names on PyPI.
    """
    modules = (package.removesuffix("-python").replace("-", "_") for package in packages)
    if any(importlib.util.find_spec(module) is None for module in modules):
        return f"not installed; run: pip install {' '.join(packages)}"
    if config.model_type not in ARCHITECTURES:
        return f"this benchmark writes no GGUF of type '{config.model_type}'"
    if dtype != "bfloat16" and quantization is None:
        return f"its file is bf16, and the model is {dtype}"
    if quantization is not None and any(len(shape) > 1 and shape[1] % _BLOCK for _, shape in _tensors(config)):
        return f"its quantized rows come in blocks of {_BLOCK}, and this model has others"
    return why_no_room(weight_bytes(config, torch.bfloat16))


def why_no_room(needed: int) -> str | None:
    """The reason that a temporary file of this many bytes cannot be written, or None."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if needed > free:
        return f"its file takes {needed / 1e9:.1f} GB, and {tempfile.gettempdir()} has {free / 1e9:.1f} GB free"
    return None


@contextmanager
def random_gguf(config: PretrainedConfig, quantization: str | None = None) -> Iterator[Path]:
    """A file of ``write_gguf`` within a block."""
    with tempfile.TemporaryDirectory(prefix="inlay-bench-") as folder:
        file = Path(folder) / "random.gguf"
        write_gguf(config, file, quantization)
        yield file
