"""A cost model of a pass on the device. It decides which rows read keys together.

Reading keys together (chunk-first) saves memory traffic. It costs partial results, which are written, read again and
merged. ``lab/benchmarks/gpu/calibrate.py`` measures the coefficients. Sharing is never chosen if the model predicts
that it is slower.
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

#: Environment variable with the path of a file of coefficients that were measured on this machine.
VARIABLE = "INLAY_TRITON_COSTS"


@dataclass(frozen=True, slots=True)
class Shape:
    """The heads of a layer.

    Args:
        itemsize: Bytes of a stored number.
        window: See AttentionOptions.
        wide: True if products are in fp32.
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
        """Bytes of the keys and values of one token."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial results of one row, fp32."""
        return self.heads * (self.head_dim + 1) * 4


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds.

    Args:
        byte_s: For a byte of keys and values read from memory.
        cached_byte_s: For a byte that another tile of the same keys has just read.
        partial_byte_s: For a byte of a partial result, written and read again.
        multiply_s: For one multiplication or one addition of a matrix product.
        launch_s: For one more kernel.
        work_s: For one more work item.
        measured_on: Name of the device. None for coefficients that were not measured.
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
                raise ParameterError(
                    f"the cost {name} is {value!r}; it must be seconds, at least 0 and below 1",
                    code="parameter.out_of_range",
                )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read coefficients that ``write`` has saved. Raises ParameterError."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ParameterError(
                f"{path}: the costs cannot be read ({error}); measure them with lab/benchmarks/gpu/calibrate.py",
                code="parameter.invalid_costs",
            ) from error
        names = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or not names >= set(found):
            raise ParameterError(
                f"{path}: these are no costs; an object with some of {', '.join(sorted(names))} is",
                code="parameter.invalid_costs",
            )
        return cls(**found)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Save the coefficients as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def together(self, lanes: Counts, keys: Counts, shape: Shape, tile: int) -> Seconds:
        """Return the seconds of groups with lanes that read their keys together, partial results included.

        Args:
            lanes, keys: (groups,), the numbers of lanes and keys.
            tile: The most rows of a tile.
        """
        rows = lanes * shape.group
        tiles = -(-rows // tile)
        memory = keys * shape.key_bytes * (self.byte_s + (tiles - 1) * self.cached_byte_s)
        products = 2.0 * tiles * tile * keys * shape.kv_heads * shape.head_dim * self.multiply_s
        merged = lanes * shape.partial_bytes * self.partial_byte_s
        return np.asarray(np.maximum(memory, products) + merged + tiles * shape.kv_heads * self.work_s)

    def apart(self, parts: Counts, keys: Counts, shape: Shape) -> Seconds:
        """Return the seconds that the same groups take if each part reads the keys alone, beside its other keys."""
        return np.asarray(parts * keys * (shape.key_bytes * self.byte_s), dtype=np.float64)

    def choose(self, parts: Counts, lanes: Counts, keys: Counts, shape: Shape, tile: int, most_partials: int) -> Flags:
        """Return which groups are read together.

        Args:
            parts, lanes, keys: (groups,), the numbers of parts, lanes and keys.
            most_partials: The most lanes that may leave a partial result. Groups with the largest gain go first.
        """
        gain = self.apart(parts, keys, shape) - self.together(lanes, keys, shape, tile)
        gain[parts < 2] = 0
        chosen = np.zeros(parts.size, dtype=bool)
        order = np.argsort(-gain, kind="stable")
        order = order[gain[order] > 0]
        chosen[order[np.cumsum(lanes[order]) <= most_partials]] = True
        if gain[chosen].sum() <= 2 * self.launch_s:  # one more kernel for their tiles, and one that merges
            chosen[:] = False
        return chosen


def coefficients() -> CostModel:
    """Return the coefficients measured on this machine (file named by INLAY_TRITON_COSTS), else the defaults."""
    path = os.environ.get(VARIABLE)
    return CostModel.read(path) if path else CostModel()
