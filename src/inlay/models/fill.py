"""Builds a stock model from weights that are not stored in the model's own form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from inlay.errors import ModelError
from inlay.models.formats.stored import StoredLinear, StoredWeight
from inlay.wording import first_line


class Lazy:
    """A weight that is made on access with ``lazy[...]``, as transformers accesses weights in files."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    def __getitem__(self, where: Any) -> Tensor:
        return self._make()[where]


def on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the stock model without weights: only its modules, names and shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def fill(
    name: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    weights: Mapping[str, Any],
    stored: Mapping[str, StoredWeight],
    meta: PreTrainedModel,
) -> PreTrainedModel:
    """Build the stock model, with a StoredLinear for each stored weight of a linear layer.

    A head that is tied to a stored embedding has that stored weight as its attribute ``in_file``.

    Args:
        name: For errors.
        weights: All parameters, as tensors or Lazy. Entries that ``stored`` has too are not read.
        stored: The packed weights by parameter name.
        meta: The model from ``on_meta``.

    Raises:
        ModelError: If weights are missing or have another shape.
    """
    linear = {path for path, module in meta.named_modules() if type(module) is nn.Linear}
    kept = {target: weight for target, weight in stored.items() if target.removesuffix(".weight") in linear}
    state = dict(weights)
    for target, weight in kept.items():
        state[target] = torch.zeros((), dtype=dtype).expand(weight.shape)  # takes no memory; replaced below
    model_class: Any = type(meta)
    try:
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except Exception as error:
        raise ModelError(
            f"{name}: the weights cannot be loaded: {first_line(error)}", code="model.unreadable_weights"
        ) from error
    check_complete(name, report)
    model.config.name_or_path = name
    for target, weight in kept.items():
        path = target.removesuffix(".weight")
        layer = model.get_submodule(path)
        if tuple(layer.weight.shape) != weight.shape:
            raise ModelError(
                f"{name}: {target} has the shape {weight.shape}; the model has {tuple(layer.weight.shape)}",
                code="model.wrong_shape",
            )
        model.set_submodule(path, StoredLinear(weight, layer.bias, dtype))
    tied = meta.all_tied_weights_keys if config.tie_word_embeddings else {}
    for target, source in tied.items():
        if source in stored and target.removesuffix(".weight") in linear:
            model.get_submodule(target.removesuffix(".weight")).in_file = stored[source]
    return model


def check_complete(name: str, report: Mapping[str, Any]) -> None:
    """Raise ModelError if a checkpoint lacks weights. transformers would fill them with noise."""
    if lacking := sorted(report["missing_keys"]):
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ModelError(
            f"{name}: the weights lack {lacking[0]}{more}; give a complete checkpoint", code="model.missing_weights"
        )
