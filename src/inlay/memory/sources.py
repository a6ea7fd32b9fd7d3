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

    name: of an architecture in ``ARCHITECTURES``, ``demo``, a shape with or without ``random:``, a directory with a
        config.json, or a hub name.
    Raises ModelError with the reason.
    """
    if name in ARCHITECTURES:
        if ARCHITECTURES[name].encoder:
            raise ModelError(f"{name} has no KV cache: this is {ENCODER_REASON}")
        return ARCHITECTURES[name].shape()
    config = config_named(name)
    try:
        return shape_of(config)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error


def config_named(name: str) -> PretrainedConfig:
    """The configuration of a model. name: as in ``shape_named``, but for ``ARCHITECTURES``. Raises ModelError."""
    from transformers import AutoConfig

    from inlay.models.load import read_config
    from inlay.models.shapes import SHAPES, check_shape

    if name.startswith("random:") or name in SHAPES:
        shape = name.removeprefix("random:")
        check_shape(shape)
        settings = dict(SHAPES[shape])
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    return read_config(str(MODEL_DIRECTORY) if name == "demo" else name)
