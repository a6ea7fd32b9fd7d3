"""Sizes of the states of a recurrent model, and the check at load that its rebound layers compute like the stock ones.

The check runs two texts in interleaved pieces, with a mark within a piece, and continues one of them from that mark. It
compares the logits with those of the stock code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inlay.attention.backend import Backend
from inlay.attention.plan import Part, items_at
from inlay.attention.storage import bytes_per_token
from inlay.engine.allocation import Work
from inlay.engine.runner import TOLERANCE, Runner, error_of, probe_ids
from inlay.errors import CapacityError, ModelError
from inlay.kv.states import LEAST_SLOTS
from inlay.models.device import on_device
from inlay.models.load import LoadedModel
from inlay.models.mixers.states import StateShape, StateSpan, StateStorage
from inlay.slots import SlotRange

#: A model without attention has no KV. Its tokens count with the memory of their ids in the index.
TOKEN_BYTES = 64

#: The most states of a pool whose size is not given.
MOST_SLOTS = 1024

_PIECES = (11, 1, 7, 1, 1, 3)  # a mark lies within the first
_MARK = 5


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The sizes of a model's states and KV."""

    shapes: dict[str, StateShape]
    token_bytes: int

    @property
    def slot_bytes(self) -> int:
        """The bytes of one state."""
        return sum(shape.bytes for shape in self.shapes.values())

    def share(self, budget: int, asked: int | None) -> tuple[int, int]:
        """Return the number of state slots, and the bytes of ``budget`` that are left for KV.

        Args:
            asked: the bytes for states. None for half of the budget, at most for MOST_SLOTS states.

        Raises:
            CapacityError: the budget does not hold the states and a token.
        """
        slots = min(budget // 2 // self.slot_bytes, MOST_SLOTS) if asked is None else asked // self.slot_bytes
        left = budget - slots * self.slot_bytes
        if slots < LEAST_SLOTS or left < self.token_bytes:
            least = 2 * LEAST_SLOTS * self.slot_bytes
            what = "kv_memory" if asked is None else f"kv_memory with state_memory of {asked} bytes"
            raise CapacityError(
                f"{what} holds {max(slots, 0)} states of {self.slot_bytes} bytes, and needs {LEAST_SLOTS} beside the "
                f"KV; give kv_memory at least {least} bytes",
                code="cache.pool_too_small",
            )
        return slots, left


def probe_states(loaded: LoadedModel, backend: Backend, kv_dtype: torch.dtype) -> StateSizes:
    """Measure the states of a model and check its layers. Raises ModelError if they differ from the stock ones."""
    states = StateStorage(LEAST_SLOTS, backend.device)
    runner = Runner(loaded, backend, 4 * sum(_PIECES), kv_dtype=kv_dtype, states=states)
    off = min(_off(loaded, runner, pair) for pair in range(3))
    if off > TOLERANCE[kv_dtype]:
        raise ModelError(
            f"{loaded.name} cannot be served: its recurrent layers differ from transformers' own code by {off:.2g} of "
            "the logits' spread; install the transformers release that inlay names",
            code="model.not_servable",
        )
    return StateSizes(states.shapes, bytes_per_token(loaded.spec.shapes, kv_dtype) or TOKEN_BYTES)


def _off(loaded: LoadedModel, runner: Runner, pair: int) -> float:
    """The error of two texts in pieces against the stock model."""
    length = sum(_PIECES)
    texts = [probe_ids(loaded.spec, 2 * pair + number)[:length] for number in (0, 1)]
    places = [SlotRange(number * length, length) for number in (0, 1)]
    found: list[list[Tensor]] = [[], []]
    at = 0
    for size in _PIECES:
        work = []
        for number, text in enumerate(texts):
            slot = number + 1
            marks = ((_MARK, LEAST_SLOTS - 1),) if not at and not number else ()
            span = StateSpan(slot if at else None, slot, marks)
            work.append(Work(text[at : at + size], _part(places[number], at, size), state=span))
        logits = runner.run(work, range(2 * size))
        found[0].append(logits[:size])
        found[1].append(logits[size:])
        at += size
    span = StateSpan(LEAST_SLOTS - 1, 1)  # the first text again, from its mark
    rest = runner.run(
        [Work(texts[0][_MARK:], _part(places[0], _MARK, length - _MARK), state=span)], range(length - _MARK)
    )
    errors = []
    for text, own in zip(texts, found, strict=True):
        whole = _stock(loaded, text, runner.backend.device)
        errors.append(error_of(torch.cat(own), whole))
        if text is texts[0]:
            errors.append(error_of(rest, whole[_MARK:]))
    return max(errors)


def _part(place: SlotRange, start: int, rows: int) -> Part:
    before = items_at((SlotRange(place.first, start),), 0) if start else ()
    return Part.of(start, rows, before, (SlotRange(place.first + start, rows),))


def _stock(loaded: LoadedModel, text: tuple[int, ...], device: torch.device) -> Tensor:
    with _short_chunks(loaded.model), on_device(device), torch.inference_mode():
        logits: Tensor = loaded.model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0]
    return logits


@contextmanager
def _short_chunks(model: nn.Module) -> Iterator[None]:
    """Let stock Mamba-2 layers pad texts to a short chunk. Padding to their own 256 takes seconds and gigabytes."""
    found = ((part, getattr(part, "chunk_size", None)) for part in model.modules())
    sizes = [(part, size) for part, size in found if isinstance(size, int)]
    for part, size in sizes:
        part.__dict__["chunk_size"] = min(size, sum(_PIECES))
    try:
        yield
    finally:
        for part, size in sizes:
            part.__dict__["chunk_size"] = size
