"""The families with state reuse. Every file in this package is found automatically; its ``SERVED`` names its families.

Other causal models of transformers are served without reuse (``models/unshared.py``) or refused with a reason. State
reuse would silently give wrong answers for a model that bypasses ``transformers``' AttentionInterface or ignores
``position_ids``.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from transformers import PretrainedConfig, PreTrainedModel

from inlay.errors import ModelError
from inlay.models.family import Family
from inlay.models.multimodal import is_multimodal
from inlay.models.spec import ModelSpec
from inlay.models.unshared import REFUSED, unshared_of

_UNKNOWN = "transformers has no causal language model of that type"
_WHOLE = "a multimodal model is no causal one; give its folder or its name, and its text model is loaded"

#: ``model_type`` → family.
FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family. Raises ValueError if one of its model types is taken."""
    for model_type in family.model_types:
        if FAMILIES.setdefault(model_type, family) is not family:
            raise ValueError(f"models of type '{model_type}' have a family already")


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a configuration. Raises ModelError if the model type is not supported."""
    kind = config.model_type
    family = FAMILIES.get(kind)
    if family is not None and not family.serves(config):
        family = family.otherwise
    if family is not None:
        return family
    reason = _WHOLE if is_multimodal(config) else REFUSED.get(kind)
    unshared = unshared_of(config) if reason is None else None
    if unshared is None:
        raise ModelError(
            f"models of type '{kind}' are not supported: {reason or _UNKNOWN}; "
            "`inlay models` lists the supported types",
            code="model.unknown_architecture",
        )
    return unshared


def check_config(config: PretrainedConfig) -> None:
    """Raise ModelError, with the reason, if a model of this configuration cannot be served."""
    family_of(config).check(config)


def describe(model: PreTrainedModel) -> ModelSpec:
    """Return the ModelSpec of a loaded model. Raises ModelError if it is not supported."""
    family = family_of(model.config)
    family.check(model.config)
    return family.spec(model)


for _module in iter_modules(__path__, f"{__name__}."):
    for _family in import_module(_module.name).SERVED:
        register(_family)
