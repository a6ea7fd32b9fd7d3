"""The work tables of a plan on the device, for each kind of layer, and the number of decode steps since they were made.

Tables are uploaded in one asynchronous copy. A decode step that only grows lengths increments one number on the
device. A *recording* keeps its tables at fixed addresses, with spare room. Several plans can use it in turn
(engine/runner.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from inlay.attention.plan import Plan
from inlay.attention.rope import Rotary
from inlay.attention.triton.plain import PlainPart, plain_parts
from inlay.attention.triton.tables import Ints, Room, Shape, WorkTables

#: The most decode steps before splits are computed again.
MOST_STEPS = 256

#: Builds the tables of a plan for layers of a shape.
Build = Callable[[Plan, Shape], WorkTables]

_TABLES = ("work", "lanes", "pieces", "merged_rows", "merged_first", "merged_index")


@dataclass(slots=True)
class Kind:
    """The tables of a plan for one kind of layer.

    Args:
        made: The tables on the host.
        memory: All tables on the device, in one tensor.
        there: Views of ``memory`` by the name of the table.
        room, partials: Only in a recording: the capacity of its tables, and its own memory for partial results.
        turns: Cosines and sines on the device, by the rotary's id. The rotary is kept, so that its id stays unique.
    """

    shape: Shape
    made: WorkTables
    memory: Tensor
    there: dict[str, Tensor]
    room: Room | None = None
    partials: Tensor | None = None
    turns: dict[int, tuple[Rotary, Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, shape: Shape, made: WorkTables, device: torch.device, *, recorded: bool) -> Kind:
        """Upload tables for layers of this shape."""
        room = Room.around(made) if recorded else None
        made = made if room is None else cast(WorkTables, room.fill(made))
        tables = [getattr(made, name) for name in _TABLES]
        (memory,) = upload(device, _joined(made))
        there = dict(zip(_TABLES, _parts(memory, tables), strict=True))
        numbers = made.partials * shape.heads * (shape.head_dim + 1)
        own = torch.empty(numbers, dtype=torch.float32, device=device) if recorded else None
        return cls(shape, made, memory, there, room, own)

    def refill(self, made: WorkTables) -> None:
        """Replace the tables on the device by others with the same numbers of rows."""
        device = self.memory.device
        (memory,) = upload(device, _joined(made))
        self.memory.copy_(memory, non_blocking=True)
        self.made = made
        for rotary, cos, sin in self.turns.values():
            for there, angles in zip((cos, sin), rotary.angles(made.shifts), strict=True):
                there.copy_(_pinned(angles, device), non_blocking=True)

    def turns_of(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of every turn, (turns, pairs), fp32."""
        if id(rotary) not in self.turns:
            cos, sin = rotary.angles(self.made.shifts)
            self.turns[id(rotary)] = (rotary, cos.to(self.memory.device), sin.to(self.memory.device))
        return self.turns[id(rotary)][1:]


@dataclass(slots=True)
class DeviceTables:
    """The device tables of a plan.

    Args:
        positions, slots: (rows,), int32, as they were when the tables were made.
        step: (1,), int32, on the device: decode steps since then.
        steps: The same number on the host.
        source: In a recording: the plan that the tables are made of.
        kinds: The tables for each kind of layer.
        plain: The parts of the plan, if all of them are plain and long.
    """

    positions: Tensor
    slots: Tensor
    step: Tensor
    steps: int = 0
    source: Plan | None = None
    kinds: dict[Shape, Kind] = field(default_factory=dict)
    plain: list[PlainPart] | None = None

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> DeviceTables:
        """Upload the positions and slots of a plan. ``kind`` adds the tables for each kind of layer on first use."""
        positions, slots = upload(device, plan.positions.astype(np.int32), plan.slots.astype(np.int32))
        return cls(positions, slots, torch.zeros(1, dtype=torch.int32, device=device), plain=plain_parts(plan))

    @property
    def recorded(self) -> bool:
        return self.source is not None

    def kind(self, plan: Plan, shape: Shape, build: Build) -> Kind:
        """Return the tables for layers of this shape. They are built on first use."""
        if shape not in self.kinds:
            made = build(self.source or plan, shape)
            # lengths are current, and the kernels add the steps again
            made.pieces[:, 1] -= made.pieces[:, 6] * self.steps
            self.kinds[shape] = Kind.of(shape, made, self.step.device, recorded=self.recorded)
        return self.kinds[shape]

    def advance(self) -> None:
        """See PreparedTables.advance."""
        self.steps += 1
        with torch.inference_mode():  # the tensor may have been made in inference mode
            self.step += 1


