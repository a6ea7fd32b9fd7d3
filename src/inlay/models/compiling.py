"""A model through ``torch.compile``: the code between two attention calls becomes fewer, larger kernels.

Attention itself is not compiled, because it works on a pool and tables that the compiler does not see. Compiled pieces
end before it and begin after it, in every layer. One piece serves all layers that are alike.
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

#: The attention name of a compiled model: the same function, opaque to the compiler.
OPAQUE = "inlay_opaque"


def check_compilable(model: PreTrainedModel, name: str, form: WeightForm, *, adapters: bool) -> None:
    """Raise ParameterError if a model cannot be compiled.

    Args:
        name: The name of the model, for errors.
        form: The form of its weights.
        adapters: True if it has LoRA adapters.
    """
    why = None
    if form.weights != "stock" or form.quantization is not None:
        why = "its weights are packed for the CPU, in layers that are compiled already; add weights='stock'"
    elif adapters:
        why = "it has adapters, which change its layers from pass to pass; leave one of the two out"
    elif type(family_of(model.config)).patch is not Family.patch:
        why = f"inlay replaces parts of models of type '{model.config.model_type}' by its own code; leave compile out"
    if why is not None:
        raise ParameterError(f"compile is set, and {name} cannot be compiled: {why}", code="model.not_compilable")


def compiled(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that is compiled during its first passes, with the same weights. The stock model is unchanged.

    Compiled code serves any number of rows. Only passes of one row have pieces of their own.
    """
    AttentionInterface.register(OPAQUE, torch.compiler.disable(attend))
    return cast(PreTrainedModel, torch.compile(model, dynamic=True))
