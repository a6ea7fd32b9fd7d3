"""A model through ``torch.compile``: what stands between two layers of attention becomes fewer, larger kernels.

Attention itself is left alone: it works on a pool and tables that no compiler sees. So compiled pieces end before it
and begin behind it, in every layer, and one piece serves all layers that are alike.
"""

from __future__ import annotations

from typing import cast

import torch
from transformers import AttentionInterface, PreTrainedModel

from inlay.errors import ParameterError
from inlay.models.families import family_of
from inlay.models.family import Family
from inlay.models.interface import attend
from inlay.models.weights import WeightForm

#: What a compiled model calls for attention: the same, behind a border that the compiler does not look across.
OPAQUE = "inlay_opaque"


def check_compilable(model: PreTrainedModel, name: str, form: WeightForm, *, adapters: bool) -> None:
    """Raise ParameterError where a model cannot be compiled. name: of the model. adapters: whether it has any."""
    why = None
    if form.weights != "stock" or form.quantization is not None:
        why = "its weights are packed for the CPU, in layers that are compiled already; add weights='stock'"
    elif adapters:
        why = "it has adapters, which change its layers from pass to pass; leave one of the two out"
    elif type(family_of(model.config)).patch is not Family.patch:
        why = f"inlay replaces parts of models of type '{model.config.model_type}' by its own code; leave compile out"
    if why is not None:
        raise ParameterError(f"compile is set, and {name} cannot be compiled: {why}")


def compiled(model: PreTrainedModel) -> PreTrainedModel:
    """A model that is compiled as its passes come, over the same weights; the stock one stays as it is.

    Numbers of rows are variables of what is compiled; only passes of one row have pieces of their own.
    """
    AttentionInterface.register(OPAQUE, torch.compiler.disable(attend))
    return cast(PreTrainedModel, torch.compile(model, dynamic=True))
