"""Reads a model's configuration from a GGUF file."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from transformers import AutoConfig, PretrainedConfig

from inlay.errors import ModelError
from inlay.models.formats.gguf_tokenizer import GGUFVocabulary
from inlay.wording import first_line

#: The factors of Llama 3's rotary scalings. A file holds only the resulting divisors.
_LLAMA3_FACTORS = (8.0, 32.0)
#: llama.cpp's names of expert widths → names in configurations.
_EXPERTS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


#: llama.cpp's architectures with another model type in transformers.
_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
#: llama.cpp's names of sizes → names in configurations. GPT-2 and BLOOM have their own.
_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_OWN_SIZES = {
    "bloom": {"block_count": "n_layer", "embedding_length": "hidden_size", "attention.head_count": "n_head"},
    "gpt2": {
        "context_length": "n_positions",
        "block_count": "n_layer",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
    },
}
_LARGEST = 2**32 - 1  # llama.cpp reads sizes as 32 bits
_NEEDED = ("block_count", "embedding_length", "attention.head_count")
_EPSILON = {"bloom": "layer_norm_epsilon", "gpt2": "layer_norm_epsilon", "nemotron": "norm_eps"}
_EPSILON |= {"stablelm": "layer_norm_eps", "starcoder2": "norm_epsilon"}


class Metadata(Protocol):
    """The metadata and the tensors of a file."""

    @property
    def name(self) -> str: ...

    @property
    def tensors(self) -> dict[str, Any]: ...

    @property
    def architecture(self) -> str: ...

    @property
    def vocabulary(self) -> GGUFVocabulary: ...

    def said(self, key: str) -> Any: ...


def config_of(file: Metadata) -> PretrainedConfig:
    """Return the configuration with which llama.cpp runs the file. Raises ModelError for an unsupported setting."""
    architecture = file.architecture
    try:
        config = AutoConfig.for_model(_MODEL_TYPES.get(architecture, architecture), **_settings(file))
        return _completed(config, file)
    except ModelError:
        raise
    except Exception as error:  # not a number, or refused by transformers
        raise ModelError(
            f"{file.name}: its configuration cannot be read: {first_line(error)}", code="model.unreadable_config"
        ) from error


def _settings(file: Metadata) -> dict[str, Any]:
    """Return the settings of a configuration: sizes, the epsilon of norms, and those of single architectures."""
    architecture = file.architecture
    sizes = {key: _size(file, key) for key in _SIZES}
    if sizes["attention.head_count_kv"] is None:
        sizes["attention.head_count_kv"] = sizes["attention.head_count"]
    _check_sizes(file, sizes)
    names = _OWN_SIZES.get(architecture, _SIZES)
    settings: dict[str, Any] = {name: sizes[key] for key, name in names.items() if sizes[key] is not None}
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        if (epsilon := file.said(f"{{arch}}.{key}")) is not None:
            settings[_EPSILON.get(architecture, "rms_norm_eps")] = float(epsilon)
    if architecture in ("qwen2moe", "qwen3moe"):
        experts = {"num_experts": _size(file, "expert_count"), "num_experts_per_tok": _size(file, "expert_used_count")}
        settings |= {name: count for name, count in experts.items() if count is not None}
    if architecture == "qwen3moe":
        settings["norm_topk_prob"] = True  # fixed in llama.cpp's code, absent in files
    if architecture == "stablelm":
        settings["use_qkv_bias"] = any(name.endswith("attn_q.bias") for name in file.tensors)
        settings["use_parallel_residual"] = not any("ffn_norm" in name for name in file.tensors)
    return settings


def _size(file: Metadata, key: str) -> int | None:
    """Return a size of the model; None if the file has no such key, or a 0 for an optional one.

    A list for all layers must hold equal values. Raises ModelError.
    """
    value = file.said(f"{{arch}}.{key}")
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        value = value[0]
    if value is None or (value == 0 and key not in _NEEDED):
        return None
    if isinstance(value, int) and 0 < value <= _LARGEST:
        return value
    raise ModelError(
        f"{file.name}: {file.architecture}.{key} is {str(value)[:60]}; it must be one number from 1 to {_LARGEST}; "
        "give the folder of its Hugging Face checkpoint",
        code="model.unsupported_setting",
    )


def _check_sizes(file: Metadata, sizes: dict[str, int | None]) -> None:
    """Raise ModelError if sizes are missing or contradict the tensors."""
    for key in _NEEDED:
        if sizes[key] is None:
            raise ModelError(
                f"{file.name}: lacks {file.architecture}.{key}; download it again", code="model.damaged_file"
            )
    width, rows = file.tensors["token_embd.weight"].shape[:2]
    if sizes["embedding_length"] != width:
        raise ModelError(
            f"{file.name}: {file.architecture}.embedding_length is {sizes['embedding_length']}, and its embeddings of "
            f"{rows} tokens have width {width}; download it again",
            code="model.damaged_file",
        )
    _check_layers(file, sizes["block_count"] or 0)
    heads = sizes["attention.head_count"] or 1
    if file.architecture in _OWN_SIZES and width % heads:  # a head has no width of its own there
        raise ModelError(
            f"{file.name}: {file.architecture}.attention.head_count is {heads}, which does not divide the width "
            f"{width}; download it again",
            code="model.damaged_file",
        )


def _check_layers(file: Metadata, count: int) -> None:
    """Raise ModelError if a layer has no tensors. Otherwise a false block_count would build millions of layers."""
    held = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    lacking = next((layer for layer in range(count) if str(layer) not in held), None)
    if lacking is not None:
        raise ModelError(
            f"{file.name}: {file.architecture}.block_count is {count}, and layer {lacking} has no tensors; download it "
            "again",
            code="model.damaged_file",
        )


def _completed(config: PretrainedConfig, file: Metadata) -> PretrainedConfig:
    """Add the settings that a file stores in another form than transformers."""
    config.tie_word_embeddings = "output.weight" not in file.tensors
    config.vocab_size = int(file.tensors["token_embd.weight"].shape[1])
    if "position_embd.weight" in file.tensors:
        config.max_position_embeddings = int(file.tensors["position_embd.weight"].shape[1])
    for key, name in _EXPERTS.items():
        if hasattr(config, name) and (width := _size(file, key)) is not None:
            setattr(config, name, width)
    _end(config, file)
    _heads(config, file)
    _window(config, file)
    _rotary(config, file)
    config.name_or_path = file.name
    return config


def _end(config: PretrainedConfig, file: Metadata) -> None:
    """Set the ids that begin and end a text. A chat turn may end with another id than a text."""
    ends = file.vocabulary.ends
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    config.bos_token_id = file.vocabulary.role("bos")
    config.pad_token_id = file.vocabulary.role("padding")


def _heads(config: PretrainedConfig, file: Metadata) -> None:
    """Set the width of a head, and the divisor of scores if that differs."""
    if file.architecture != "phi3" and _declares(config, "head_dim"):
        width = _size(file, "attention.key_length") or _size(file, "rope.dimension_count")
        if width is not None:
            config.head_dim = width
    if file.architecture in ("gemma2", "gemma3"):
        layers = {"gemma2": 46, "gemma3": 62}[file.architecture]  # llama.cpp recognizes the 27B models by their layers
        apart = config.num_hidden_layers == layers
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if apart else config.head_dim


def _window(config: PretrainedConfig, file: Metadata) -> None:
    """Set the file's sliding window. A configuration class may have another default."""
    if not _declares(config, "sliding_window"):
        return
    window = file.said("{arch}.attention.sliding_window")
    if window is not None:
        config.sliding_window = int(window) if window else None


