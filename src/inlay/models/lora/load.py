"""Loads adapters from PEFT's folders: the adapted layers, and the two factors of each update."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from inlay.errors import ModelError, ParameterError
from inlay.models.fingerprint import blocks_of
from inlay.models.linear import LINEAR, FrozenLinear, inputs_of, outputs_of
from inlay.models.location import check_pointers
from inlay.models.lora.config import CONFIG_FILE, SAVED, LoRAConfig, read_config
from inlay.models.multimodal import NAMES
from inlay.models.quantized import renamed
from inlay.wording import clip, counted, show

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<factor>[AB])\.weight")
_DIGEST = b"inlay adapter 1"
_MOST_NAME = 200


@dataclass(frozen=True)
class LowRank:
    """The update of one layer: ``up @ down``.

    Args:
        down: (rank, in_features), in the model's dtype.
        up: (out_features, rank), in the model's dtype, multiplied by the scale.
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Information about an adapter, without its weights.

    Args:
        folder: The folder that it was read from.
        rank: The largest rank of its layers.
        layers: Number of adapted layers.
        nbytes: Bytes of its weights.
    """

    name: str
    folder: str
    rank: int
    layers: int
    nbytes: int

    def __str__(self) -> str:
        size = f"{self.nbytes / 2**20:,.1f} MiB of weights"
        return f"adapter {clip(self.name)}: rank {self.rank} in {counted(self.layers, 'layer')}, {size}"


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter of one model.

    Args:
        digest: sha256 of the bytes and scales of all updates, independent of the name. It is part of the key of every
            segment that is computed with the adapter.
        updates: By the path of the stock model's layer.
    """

    info: AdapterInfo
    digest: bytes
    updates: Mapping[str, LowRank]


@dataclass(frozen=True)
class AdaptedModule:
    """The module and the outputs in it that stand for a stock layer.

    Args:
        module: The module that computes them.
        first, outputs: The stock layer has the module's outputs ``first`` to ``first + outputs`` - 1.
        inputs: Number of inputs.
        head: True for the output layer. It is called only with the rows that need logits.
    """

    module: nn.Module
    first: int
    outputs: int
    inputs: int
    head: bool


def linear_places(model: PreTrainedModel) -> dict[str, AdaptedModule]:
    """Return every linear layer of the stock model by its path, in whatever form its weights are."""
    head = model.get_output_embeddings()
    found: dict[str, AdaptedModule] = {}
    for path, module in model.named_modules():
        first = 0
        joined: tuple[tuple[str, int], ...] | None = getattr(module, "stands_for", None)
        if joined is None and isinstance(module, LINEAR):
            joined = ((path, outputs_of(module)),)
        for name, outputs in joined or ():
            inputs = inputs_of(module) if isinstance(module, (*LINEAR, FrozenLinear)) else 0
            found[name or path] = AdaptedModule(module, first, outputs, inputs, module is head)
            first += outputs
    return found


def check_names(names: Iterable[str], taken: Iterable[str]) -> None:
    """Raise ParameterError for adapter names that requests could not use.

    Args:
        taken: The names of the model, which an adapter must not have.
    """
    for name in names:
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > _MOST_NAME:
            allowed = f"a name that can be written on one line, of at most {_MOST_NAME} characters"
            raise ParameterError(f"an adapter is called {show(name)}; give it {allowed}", code="adapter.invalid_name")
        if name in taken:
            raise ParameterError(
                f"an adapter is called {show(name)} as is its model; give one of them another name",
                code="adapter.invalid_name",
            )


def load_adapters(
    model: PreTrainedModel, model_name: str, folders: Mapping[str, str | os.PathLike[str]]
) -> dict[str, Adapter]:
    """Load adapters. Returns them by name.

    Args:
        folders: The folder of each adapter by name.

    Raises:
        ParameterError: If ``folders`` is not such a mapping.
        ModelError: If an adapter cannot be used with this model.
    """
    if not isinstance(folders, Mapping):
        raise ParameterError(
            f"adapters is {show(folders)}; give names with folders, as in {{'sql': 'adapters/sql'}}",
            code="parameter.wrong_type",
        )
    check_names(folders, (model_name,))
    return {name: load_adapter(model, name, folder) for name, folder in folders.items()}


