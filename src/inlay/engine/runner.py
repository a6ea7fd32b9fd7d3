"""Forward passes of the stock model over packed work, with our attention in every layer.

The probe at load time checks that reading a segment at a shift gives the same result as computing it there. That holds
for rotary positions, for ALiBi, and without positions, because scores depend on distances only. A model that changes
its keys after the rotation fails the probe, and shifts are refused for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.backend import Backend
from inlay.attention.mass import BLOCK_BYTES
from inlay.attention.plan import Part, Plan, build_plan, items_at, plan_of_rows
from inlay.engine.allocation import Work
from inlay.engine.graphs import Record, pass_graphs
from inlay.errors import CapacityError, ParameterError
from inlay.kv.pool import KVPool
from inlay.models.compiling import OPAQUE, compiled
from inlay.models.device import on_device, upload
from inlay.models.interface import IMPLEMENTATION, EndOfPassError, KeptRows, PassContext, attention_implementation
from inlay.models.load import LoadedModel
from inlay.models.lora import Adapters
from inlay.models.mixers.states import PassStates, StateSpan, StateStorage
from inlay.models.spec import ModelSpec
from inlay.slots import SlotRange, cut


class Runner:
    """Runs work through the model. KV goes to the backend's pool, and the requested logits are returned.

    Args:
        slots: the pool's number of token slots.
        record: records passes of few rows. None for CUDA graphs on a GPU.
        adapters: the adapters that work may name. None for none.
        kv_dtype: of the KV in the pool. None for the model's dtype.
        compile: run the model through ``torch.compile`` where ``check_compilable`` allows it.
        states: the slots for the states of recurrent layers. None for a model without them.

    Attributes:
        rows_saved: rows that passes did not compute in a layer that reads the keys of another, summed over layers.
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
        states: StateStorage | None = None,
    ) -> None:
        self._loaded = loaded
        self.states = states
        self._compiled = compiled(loaded.model) if compile else None
        self.backend = backend
        self._adapters = adapters or Adapters(loaded.model, ())
        self.rows_saved = 0
        self.storage = backend.make_pool(loaded.spec.shapes, kv_dtype or loaded.model.dtype, slots)
        # None if passes are not recorded. A recording has fixed inputs, and states have other slots in each pass.
        self.graphs = pass_graphs(backend, self._forward, record) if states is None else None

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
        hidden: list[Tensor] | None = None,
    ) -> Tensor:
        """Run one forward pass over packed work.

        Args:
            rows: the packed rows with logits.
            plan: the plan of this work, if the caller has it.
            ids: the token ids, (rows,), int64, on the device. None if the host knows them.
            await_layer: see PassContext. A pass with it is neither recorded nor compiled.
            hidden: receives the last hidden states, behind the final norm, (len(rows), hidden), in the model's dtype. A
                pass with it is neither recorded nor compiled.

        Returns:
            Logits, (len(rows), vocabulary), in the model's dtype.
        """
        plan = plan or build_plan([w.part for w in work])
        watched, first = [], 0
        for each in work:
            if each.mass is not None:
                watched.append((first, each.part, each.mass))
            first += each.part.rows
        known = [token for w in work for token in w.ids] if ids is None else ids
        spec = self._loaded.spec
        states = None
        if self.states is not None:
            states = PassStates(self.states, [(each.part.rows, each.state or StateSpan()) for each in work])
        context = PassContext(self.backend, self.storage, plan, spec, watched, await_layer=await_layer, states=states)
        recordable = not watched and await_layer is None
        with on_device(self.backend.device):
            if hidden is not None:
                return self._run_with_hidden(known, rows, context, self._adapted(work), hidden)
            if self.graphs is not None and recordable and not any(w.adapter for w in work):
                logits = self.graphs.run(known, plan, rows)
                if logits is not None:
                    return logits
            if not context.plain or not self._saves_rows(plan.rows, len(rows)):
                return self._run(known, rows, context, self._adapted(work))
            return self._run_kept(known, rows, context)

    def _run_with_hidden(
        self,
        ids: list[int] | Tensor,
        rows: Sequence[int],
        context: PassContext,
        adapted: Sequence[tuple[bytes, int]],
        hidden: list[Tensor],
    ) -> Tensor:
        """Run a pass, and take the input of the output layer."""
        head = self._loaded.model.get_output_embeddings()
        compiled, self._compiled = self._compiled, None
        hook = head.register_forward_pre_hook(lambda _, given: hidden.append(given[0][0]))
        try:
            return self._run(ids, rows, context, adapted)
        finally:
            hook.remove()
            self._compiled = compiled

    def _saves_rows(self, rows: int, wanted: int) -> bool:
        """True if some layers need only the wanted rows of a pass.

        Adapters and the compiled model expect all rows in every layer.
        """
        return self._loaded.spec.readers > 0 and wanted < rows and not self._adapters and self._compiled is None

    def _run_kept(self, ids: list[int] | Tensor, rows: Sequence[int], context: PassContext) -> Tensor:
        """Run a pass and compute only the wanted rows behind the last layer with keys of its own."""
        spec = self._loaded.spec
        if not rows:
            self.rows_saved += context.plan.rows * spec.readers
            with suppress(EndOfPassError):
                self._run(ids, [], replace(context, last_layer=len(spec.layers) - 1), ())
            return torch.empty(0, spec.vocab_size, dtype=self._loaded.model.dtype, device=self.backend.device)
        if not spec.keeps_rows:
            return self._run(ids, rows, context, ())
        kept, where = np.unique(np.array(rows, dtype=np.int64), return_inverse=True)
        self.rows_saved += (context.plan.rows - kept.size) * spec.readers
        narrow = plan_of_rows(context.plan, kept.tolist())
        self.backend.prepare(narrow)
        kept_rows = KeptRows(upload(kept, self.backend.device), narrow)
        logits = self._run(ids, kept.tolist(), replace(context, kept=kept_rows), ())
        return logits if (np.diff(where) == 1).all() else logits[upload(where, logits.device)]

    @property
    def check_layer(self) -> int:
        """The layer whose keys measure how tokens change in context, as in CacheBlend (arXiv 2405.16444).

        It is a third of the way up. The first layer serves only if there is no other, because its keys depend on the
        token alone.
        """
        layers = len(self.storage.keys)
        return min(max(1, layers // 3), layers - 1)

    def check_cost(self, tokens: int) -> int:
        """The cost of these tokens through the layers below the check layer, in tokens through all layers."""
        layers = len(self.storage.keys) + self._loaded.spec.readers
        return -(-tokens * self.check_layer // layers) if tokens else 0

    def run_to_check(self, work: Sequence[Work]) -> None:
        """Run packed work up to the keys of the check layer. No KV is written for higher layers."""
        plan = build_plan([w.part for w in work])
        context = PassContext(self.backend, self.storage, plan, self._loaded.spec, last_layer=self.check_layer)
        with on_device(self.backend.device), suppress(EndOfPassError):
            self._run([token for w in work for token in w.ids], [], context, self._adapted(work))

    def key_deviation(
        self, here: npt.NDArray[np.int64], stored: npt.NDArray[np.int64], shift: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:  # (tokens,)
        """The distance between the check layer's keys at two places, given as slots (tokens,).

        Tokens at the first place are ``shift`` positions further on.
        """
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
        """(adapter, number of rows) for each piece of work; empty without adapters."""
        return [(w.adapter, w.part.rows) for w in work] if self._adapters else []

    def _run(
        self, ids: list[int] | Tensor, rows: Sequence[int], context: PassContext, adapted: Sequence[tuple[bytes, int]]
    ) -> Tensor:
        """Upload the inputs and run the model. ``adapted``: see ``_adapted``."""
        self.backend.prepare(context.plan)
        device = self.backend.device
        # copied, because the plan's array is advanced in place
        positions = upload(context.plan.positions.copy(), device)
        wanted = upload(np.array(rows, dtype=np.int64), device)
        known = ids if isinstance(ids, Tensor) else upload(np.array(ids, dtype=np.int64), device)
        with self._adapters.applied(adapted, rows):
            return self._compute(known, positions, context, wanted)

    def _forward(self, ids: Tensor, positions: Tensor, plan: Plan, rows: Tensor | None) -> Tensor:
        """See ``graphs.Forward``."""
        return self._compute(ids, positions, PassContext(self.backend, self.storage, plan, self._loaded.spec), rows)

    def _compute(self, ids: Tensor, positions: Tensor, context: PassContext, rows: Tensor | None) -> Tensor:
        """The model's logits. ``ids`` and ``positions`` are (rows,); ``rows`` have logits, None for all."""
        whole = context.plain and context.await_layer is None
        model, name = self._loaded.model, IMPLEMENTATION
        if self._compiled is not None and whole:  # other passes stop between layers or wait there
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

#: Number of probe texts, of which one must pass. Rounding can change a token's experts in single texts; wrong
#: frequencies fail all texts.
_TEXTS = 8

#: Tolerated error of logits, as a share of their spread. Rounding alone gives 1e-5 in fp32 and 0.03 in bf16 and int8.
#: In fp8 it gives 0.03 to 0.24, and the least over some texts stays within the same bound.
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
    model, graphs, found = runner._compiled, runner.graphs, []
    runner.graphs = None  # a recording would be replayed for both models
    try:
        for runner._compiled in (model, None):
            found.append(torch.cat([_whole(0, probe_ids(spec, 0)[:rows], runner, runs) for rows in (_HEAD, _TAIL, 1)]))
        off = max(error_of(one, other) for one, other in zip(*found, strict=True))
    except (RuntimeError, ImportError, NotImplementedError) as error:  # the compiler's errors are RuntimeErrors
        reason = str(error).strip().splitlines()[:1]
        raise ParameterError(
            f"compile is set, and torch.compile fails at this model: {type(error).__name__}: {' '.join(reason)[:300]}; "
            "leave compile out",
            code="model.not_compilable",
        ) from error
    finally:
        runner._compiled, runner.graphs = model, graphs
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
    """The larger error of a text's last logits from two changes: reading its head at a shift, and moving all of it."""
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
    return runner.run([Work(ids[_HEAD:], span)], [_TAIL - 1])


def error_of(logits: Tensor, expected: Tensor) -> float:
    """The error of logits as a share of their spread."""
    logits, expected = logits.float(), expected.float()
    spread = (expected - expected.mean()).norm().clamp_min(1e-9)
    return float((logits - expected).norm() / spread)
