"""Checks of a model at load: shifts, the compiled model, adapters, and recurrent layers.

Reading a segment at a shift must give the same result as computing it there. That holds for rotary positions, for
ALiBi, and without positions, because scores depend on distances only. A model that changes its keys after the rotation
fails the check, and shifts are refused for it.

The check of recurrent layers runs two texts in interleaved pieces, with a mark within a piece, and continues one of
them from that mark. It compares the logits with those of the stock code, and measures the size of a state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from inlay.attention.backend import Backend
from inlay.attention.plan import Part, items_at
from inlay.attention.storage import bytes_per_token
from inlay.engine.allocation import Work
from inlay.engine.runner import Runner
from inlay.errors import CapacityError, ModelError, ParameterError
from inlay.kv.pool import LEAST_SLOTS, KVPool
from inlay.models.device import on_device
from inlay.models.load import LoadedModel
from inlay.models.lora import Adapters
from inlay.models.mixers.states import SCRATCH, StateShape, StateSpan, StateStorage
from inlay.models.spec import ModelSpec
from inlay.slots import SlotRange, cut

_HEAD, _TAIL = 16, 8
_START, _SHIFT = 53, 41

#: Number of probe texts, of which one must pass. Rounding can change a token's experts in single texts; wrong
#: frequencies fail all texts.
_TEXTS = 8

#: Tolerated error of logits, as a share of their spread. Rounding alone gives 1e-5 in fp32 and 0.03 in bf16 and int8.
#: In fp8 it gives 0.03 to 0.24 for a single text. The text with the least error stays below 0.15.
TOLERANCE = {torch.float32: 1e-3} | dict.fromkeys((torch.bfloat16, torch.int8, torch.float8_e4m3fn), 0.15)


def check_compiled(spec: ModelSpec, runner: Runner, pool: KVPool) -> None:
    """Check that the compiled model runs and gives the same logits as the uncompiled one.

    This compiles it for passes of several rows and of one.

    Raises:
        ParameterError: compiling fails or changes the logits.
        CapacityError: the pool is too small for the passes.
    """
    runs = pool.allocate(_HEAD)
    if runs is None:
        raise _too_small(pool, _HEAD)
    found = []
    try:
        for compiled in (True, False):
            with runner.unrecorded(compiled=compiled):
                passes = [_whole(0, probe_ids(spec, 0)[:rows], runner, runs) for rows in (_HEAD, _TAIL, 1)]
            found.append(torch.cat(passes))
        off = max(error_of(one, other) for one, other in zip(*found, strict=True))
    except (RuntimeError, ImportError, NotImplementedError) as error:  # the compiler's errors are RuntimeErrors
        reason = str(error).strip().splitlines()[:1]
        raise ParameterError(
            f"compile is set, and torch.compile fails at this model: {type(error).__name__}: {' '.join(reason)[:300]}; "
            "leave compile out",
            code="model.not_compilable",
        ) from error
    finally:
        pool.free(runs)
    if off > TOLERANCE[runner.storage.dtype]:
        raise ParameterError(
            f"compile is set, and torch.compile changes this model's logits by {off:.2g} of their spread; leave it out",
            code="model.not_compilable",
        )


def why_not_shift(spec: ModelSpec, runner: Runner, pool: KVPool) -> str | None:
    """The reason why this model's segments cannot be read at a shift; None if they can.

    Raises CapacityError if the pool is too small for the probe.
    """
    if spec.why_fixed is not None:
        return spec.why_fixed
    runs = pool.allocate(_HEAD + _TAIL)
    if runs is None:
        raise _too_small(pool, _HEAD + _TAIL)
    tolerance = TOLERANCE[runner.storage.dtype]
    try:
        least = _change(spec, runner, runs, 0)
        for text in range(1, _TEXTS):
            if least > tolerance:
                least = min(least, _change(spec, runner, runs, text))
    finally:
        pool.free(runs)
    if least > tolerance:
        return f"a shifted segment changes this model's logits by {least:.2g} of their spread"
    return None


def check_adapters(adapters: Adapters, spec: ModelSpec, runner: Runner, pool: KVPool) -> None:
    """Check that a pass calls the adapted layers as the adapters expect.

    Raises:
        ModelError: it does not.
        CapacityError: the pool is too small for the pass.
    """
    if not adapters:
        return
    ids, wanted = probe_ids(spec, 0)[:_TAIL], [1, _TAIL - 1]
    runs = pool.allocate(len(ids))
    if runs is None:
        raise _too_small(pool, len(ids))
    try:
        work = [Work(ids, Part.of(0, len(ids), (), cut(runs, 0, len(ids))))]
        adapters.check_calls(lambda: runner.run(work, wanted), rows=len(ids), wanted=len(wanted))
    finally:
        pool.free(runs)


def _too_small(pool: KVPool, tokens: int) -> CapacityError:
    needed = pool.chunks_for(tokens) * pool.chunk_size * pool.bytes_per_token
    return CapacityError(
        f"kv_memory is too small to run anything; give at least {needed} bytes", code="cache.pool_too_small"
    )


def _change(spec: ModelSpec, runner: Runner, runs: tuple[SlotRange, ...], text: int) -> float:
    """Return the error of a text's last logits after two changes, the larger one.

    The changes are: its head is read at a shift, and all of the text stands at other positions.
    """
    ids = probe_ids(spec, text)
    here = _whole(0, ids, runner, runs)
    moved = error_of(_whole(_SHIFT, ids, runner, runs), here)
    return max(moved, error_of(_shifted(ids, runner, runs), here))


def probe_ids(spec: ModelSpec, text: int) -> tuple[int, ...]:
    """A probe text by number."""
    generator = torch.Generator().manual_seed(1 + text)
    return tuple(torch.randint(0, min(spec.vocab_size, 1 << 15), (_HEAD + _TAIL,), generator=generator).tolist())


def _whole(start: int, ids: tuple[int, ...], runner: Runner, runs: tuple[SlotRange, ...]) -> Tensor:
    """The last logits of a prompt that is computed in one piece, from position ``start`` on."""
    return runner.run([Work(ids, Part.of(start, len(ids), (), cut(runs, 0, len(ids))))], [len(ids) - 1])


def _shifted(ids: tuple[int, ...], runner: Runner, runs: tuple[SlotRange, ...]) -> Tensor:
    """The last logits of a prompt whose head is encoded at one position and read from another."""
    head, tail = cut(runs, 0, _HEAD), cut(runs, _HEAD, _TAIL)
    runner.run([Work(ids[:_HEAD], Part.of(_START, _HEAD, (), head))], [])
    context = items_at(head, _START, _SHIFT)
    span = Part.of(_START + _SHIFT + _HEAD, _TAIL, context, tail)
    state = None if runner.states is None else StateSpan(SCRATCH)  # the head has written it
    return runner.run([Work(ids[_HEAD:], span, state=state)], [_TAIL - 1])


def error_of(logits: Tensor, expected: Tensor) -> float:
    """The error of logits as a share of their spread."""
    logits, expected = logits.float(), expected.float()
    spread = (expected - expected.mean()).norm().clamp_min(1e-9)
    return float((logits - expected).norm() / spread)


def error_by_row(logits: Tensor, expected: Tensor) -> Tensor:
    """The error of each row of logits as a share of their spread."""
    logits, expected = logits.float(), expected.float()
    spread = torch.linalg.vector_norm(expected - expected.mean(-1, keepdim=True), dim=-1).clamp_min(1e-9)
    error: Tensor = torch.linalg.vector_norm(logits - expected, dim=-1) / spread
    return error


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
    least, off = None, math.inf
    for pair in range(3):  # rounding may choose other experts, at other rows in each text
        found = _row_errors(loaded, runner, pair)
        least = found if least is None else [torch.minimum(*each) for each in zip(least, found, strict=True)]
        off = max(float(errors.square().mean().sqrt()) for errors in least)
        if off <= TOLERANCE[kv_dtype]:
            break
    else:
        raise ModelError(
            f"{loaded.name} cannot be served: its recurrent layers differ from transformers' own code by {off:.2g} of "
            "the logits' spread; install the transformers release that inlay names",
            code="model.not_servable",
        )
    return StateSizes(states.shapes, bytes_per_token(loaded.spec.shapes, kv_dtype) or TOKEN_BYTES)


def _row_errors(loaded: LoadedModel, runner: Runner, pair: int) -> list[Tensor]:
    """The errors against the stock model, by row: of two texts in pieces, and of the first one behind its mark."""
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
    wholes = [_stock(loaded, text, runner.backend.device) for text in texts]
    computed = (*(torch.cat(own) for own in found), rest)
    return [error_by_row(*each) for each in zip(computed, (*wholes, wholes[0][_MARK:]), strict=True)]


def _part(place: SlotRange, start: int, rows: int) -> Part:
    before = items_at((SlotRange(place.first, start),), 0) if start else ()
    return Part.of(start, rows, before, (SlotRange(place.first + start, rows),))


def _stock(loaded: LoadedModel, text: tuple[int, ...], device: torch.device) -> Tensor:
    with _short_chunks(loaded.model), WideConvolution(), on_device(device), torch.inference_mode():
        logits: Tensor = loaded.model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0]
    return logits


class WideConvolution(TorchFunctionMode):
    """Lets the convolutions of stock layers run in fp32 on a CPU. Some processors take seconds for one in bfloat16."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named: dict[str, Any] = kwargs or {}
        if func is not torch.conv1d or args[0].dtype != torch.bfloat16 or args[0].device.type != "cpu":
            return func(*args, **named)
        return func(*map(_wide, args), **{name: _wide(each) for name, each in named.items()}).to(args[0].dtype)


def _wide(given: Any) -> Any:
    return given.float() if isinstance(given, Tensor) else given


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
