"""Estimates the memory of a cached token from a model's configuration."""

from inlay.authoring.memory.estimate import ARCHITECTURES, Architecture, known_without_files, shape_named, weights_named
from inlay.authoring.memory.families import CODECS, KVLayer, KVShape, NumberFormat, Vectors, codec_named

__all__ = [
    "ARCHITECTURES",
    "CODECS",
    "Architecture",
    "KVLayer",
    "KVShape",
    "NumberFormat",
    "Vectors",
    "codec_named",
    "known_without_files",
    "shape_named",
    "weights_named",
]
