"""How much memory a cached token takes, from a model's configuration alone."""

from inlay.memory.codecs import CODECS, Codec, codec_named
from inlay.memory.layers import KVLayer, KVShape, Vectors
from inlay.memory.named import ARCHITECTURES, Architecture
from inlay.memory.sources import shape_named

__all__ = [
    "ARCHITECTURES",
    "CODECS",
    "Architecture",
    "Codec",
    "KVLayer",
    "KVShape",
    "Vectors",
    "codec_named",
    "shape_named",
]
