"""The record that is stored with a segment's KV: all parts of its key, and its shape."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from inlay.errors import ParameterError
from inlay.kv.identity import LABEL_BYTES, LOSSLESS, Context, KeyMaker, SegmentSpec
from inlay.kv.offload.codecs import CODECS, DTYPES, SCALE_BYTES, SCALED, Codec, Shape, Slab, SlabPart
from inlay.slots import SlotRange


class HeadShape(Protocol):
    """The number of KV heads in one layer, and their width."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class SlabMemory(Protocol):
    """The pool's memory, as seen by code that copies between it and another tier."""

    @property
    def layers(self) -> Sequence[HeadShape]: ...

    def read_slab(self, layer: int, slots: Sequence[SlotRange]) -> Slab: ...

    def write_slab(self, layer: int, slots: Sequence[SlotRange], slab: Slab) -> None: ...

    def beside(self) -> AbstractContextManager[None]: ...

    def put_slab(self, layer: int, slots: Sequence[SlotRange], slab: Slab) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent state.

    Attributes:
        name: its layer and kind.
        dtype: a key of DTYPES.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def part(self) -> SlabPart:
        """The tensor as safetensors describes it."""
        return SlabPart(self.name, DTYPES[self.dtype][0], self.shape)


class StateMemory(Protocol):
    """The states of a model with recurrent layers, as seen by code that copies between them and another tier."""

    @property
    def layout(self) -> tuple[StatePart, ...]:
        """The parts of a state, in their order in its bytes."""
        ...

    def read(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a slot."""
        ...

    def write(self, slot: int, data: npt.NDArray[np.uint8]) -> None:
        """Write the bytes of a slot."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecord:
    """The description of a segment in a tier, without its KV.

    Attributes:
        model: the model's name for people.
        fingerprint … numerics: see KeyMaker. Of a salt, only the sha256 is stored.
        codec: the form in the tiers.
        ids, start, before: its tokens, their first position, and the context in front.
        layers: (heads, width) of each layer.
        state: the recurrent state behind the last token, which is one more slab. Empty without recurrent layers.
        labels: see SegmentSpec.
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
    state: tuple[StatePart, ...] = ()
    labels: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls,
        spec: SegmentSpec,
        keys: KeyMaker,
        layers: Sequence[HeadShape],
        model: str,
        state: tuple[StatePart, ...] = (),
    ) -> SegmentRecord:
        """The record of a segment that an engine with these keys has computed."""
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
            state=state,
            labels=spec.labels,
        )

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def context(self) -> bytes:
        return self.before.digest(self.start)

    @property
    def text(self) -> bytes:
        """The digest of the tokens alone, equal for all contexts and forms."""
        return text_digest(self.ids)

    @property
    def form(self) -> Codec:
        """The codec of its slabs."""
        return CODECS[self.codec]

    def shape(self, layer: int) -> Shape:
        """The shape of a layer's slab, in numbers."""
        heads, width = self.layers[layer]
        return 2, heads, self.tokens, width + (SCALE_BYTES if self.kv_dtype in SCALED else 0)

    @property
    def slabs(self) -> int:
        """The number of slabs: one for each layer, and one for the state."""
        return len(self.layers) + bool(self.state)

    def slab_bytes(self, number: int) -> int:
        """The encoded size of a slab in bytes."""
        if number == len(self.layers):
            return sum(part.bytes for part in self.state)
        return self.form.nbytes(self.shape(number), self.kv_dtype)

    def slab_parts(self, number: int) -> tuple[SlabPart, ...]:
        """The tensors of a slab, with their whole names."""
        if number == len(self.layers):
            return tuple(replace(each.part, name=f"state.{each.name}") for each in self.state)
        parts = self.form.parts(self.shape(number), self.kv_dtype)
        return tuple(replace(part, name=f"layers.{number}.{part.name}") for part in parts)

    def encode(self, number: int, slab: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The stored bytes of a slab. A state is stored as it is, whatever the codec."""
        return slab if number == len(self.layers) else self.form.encode(slab, self.kv_dtype)

    def decode(self, number: int, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The slab of stored bytes; see ``encode``."""
        return data if number == len(self.layers) else self.form.decode(data, self.shape(number), self.kv_dtype)

    def same(self, other: SegmentRecord) -> bool:
        """True if both records describe the same KV. The model's name and the labels may differ."""
        names = (name for name in self.__slots__ if name not in ("model", "labels"))
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def key_holds(self) -> bool:
        """True if the key matches the fields. Keys with a salt cannot be checked, because the salt is not stored."""
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
            **({"state": [[each.name, each.dtype, list(each.shape)] for each in self.state]} if self.state else {}),
            **({"labels": [label.hex() for label in self.labels]} if self.labels else {}),
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> SegmentRecord:
        """Read a record. Raises ValueError if it is invalid."""
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
                state=tuple(
                    StatePart(str(name), str(dtype), tuple(map(int, shape)))
                    for name, dtype, shape in said.get("state", ())
                ),
                labels=tuple(map(bytes.fromhex, said.get("labels", ()))),
            )
        except (KeyError, TypeError, AttributeError, ParameterError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if len(record.key) != 32 or not record.ids or not record.slabs or record.kv_dtype not in (*DTYPES, *SCALED):
            raise ValueError("it has no key, no tokens, no layers or an unknown dtype")
        if any(each.dtype not in DTYPES or min(each.shape, default=0) < 1 for each in record.state):
            raise ValueError("a part of its state has an unknown dtype or no width")
        if any(len(label) != LABEL_BYTES for label in record.labels):
            raise ValueError("a label has another length")
        if record.codec not in CODECS:
            raise ValueError(f"it has the unknown codec {record.codec!r:.20}")
        if record.kv_dtype in SCALED and record.codec != LOSSLESS:
            raise ValueError("it was rounded twice")
        if min((min(layer) for layer in record.layers), default=1) < 1:
            raise ValueError("a layer has no width")
        return record


def is_finite_state(data: npt.NDArray[np.uint8], layout: Sequence[StatePart]) -> bool:
    """True if a state has neither infinities nor NaN."""
    ends = np.cumsum([each.bytes for each in layout])
    return all(is_finite(part, each.dtype) for part, each in zip(np.split(data, ends[:-1]), layout, strict=True))


def is_finite(slab: Slab, kv_dtype: str) -> bool:
    """True if the KV has neither infinities nor NaN."""
    if kv_dtype == "fp8" and ((slab[..., :-SCALE_BYTES] & 0x7F) == 0x7F).any():
        return False
    if kv_dtype in SCALED:
        return bool(np.isfinite(np.ascontiguousarray(slab[..., -SCALE_BYTES:]).view("<f4")).all())
    _, size, exponent = DTYPES[kv_dtype]
    bits = np.ascontiguousarray(slab).reshape(-1).view(f"<u{size}")
    return not bool(((bits & exponent) == exponent).any())


def salt_digest(salt: bytes) -> bytes:
    """The stored digest of a salt; empty for no salt."""
    return hashlib.sha256(b"inlay salt" + salt).digest() if salt else b""


def text_digest(ids: Sequence[int]) -> bytes:
    """A digest of token ids, 16 bytes."""
    return hashlib.sha256(_packed(ids)).digest()[:16]


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<u4").tobytes()
