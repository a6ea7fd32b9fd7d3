"""Passes that are recorded once for each padded number of rows, and played again: CUDA graphs.

A pass of few rows takes a GPU less time than launching its kernels takes Python. What a recorded pass reads lies in
memory that stays where it is: ids, positions, the rows whose logits are wanted, and the backend's tables, which are
overwritten before it is played. A pass with fewer rows is filled up with rows that belong to nobody and store nothing.

Decode steps are recorded as they come. Other passes, as of the new text of a prompt, come in more shapes, and recording
one takes as long as some passes do: it is recorded when its shape comes a second time.
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

#: The numbers of rows that passes are recorded for; larger ones are not.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)

#: Recordings of one shape, for plans whose tables differ much; others are computed as they come.
_MOST_RECORDINGS = 4

#: A forward pass: ids (rows,), positions (rows,), a plan, and the rows whose logits are wanted, (wanted,), or None for
#: all of them → logits (wanted, vocabulary).
Forward = Callable[[Tensor, Tensor, Plan, Tensor | None], Tensor]

#: What records a pass: it calls it, and returns what plays it again.
Record = Callable[[Callable[[], None]], Callable[[], None]]


class _Shape(NamedTuple):
    """rows: of the pass, filled up. wanted: the rows that logits are made of, filled up; None for all."""

    rows: int
    wanted: int | None


@dataclass(slots=True)
class _Recorded:
    """A pass that was recorded.

    inputs: (3, rows): ids, positions, and first of all in the third row the rows that are wanted. logits: where a pass
    leaves them.
    """

    tables: Recording
    inputs: Tensor
    logits: Tensor
    replay: Callable[[], None]


class PassGraphs:
    """Recordings of passes by their shape.

    record: makes a recording of a pass; what ``cuda_recorder`` gives, or in tests something simpler.
    """

    def __init__(self, backend: RecordingBackend, forward: Forward, record: Record) -> None:
        self._backend = backend
        self._forward = forward
        self._record = record
        self._recorded: dict[_Shape, list[_Recorded]] = {}
        self._works = True
        self.played = self.played_prefills = 0  # passes so far, and those of them that were no decode steps

    def run(self, ids: Sequence[int] | Tensor, plan: Plan, wanted: Sequence[int]) -> Tensor | None:
        """The logits of the rows wanted, (wanted, vocabulary), valid until the next pass; None where it has to be
        computed.

        ids: (rows,), on the device where they are a tensor.
        """
        if plan.rows > SIZES[-1] or not self._works:
            return None
        every = len(plan.parts) == plan.rows and list(wanted) == list(range(plan.rows))
        shape = _Shape(_size(plan.rows), None if every else _size(max(1, len(wanted))))
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

    def _fitting(self, shape: _Shape, plan: Plan) -> _Recorded | None:
        """A recording whose tables are this plan's now."""
        if shape.wanted is not None and shape not in self._recorded:
            self._recorded[shape] = []  # it may never come again
            return None
        known = self._recorded.setdefault(shape, [])
        with torch.inference_mode():
            found = next((each for each in known if each.tables.fill(plan)), None)
        if found is not None or len(known) >= _MOST_RECORDINGS:
            return found
        try:
            made = self._make(shape, plan)
        except torch.OutOfMemoryError:  # this pass fails, and the next one may find memory
            raise
        except RuntimeError as error:
            self._works = False
            logger.warning("passes of this model cannot be recorded (%s); each is launched anew", error)
            return None
        known.append(made)
        with torch.inference_mode():
            made.tables.fill(plan)
        return made

    def _make(self, shape: _Shape, plan: Plan) -> _Recorded:
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
    """The next of ``SIZES``."""
    return SIZES[bisect_left(SIZES, count)]


def pass_graphs(backend: Backend, forward: Forward, record: Record | None) -> PassGraphs | None:
    """Recordings of a backend's passes; None where there is nothing to record with, or no GPU."""
    if not isinstance(backend, RecordingBackend) or (record is None and backend.device.type != "cuda"):
        return None
    return PassGraphs(backend, forward, record or cuda_recorder())


def cuda_recorder() -> Record:
    """Records passes as CUDA graphs, which share the memory that they work in: one is played at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Callable[[], None]) -> Callable[[], None]:
        beside, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(here)
        with torch.cuda.stream(beside):  # kernels are compiled, and memory is taken that must not be in the graph
            step()
            step()
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        return graph.replay

    return record


def _nothing() -> None:
    """In place of a pass that is not recorded yet."""
