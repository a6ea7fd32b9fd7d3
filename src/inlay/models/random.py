"""Named architectures with random weights, to measure speed without a checkpoint.

``random:qwen2.5-0.5b`` has the shape of Qwen2.5-0.5B and random weights. Its answers mean nothing, and it is exactly
as fast as the real one. Its tokenizer has one token for each byte, and a chat template. ``random:llama-2-7b:2`` has
only the first two layers. Layers are alike, so a shape that does not fit in memory can still be measured.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inlay.models.shapes import SHAPES, bytes_tokenizer, check_shape, shape_settings
from inlay.models.weights import Preparation, WeightForm, parts

__all__ = ["SHAPES", "build_random", "bytes_tokenizer", "check_shape", "shape_settings"]


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