def load_adapter(model: PreTrainedModel, name: str, folder: str | os.PathLike[str]) -> Adapter:
    """Load an adapter for this model. folder: as written by PEFT. Raises ParameterError and ModelError, with the
    reason.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ParameterError(f"adapter {show(name)} is {show(folder)}; {SAVED}", code="adapter.not_found")
    path = Path(os.path.expanduser(os.fsdecode(folder)))
    with _told_of(name, path):
        config = _configuration(path)
        with _weights(path) as weights:
            places = linear_places(model)
            factors = _factors(weights.keys(), places)
            _check_targets(config, factors, places)
            return _adapter(name, path, config, factors, places, weights, model.dtype)


def size_of(name: str, folder: str | os.PathLike[str]) -> int:
    """Return the number of elements of an adapter, without its model. Raises ModelError."""
    path = Path(os.path.expanduser(os.fsdecode(folder)))
    with _told_of(name, path):
        _configuration(path)
        with _weights(path) as weights:
            return sum(prod(weights.get_slice(key).get_shape()) for key in list(weights.keys()))


@contextmanager
def _told_of(name: str, path: Path) -> Iterator[None]:
    """Add the adapter's name and path to errors."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"adapter {clip(name)!r} ({path}): {error}", code=error.code) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(
            f"adapter {clip(name)!r} ({path}): cannot be read ({reason}); check its files", code="adapter.unreadable"
        ) from None


def _configuration(path: Path) -> LoRAConfig:
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such directory"
        raise ModelError(f"{what}; {SAVED}", code="adapter.not_found")
    check_pointers(path)
    return read_config(path)


@contextmanager
def _weights(path: Path) -> Iterator[Any]:
    """Open the file of weights. Raises ModelError."""
    file = path / WEIGHTS_FILE
    if not file.is_file():
        if (path / _PICKLE).is_file():
            raise ModelError(
                f"{_PICKLE} is a pickle, which could run code when it is read; load it with PEFT where you trust it, "
                f"and save it with save_pretrained, which writes {WEIGHTS_FILE}",
                code="adapter.pickled_weights",
            )
        raise ModelError(f"it holds no {WEIGHTS_FILE}; {SAVED}", code="adapter.not_found")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ModelError(
            f"{WEIGHTS_FILE} is damaged ({error}); copy it again", code="adapter.damaged_weights"
        ) from None


Factors = dict[str, dict[str, str]]
"""Layer path → keys of its factors in the file, by "A" and "B"."""


def _factors(keys: Iterable[str], places: Mapping[str, AdaptedModule]) -> Factors:
    """Find the factors of each layer. Raises ModelError if a key is not part of a LoRA of this model's linear
    layers.
    """
    found: Factors = {}
    for key in sorted(keys):
        match = _KEY.fullmatch(key)
        if "lora_embedding_" in key:
            raise ModelError(
                f"it adapts an embedding ({clip(key)}), which is not supported; train it without the embedding",
                code="adapter.unsupported_kind",
            )
        if "lora_magnitude_vector" in key:
            raise ModelError(
                f"it is a DoRA ({clip(key)}), which is not supported; merge it into its model with PEFT",
                code="adapter.unsupported_kind",
            )
        if key.endswith(".base_layer.weight"):
            raise ModelError(
                f"{WEIGHTS_FILE} holds all of a layer's own weights ({clip(key)}); save the adapter with PEFT and "
                "save_embedding_layers=False",
                code="adapter.unsupported_kind",
            )
        if match is None:
            raise ModelError(
                f"{WEIGHTS_FILE} holds {clip(key)}, which is no part of a LoRA; save the adapter with PEFT",
                code="adapter.unsupported_kind",
            )
        path = match["path"]
        if path not in places:  # trained on the multimodal model of this text model
            path = renamed(path, NAMES)
        if path not in places:
            raise ModelError(
                f"it adapts {match['path']}, which is no linear layer of this model; give it with the model that it "
                "was trained on",
                code="adapter.wrong_model",
            )
        found.setdefault(path, {})[match["factor"]] = key
    for path, factors in found.items():
        for factor in "AB":
            if factor not in factors:
                raise ModelError(
                    f"{WEIGHTS_FILE} lacks lora_{factor} of {path}; copy it again", code="adapter.missing_weights"
                )
    if not found:
        raise ModelError(f"{WEIGHTS_FILE} holds no weights; save the adapter again", code="adapter.missing_weights")
    return found


