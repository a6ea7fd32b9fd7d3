"""Models by name, as far as their configuration: no weights, no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.demo import MODEL_DIRECTORY
from inlay.errors import ModelError
from inlay.memory.families import ENCODER_REASON, shape_of
from inlay.memory.layers import KVShape
from inlay.memory.named import ARCHITECTURES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def shape_named(name: str) -> KVShape:
    """What a model keeps of every token.

    name: of an architecture in ``ARCHITECTURES``, ``demo``, ``random:<shape>``, a directory with a config.json, or a
        hub name.
    Raises ModelError with the reason.
    """
    if name in ARCHITECTURES:
        if ARCHITECTURES[name].encoder:
            raise ModelError(f"{name} has no KV cache: this is {ENCODER_REASON}")
        return ARCHITECTURES[name].shape()
    config = read_config(name)
    try:
        return shape_of(config)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error


def read_config(name: str) -> PretrainedConfig:
    """The configuration of a model. name: as in ``inlay.models.load.load_model``. Raises ModelError."""
    from transformers import AutoConfig

    from inlay.models.load import read_config
    from inlay.models.shapes import SHAPES, check_shape

    if name.startswith("random:"):
        shape = name.removeprefix("random:")
        check_shape(shape)
        settings = dict(SHAPES[shape])
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    return read_config(str(MODEL_DIRECTORY) if name == "demo" else name)
