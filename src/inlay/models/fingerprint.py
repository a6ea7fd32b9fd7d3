"""The fingerprint of a model's attention states: part of every segment key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import transformers
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PretrainedConfig, PreTrainedModel

#: Version of the kernels and of the KV layout in a segment. Raised when a change alters computed results.
NUMERICS_VERSION = 2  # 2: int4 products round their inputs to 8 bits

#: Fields of a configuration that do not affect the computation.
_VOLATILE = ("_name_or_path", "transformers_version", "_attn_implementation")
BLOCK = 1 << 20  # bytes that one thread hashes at a time


class Fingerprint:
    """sha256 over the configuration and over the name, shape, dtype and bytes of every weight.

    The bytes of a weight are hashed in blocks by PyTorch's number of threads, and the digests of the blocks are hashed
    in
    order. So the fingerprint does not depend on the threads. Weights may be added part by part, in any order, so a part
    can be packed or dropped before the next one is loaded.

    Args:
        weights: The digest of the weights, if it is known. Then no weights need to be added.
    """

    def __init__(self, config: PretrainedConfig, weights: bytes | None = None) -> None:
        settings = config.to_dict()
        for name in _VOLATILE:
            settings.pop(name, None)
        self._config = json.dumps(settings, sort_keys=True, default=str).encode()
        self._known = weights
        self._weights: dict[str, bytes] = {}
        self._hashed = WeakTensorKeyDictionary()  # a tied weight has two names and is hashed once

    def add(self, path: str, part: nn.Module) -> None:
        """Add the weights of the module at this path of the model."""
        if self._known is not None:
            return
        weights = part.state_dict(prefix=f"{path}." if path else "", keep_vars=True)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for name, weight in weights.items():
                if weight not in self._hashed:
                    self._hashed[weight] = _sha256(b"".join(threads.map(_sha256, blocks_of(weight))))
                described = f"{name} {tuple(weight.shape)} {weight.dtype}"
                self._weights[name] = _sha256(described.encode()) + self._hashed[weight]

    def weights(self) -> bytes:
        """Return the digest of all weights."""
        return self._known or _sha256(b"".join(weight for _, weight in sorted(self._weights.items())))

    def digest(self, quantization: str | None = None) -> bytes:
        """Return the fingerprint. quantization: how the weights are rounded, which makes it another model."""
        rounded = "" if quantization is None else f"quantization {quantization}"
        return _sha256(_sha256(self._config) + self.weights() + rounded.encode())


def numerics() -> str:
    """Return the versions of the code that computes keys and values: another part of every segment key."""
    return f"inlay {NUMERICS_VERSION}, transformers {transformers.__version__}, torch {torch.__version__}"


def fingerprint(model: PreTrainedModel) -> bytes:
    """Return the fingerprint of a stock model."""
    whole = Fingerprint(model.config)
    whole.add("", model)
    return whole.digest()


def blocks_of(weight: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a weight in blocks."""
    flat = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return (block.numpy().data for block in flat.split(BLOCK))


def _sha256(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()