def _check_targets(config: LoRAConfig, factors: Factors, places: Mapping[str, AdaptedModule]) -> None:
    """Raise ModelError if the layers with weights differ from those that the configuration names."""
    targets = {path for path, place in places.items() if config.adapts(path, head=place.head)}
    for path in sorted(targets - factors.keys()):
        raise ModelError(
            f"{WEIGHTS_FILE} has no weights for {path}, which target_modules names; copy both files again",
            code="adapter.missing_weights",
        )
    for path in sorted(factors.keys() - targets):
        raise ModelError(
            f"{WEIGHTS_FILE} has weights for {path}, which target_modules does not name; copy both again",
            code="adapter.unexpected_weights",
        )


def _adapter(
    name: str,
    folder: Path,
    config: LoRAConfig,
    factors: Factors,
    places: Mapping[str, AdaptedModule],
    weights: Any,
    dtype: torch.dtype,
) -> Adapter:
    digest, updates = hashlib.sha256(_DIGEST), {}
    for path, keys in sorted(factors.items()):
        down, up = (_number_of(weights, keys[factor], path) for factor in "AB")
        _check_shapes(path, down, up, config.rank_of(path), places[path])
        scale = config.scale_of(path)
        for factor in (down, up):
            digest.update(f"{path} {tuple(factor.shape)} {factor.dtype} {scale.hex()}".encode())
            for block in blocks_of(factor):
                digest.update(block)
        # Copies, because the read tensors are the mapped file, which may change during serving.
        updates[path] = LowRank(down.to(dtype, copy=True).contiguous(), (up.float() * scale).to(dtype).contiguous())
    size = sum(low.down.nbytes + low.up.nbytes for low in updates.values())
    rank = max(len(low.down) for low in updates.values())
    return Adapter(AdapterInfo(name, str(folder), rank, len(updates), size), digest.digest(), updates)


def _number_of(weights: Any, key: str, path: str) -> Tensor:
    tensor: Tensor = weights.get_tensor(key)
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise ModelError(
            f"{WEIGHTS_FILE} has {clip(key)} in {tensor.dtype}; save it in float32, bfloat16 or float16",
            code="adapter.damaged_weights",
        )
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(
            f"{WEIGHTS_FILE} holds numbers that are infinite or none, in {path}; copy it, or train, again",
            code="adapter.damaged_weights",
        )
    return tensor


def _check_shapes(path: str, down: Tensor, up: Tensor, rank: int, place: AdaptedModule) -> None:
    if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1]:
        raise ModelError(
            f"the factors of {path} are {_shape(down)} and {_shape(up)}, which do not fit; copy it again",
            code="adapter.wrong_shape",
        )
    if len(down) != rank:
        raise ModelError(
            f"{path} has rank {len(down)} and {CONFIG_FILE} says {rank}; copy both files again",
            code="adapter.wrong_shape",
        )
    if (place.inputs, place.outputs) != (down.shape[1], len(up)):
        raise ModelError(
            f"it is for another model: its update of {path} is from {down.shape[1]:,} to {len(up):,} numbers, and the "
            f"layer from {place.inputs:,} to {place.outputs:,}; give it with the model that it was trained on",
            code="adapter.wrong_model",
        )


def _shape(tensor: Tensor) -> str:
    return " × ".join(f"{size:,}" for size in tensor.shape) or "of one number"
