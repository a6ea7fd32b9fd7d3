"""Named architectures with random weights, to measure speed without a checkpoint.

``random:qwen2.5-0.5b`` has the shape of Qwen2.5-0.5B and random weights. Its answers mean nothing, and it is exactly
as fast as the real one. Its tokenizer has one token for each byte, and a chat template. ``random:llama-2-7b:2`` has
only the first two layers. Layers are alike, so a shape that does not fit in memory can still be measured.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from inlay.errors import ModelError
from inlay.models.weights import Preparation, WeightForm, parts

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


def build_random(
    shape: str, dtype: torch.dtype, seed: int, *, bos: int, eos: int, form: WeightForm | None = None
) -> tuple[PreTrainedModel, bytes]:
    """Build a model of a named shape with random weights. The same seed gives the same weights.

    Args:
        bos, eos: Ids that begin and end a text. They replace the defaults of the configuration class.
        form: The form of the weights. Each part is converted before the next one is drawn.

    Returns:
        The model and its fingerprint.

    Raises:
        ModelError: If the shape is unknown.
    """
    settings = shape_settings(shape)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, bos_token_id=bos, eos_token_id=eos)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    preparation = Preparation(model, form or WeightForm())
    draw = _Noise(seed)
    for path, part in list(parts(model)):
        if "rotary" in path:  # its frequencies are computed, and were lost on the meta device
            part = type(part)(config=config)
            model.set_submodule(path, part)
        elif any(parameter.is_meta for parameter in part.parameters()):
            part.to_empty(device="cpu")
            draw.fill(part)
            if isinstance(part, nn.Embedding):
                model.tie_weights()
        preparation.take(path, part)
    return model.eval(), preparation.fingerprint()


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


class _Noise:
    """Draws random weights from one block of normal noise, at memory speed. 7 billion fresh draws would take
    minutes.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(1 << 24, generator=self._generator)

    def fill(self, part: nn.Module) -> None:
        """Draw the weights of a part of a model."""
        norms = {id(p) for m in part.modules() if "norm" in type(m).__name__.lower() for p in m.parameters()}
        for parameter in part.parameters():
            if id(parameter) in norms:
                nn.init.ones_(parameter)
            elif parameter.dim() < 2:
                nn.init.zeros_(parameter)
            else:
                self._fill(parameter.data)

    def _fill(self, weight: torch.Tensor) -> None:
        most, scale = self._noise.numel() // 2, weight.shape[-1] ** -0.5
        flat, at = weight.view(-1), 0
        while at < flat.numel():
            offset = int(torch.randint(0, most, (1,), generator=self._generator))
            size = min(flat.numel() - at, most)
            torch.mul(self._noise[offset : offset + size], scale, out=flat[at : at + size])
            at += size


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
