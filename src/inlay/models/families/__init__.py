"""The families that inlay serves, one file each; a file is found by being here, and gives its family as ``FAMILY``.

Everything else is refused with a reason, because a model whose attention does not go through ``transformers``'
AttentionInterface, or that ignores ``position_ids``, would give wrong answers without a word.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from transformers import PretrainedConfig, PreTrainedModel

from inlay.errors import ModelError
from inlay.models.family import Family
from inlay.models.refused import REFUSED
from inlay.models.spec import ModelSpec

#: ``model_type`` → family.
FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Serve the models of a family. Raises ValueError where one of its model types has a family already."""
    for model_type in family.model_types:
        if FAMILIES.setdefault(model_type, family) is not family:
            raise ValueError(f"models of type '{model_type}' have a family already")


def family_of(config: PretrainedConfig) -> Family:
    """The family of models of this configuration. Raises ModelError where none has been verified."""
    if config.model_type not in FAMILIES:
        reason = REFUSED.get(config.model_type, "inlay has not verified their attention and positions")
        raise ModelError(
            f"models of type '{config.model_type}' are not supported: {reason}; `inlay models` lists those that are, "
            "and transformers itself runs this one, without reuse"
        )
    return FAMILIES[config.model_type]


def check_config(config: PretrainedConfig) -> None:
    """Raise ModelError, with the reason, if a model of this configuration cannot be served."""
    family_of(config).check(config)


def describe(model: PreTrainedModel) -> ModelSpec:
    """The ModelSpec of a loaded model. Raises ModelError for what is not supported."""
    family = family_of(model.config)
    family.check(model.config)
    return family.spec(model)


for _module in iter_modules(__path__, f"{__name__}."):
    register(import_module(_module.name).FAMILY)
