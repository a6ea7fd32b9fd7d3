"""Tiny models with their weights in another form, beside the stock ones that they are compared with."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from inlay.models.load import LoadedModel
from inlay.models.weights import WeightForm, prepare
from tests.conftest import tiny


def prepared(name: str, form: WeightForm | None = None, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A tiny model in a form; packed if none is given."""
    form = form or WeightForm()
    model = in_dtype(name, dtype)
    return replace(tiny(name), model=model, fingerprint=prepare(model, form), form=form)


def in_dtype(name: str, dtype: torch.dtype):
    """A copy of the stock model; buffers, such as rotary frequencies, stay in fp32 as they do on loading."""
    model = copy.deepcopy(tiny(name).model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