def _rotary(config: PretrainedConfig, file: Metadata) -> None:
    """Set the scaling of the rotary embedding, which transformers does not read.

    As in llama.cpp, a factor without a type is linear, and older files store it as ``rope.scale_linear``.
    """
    kind, factor = file.said("{arch}.rope.scaling.type") or "linear", file.said("{arch}.rope.scaling.factor")
    if factor is None:
        factor = file.said("{arch}.rope.scale_linear")
    scaled = kind != "none" and factor not in (None, 0.0, 1.0)
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        return
    rotated = parameters.get("full_attention", parameters)  # in gemma3, the layers without a window
    if base := file.said("{arch}.rope.freq_base"):
        rotated["rope_theta"] = float(base)
    if (width := file.said("{arch}.rope.dimension_count")) and "partial_rotary_factor" in rotated:
        rotated["partial_rotary_factor"] = width * config.num_attention_heads / config.hidden_size
    if any(name.startswith("rope_factors_") for name in file.tensors):
        parameters |= _longrope(config, file)
        return
    divided = _llama3(config, file) if "rope_freqs.weight" in file.tensors else {}
    if divided and scaled:
        raise ModelError(
            f"{file.name}: scales its rotary embedding twice, by rope_freqs and by the factor {factor:g}, which is not "
            "supported; give the folder of its Hugging Face checkpoint",
            code="model.unsupported_setting",
        )
    if divided:
        config.rope_parameters = parameters | divided
    elif not scaled:
        return
    elif kind == "linear":
        rotated |= {"rope_type": "linear", "factor": float(factor)}
    elif kind == "yarn":
        context = file.said("{arch}.rope.scaling.original_context_length")
        parameters |= {"rope_type": "yarn", "factor": float(factor)}
        parameters["original_max_position_embeddings"] = int(context or config.max_position_embeddings / factor)
    else:
        raise ModelError(
            f"{file.name}: rotary scaling '{kind}' is not supported; use one of linear, yarn, llama3",
            code="model.unsupported_setting",
        )


