"""Records passes as CUDA graphs, once for each padded number of rows, and replays them.

A GPU runs a pass of few rows faster than Python can launch its kernels. A recorded pass reads from fixed memory: ids,
positions, the rows with logits, and the backend's tables. These are overwritten before each replay. A smaller pass is
padded with rows that belong to no request and store nothing.

Decode steps are recorded on first use. Other passes have more shapes, and a recording can take as long as several
passes. They are recorded when their shape comes a second time.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inlay.attention.backend import Backend, Recording, RecordingBackend
from inlay.attention.plan import Plan
from inlay.models.device import upload

logger = logging.getLogger(__name__)

#: Recorded numbers of rows; larger passes are not recorded.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)

#: Recordings per shape, for plans whose tables differ much; further plans run without recording.
_MOST_RECORDINGS = 4

#: A forward pass: ids (rows,), positions (rows,), a plan, and the rows with logits, (wanted,), or None for all → logits
#: (wanted, vocabulary).
Forward = Callable[[Tensor, Tensor, Plan, Tensor | None], Tensor]

#: Records a pass: calls it and returns a function that replays it.
Record = Callable[[Callable[[], None]], Callable[[], None]]


class _PassShape(NamedTuple):
    """The padded number of rows, and the padded number of rows with logits; None for all."""

    rows: int
    wanted: int | None


@dataclass(slots=True)
class _Recorded:
    """A recorded pass. ``inputs``, (3, rows), are ids, positions and the rows with logits, padded."""

    tables: Recording
    inputs: Tensor
    logits: Tensor
    replay: Callable[[], None]


class PassGraphs:
    """Recordings of passes by shape.

    Args:
        record: records a pass; ``cuda_recorder()``, or something simpler in tests.
    """

    def __init__(self, backend: RecordingBackend, forward: Forward, record: Record) -> None:
        self._backend = backend
        self._forward = forward
        self._record = record
        self._recorded: dict[_PassShape, list[_Recorded]] = {}
        self._works = True
        self.played = self.played_prefills = 0  # replayed passes, and those of them that were not decode steps

    def run(self, ids: Sequence[int] | Tensor, plan: Plan, wanted: Sequence[int]) -> Tensor | None:
        """Replay a pass. Returns the logits of the wanted rows, (wanted, vocabulary), valid until the next pass.

        Args:
            ids: (rows,); a tensor must be on the device.

        Returns:
            None if there is no recording; then compute the pass.
        """
        if plan.rows > SIZES[-1] or not self._works:
            return None
        every = len(plan.parts) == plan.rows and list(wanted) == list(range(plan.rows))
        shape = _PassShape(_size(plan.rows), None if every else _size(max(1, len(wanted))))
        found = self._fitting(shape, plan)
        if found is None:
            return None
        inputs = np.zeros((3, shape.rows), dtype=np.int64)
        inputs[0, : plan.rows] = 0 if isinstance(ids, Tensor) else ids
        inputs[1, : plan.rows] = plan.positions
        if not every:
            inputs[2, : len(wanted)] = wanted
        with torch.inference_mode():
            found.inputs.copy_(upload(inputs, found.inputs.device), non_blocking=True)
            if isinstance(ids, Tensor):
                found.inputs[0, : plan.rows] = ids
            found.replay()
        self.played += 1
        self.played_prefills += not every
        return found.logits[: len(wanted)]

    def _fitting(self, shape: _PassShape, plan: Plan) -> _Recorded | None:
        """A recording that holds this plan's tables now."""
        if shape.wanted is not None and shape not in self._recorded:
            self._recorded[shape] = []  # the shape may never come again
            return None
        known = self._recorded.setdefault(shape, [])
        with torch.inference_mode():
            found = next((each for each in known if each.tables.fill(plan)), None)
        if found is not None or len(known) >= _MOST_RECORDINGS:
            return found
        try:
            made = self._make(shape, plan)
        except torch.OutOfMemoryError:  # only this pass fails; the next one may find memory
            raise
        except RuntimeError as error:
            self._works = False
            logger.warning("passes of this model cannot be recorded (%s); they run without recordings", error)
            return None
        known.append(made)
        with torch.inference_mode():
            made.tables.fill(plan)
        return made

    def _make(self, shape: _PassShape, plan: Plan) -> _Recorded:
        tables = self._backend.capture(plan, shape.rows)
        device = self._backend.device
        inputs = torch.zeros(3, shape.rows, dtype=torch.long, device=device)
        made = _Recorded(tables, inputs, torch.empty(0), _nothing)
        rows = None if shape.wanted is None else inputs[2, : shape.wanted]

        def step() -> None:
            made.logits = self._forward(inputs[0], inputs[1], tables.plan, rows)

        made.replay = self._record(step)
        return made


def _size(count: int) -> int:
    """The next larger of ``SIZES``."""
    return SIZES[bisect_left(SIZES, count)]


def pass_graphs(backend: Backend, forward: Forward, record: Record | None) -> PassGraphs | None:
    """The recordings of a backend's passes; None without a recording backend or a GPU."""
    if not isinstance(backend, RecordingBackend) or (record is None and backend.device.type != "cuda"):
        return None
    return PassGraphs(backend, forward, record or cuda_recorder())


def cuda_recorder() -> Record:
    """Records passes as CUDA graphs. They share working memory, so only one may run at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Callable[[], None]) -> Callable[[], None]:
        beside, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(here)
        with torch.cuda.stream(beside):  # compiles kernels and allocates memory outside the graph
            step()
            step()
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        return graph.replay

    return record


def _nothing() -> None:
    """Placeholder before the pass is recorded."""