class TritonRecording:
    """See ``backend.Recording``.

    Args:
        name: Key in ``Plan.work``.
        rows: Number of rows of the recorded pass.
        source: A plan that resembles those to be loaded.
    """

    def __init__(self, name: str, rows: int, source: Plan, build: Build, device: torch.device) -> None:
        nobody = np.zeros(rows, dtype=np.int64)
        self.plan = Plan((), nobody, nobody - 1)
        self.work = self.plan.work[name] = DeviceTables.of(self.plan, device)
        self.work.source = source
        self.turn = 0  # number of fills so far
        self._name = f"{name} recorded"
        self._build = build
        self._rows(source)

    def fill(self, plan: Plan) -> bool:
        """See ``backend.Recording``."""
        before = plan.work.get(self._name)
        if isinstance(before, _Filled) and before.is_in(self):
            return True
        kinds = list(self.work.kinds.values())
        tables = [cast(Room, kind.room).fill(self._build(plan, kind.shape)) for kind in kinds]
        made = [each for each in tables if each is not None]
        if len(made) < len(kinds):
            return False
        for kind, filling in zip(kinds, made, strict=True):
            kind.refill(filling)
        self.work.step.zero_()
        self._rows(plan)
        self.turn += 1
        plan.work[self._name] = _Filled(self, self.turn)
        return True

    def _rows(self, plan: Plan) -> None:
        """Upload the positions and slots of the plan's rows. Padding rows get slot -1."""
        filling = np.zeros((2, self.plan.rows), dtype=np.int32)
        filling[1] = -1
        filling[:, : plan.rows] = plan.positions, plan.slots
        positions, slots = upload(self.work.step.device, filling[0], filling[1])
        self.work.positions.copy_(positions, non_blocking=True)
        self.work.slots.copy_(slots, non_blocking=True)


@dataclass(slots=True)
class _Filled:
    """A plan with its tables in a recording, until another plan is loaded there. ``steps``: see DeviceTables."""

    recording: TritonRecording
    turn: int
    steps: int = 0

    def is_in(self, recording: TritonRecording) -> bool:
        """Return True if the tables are still there and need not be built again."""
        return self.recording is recording and self.turn == recording.turn and self.steps < MOST_STEPS

    def advance(self) -> None:
        """See PreparedTables.advance."""
        self.steps += 1
        if self.turn == self.recording.turn:
            with torch.inference_mode():
                self.recording.work.step += 1


def upload(device: torch.device, *tables: Ints) -> list[Tensor]:
    """Copy tables to the device in one asynchronous copy. Returns views of one tensor."""
    joined = torch.from_numpy(np.concatenate([table.ravel() for table in tables]))
    return _parts(_pinned(joined, device).to(device, non_blocking=True), tables)


def _parts(memory: Tensor, tables: Sequence[Ints]) -> list[Tensor]:
    """Split memory into consecutive tables of these shapes."""
    ends = np.cumsum([table.size for table in tables]).tolist()
    return [memory[end - table.size : end].view(table.shape) for end, table in zip(ends, tables, strict=True)]


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Pin host memory, so that a CUDA device can copy from it directly."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _joined(made: WorkTables) -> Ints:
    return np.concatenate([getattr(made, name).ravel() for name in _TABLES])