def _longrope(config: PretrainedConfig, file: Metadata) -> dict[str, Any]:
    """Return Phi-3's scaling: divisors of the frequencies up to the original context and beyond it."""
    context = file.said("{arch}.rope.scaling.original_context_length")
    tensors = {f"{length}_factor": f"rope_factors_{length}.weight" for length in ("short", "long")}
    if context is None or not all(name in file.tensors for name in tensors.values()):
        raise ModelError(
            f"{file.name}: has rotary factors without the context that they are for, or for one length alone; give the "
            "folder of its Hugging Face checkpoint",
            code="model.unsupported_setting",
        )
    config.original_max_position_embeddings = int(context)
    factor = config.max_position_embeddings / int(context)
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "factor": factor,
        "original_max_position_embeddings": int(context),
    }
    for key, name in tensors.items():
        found[key] = np.asarray(file.tensors[name].data, dtype=np.float32).tolist()
    if attention := file.said("{arch}.rope.scaling.attn_factor"):
        found["attention_factor"] = float(attention)
    return found


def _llama3(config: PretrainedConfig, file: Metadata) -> dict[str, Any]:
    """Recognize Llama 3's scaling by the file's divisors of the frequencies."""
    factors = np.asarray(file.tensors["rope_freqs.weight"].data, dtype=np.float32)
    if np.allclose(factors, 1):
        return {}
    width = 2 * len(factors)
    waves = 2 * math.pi * config.rope_parameters["rope_theta"] ** (np.arange(0, width, 2) / width)
    for factor in _LLAMA3_FACTORS:
        smooth = (8192 / waves - 1) / 3  # between wavelengths of 8192 / 4 and 8192
        between = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(waves < 8192 / 4, 1.0, np.where(waves > 8192, factor, between))
        if np.allclose(factors, expected, rtol=1e-3):
            named = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", "original_max_position_embeddings": 8192} | named
    raise ModelError(
        f"{file.name}: its rope_freqs are not those of a rotary scaling that inlay knows; give the folder of its "
        "Hugging Face checkpoint",
        code="model.unsupported_setting",
    )


def _declares(config: PretrainedConfig, name: str) -> bool:
    return name in getattr(type(config), "__dataclass_fields__", {}) or hasattr(config, name)
