"""Families whose stock attention goes through the interface; each class states how it differs from the plain case.

The plain case has rotary positions in halves of a head. A model type is listed here after its unchanged stock code
passes the suite in ``tests/model/families``.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from inlay.attention.rope import Rotary
from inlay.models.interface import carried_pass, carry
from inlay.models.standard import ROUTERS, Standard


class Plain(Standard):
    """Families without differences. Windows, caps, sinks, norms and experts are in the stock modules."""

    model_types = (
        *("apertus", "arcee", "aria_text", "bitnet", "cwm", "dots1", "flex_olmo", "gemma", "gemma2"),
        *("gemma3_text", "glm4_moe", "granite", "granitemoe", "granitemoeshared", "hy_v3", "hyperclovax"),
        *("internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "mellum", "minimax_m2", "mixtral", "olmo"),
        *("olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2_moe", "qwen3_moe", "seed_oss", "solar_open"),
        *("starcoder2", "vaultgemma"),
    )


class Cohere2(Standard):
    """Cohere2. Layers with a sliding window rotate, in adjacent elements; the others have no positions."""

    model_types = ("cohere2", "cohere2_moe")
    interleaved = True

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.layer_types[layer] == "sliding_attention")


class Exaone4(Standard):
    """EXAONE 4 and AFMoE. Layers with a sliding window rotate; a model without any window rotates in all layers."""

    model_types = ("afmoe", "exaone4", "exaone_moe")

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return config.sliding_window is None or bool(config.layer_types[layer] == "sliding_attention")


class Glm4(Standard):
    """GLM-4 and similar models. The two elements of a rotated pair are adjacent."""

    model_types = ("cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
    interleaved = True


class GptBigCode(Standard):
    """GPT-BigCode (StarCoder). Positions are learned; there is one KV head for all queries, or one for each."""

    model_types = ("gpt_bigcode",)
    positions = "learned"

    def kv_heads(self, config: PretrainedConfig) -> int:
        """See Standard.kv_heads."""
        return 1 if config.multi_query else int(config.num_attention_heads)


class GptNeox(Standard):
    """GPT-NeoX and Persimmon. Every head has its own keys and values."""

    model_types = ("gpt_neox", "persimmon")
    multi_head = True


class GptOss(Standard):
    """gpt-oss and similar models. The stock layer passes its attention sinks to the interface."""

    model_types = ("gpt_oss", "granite_swa", "granitemoe_swa")
    sinks = True


class Hunyuan(Standard):
    """Hunyuan. Keys have a norm with weights after the rotation. The router is one module deeper than elsewhere."""

    model_types = ("hunyuan_v1_dense", "hunyuan_v1_moe")
    fixed = "keys are normed after their rotation, so a module is read only where it was encoded"
    unpacked = (*ROUTERS, "wg")


class InlayLlama4Attention(Llama4TextAttention):
    """Llama4TextAttention without its temperature in a pass. It behaves like the stock class if no pass is carried.

    Stock code takes the row of a query for its position, and a pass has rows of several requests. The temperature is 1
    at all positions that ``Llama4`` accepts.
    """

    @property
    def attn_temperature_tuning(self) -> bool:  # type: ignore[override]  # stock code sets it once
        return bool(self.config.attn_temperature_tuning) and carried_pass() is None


class Llama4(Standard):
    """Llama 4. Layers that rotate attend within chunks of 8,192 positions. The other layers see the whole text."""

    model_types = ("llama4_text",)
    interleaved = True

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.no_rope_layers[layer])

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)
        for module in model.modules():
            if type(module) is Llama4TextAttention:
                attention: Any = module
                attention.__class__ = InlayLlama4Attention


class Ministral3(Standard):
    """Ministral 3. Queries beyond the first training length are scaled; the probe's small positions do not show it."""

    model_types = ("ministral3",)
    fixed = "queries are scaled by their position, so a module is read only where it was encoded"


class NanoChat(Standard):
    """nanochat. Pairs rotate in the opposite direction. The norm after the rotation has no weights, so shifts work."""

    model_types = ("nanochat",)

    def rotary(self, model: PreTrainedModel, layer: int, positions: str) -> Rotary | None:
        """See Standard.rotary. Frequencies are negative."""
        stock = super().rotary(model, layer, positions)
        return None if stock is None else Rotary(-stock.inverse_frequencies)


class Opt(Standard):
    """OPT and BioGPT. Positions are learned, so segments cannot be shifted."""

    model_types = ("biogpt", "opt")
    positions = "learned"
    multi_head = True


class PhiMoe(Standard):
    """Phi-3.5-MoE. Stock code gives its window, the same in all layers, only to the mask, which is not built here."""

    model_types = ("phimoe",)

    def masked_window(self, config: PretrainedConfig) -> int | None:
        """See Standard.masked_window."""
        return config.sliding_window


class SmolLM3(Standard):
    """SmolLM3: Llama with some layers without positions. The configuration has a 1 for every layer that rotates."""

    model_types = ("smollm3",)

    def rotates(self, config: PretrainedConfig, layer: int) -> bool:
        """See Standard.rotates."""
        return bool(config.no_rope_layers[layer])


class StableLm(Standard):
    """StableLM and Nemotron. Their layers pass no keyword arguments on, so the pass is carried past them."""

    model_types = ("nemotron", "stablelm")

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)


SERVED: tuple[Standard, ...] = (
    *(Plain(), Cohere2(), Exaone4(), Glm4(), GptBigCode()),
    *(GptNeox(), GptOss(), Hunyuan(), Llama4(), Ministral3()),
    *(NanoChat(), Opt(), PhiMoe(), SmolLM3(), StableLm()),
)
