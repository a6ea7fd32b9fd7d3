"""The tensors of the state pool, and the spans of one pass that read and write them.

A slot holds the state behind one token, of all recurrent and convolution layers: for each layer the last ``kernel - 1``
columns of its convolution, and its recurrent state. An operation reads a slot and writes another one. So a request that
continues a stored state copies nothing, and a stored state never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.kv.offload.record import StatePart
from inlay.models.spec import dtype_name

#: The slot of passes that keep no state, such as probes.
SCRATCH = 0


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Rows of one sequence in a pass, with the slots of its states.

    Attributes:
        source: the slot of the state in front of the rows. None if no token precedes them.
        target: the slot for the state behind them. It may be the source.
        marks: (rows, slot) for every state to keep: the state behind so many of the rows. Increasing, without 0.
    """

    source: int | None = None
    target: int = SCRATCH
    marks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of one layer's part of a slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StateStorage:
    """State slots, one tensor (slots, ...) for each part of a slot.

    Args:
        slots: the number of slots.
        shapes: by name, the parts of a slot. None to learn them from the first pass.
    """

    def __init__(self, slots: int, device: torch.device, shapes: dict[str, StateShape] | None = None) -> None:
        self.slots = slots
        self._device = device
        self._learns = shapes is None
        self.shapes: dict[str, StateShape] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, shape in (shapes or {}).items():
            self._add(name, shape)

    @property
    def slot_bytes(self) -> int:
        """The bytes of one slot."""
        return sum(shape.bytes for shape in self.shapes.values())

    def part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the part of all slots with this name, (slots, *shape)."""
        if self._learns and name not in self.shapes:
            self._add(name, StateShape(shape, dtype))
        assert self.shapes[name] == StateShape(shape, dtype), f"{name} has changed its shape"
        return self.tensors[name]

    @property
    def layout(self) -> tuple[StatePart, ...]:
        """The parts of a slot, in their order in its bytes."""
        return tuple(StatePart(name, dtype_name(each.dtype), each.shape) for name, each in self.shapes.items())

    def read(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a slot."""
        parts = [tensor[slot].cpu().contiguous().view(torch.uint8).reshape(-1) for tensor in self.tensors.values()]
        return torch.cat(parts).numpy()

    def write(self, slot: int, data: npt.NDArray[np.uint8]) -> None:
        """Write the bytes of a slot."""
        at = 0
        for tensor in self.tensors.values():
            part = tensor[slot]
            part.copy_(torch.from_numpy(data[at : at + part.nbytes].copy()).view(tensor.dtype).reshape(part.shape))
            at += part.nbytes

    def _add(self, name: str, shape: StateShape) -> None:
        self.shapes[name] = shape
        self.tensors[name] = torch.zeros((self.slots, *shape.shape), dtype=shape.dtype, device=self._device)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that one call of a scan computes.

    Attributes:
        first, end: the packed rows.
        source: see StateSpan. None also for a piece that continues the one before it.
        goes_on: True if it continues the piece before it.
        target: the slot for the state behind it.
    """

    first: int
    end: int
    source: int | None
    goes_on: bool
    target: int


class PassStates:
    """The states of one pass, for the mixers of a model.

    Args:
        spans: the spans of the pass in row order, each with its number of rows.
    """

    def __init__(self, storage: StateStorage, spans: Sequence[tuple[int, StateSpan]]) -> None:
        self._storage = storage
        self._layer = ""
        self.pieces: list[Piece] = []
        steps: list[tuple[int, int, int]] = []  # (row, source, target)
        self.long: list[tuple[int, int, StateSpan]] = []  # (first row, rows, span) of the others
        first = 0
        for rows, span in spans:
            if rows == 1 and span.source is not None and not span.marks:
                steps.append((first, span.source, span.target))
            else:
                self.long.append((first, rows, span))
                self.pieces += _pieces(first, rows, span)
            first += rows
        self.rows = first
        device = storage._device
        table = torch.tensor(steps, dtype=torch.int64).reshape(-1, 3).to(device)
        #: Decode rows, which run as one batch: their rows, sources and targets, (steps,) each.
        self.step_rows, self.step_sources, self.step_targets = table.unbind(1)
        self.steps = len(steps)
        self._spans: tuple[npt.NDArray[np.int64], ...] | None = None
        self._cut = [(rows, span) for rows, span in spans]

    @property
    def spans(self) -> tuple[npt.NDArray[np.int64], ...]:
        """All spans for the compiled kernel, int64 each.

        These are the first piece of each span (spans + 1,), the source of each span (-1 for none), and the first row,
        the end and the target of each piece.
        """
        if self._spans is None:
            firsts, sources, pieces, at = [0], [], [], 0
            for rows, span in self._cut:
                pieces += [(each.first, each.end, each.target) for each in _pieces(at, rows, span)]
                firsts.append(len(pieces))
                sources.append(-1 if span.source is None else span.source)
                at += rows
            columns = np.array(pieces, np.int64).reshape(-1, 3).T
            self._spans = (np.array(firsts, np.int64), np.array(sources, np.int64), *map(np.ascontiguousarray, columns))
        return self._spans

    def enter(self, layer: str) -> None:
        """Name the layer whose operations follow."""
        self._layer = layer

    def part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return this layer's part of all slots, (slots, *shape)."""
        return self._storage.part(f"{self._layer}.{name}", shape, dtype)


def _pieces(first: int, rows: int, span: StateSpan) -> list[Piece]:
    """Cut a span at its marks. The last piece ends in the sequence's own slot."""
    found: list[Piece] = []
    at = 0
    for end, slot in span.marks:
        found.append(Piece(first + at, first + end, None if at else span.source, bool(at), slot))
        at = end
    found.append(Piece(first + at, first + rows, None if at else span.source, bool(at), span.target))
    return found
