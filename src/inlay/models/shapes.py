"""Models that need no files: the named shapes of ``random:<shape>`` with their tokenizer, and the bundled model.

Nothing here loads model code, which takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inlay.errors import ModelError

MODEL_DIRECTORY = Path(__file__).parent / "demo"

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA3_SCALING,
        "tie_word_embeddings": True,
    },
    "llama-2-7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "llama-2-13b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "mha-0.4b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    # Three of four layers are gated delta nets.
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    # Ten of sixteen layers are short convolutions.
    "lfm2-350m": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    # 28 of 32 layers are Mamba-2.
    "granite-4.0-h-350m": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["full_attention" if layer in (10, 13, 17, 27) else "linear_attention" for layer in range(32)],
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        # Without multipliers, 32 random layers of this kind turn bf16's rounding into a quarter of the logits' spread.
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.246,
        "attention_multiplier": 0.015625,
        "logits_scaling": 3.0,
    },
    # Loads at once, for trying out commands.
    "tiny": {
        "model_type": "llama",
        "vocab_size": 262,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def check_shape(shape: str) -> None:
    """Raise ModelError for an unknown shape or an invalid number of layers."""
    name, colon, layers = shape.partition(":")
    if name not in SHAPES:
        raise ModelError(
            f"random:{shape} is not a known shape; use one of {', '.join(sorted(SHAPES))}", code="model.unknown_shape"
        )
    most = SHAPES[name]["num_hidden_layers"]
    if colon and not (layers.isascii() and layers.isdecimal() and 1 <= int(layers[:9]) <= most):
        raise ModelError(
            f"random:{shape}: {name} has layers 1 to {most}; write how many of them, as in random:{name}:1",
            code="model.unknown_shape",
        )


def shape_settings(shape: str) -> dict[str, Any]:
    """Return the configuration of a shape, or of its first layers as in ``llama-2-7b:2``. Raises ModelError."""
    check_shape(shape)
    name, _, layers = shape.partition(":")
    return SHAPES[name] | ({"num_hidden_layers": int(layers)} if layers else {})


_SPECIAL = ("<|bos|>", "<|eos|>", "<|unk|>", "<|start|>", "<|turn|>", "<|end|>")

_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|start|>{{ message['role'] }}<|turn|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|turn|>{% endif %}"
)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Return a fast tokenizer with ids 0–255 for the bytes, followed by six special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
