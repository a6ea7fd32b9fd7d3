"""Checkpoints that are already quantized: the supported formats, and the format of each layer.

The tensors in the files tell which layers are packed, not the lists of names in the configuration. Activations stay in
the model's dtype, whatever the checkpoint was made for.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from inlay.errors import ModelError
from inlay.models.fill import Lazy, fill, on_meta
from inlay.models.formats.packings import AWQ, GPTQ, Float8, Int8, MisfitError, PackQuantized
from inlay.models.formats.stored import StoredWeight

_READ = "awq, gptq, compressed-tensors (pack-quantized, int-quantized, float-quantized), fp8 and GGUF"
_INSTEAD = "give the original weights, with quantization int8 or int4, or one of these"
_ORIGINAL = "give the original weights, with quantization int8 or int4"
_LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense")
#: Tensors that say how to round activations or attention states.
_OF_ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".input_scale_ub", ".output_scale", ".output_zero_point"),
    *(".activation_scale", ".k_scale", ".v_scale"),
)
_FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Settings = Mapping[str, Any]


def check_quantized(settings: Settings) -> None:
    """Raise ModelError for a ``quantization_config`` with an unsupported format."""
    method, bits = settings.get("quant_method"), settings.get("bits")
    wrong = None
    match method:
        case "awq":
            version = str(settings.get("version") or settings.get("format") or "gemm").lower()
            if version != "gemm" or bits not in (None, 4):
                wrong = f"awq in {bits or 4} bits, version '{version}'"
        case "gptq":
            layout = settings.get("checkpoint_format") or "gptq"
            if layout not in ("gptq", "gptq_v2") or bits not in (2, 4, 8):
                wrong = f"gptq in {bits} bits, format '{layout}'"
        case "compressed-tensors":
            wrong = _wrong_compressed(settings)
        case "fp8" | "fbgemm_fp8":
            pass
        case _:
            wrong = f"'{method}'"
    if wrong is not None:
        raise ModelError(
            f"weights quantized by {wrong} are not read; inlay reads {_READ}: {_INSTEAD}",
            code="model.unsupported_quantization",
        )


def _wrong_compressed(settings: Settings) -> str | None:
    groups = (settings.get("config_groups") or {}).values()
    for layout in (settings.get("format") or "dense", *(each.get("format") or "dense" for each in groups)):
        if layout not in (*_LAYOUTS, "mixed-precision"):
            return f"compressed-tensors, format '{layout}'"
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return f"compressed-tensors, sparsity '{settings['sparsity_config']['format']}'"
    if (settings.get("transform_config") or {}).get("config_groups"):
        return "compressed-tensors with transforms"
    for weights in (each.get("weights") or {} for each in groups):
        if weights.get("num_bits") not in (None, 4, 8):
            return f"compressed-tensors in {weights['num_bits']} bits"
    return None


def settings_of(config: PretrainedConfig) -> Settings | None:
    """Return the ``quantization_config`` of a checkpoint. None if it is not quantized."""
    settings = getattr(config, "quantization_config", None)
    if settings is None or isinstance(settings, Mapping):
        return settings
    return settings.to_dict()


def read_quantized(
    name: str,
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    names: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """Read a quantized checkpoint. Its packed layers become StoredLinear modules.

    Args:
        name: For errors.
        config: Has a ``quantization_config`` that ``check_quantized`` accepts.
        names: Patterns of names in the files, and their replacements. None: they are the model's names.

    Raises:
        ModelError: If weights are missing, do not fit together, or have an unknown format.
    """
    settings = settings_of(config) or {}
    config = copy.deepcopy(config)
    del config.quantization_config  # or transformers would look for the library that made the checkpoint
    files = _Files(name, folder, names or {})
    meta = on_meta(config, dtype)
    weights: dict[str, Lazy] = {}
    stored: dict[str, StoredWeight] = {}
    for stem, parts in files.stems.items():
        try:
            packed = _packed(files, stem, parts, settings)
        except MisfitError as error:
            raise ModelError(
                f"{files.place(stem, parts)}: {stem}.weight {error}; {_ORIGINAL}", code="model.invalid_quantization"
            ) from error
        if packed is not None:
            stored[f"{stem}.weight"] = packed
            weights[f"{stem}.weight"] = Lazy(partial(packed.whole, dtype))
            parts = parts & {"bias"}
        for part in parts:
            full = f"{stem}.{part}" if stem else part
            if not full.endswith(_OF_ACTIVATIONS):
                weights[full] = Lazy(partial(files.tensor, full))
    if not stored:
        raise ModelError(
            f"{name}: its configuration says that it is quantized, and none of its weights are; download it again",
            code="model.invalid_quantization",
        )
    model = fill(name, config, dtype, weights, stored, meta)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _packed(files: _Files, stem: str, parts: set[str], settings: Settings) -> StoredWeight | None:
    """Return the weight of a layer with these tensors, or None if it is not packed.

    Raises MisfitError if the tensors do not fit together or are unknown.
    """
    get = partial(files.part, stem)
    sizes = _sizes(settings)
    if "qweight" in parts and settings["quant_method"] == "awq":
        _know(parts, "qweight", "qzeros", "scales")
        return AWQ(get("qweight"), get("qzeros"), get("scales"), sizes)
    if "qweight" in parts:
        _know(parts, "qweight", "qzeros", "scales", "g_idx")
        less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        order = get("g_idx") if "g_idx" in parts else None
        return GPTQ(get("qweight"), get("qzeros"), get("scales"), order, int(settings["bits"]), less, sizes)
    zeros = get("weight_zero_point") if "weight_zero_point" in parts else None
    order = get("weight_g_idx") if "weight_g_idx" in parts else None
    if order is not None and (order < 0).any():  # negative entries mean that there is none
        order = None
    if "weight_packed" in parts:
        _know(parts, "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
        numbers, shape = get("weight_packed"), get("weight_shape").tolist()
        if len(shape) != 2 or numbers.dim() != 2:
            raise MisfitError(f"is of the shape {tuple(shape)}, which is no matrix")
        bits = 4 if -(-shape[1] // 8) == numbers.shape[1] else 8
        return PackQuantized(numbers, (shape[0], shape[1]), get("weight_scale"), zeros, order, bits, sizes)
    if several := sorted(part for part in parts if part.endswith("_proj_scale_inv")):
        raise MisfitError(f"is several experts in one tensor with a {several[0]}, which inlay does not read")
    names = sorted(parts & {"weight_scale", "weight_scale_inv"})
    if "weight" not in parts or not names or (weight := get("weight")).dtype not in (*_FLOATS8, torch.int8):
        return None
    if len(names) > 1:
        raise MisfitError("has both a weight_scale and a weight_scale_inv, and nothing says which of them is meant")
    _know(parts, "weight", *names, "weight_zero_point", "weight_g_idx")
    if weight.dtype == torch.int8:
        return Int8(weight, get(names[0]), zeros, order, sizes)
    if zeros is not None and zeros.float().any():
        raise MisfitError("has floats of 8 bits with zeros (weight_zero_point)")
    return Float8(weight, get(names[0]), _block(settings), order, sizes)


def _know(parts: set[str], *known: str) -> None:
    """Raise MisfitError for unknown tensors of a packed layer. They may change the meaning of its numbers."""
    rest = parts - {*known, "bias"}
    if unknown := sorted(part for part in rest if f".{part}" not in _OF_ACTIVATIONS):
        raise MisfitError(f"is packed with a {' and a '.join(unknown)}, which inlay does not know")


def _sizes(settings: Settings) -> set[int]:
    """The group sizes in a configuration, for all layers or for some. -1 means a whole row."""
    named = [settings, *(settings.get("config_groups") or {}).values(), *(settings.get("dynamic") or {}).values()]
    weights = (each.get("weights") or each for each in named)
    return {int(each["group_size"]) for each in weights if each.get("group_size") is not None}


def _block(settings: Settings) -> tuple[int, int] | None:
    """The numbers of outputs and inputs that share an fp8 scale, or None."""
    block = settings.get("weight_block_size")
    for group in (settings.get("config_groups") or {}).values():
        block = block or (group.get("weights") or {}).get("block_structure")
    return None if block is None else (int(block[0]), int(block[1]))


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return a name of a weight after the replacements of all patterns in ``names``."""
    for pattern, replacement in names.items():
        name = re.sub(pattern, replacement, name)
    return name


