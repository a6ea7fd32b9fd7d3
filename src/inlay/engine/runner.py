"""Forward passes of the stock model over packed work, with our attention in every layer.

``Runner`` runs the passes. ``PassGraphs`` records those of a GPU, and ``Selection`` measures tokens to recompute.

A GPU runs a pass of few rows faster than Python can launch its kernels. A recorded pass reads from fixed memory: ids,
positions, the rows with logits, and the backend's tables. These are overwritten before each replay. A smaller pass is
padded with rows that belong to no request and store nothing.

Decode steps are recorded on first use. Other passes have more shapes, and a recording can take as long as several
passes. They are recorded when their shape comes a second time.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.attention.backend import Backend, Recording, RecordingBackend
from inlay.attention.cpu import CpuBackend
from inlay.attention.mass import BLOCK_BYTES, AttentionMass
from inlay.attention.plan import Plan, build_plan, plan_of_rows
from inlay.engine.allocation import SequenceAllocation, Work
from inlay.kv.identity import TokenRun
from inlay.kv.store import SegmentStore
from inlay.models.compiling import OPAQUE, compiled
from inlay.models.device import on_device, upload
from inlay.models.few_rows import FewRowsPass, awake, most_rows_awake
from inlay.models.fused import LastLayer
from inlay.models.interface import IMPLEMENTATION, EndOfPassError, KeptRows, PassContext, attention_implementation
from inlay.models.load import LoadedModel
from inlay.models.lora import Adapters
from inlay.models.mixers.states import PassStates, StateSpan, StateStorage
from inlay.policy import Recompute
from inlay.prompt.composed import CachedSpan, ComposedPrompt, NewSpan, Scores, inexact_modules
from inlay.slots import SlotRange, cut

_WORTH_A_PLAN = 64  # fewer skipped rows save less than the plan of the kept rows costs

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
        record: records a pass: ``cuda_recorder()``, or a plain function in tests.
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
        beside, here = torch.cuda.Stream(), torch.cuda.current_stream()
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


def place_of(run: TokenRun) -> tuple[bytes, int]:
    """The identity of a run's start, wherever the run ends."""
    return run.digest, run.start


class Selection:
    """One selecting pass.

    Args:
        composed: its composed prompt.
        allocation: its own, with no work taken yet.
    """

    def __init__(self, recompute: Recompute, composed: ComposedPrompt, allocation: SequenceAllocation) -> None:
        self._composed = composed
        self._tail = allocation.tail
        self._mass: AttentionMass | None = None
        own = [prefill for prefill in allocation.prefill if not prefill.module]
        self._computed = [(prefill.keep, prefill.tokens_left) for prefill in own]
        if recompute.by_attention:
            last = composed[-1]
            assert isinstance(last, NewSpan), "the new text comes last"
            self._mass = AttentionMass(last.start + len(last.ids))
            own = own[-1:]
        for prefill in own:
            assert prefill.left is not None, "nothing is taken yet"
            prefill.left = replace(prefill.left, mass=self._mass, check=recompute.by_keys)

    def cost(self, chosen: ComposedPrompt, runner: Runner) -> int:
        """The cost in tokens through all layers; see Usage.selecting_tokens.

        Args:
            chosen: the final composed prompt. Work of this pass that it reuses is not counted.
        """
        kept = {place_of(part.run) for part in chosen if not isinstance(part, CachedSpan) and part.run is not None}
        tokens = sum(tokens for run, tokens in self._computed if run is None or place_of(run) not in kept)
        return tokens if self._mass is not None else runner.check_cost(tokens)

    def scores(self, store: SegmentStore, runner: Runner) -> Scores:
        """The measured scores, once the whole pass is computed."""
        if self._mass is not None:
            at = self._mass.by_position
            return {part.start: at[part.start : part.start + part.length] for part in inexact_modules(self._composed)}
        compared: list[tuple[int, npt.NDArray[np.int64]]] = []  # per module: its start, and one column per token
        taken = 0
        for before, part in zip((None, *self._composed), self._composed, strict=False):
            if not isinstance(part, NewSpan):
                continue
            if isinstance(before, CachedSpan) and before.start == part.start:
                stored = store.get(before.spec)
                if stored is not None:  # otherwise another copy was read, which is gone now
                    here = _numbers(cut(self._tail, taken, len(part.ids)))
                    there = _numbers(cut(stored.slots, before.first, before.length))
                    shift = np.full_like(here, before.start - before.first - before.spec.start)
                    compared.append((part.start, np.stack((here, there, shift))))
            taken += len(part.ids)
        if not compared:
            return {}
        columns = [each for _, each in compared]
        moved = runner.key_deviation(*np.hstack(columns))
        of_modules = np.split(moved, np.cumsum([each.shape[1] for each in columns])[:-1])
        return {start: own for (start, _), own in zip(compared, of_modules, strict=True)}


