"""What tells one model's attention states from another's: part of every segment key."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

#: Entries of a configuration that say nothing of what the model computes.
_VOLATILE = ("_name_or_path", "transformers_version", "_attn_implementation")
_SAMPLE = 1024


class Fingerprint:
    """sha256 over the configuration and, of every weight, its name, shape, dtype and up to 1,024 spread values.

    Weights may be shown part by part, in any order, so that a part can be packed or dropped before the next is there.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        settings = config.to_dict()
        for name in _VOLATILE:
            settings.pop(name, None)
        self._config = json.dumps(settings, sort_keys=True, default=str).encode()
        self._weights: dict[str, bytes] = {}

    def add(self, path: str, part: nn.Module) -> None:
        """Take in the weights of a module that stands at that path of the model."""
        for name, weight in part.state_dict(prefix=f"{path}." if path else "").items():
            flat = weight.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLE)].to(torch.float32).contiguous()
            described = f"{name} {tuple(weight.shape)} {weight.dtype}".encode()
            self._weights[name] = described + sample.cpu().numpy().tobytes()

    def digest(self, quantization: str | None = None) -> bytes:
        """The fingerprint. quantization: how the weights are rounded, which makes another model of them."""
        digest = hashlib.sha256(self._config)
        for _, weight in sorted(self._weights.items()):
            digest.update(weight)
        if quantization is not None:
            digest.update(f"quantization {quantization}".encode())
        return digest.digest()


def fingerprint(model: PreTrainedModel) -> bytes:
    """The Fingerprint of a stock model."""
    whole = Fingerprint(model.config)
    whole.add("", model)
    return whole.digest()
