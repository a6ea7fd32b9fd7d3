"""The families that inlay reuses states of, one file each; a file is found by being here, and gives a ``FAMILY``.

Whatever else is a causal model of transformers is served without reuse (``models/unshared.py``), or refused with a
reason: a model whose attention does not go through ``transformers``' AttentionInterface, or that ignores
``position_ids``, would give wrong answers without a word where its states were reused.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from transformers import PretrainedConfig, PreTrainedModel

from inlay.errors import ModelError
from inlay.models.family import Family
from inlay.models.refused import REFUSED
from inlay.models.spec import ModelSpec
from inlay.models.unshared import unshared_of

#: ``model_type`` → family.
FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Serve the models of a family. Raises ValueError where one of its model types has a family already."""
    for model_type in family.model_types:
        if FAMILIES.setdefault(model_type, family) is not family:
            raise ValueError(f"models of type '{model_type}' have a family already")


def family_of(config: PretrainedConfig) -> Family:
    """The family of models of this configuration. Raises ModelError where it cannot be served."""
    kind = config.model_type
    family = FAMILIES.get(kind) or (None if kind in REFUSED else unshared_of(config))
    if family is None:
        reason = REFUSED.get(kind, "transformers has no causal language model of that type")
        raise ModelError(f"models of type '{kind}' are not supported: {reason}; `inlay models` lists those that are")
    return family


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