class _Files:
    """The mapped tensors of a checkpoint in safetensors, by their names in the model.

    Args:
        names: See ``read_quantized``.

    Attributes:
        stems: Names up to the last dot, with the set of parts after it.
    """

    def __init__(self, name: str, folder: Path, names: Mapping[str, str]) -> None:
        self._name = name
        self._places: dict[str, Any] = {}
        self._stored_as: dict[str, str] = {}
        self._paths: dict[str, Path] = {}
        for path in self._found(name, folder):
            try:
                opened = safe_open(path, framework="pt")
            except Exception as error:  # the library's own error types
                raise ModelError(f"{path}: cannot be read: {error}", code="model.unreadable_weights") from error
            for stored in opened.keys():  # noqa: SIM118  (no mapping)
                full = renamed(stored, names)
                self._places[full], self._paths[full], self._stored_as[full] = opened, path, stored
        self.stems: dict[str, set[str]] = {}
        for full in self._places:
            stem, _, part = full.rpartition(".")
            self.stems.setdefault(stem, set()).add(part)

    @staticmethod
    def _found(name: str, folder: Path) -> list[Path]:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / file for file in sorted(set(named))]
        whole = folder / "model.safetensors"
        paths = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(
                f"{name}: holds no weights in safetensors; give a checkpoint that does", code="model.missing_weights"
            )
        return paths

    def place(self, stem: str, parts: set[str]) -> Path:
        """Return one file that holds the layer."""
        return self._paths[f"{stem}.{min(parts)}"]

    def tensor(self, full: str) -> Tensor:
        return self._places[full].get_tensor(self._stored_as[full])

    def part(self, stem: str, part: str) -> Tensor:
        full = f"{stem}.{part}"
        if full not in self._places:
            raise ModelError(
                f"{self._name}: the weights lack {full}; give a complete checkpoint", code="model.missing_weights"
            )
        return self.tensor(full)
