"""PEFT's adapter_config.json, as far as it describes a LoRA of linear layers. Everything else is rejected."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from inlay.errors import ModelError
from inlay.strict_json import JSONError, read_json
from inlay.wording import shown

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"
SAVED = "give the folder that PEFT's save_pretrained wrote"
_MOST_BYTES = 4 << 20

#: The supported fields, for a LoRA of linear layers.
HONOURED = (
    *("alpha_pattern", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
    *("peft_type", "r", "rank_pattern", "target_modules", "use_rslora"),
)
#: Fields without effect on the update: origin, initialization and training of the adapter.
_IRRELEVANT = (
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out"),
    *("inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type", "velora_config"),
)
#: Fields that make an adapter more than a low-rank update, with the reason of the rejection.
_REASONS: Mapping[str, str] = {
    "use_dora": "DoRA scales each output by the length of its whole weight",
    "modules_to_save": "whole modules were trained beside the LoRA",
    "trainable_token_indices": "embeddings of tokens were trained beside the LoRA",
    "target_parameters": "parameters are adapted that are no linear layer's, such as experts kept in one tensor",
    "layer_replication": "layers stand in the model several times",
    "lora_bias": "the update has a bias of its own",
    "alora_invocation_tokens": "the update begins at certain tokens alone",
    "use_qalora": "inputs are averaged in groups",
}
_REMEDY = "merge it into its model with PEFT's merge_and_unload(), save the result, and serve that"
#: Initializations that keep the model's own weights. Others subtract a part from them.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoRAConfig:
    """The layers that a LoRA adapts, and their ranks and scales.

    Args:
        rank, alpha: For layers that no pattern in ``ranks`` and ``alphas`` matches.
        rslora: True: the scale is alpha / √rank (rank-stabilized LoRA, arXiv 2312.03732). False: alpha / rank.
        targets, excluded: Ends of paths, or one pattern of whole paths.
        layers: Numbers of the adapted layers. None: all.
        layers_patterns: Names of the lists that ``layers`` counts in.
        ranks, alphas: By pattern of a layer's path.
    """

    rank: int
    alpha: float
    rslora: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_patterns: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def adapts(self, path: str, *, head: bool) -> bool:
        """Return True if PEFT adapts the linear layer at this path. head: True for the output layer."""
        if self.excluded and _named(self.excluded, path):
            return False
        if self.targets == "all-linear":
            return not head
        if not _named(self.targets, path):
            return False
        exact = isinstance(self.targets, str) or path in self.targets
        return exact or self.layers is None or self._layer_of(path) in self.layers

    def rank_of(self, path: str) -> int:
        """Return the rank of the update of a layer."""
        return _of_pattern(self.ranks, path, self.rank)

    def scale_of(self, path: str) -> float:
        """Return the factor of the update of a layer."""
        rank, alpha = self.rank_of(path), _of_pattern(self.alphas, path, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def _layer_of(self, path: str) -> int | None:
        if not self.layers_patterns:
            found = re.match(r".*?\.[^.]*\.(\d+)\.", path)
        else:
            tried = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", path) for pattern in self.layers_patterns)
            found = next((match for match in tried if match), None)
        return int(found[1]) if found else None


def _named(names: str | Sequence[str], path: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, T], path: str, otherwise: T) -> T:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), otherwise)


def read_config(folder: Path) -> LoRAConfig:
    """Read the configuration of an adapter. Raises ModelError, with a message that does not name the adapter."""
    said = _read(folder / CONFIG_FILE)
    kind = said.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{CONFIG_FILE} says peft_type {shown(kind)}, and adapters are LORA here; {_REMEDY}",
            code="adapter.unsupported_kind",
        )
    for name, value in said.items():
        _check_known(name, value)
    reader = _Reader(said)
    layers = said.get("layers_to_transform")
    config = LoRAConfig(
        rank=reader.number("r", 8, whole=True),
        alpha=reader.number("lora_alpha", 8),
        rslora=bool(said.get("use_rslora")),
        targets=reader.names("target_modules"),
        excluded=reader.names("exclude_modules"),
        layers=None if layers is None or layers == [] else tuple(layers if isinstance(layers, list) else [layers]),
        layers_patterns=_several(reader.names("layers_pattern")),
        ranks=reader.table("rank_pattern", whole=True),
        alphas=reader.table("alpha_pattern"),
    )
    if not config.targets:
        raise ModelError(
            f"{CONFIG_FILE} names no target_modules; save the adapter with PEFT, which writes them",
            code="adapter.invalid_config",
        )
    _try_patterns(config)
    return config


def _check_known(name: str, value: Any) -> None:
    """Raise ModelError for an unsupported field, unless it is switched off."""
    if name == "init_lora_weights" and value not in _PLAIN_BEGINNINGS:
        raise ModelError(
            f"{CONFIG_FILE} says init_lora_weights {shown(value)}, which takes a part out of the model's own weights "
            "first; convert it with PEFT (save_pretrained with path_initial_model_for_weight_conversion)",
            code="adapter.unsupported_kind",
        )
    if name in HONOURED or name in _IRRELEVANT or not value or (name == "bias" and value == "none"):
        return
    reason = "biases of the model were trained beside the LoRA" if name == "bias" else _REASONS.get(name)
    why = reason or "this version of inlay does not know it"
    raise ModelError(
        f"{CONFIG_FILE} says {name} {shown(value)}, which is not supported ({why}); {_REMEDY}",
        code="adapter.unsupported_kind",
    )


def _read(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            said = read_json(opened.read(_MOST_BYTES))
    except FileNotFoundError:
        raise ModelError(f"it holds no {CONFIG_FILE}; {SAVED}", code="adapter.not_found") from None
    except OSError as error:
        raise ModelError(
            f"{CONFIG_FILE} cannot be read ({error.strerror or error}); check the file", code="adapter.unreadable"
        ) from None
    except JSONError:
        raise ModelError(
            f"{CONFIG_FILE} is no JSON; copy it again, or save the adapter again with PEFT",
            code="adapter.invalid_config",
        ) from None
    if not isinstance(said, Mapping):
        raise ModelError(
            f"{CONFIG_FILE} is {shown(said)}, not an object; save the adapter again with PEFT",
            code="adapter.invalid_config",
        )
    return said


class _Reader:
    """Values of a configuration with checked types. Raises ModelError."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self._said = said

    def number(self, name: str, otherwise: float, *, whole: bool = False) -> Any:
        value = self._said.get(name, otherwise)
        if not _is_number(value, whole=whole):
            raise self._wrong(name, value, f"a {'whole ' if whole else ''}number above 0")
        return value

    def names(self, name: str) -> str | tuple[str, ...]:
        value = self._said.get(name) or ()
        if isinstance(value, str):
            return value
        if value != () and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self._wrong(name, value, "names, or one pattern")
        return tuple(value)

    def table(self, name: str, *, whole: bool = False) -> Mapping[str, Any]:
        value = self._said.get(name) or {}
        if not isinstance(value, dict) or not all(_is_number(each, whole=whole) for each in value.values()):
            raise self._wrong(name, value, "patterns with a number each")
        return value

    def _wrong(self, name: str, value: Any, what: str) -> ModelError:
        return ModelError(
            f"{CONFIG_FILE} says {name} {shown(value)}, which must be {what}; save the adapter again",
            code="adapter.invalid_config",
        )


def _is_number(value: Any, *, whole: bool) -> bool:
    kinds = (int,) if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < 2**24


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _try_patterns(config: LoRAConfig) -> None:
    """Raise ModelError for an invalid pattern or layer number."""
    if config.layers is not None and not all(isinstance(layer, int) for layer in config.layers):
        raise ModelError(
            f"{CONFIG_FILE} says layers_to_transform that are no whole numbers; save the adapter again",
            code="adapter.invalid_config",
        )
    whole = [each for each in (config.targets, config.excluded) if isinstance(each, str)]
    for pattern in (*whole, *config.layers_patterns, *config.ranks, *config.alphas):
        try:
            re.compile(pattern)
        except re.error as error:
            message = f"{CONFIG_FILE} has {shown(pattern)}, which is no regular expression ({error}); correct it"
            raise ModelError(message, code="adapter.invalid_config") from None
