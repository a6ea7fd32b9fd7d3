"""Forward passes of the stock model over packed work, with our attention in every layer.

The load-time probe: does reading a segment at a shift give what computing it there would give?

It holds for rotary positions and for ALiBi, because scores depend on differences alone, and without positions. A model
that does anything to its keys after the rotation fails the probe, and shifts are refused for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.backend import Backend
from inlay.attention.mass import BLOCK_BYTES
from inlay.attention.plan import Part, Plan, build_plan, items_at
from inlay.engine.allocation import Work
from inlay.engine.graphs import Record, pass_graphs
from inlay.errors import CapacityError, ParameterError
from inlay.kv.pool import KVPool
from inlay.models.compiling import OPAQUE, compiled
from inlay.models.device import on_device, upload
from inlay.models.interface import IMPLEMENTATION, EndOfPassError, PassContext, attention_implementation
from inlay.models.load import LoadedModel
from inlay.models.lora import Adapters
from inlay.models.spec import ModelSpec
from inlay.slots import SlotRange, cut


class Runner:
    """Runs work through the model. Keys and values go to the backend's pool; logits come back where asked for.

    slots: how many token slots that pool has. record: what records passes of few rows; None for CUDA graphs, on a GPU.
    adapters: what work may name; None for none. kv_dtype: of keys and values in the pool; None for the model's.
    compile: whether the model runs through ``torch.compile``, where ``check_compilable`` lets it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        backend: Backend,
        slots: int,
        record: Record | None = None,
        adapters: Adapters | None = None,
        kv_dtype: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        self._loaded = loaded
        self._compiled = compiled(loaded.model) if compile else None
        self.backend = backend
        self._adapters = adapters or Adapters(loaded.model, ())
        self.storage = backend.make_pool(loaded.spec.shapes, kv_dtype or loaded.model.dtype, slots)
        self.graphs = pass_graphs(backend, self._forward, record)  # None where passes are not recorded

    @property
    def vocabulary(self) -> int:
        """The width of its logits."""
        return self._loaded.spec.vocab_size

    def run(
        self,
        work: Sequence[Work],
        rows: Sequence[int],
        plan: Plan | None = None,
        ids: Tensor | None = None,
        await_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """One forward pass over packed work.

        rows: the packed rows whose logits are wanted.
        plan: the plan of just this work, where the caller has it already.
        ids: the work's, (rows,), int64, on the device, where the host does not know them.
        await_layer: see PassContext; a pass with it is launched as it is, neither recorded nor compiled.
        Returns (len(rows), vocabulary) in the model's dtype.
        """
        plan = plan or build_plan([w.part for w in work])
        watched, first = [], 0
        for each in work:
            if each.mass is not None:
                watched.append((first, each.part, each.mass))
            first += each.part.rows
        known = [token for w in work for token in w.ids] if ids is None else ids
        spec = self._loaded.spec
        context = PassContext(self.backend, self.storage, plan, spec, watched, await_layer=await_layer)
        recordable = not watched and await_layer is None
        with on_device(self.backend.device):
            if self.graphs is not None and recordable and not any(w.adapter for w in work):
                logits = self.graphs.run(known, plan, rows)
                if logits is not None:
                    return logits
            return self._run(known, rows, context, self._adapted(work))

    @property
    def check_layer(self) -> int:
        """The layer whose keys tell how tokens change where they stand (CacheBlend, arXiv 2405.16444): a third of the
        way up, but not the first one, whose keys follow from the token alone, if there is another."""
        layers = len(self.storage.keys)
        return min(max(1, layers // 3), layers - 1)

    def check_cost(self, tokens: int) -> int:
        """How many tokens through all layers take as long as these through the ones below the check layer."""
        return -(-tokens * self.check_layer // len(self.storage.keys))

    def run_to_check(self, work: Sequence[Work]) -> None:
        """Run packed work to the keys of the check layer: keys and values of the layers above are not written."""
        plan = build_plan([w.part for w in work])
        context = PassContext(self.backend, self.storage, plan, self._loaded.spec, last_layer=self.check_layer)
        with on_device(self.backend.device), suppress(EndOfPassError):
            self._run([token for w in work for token in w.ids], [], context, self._adapted(work))

    def key_deviation(
        self, here: npt.NDArray[np.int64], stored: npt.NDArray[np.int64], shift: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:  # (tokens,)
        """How far keys of the check layer are apart in two places, slots (tokens,), the first ``shift`` further on."""
        kv_heads, _, head_dim = self.storage.keys[self.check_layer].shape
        some = max(1, BLOCK_BYTES // (4 * kv_heads * head_dim))
        blocks = [slice(at, at + some) for at in range(0, len(here), some)]
        return np.concatenate([self._key_deviation(here[one], stored[one], shift[one]) for one in blocks])

    def _key_deviation(
        self, here: npt.NDArray[np.int64], stored: npt.NDArray[np.int64], shift: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """See ``key_deviation``."""
        layer = self.check_layer
        new, old = (self.storage.read_keys(layer, torch.from_numpy(slots)).float() for slots in (here, stored))
        rotary = self._loaded.spec.layers[layer].rotary
        if shift.any():
            assert rotary is not None, "a shift needs positions that move"
            new = rotary.turn(new, *rotary.angles_of(shift, new.device))
        moved: npt.NDArray[np.float32] = (new - old).pow(2).sum((0, 2)).sqrt().cpu().numpy()
        return moved

    def _adapted(self, work: Sequence[Work]) -> list[tuple[bytes, int]]:
        """The adapter of each stretch of rows, and how many these are; none where nobody can have named one."""
        return [(w.adapter, w.part.rows) for w in work] if self._adapters else []

    def _run(
        self, ids: list[int] | Tensor, rows: Sequence[int], context: PassContext, adapted: Sequence[tuple[bytes, int]]
    ) -> Tensor:
        """adapted: see ``_adapted``."""
        self.backend.prepare(context.plan)
        device = self.backend.device
        positions = upload(context.plan.positions.copy(), device)  # which grows in place, step by step
        wanted = upload(np.array(rows, dtype=np.int64), device)
        known = ids if isinstance(ids, Tensor) else upload(np.array(ids, dtype=np.int64), device)
        with self._adapters.applied(adapted, rows):
            return self._compute(known, positions, context, wanted)

    def _forward(self, ids: Tensor, positions: Tensor, plan: Plan, rows: Tensor | None) -> Tensor:
        """See ``graphs.Forward``."""
        return self._compute(ids, positions, PassContext(self.backend, self.storage, plan, self._loaded.spec), rows)

    def _compute(self, ids: Tensor, positions: Tensor, context: PassContext, rows: Tensor | None) -> Tensor:
        """The model's logits. ids, positions: (rows,). rows: the ones wanted; None for all."""
        whole = context.plain and context.await_layer is None
        model, name = self._loaded.model, IMPLEMENTATION
        if self._compiled is not None and whole:  # others leave the layers on their way, or wait there
            model, name = self._compiled, OPAQUE
        with torch.inference_mode(), attention_implementation(self._loaded.model, name):
            output = model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
                inlay=context,
            )
        logits: Tensor = output.logits[0]
        return logits


_HEAD, _TAIL = 16, 8
_START, _SHIFT = 53, 41

#: How many texts may fail: rounding can choose other experts for a token, wrong frequencies are wrong for every text.
_TEXTS = 8

#: How far logits may be off, as a share of their spread. Rounding alone gives 1e-5 in fp32 and 0.03 in bf16
#: and int8, and 0.03 to 0.24 in fp8, where the least of some texts is within the same.
TOLERANCE = {torch.float32: 1e-3} | dict.fromkeys((torch.bfloat16, torch.int8, torch.float8_e4m3fn), 0.15)


def check_compiled(spec: ModelSpec, runner: Runner, pool: KVPool) -> None:
    """Raise ParameterError where a compiled model does not run, or gives other logits than it does uncompiled.

    That compiles it, for passes of several rows and of one. Raises CapacityError where the pool cannot hold the passes.
    """
    runs = pool.allocate(_HEAD)
    if runs is None:
        raise _too_small(pool, _HEAD)
    model, graphs, found = runner._compiled, runner.graphs, []
    runner.graphs = None  # which would play a recording of either for both
    try:
        for runner._compiled in (model, None):
            found.append(torch.cat([_whole(0, probe_ids(spec, 0)[:rows], runner, runs) for rows in (_HEAD, _TAIL, 1)]))
        off = max(error_of(one, other) for one, other in zip(*found, strict=True))
    except (RuntimeError, ImportError, NotImplementedError) as error:  # those of the compiler's are of the first kind
        reason = str(error).strip().splitlines()[:1]
        raise ParameterError(
            f"compile is set, and torch.compile fails at this model: {type(error).__name__}: {' '.join(reason)[:300]}; "
            "leave compile out"
        ) from error
    finally:
        runner._compiled, runner.graphs = model, graphs
        pool.free(runs)
    if off > TOLERANCE[runner.storage.dtype]:
        raise ParameterError(
            f"compile is set, and torch.compile changes this model's logits by {off:.2g} of their spread; leave it out"
        )


def why_not_shift(spec: ModelSpec, runner: Runner, pool: KVPool) -> str | None:
    """The reason why segments of this model cannot be read at a shift; None where they can.

    Raises CapacityError where the pool cannot hold the probe.
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
    """Raise ModelError where a pass does not call the layers that adapters adapt, as they count on.

    Raises CapacityError where the pool cannot hold the pass.
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
    return CapacityError(f"kv_memory is too small to run anything; give at least {needed} bytes")


def _change(spec: ModelSpec, runner: Runner, runs: tuple[SlotRange, ...], text: int) -> float:
    """How far a shift moves the last logits of a text, and how far moving all of it does: the worse of the two."""
    ids = probe_ids(spec, text)
    here = _whole(0, ids, runner, runs)
    moved = error_of(_whole(_SHIFT, ids, runner, runs), here)
    return max(moved, error_of(_shifted(ids, runner, runs), here))


def probe_ids(spec: ModelSpec, text: int) -> tuple[int, ...]:
    """A text of the probes, by its number."""
    generator = torch.Generator().manual_seed(1 + text)
    return tuple(torch.randint(0, min(spec.vocab_size, 1 << 15), (_HEAD + _TAIL,), generator=generator).tolist())


def _whole(start: int, ids: tuple[int, ...], runner: Runner, runs: tuple[SlotRange, ...]) -> Tensor:
    """The last logits of a prompt that is computed whole, from position ``start`` on."""
    return runner.run([Work(ids, Part.of(start, len(ids), (), cut(runs, 0, len(ids))))], [len(ids) - 1])


def _shifted(ids: tuple[int, ...], runner: Runner, runs: tuple[SlotRange, ...]) -> Tensor:
    """The same, where the head is encoded at one place and read from another."""
    head, tail = cut(runs, 0, _HEAD), cut(runs, _HEAD, _TAIL)
    runner.run([Work(ids[:_HEAD], Part.of(_START, _HEAD, (), head))], [])
    context = items_at(head, _START, _SHIFT)
    span = Part.of(_START + _SHIFT + _HEAD, _TAIL, context, tail)
    return runner.run([Work(ids[_HEAD:], span)], [_TAIL - 1])


def error_of(logits: Tensor, expected: Tensor) -> float:
    """How far logits are off, as a share of their spread."""
    logits, expected = logits.float(), expected.float()
    spread = (expected - expected.mean()).norm().clamp_min(1e-9)
    return float((logits - expected).norm() / spread)
