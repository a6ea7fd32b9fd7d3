"""What a pass costs on the device, by which it is decided who reads keys together.

Reading them together (chunk-first) saves memory traffic and costs partial results, which are written, read again and
merged. ``lab/benchmarks/gpu/calibrate.py`` measures the coefficients; sharing is never chosen where the model
says that it is slower.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from inlay.errors import ParameterError

Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Seconds = npt.NDArray[np.float64]

#: Names a file of coefficients that were measured on this machine.
VARIABLE = "INLAY_TRITON_COSTS"


@dataclass(frozen=True, slots=True)
class Shape:
    """The heads of a layer.

    itemsize: bytes of a stored number. window: see AttentionOptions. wide: whether products are of fp32 numbers.
    """

    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    window: int | None = None
    wide: bool = False

    @property
    def group(self) -> int:
        """How many query heads read one head of keys."""
        return self.heads // self.kv_heads

    @property
    def key_bytes(self) -> int:
        """Of one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """Of the partial results of one row."""
        return self.heads * (self.head_dim + 1) * 4


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds.

    byte_s: for a byte of keys and values that comes from memory. cached_byte_s: for one that another tile of the same
    keys has just read. partial_byte_s: for a byte of a partial result, written and read again. multiply_s: for a
    multiplication and an addition of a product. launch_s: for one more kernel. work_s: for one more work item.
    measured_on: the device's name; None for coefficients that nobody has measured.
    """

    byte_s: float = 1 / 2.5e12
    cached_byte_s: float = 1 / 6e12
    partial_byte_s: float = 2 / 2.0e12
    multiply_s: float = 1 / 1.5e14
    launch_s: float = 4e-6
    work_s: float = 2e-8
    measured_on: str | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "measured_on" and not (isinstance(value, int | float) and 0 <= value < 1):
                raise ParameterError(f"the cost {name} is {value!r}; it must be seconds, at least 0 and below 1")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CostModel:
        """What ``write`` has written. Raises ParameterError."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ParameterError(
                f"{path}: the costs cannot be read ({error}); measure them with lab/benchmarks/gpu/calibrate.py"
            ) from error
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or not names >= set(found):
            raise ParameterError(f"{path}: these are no costs; an object with some of {', '.join(sorted(names))} is")
        return cls(**found)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Keep the coefficients in a file."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def together(self, lanes: Counts, keys: Counts, shape: Shape, tile: int) -> Seconds:
        """Of groups whose lanes read their keys together, partial results included. tile: rows of one at most."""
        rows = lanes * shape.group
        tiles = -(-rows // tile)
        memory = keys * shape.key_bytes * (self.byte_s + (tiles - 1) * self.cached_byte_s)
        products = 2.0 * tiles * tile * keys * shape.kv_heads * shape.head_dim * self.multiply_s
        merged = lanes * shape.partial_bytes * self.partial_byte_s
        return np.asarray(np.maximum(memory, products) + merged + tiles * shape.kv_heads * self.work_s)

    def apart(self, parts: Counts, keys: Counts, shape: Shape) -> Seconds:
        """Of the same groups where each part reads the keys for itself, among the others that it reads."""
        return np.asarray(parts * keys * (shape.key_bytes * self.byte_s), dtype=np.float64)

    def choose(self, parts: Counts, lanes: Counts, keys: Counts, shape: Shape, tile: int, most_partials: int) -> Flags:
        """Which groups are worked on together.

        parts, lanes, keys: of each group. most_partials: how many lanes may leave a partial result for it; groups that
            gain most go first.
        """
        gain = self.apart(parts, keys, shape) - self.together(lanes, keys, shape, tile)
        gain[parts < 2] = 0
        chosen = np.zeros(parts.size, dtype=bool)
        order = np.argsort(-gain, kind="stable")
        order = order[gain[order] > 0]
        chosen[order[np.cumsum(lanes[order]) <= most_partials]] = True
        if gain[chosen].sum() <= 2 * self.launch_s:  # a kernel for their tiles, and one that merges
            chosen[:] = False
        return chosen


def coefficients() -> CostModel:
    """Those measured on this machine, where INLAY_TRITON_COSTS names their file, else the defaults."""
    path = os.environ.get(VARIABLE)
    return CostModel.read(path) if path else CostModel()
