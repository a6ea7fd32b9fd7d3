"""What is written of a segment beside its keys and values: all that its key is made of, and what it looks like."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from inlay.errors import ParameterError
from inlay.kv.codecs import CODECS
from inlay.kv.codecs.codec import DTYPES, SCALE_BYTES, SCALED, Codec, Shape, Slab
from inlay.kv.identity import LOSSLESS, Context, KeyMaker, SegmentSpec
from inlay.slots import SlotRange


class HeadShape(Protocol):
    """Heads of keys and values in one layer, and their width."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class SlabMemory(Protocol):
    """The memory of a pool, as those see it who copy between it and another tier."""

    @property
    def layers(self) -> Sequence[HeadShape]: ...

    def read_slab(self, layer: int, slots: Sequence[SlotRange]) -> Slab: ...

    def write_slab(self, layer: int, slots: Sequence[SlotRange], slab: Slab) -> None: ...

    def beside(self) -> AbstractContextManager[None]: ...

    def put_slab(self, layer: int, slots: Sequence[SlotRange], slab: Slab) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecord:
    """A segment as a tier knows it.

    model: what people call the model, never its path. fingerprint … numerics: see KeyMaker; of a salt, only its sha256.
    codec: the form in which tiers have it. ids, start, before: its tokens, where they were encoded, and behind what.
    layers: heads and width of each layer.
    """

    key: bytes
    model: str
    fingerprint: bytes
    kv_dtype: str
    codec: str
    salt: bytes
    positioned: bool
    numerics: str
    ids: tuple[int, ...]
    start: int
    before: Context
    layers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: SegmentSpec, keys: KeyMaker, layers: Sequence[HeadShape], model: str) -> SegmentRecord:
        """That of a segment which an engine with these keys has computed."""
        return cls(
            key=spec.key,
            model=model,
            fingerprint=keys.fingerprint,
            kv_dtype=keys.kv_dtype,
            codec=keys.codec if spec.codec == LOSSLESS else spec.codec,
            salt=salt_digest(keys.salt),
            positioned=keys.positioned,
            numerics=keys.numerics,
            ids=spec.ids,
            start=spec.start,
            before=spec.lossless.before,
            layers=tuple((layer.kv_heads, layer.head_dim) for layer in layers),
        )

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def context(self) -> bytes:
        """The context digest."""
        return self.before.digest(self.start)

    @property
    def text(self) -> bytes:
        """What two segments of the same tokens have in common, however they were made."""
        return text_digest(self.ids)

    @property
    def form(self) -> Codec:
        """What encodes and decodes its slabs."""
        return CODECS[self.codec]

    def shape(self, layer: int) -> Shape:
        """Of a layer's slab, in numbers, not bytes."""
        heads, width = self.layers[layer]
        return 2, heads, self.tokens, width + (SCALE_BYTES if self.kv_dtype in SCALED else 0)

    def slab_bytes(self, layer: int) -> int:
        """How many bytes a layer's keys and values have in this form."""
        return self.form.nbytes(self.shape(layer), self.kv_dtype)

    def same(self, other: SegmentRecord) -> bool:
        """Whether another record is of the very same keys and values, whatever people call the model."""
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__ if name != "model")

    def key_holds(self) -> bool:
        """Whether the key is that of the fields; one with a salt, which is not written, cannot be worked out."""
        if self.salt:
            return True
        keys = KeyMaker(self.fingerprint, self.kv_dtype, self.codec, b"", self.positioned, self.numerics)
        return keys.key(self.context, self.ids, self.start) == self.key

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key.hex(),
            "model": self.model,
            "fingerprint": self.fingerprint.hex(),
            "kv_dtype": self.kv_dtype,
            "codec": self.codec,
            "salt": self.salt.hex(),
            "positioned": self.positioned,
            "numerics": self.numerics,
            "ids": base64.b64encode(_packed(self.ids)).decode(),
            "start": self.start,
            "before": base64.b64encode(self.before.to_bytes()).decode(),
            "layers": [list(layer) for layer in self.layers],
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> SegmentRecord:
        """Raises ValueError for what is no record."""
        try:
            record = cls(
                key=bytes.fromhex(said["key"]),
                model=str(said["model"]),
                fingerprint=bytes.fromhex(said["fingerprint"]),
                kv_dtype=str(said["kv_dtype"]),
                codec=str(said["codec"]),
                salt=bytes.fromhex(said["salt"]),
                positioned=bool(said["positioned"]),
                numerics=str(said["numerics"]),
                ids=tuple(np.frombuffer(base64.b64decode(said["ids"], validate=True), "<u4").tolist()),
                start=int(said["start"]),
                before=Context.from_bytes(base64.b64decode(said["before"], validate=True)),
                layers=tuple((int(heads), int(width)) for heads, width in said["layers"]),
            )
        except (KeyError, TypeError, AttributeError, ParameterError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if len(record.key) != 32 or not record.ids or not record.layers or record.kv_dtype not in (*DTYPES, *SCALED):
            raise ValueError("it has no key, no tokens, no layers or an unknown dtype")
        if record.codec not in CODECS:
            raise ValueError(f"it has the unknown codec {record.codec!r:.20}")
        if record.kv_dtype in SCALED and record.codec != LOSSLESS:
            raise ValueError("it was rounded twice")
        if min(min(layer) for layer in record.layers) < 1:
            raise ValueError("a layer has no width")
        return record


def is_finite(slab: Slab, kv_dtype: str) -> bool:
    """Whether keys and values hold no infinity and nothing that is no number."""
    if kv_dtype == "fp8" and ((slab[..., :-SCALE_BYTES] & 0x7F) == 0x7F).any():
        return False
    if kv_dtype in SCALED:
        return bool(np.isfinite(np.ascontiguousarray(slab[..., -SCALE_BYTES:]).view("<f4")).all())
    _, size, exponent = DTYPES[kv_dtype]
    bits = np.ascontiguousarray(slab).reshape(-1).view(f"<u{size}")
    return not bool(((bits & exponent) == exponent).any())


def salt_digest(salt: bytes) -> bytes:
    """What is written of a salt; nothing where there is none."""
    return hashlib.sha256(b"inlay salt" + salt).digest() if salt else b""


def text_digest(ids: Sequence[int]) -> bytes:
    """16 bytes that tell token ids from others."""
    return hashlib.sha256(_packed(ids)).digest()[:16]


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<u4").tobytes()
