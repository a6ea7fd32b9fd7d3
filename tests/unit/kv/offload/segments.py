"""Segments to keep in tiers. Without torch, for processes that are to begin quickly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from inlay.kv.identity import KeyMaker, SegmentSpec, specify
from inlay.kv.offload.codecs import CODECS, Slab
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.record import SegmentRecord
from inlay.kv.offload.tier import Tier


class Shape(NamedTuple):
    """As a LayerShape."""

    kv_heads: int
    head_dim: int


KEYS = KeyMaker(b"model", "float32", "none", b"", positioned=False, numerics="1")
LAYERS = (Shape(2, 8), Shape(1, 24))


def spec_of(number: int, tokens: int = 40) -> SegmentSpec:
    return specify(tuple(range(1000 * number, 1000 * number + tokens)), 0, (), KEYS)


def record_of(spec: SegmentSpec, keys: KeyMaker = KEYS) -> SegmentRecord:
    return SegmentRecord.of(spec, keys, LAYERS, "a model")


def slabs_of(spec: SegmentSpec) -> list[Slab]:
    """Keys and values that only this segment has."""
    generator = np.random.default_rng(spec.ids[0])
    return [
        generator.standard_normal((2, layer.kv_heads, len(spec.ids), layer.head_dim)).astype("<f4").view(np.uint8)
        for layer in LAYERS
    ]


def read(tier: Tier, record: SegmentRecord) -> list[Slab]:
    """The slabs that a tier returns. Raises TierMissError."""
    taken: list[Slab] = []
    tier.get(record, lambda layer, slab: taken.append(slab.copy()), lambda: False)
    return taken


def same(taken: Sequence[Slab], expected: Sequence[Slab]) -> bool:
    return len(taken) == len(expected) and all(map(np.array_equal, taken, expected))


def expected(spec: SegmentSpec) -> list[Slab]:
    """The contents of a segment, or of one of its forms."""
    codec = CODECS[spec.codec]
    return [
        codec.decode(codec.encode(slab, "float32"), (2, layer.kv_heads, len(spec.ids), layer.head_dim), "float32")
        for slab, layer in zip(slabs_of(spec), LAYERS, strict=True)
    ]


def alike(taken: Sequence[Slab], expected: Sequence[Slab], codec: str) -> bool:
    """True if they are the same. Values that moved between tiers through a lossy codec may differ in the last bit."""
    if codec == "none":
        return same(taken, expected)
    pairs = zip(taken, expected, strict=True)
    return all(np.allclose(one.view("<f4"), other.view("<f4"), rtol=1e-6, atol=0) for one, other in pairs)


def filled(folder: Path, *specs: SegmentSpec, quota: int = 1 << 30) -> DiskTier:
    """A disk tier that holds these."""
    tier = DiskTier(folder, quota)
    for spec in specs:
        assert tier.put(record_of(spec), slabs_of(spec))
    return tier