def _numbers(ranges: tuple[SlotRange, ...]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(each.first, each.end) for each in ranges])


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
        # the least number of rows that must be saved, None if all rows are computed in every layer
        self._least_saved = 1 if loaded.spec.keeps_rows and loaded.spec.readers else None
        if self._least_saved is None and LastLayer.serves(loaded.model):
            self._least_saved = _WORTH_A_PLAN
        self.storage = backend.make_pool(loaded.spec.shapes, kv_dtype or loaded.model.dtype, slots)
        self._few_rows = FewRowsPass.of(loaded.model, loaded.spec, backend, self.storage)
        self._most_awake = most_rows_awake(loaded.model) if isinstance(backend, CpuBackend) else 0
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
            return self._run_kept(known, rows, context, self._adapted(work))

    @contextmanager
    def unrecorded(self, *, compiled: bool) -> Iterator[None]:
        """Run the passes of a block without recordings, and with the compiled model only if ``compiled`` is True."""
        before = self._compiled, self.graphs
        self._compiled, self.graphs = before[0] if compiled else None, None
        try:
            yield
        finally:
            self._compiled, self.graphs = before

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
        hook = head.register_forward_pre_hook(lambda _, given: hidden.append(given[0][0]))
        try:
            with self.unrecorded(compiled=False):
                return self._run(ids, rows, context, adapted)
        finally:
            hook.remove()

    def _saves_rows(self, rows: int, wanted: int) -> bool:
        """True if some layers need only the wanted rows of a pass.

        The last layer needs only the keys and values of other rows, but recurrent layers behind it need its output.
        The compiled model expects all rows in every layer, and so do adapters.
        """
        if self._compiled is not None or self.states is not None:
            return False
        if not wanted:
            return True
        return self._least_saved is not None and rows - wanted >= self._least_saved and not self._adapters

    def _run_kept(
        self, ids: list[int] | Tensor, rows: Sequence[int], context: PassContext, adapted: Sequence[tuple[bytes, int]]
    ) -> Tensor:
        """Run a pass and compute only the wanted rows behind the keys of the last layer with keys of its own."""
        spec = self._loaded.spec
        if not rows:
            self.rows_saved += context.plan.rows * spec.readers
            with suppress(EndOfPassError):
                self._run(ids, [], replace(context, last_layer=len(spec.layers) - 1), adapted)
            return torch.empty(0, spec.vocab_size, dtype=self._loaded.model.dtype, device=self.backend.device)
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

        The layer is a third of the way up. The first layer is used only if there is no other, because its keys depend
        on the token alone.
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
        """See ``Forward``."""
        return self._compute(ids, positions, PassContext(self.backend, self.storage, plan, self._loaded.spec), rows)

    def _compute(self, ids: Tensor, positions: Tensor, context: PassContext, rows: Tensor | None) -> Tensor:
        """The model's logits. ``ids`` and ``positions`` are (rows,); ``rows`` have logits, None for all."""
        if self._few_rows is not None and self._compiled is None and self._few_rows.fits(context):
            with torch.inference_mode():
                return self._few_rows.logits(ids, positions, context, rows)
        whole = context.plain and context.await_layer is None
        model, name = self._loaded.model, IMPLEMENTATION
        if self._compiled is not None and whole:  # other passes stop between layers or wait there
            model, name = self._compiled, OPAQUE
        inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": positions[None], "inlay": context}
        run = partial(model, **inputs, use_cache=False, logits_to_keep=0 if rows is None else rows)
        stay = context.plan.rows <= self._most_awake and not context.watched and model is self._loaded.model
        with torch.inference_mode(), attention_implementation(self._loaded.model, name):
            output = awake(run) if stay else run()
        logits: Tensor = output.logits[0]
        return logits
