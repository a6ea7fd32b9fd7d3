"""DeepSeek and others with multi-head latent attention: one cached latent for all heads.

The latent of a token stands for the keys and values of every head (DeepSeek-V2, arXiv 2405.04434, section 2.1). Stock
code expands it before attention. Here the expanding products are applied to the query and to the output instead
("absorbed", same section). So every head attends to one key, which is the rotary part followed by the latent. This key
is its own value too. The rotary part of the output has no meaning and is dropped.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.models.interface import Absorbing, carried_pass, carry
from inlay.models.spec import LayerSpec
from inlay.models.standard import ROUTERS, Standard


class LatentAttention(Absorbing):
    """Base of a stock attention class for inlay. It behaves like the stock class if no pass is carried."""

    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    kv_b_proj: nn.Linear

    def expand_kv(self, latent: Tensor, rotated: Tensor) -> Any:
        """Replace the stock expansion of latents during a pass.

        Args:
            latent: (batch, 1, rows, rank).
            rotated: (batch, 1, rows, rotary width).

        Returns:
            Key and value. During a pass both are (batch, 1, rows, rotary width + rank).
        """
        if carried_pass() is None:
            return super().expand_kv(latent, rotated)  # type: ignore[misc]
        key = torch.cat((rotated, latent), -1)
        return key, key

    def enter_attention(self, query: Tensor) -> Tensor:
        """Convert queries, (1, heads, rows, width), for latents: (1, heads, rows, rotary width + rank)."""
        plain, rotated = query.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        return torch.cat((rotated, plain @ self._expanding()[:, : self.qk_nope_head_dim]), -1)

    def leave_attention(self, output: Tensor) -> Tensor:
        """Convert sums of keys, (1, rows, heads, rotary width + rank), to sums of values, (1, rows, heads, value
        width).
        """
        values = self._expanding()[:, self.qk_nope_head_dim :]
        latent = output[..., self.qk_rope_head_dim :].transpose(1, 2)
        return (latent @ values.transpose(1, 2)).transpose(1, 2)

    def _expanding(self) -> Tensor:  # (heads, plain width + value width, rank)
        return self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))


class DeepseekV3(Standard):
    """Models with latent attention. The rotary part comes first in a stored key."""

    model_types: ClassVar[tuple[str, ...]] = ("axk1", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
    latent = True
    unpacked = (*ROUTERS, "kv_b_proj")  # the weight is read for each head

    def layers(self, model: PreTrainedModel) -> tuple[LayerSpec, ...]:
        """See Family.layers. There is one head, and its values are its keys."""
        config = model.config
        width = config.qk_rope_head_dim + config.kv_lora_rank
        return tuple(
            LayerSpec(1, width, self.rotary(model, i, positions), shared=True)
            for i, positions in enumerate(self.layer_positions(config))
        )

    def patch(self, model: PreTrainedModel) -> None:
        """See Family.patch."""
        carry(model)
        absorb(model)


def absorb(model: PreTrainedModel) -> None:
    """Let all latent attention of a model store latents."""
    for module in model.modules():
        if hasattr(module, "expand_kv") and not isinstance(module, LatentAttention):
            stock = type(module)
            module.__class__ = type(f"Inlay{stock.__name__}", (LatentAttention, stock), {})


class DeepseekV2(DeepseekV3):
    """DeepSeek-V2. Only the layout of the rotary part differs from V3."""

    model_types = ("deepseek_v2",)
    interleaved = True


SERVED = (DeepseekV2(), DeepseekV3())
