"""How many bytes a vector of keys or values takes in each number format, scales included."""

from __future__ import annotations

from dataclasses import dataclass

from inlay.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Codec:
    """A number format of stored keys and values.

    bits: of one element.
    scale_bytes: what every group of elements adds.
    group: how many elements of a vector share that; None for all of them.
    runs: whether the engine stores keys and values in it today; the others are for planning.
    adds: what is counted besides the elements, in words.
    """

    name: str
    bits: int
    scale_bytes: int = 0
    group: int | None = None
    runs: bool = False
    adds: str = "nothing"

    def vector_bytes(self, width: int) -> int:
        """Bytes of one vector of ``width`` elements: the key, or the value, of one head."""
        groups = 1 if self.group is None else -(-width // self.group)
        return -(-width * self.bits // 8) + groups * self.scale_bytes


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", 32, runs=True),
        Codec("bf16", 16, runs=True),
        Codec("fp16", 16),
        Codec("fp8", 8, adds="nothing: its scale is one number a layer, not a token"),
        Codec("int8", 8, scale_bytes=2, adds="a 16-bit scale for each key and each value of a head"),
        Codec("int4", 4, scale_bytes=4, group=64, adds="a 16-bit scale and zero point for every 64 elements of a head"),
    )
}


def codec_named(name: str) -> Codec:
    """The codec of this name. Raises ParameterError."""
    if name not in CODECS:
        raise ParameterError(f"--codec is '{name}'; use one of {', '.join(CODECS)}")
    return CODECS[name]
