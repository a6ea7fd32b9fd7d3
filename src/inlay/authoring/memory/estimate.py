"""The memory of a cached token, for a model by name. Needs its configuration, but no weights and no tokenizer.

Some architectures need no file. They carry the figures that Prompt Cache prints for them (arXiv 2311.04934, table 2).
Their numbers are those of the public configurations: bert-base-uncased, falcon-rw-1b, Llama-2, mpt-30b, falcon-40b and
falcon-180B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inlay.authoring.memory.families import ENCODER_REASON, KVShape, attention_layer, falcon_note, shape_of
from inlay.errors import ModelError
from inlay.models.shapes import MODEL_DIRECTORY, SHAPES, shape_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers that determine a model's KV of one token.

    Attributes:
        kind: The model type in transformers.
        width: Elements of one head.
        label: The name in the paper's table.
        paper: Megabytes of one token in the paper's table.
    """

    kind: str
    layers: int
    heads: int
    kv_heads: int
    width: int
    label: str
    paper: float

    @property
    def encoder(self) -> bool:
        """True if the model has no KV cache, so its size is only a number."""
        return self.kind == "bert"

    @property
    def repeated(self) -> bool:
        """True if transformers repeats the KV heads for every head before it caches them."""
        return self.kind == "falcon" and 1 < self.kv_heads < self.heads

    def shape(self) -> KVShape:
        """Return the KV of one token."""
        notes = (falcon_note(self.kv_heads, self.heads),) if self.repeated else ()
        layers = (attention_layer(self.kv_heads, self.width),) * self.layers
        return KVShape(self.kind, layers, notes=notes)

    def every_head(self) -> KVShape:
        """Return the KV of one token with a key and a value for every query head."""
        return replace(self, kv_heads=self.heads).shape()

    def reason(self) -> str:
        """Return the reason why it keeps less than a key and a value for every query head, or "" if it does not."""
        if self.encoder:
            return ENCODER_REASON
        if self.kv_heads == self.heads:
            return ""
        return f"{self.kv_heads} KV heads serve {self.heads} heads (grouped-query attention)"


ARCHITECTURES = {
    "bert-base": Architecture("bert", 12, 12, 12, 64, "BERT", 0.03),
    "falcon-rw-1b": Architecture("falcon", 24, 32, 32, 64, "Falcon 1B", 0.18),
    "llama-2-7b": Architecture("llama", 32, 32, 32, 128, "Llama 7B", 0.50),
    "llama-2-13b": Architecture("llama", 40, 40, 40, 128, "Llama 13B", 0.78),
    "mpt-30b": Architecture("mpt", 48, 64, 64, 112, "MPT 30B", 1.31),
    "falcon-40b": Architecture("falcon", 60, 128, 8, 64, "Falcon 40B", 1.87),
    "llama-2-70b": Architecture("llama", 80, 64, 8, 128, "Llama 70B", 2.5),
    "falcon-180b": Architecture("falcon", 80, 232, 8, 64, "Falcon 180B", 4.53),
}


def known_without_files(name: str) -> bool:
    """Return True for a name of an architecture or shape with known numbers, so no file is read."""
    return name in ARCHITECTURES or name in SHAPES


def shape_named(name: str) -> KVShape:
    """Return a model's KV of one token.

    Args:
        name: An architecture in ``ARCHITECTURES``, ``demo``, a shape with or without ``random:``, a directory with a
            config.json, or a hub name.

    Raises:
        ModelError: The model has no KV cache or cannot be counted. The message gives the reason.
    """
    if name in ARCHITECTURES:
        if ARCHITECTURES[name].encoder:
            raise ModelError(f"{name} has no KV cache: this is {ENCODER_REASON}", code="model.no_cache")
        return ARCHITECTURES[name].shape()
    config = config_named(name)
    try:
        return shape_of(config)
    except ModelError as error:
        raise ModelError(f"{name}: {error}", code=error.code) from error


def weights_named(name: str) -> dict[str, int] | None:
    """Return the bytes of a model's loaded weights, in its own dtype, int8 and int4.

    Args:
        name: As in ``shape_named``. An architecture that is not a shape with a vocabulary gives None.

    Raises:
        ModelError: The model cannot be read.
    """
    import torch

    from inlay.models.spec import dtype_name
    from inlay.models.weight_size import weight_bytes

    if name in ARCHITECTURES and name not in SHAPES:
        return None
    config = config_named(name)
    own = torch.float32 if config.dtype == torch.float32 else torch.bfloat16
    return {
        dtype_name(own): weight_bytes(config, own),
        **{form: weight_bytes(config, own, form) for form in ("int8", "int4")},
    }


def config_named(name: str) -> PretrainedConfig:
    """Return the configuration of a model. ``name`` is as in ``shape_named``, without ``ARCHITECTURES``. Raises
    ModelError.
    """
    from transformers import AutoConfig

    from inlay.models.load import read_config

    if name.startswith("random:") or name in SHAPES:
        settings = shape_settings(name.removeprefix("random:"))
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    return read_config(str(MODEL_DIRECTORY) if name == "demo" else name)
