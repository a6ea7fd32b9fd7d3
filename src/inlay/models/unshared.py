"""Causal models of transformers without a family: served without reuse, or refused with a reason.

Without reuse, each request runs through the stock code with transformers' own cache. The states cannot be shared
between requests, or not through inlay's attention. So these models have no KV in the pool, and the only reuse policy
is ``off``. A probe at load (engine/unshared_runner.py) verifies that a text in chunks gives the same result as in one
pass.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from inlay.errors import ModelError, ParameterError
from inlay.models.family import Allows, Family
from inlay.models.linear import MakeLinear
from inlay.models.quantized import settings_of
from inlay.models.spec import LayerSpec, ModelSpec

#: Reasons against reuse, with the model types that they are known for.
WHY: dict[str, tuple[str, ...]] = {
    "they have recurrent layers that inlay cannot run itself, so their states are not stored or shared": (
        *("bailing_hybrid", "inkling2_text", "inkling_text", "minimax", "qwen4_exp", "qwen4_exp_text", "rwkv"),
        *("xlstm", "zamba", "zaya"),
    ),
    "their attention bypasses transformers' AttentionInterface, so their keys and values are not stored or shared": (
        *("axk2", "codegen", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "glm_moe_dsa", "hy_v4"),
        *("minimax_m3_vl_text", "dots3_note", "dots3_note_text", "longcat_flash"),
        *("gpt_neox_japanese", "xglm", "gptj", "jetmoe", "hrm_text"),
    ),
    "their keys and values differ in width, and no attention backend stores such pairs, so they are not shared": (
        "mimo_v2_flash",
    ),
}
_UNVERIFIED = "inlay has not verified their attention and positions, so their keys and values are not stored or shared"

_REASONS: dict[str, str] = {kind: why for why, kinds in WHY.items() for kind in kinds}

#: The context of models without a limit of their own.
_POSITIONS = 1 << 20


class Unshared(Family):
    """A family that is served without reuse."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    @property
    def why(self) -> str:
        """The reason against reuse."""
        return _REASONS.get(self.model_type, _UNVERIFIED)

    def check(self, config: PretrainedConfig) -> None:
        """Accept any configuration without quantized weights. Raises ModelError."""
        if settings_of(config) is not None:
            raise ModelError(
                f"models of type '{self.model_type}' are served as transformers has them, without reuse ({self.why}), "
                "and quantized weights of such are not read; use the checkpoint in bfloat16",
                code="model.unsupported_quantization",
            )

    def allows(self, config: PretrainedConfig) -> Allows:
        return Allows(
            exact=False,
            modular=False,
            shifts=None,
            reason=self.why,
            windows=(),
            sinks=False,
            latent=False,
            joined=False,
        )

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """Return (), because the pool holds no KV of these layers."""
        return ()

    def spec(self, model: PreTrainedModel) -> ModelSpec:
        config = model.config.get_text_config(decoder=True)
        why = f"models of type '{self.model_type}' are served without reuse: {self.why}"
        return ModelSpec(self.model_type, (), positions_of(config), config.vocab_size, fixed=why, unshared=why)

    def fuse(self, path: str, part: nn.Module, make: MakeLinear) -> nn.Module:
        """Return the part unchanged, because the model's own code may read any weight."""
        return part


def unshared_of(config: PretrainedConfig) -> Unshared | None:
    """Return the family without reuse; None if transformers has no causal model of that type."""
    return Unshared(config.model_type) if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else None


def positions_of(config: Any) -> int:
    """Return the number of tokens that a prompt and its answer may have together."""
    found = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(found) if isinstance(found, int) and found > 0 else _POSITIONS


def check_unquantized(spec: ModelSpec, quantization: str | None) -> None:
    """Raise ParameterError if a model without reuse is to be quantized."""
    if spec.unshared is not None and quantization is not None:
        raise ParameterError(
            f"quantization is '{quantization}', and {spec.unshared}; leave quantization out",
            code="model.unsupported_quantization",
        )


#: Reason → model types.
REASONS: dict[str, tuple[str, ...]] = {
    "they are encoders, or decoders of encoder-decoders, and inlay serves decoder-only models": (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small"),
        *("camembert", "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus"),
        *("plbart", "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
        *("trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
    ),
    "they read images, sound or several streams beside text, and inlay reads text alone": (
        *("blt", "emu3", "fuyu", "gemma4_assistant", "gemma4_unified_assistant", "git"),
        *("got_ocr2", "mllama", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody"),
        "phi4_multimodal",
    ),
    "they have no cache, or keep it inside the model, so requests cannot run side by side": (
        *("cpmant", "openai-gpt", "recurrent_gemma"),
    ),
}

REFUSED: dict[str, str] = {kind: reason for reason, kinds in REASONS.items() for kind in kinds}
