"""The tables and figures of the attention benchmark. Each row times the same decode step in six columns:

- ``ours``: shared chunks stored once and read by all rows together (chunk-first), then each row's own chunks.
- ``paged``: the paper's PagedAttn*. Shared chunks are stored once, and every row reads them separately.
- ``unshared``: our kernel; every sequence has its own copy.
- ``sdpa``: one call of torch's scaled_dot_product_attention over all sequences' own keys. KV heads are not expanded.
- ``flash``: torch's flash kernel for the CPU, one call per sequence. Query heads of one KV head are rows of one call.
- ``naive``: matmul, softmax, matmul in torch.

A step writes the new tokens' keys and values and attends; it returns (batch, heads, head_dim).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inlay.attention.backend import Backend
from inlay.attention.plan import build_plan
from inlay.attention.registry import get_backend
from inlay.errors import ParameterError
from inlay.models.load import DTYPES
from inlay.settings import check_choice
from inlay_lab.bench.attention.cases import Case, Content, Dense, Pages, SegmentCase, measure_segments
from inlay_lab.bench.attention.plans import PrefillCase, measure_plans, measure_prefill
from inlay_lab.bench.machine import (
    GB,
    CacheFlush,
    Ceilings,
    Progress,
    Timing,
    clocked,
    describe_machine,
    in_turns,
    measure_ceilings,
)
from inlay_lab.options import check_least

#: One decode step: (batch, heads, head_dim).
Step = Callable[[], Tensor]

#: Storage of a column's keys and values: "shared" or "copies" (chunks of a pool), or "dense" (one tensor).
MEMORY = {
    "ours": "shared",
    "paged": "shared",
    "unshared": "copies",
    "sdpa": "dense",
    "flash": "dense",
    "naive": "dense",
}
COLUMNS = tuple(MEMORY)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def store(memory: str, case: Case, content: Content) -> Pages | Dense:
    """Keys and values of a case in one kind of storage."""
    return Dense(case, content) if memory == "dense" else Pages(case, content, copies=memory == "copies")


def step(column: str, stored: Pages | Dense, backend: Backend) -> Step:
    """The step of a column. ``stored`` must be of the kind ``MEMORY[column]``."""
    if isinstance(stored, Dense):
        return {"sdpa": _sdpa, "flash": _flash_each, "naive": _naive}[column](stored)
    return _attend(stored, backend, share=column != "paged")


def _attend(pages: Pages, backend: Backend, *, share: bool) -> Step:
    plan = build_plan(pages.parts, share=share)  # once for all layers and steps, as in the engine
    content = pages.content
    return lambda: backend.attend(content.query, content.key, content.value, pages.storage, plan, 0, pages.options)


def _sdpa(dense: Dense) -> Step:
    query = dense.content.query.transpose(0, 1).unsqueeze(2).contiguous()  # (batch, heads, 1, head_dim)
    grouped = query.shape[1] != dense.keys.shape[1]

    def run() -> Tensor:
        dense.append()
        output = scaled_dot_product_attention(query, dense.keys, dense.values, scale=dense.scale, enable_gqa=grouped)
        return output.squeeze(2)

    return run


def _flash_each(dense: Dense) -> Step:
    query = _grouped(dense)

    def run() -> Tensor:
        dense.append()
        rows = [
            _flash(query[i : i + 1], dense.keys[i : i + 1], dense.values[i : i + 1], scale=dense.scale)[0]
            for i in range(query.shape[0])
        ]
        return torch.cat(rows).flatten(1, 2)

    return run


def _naive(dense: Dense) -> Step:
    query = _grouped(dense)

    def run() -> Tensor:
        dense.append()
        weights = torch.softmax(query @ dense.keys.transpose(2, 3) * dense.scale, -1)
        return (weights @ dense.values).flatten(1, 2)

    return run


def _grouped(dense: Dense) -> Tensor:
    """(batch, kv_heads, query heads of each, head_dim)."""
    batch, kv_heads, _, head_dim = dense.keys.shape
    return dense.content.query.transpose(0, 1).reshape(batch, kv_heads, -1, head_dim).contiguous()


PARTS = ("table3", "figure3", "figure4", "segments", "prefill", "plan")
FRACTIONS = (0.0, 0.5, 0.75, 1.0)  # shared fractions of a prompt in table 3
_USABLE = 0.85  # of the free memory


@dataclass(frozen=True, kw_only=True)
class AttentionSetting:
    """Options of the attention benchmark. The defaults are the paper's sizes.

    Attributes:
        heads: Pairs of (query heads, KV heads).
        prompts: n_p of table 3, in tokens.
        figure_prompt: n_p = n_s of both figures, in tokens.
        completions: n_c of figure 3, in tokens.
        batches: Batch sizes of figure 4.
        segments, segment_tokens: Number and length of the segments in the part on segments.
        prefill, prefill_runs: Tokens of a prompt, and the numbers of runs that its slots lie in.
        plan_requests, modules: Requests in a plan, and modules that each request reads.
        repaired: Tokens of the partly recomputed segment.
        backend: Attention backend of our columns.
        runs: Least number of runs of each cell.

    Raises:
        ParameterError: A value is out of range or unknown.
    """

    parts: tuple[str, ...] = PARTS
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    heads: tuple[tuple[int, int], ...] = ((32, 32), (32, 8))
    head_dim: int = 128
    chunk: int = 64
    batch: int = 32
    prompts: tuple[int, ...] = (1024, 2048, 4096)
    figure_prompt: int = 2048
    completions: tuple[int, ...] = (0, 256, 512, 1024, 1536, 2048)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96)
    segments: int = 30
    segment_tokens: int = 10
    prefill: int = 4096
    prefill_runs: tuple[int, ...] = (1, 10, 57)
    plan_requests: int = 64
    modules: int = 1000
    recomputed: int = 2048
    columns: tuple[str, ...] = COLUMNS
    backend: str = "auto"
    runs: int = 5
    quick: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("parts", PARTS), ("dtypes", tuple(DTYPES)), ("columns", COLUMNS)):
            for word in getattr(self, name):
                check_choice(name.removesuffix("s"), word, allowed)
        for heads, kv_heads in self.heads:
            if min(heads, kv_heads) < 1 or heads % kv_heads:
                raise ParameterError(f"heads are {heads}/{kv_heads}; query heads must be a multiple of KV heads: 32/8")
        check_least(1, prompt=self.prompts, batch=(self.batch, *self.batches), figure_prompt=self.figure_prompt)
        check_least(1, chunk=self.chunk, runs=self.runs)
        check_least(0, completion=self.completions)

    def small(self) -> AttentionSetting:
        """The same parts at sizes that take seconds. Such figures say little."""
        return replace(
            self,
            heads=((4, 4), (4, 2)),
            head_dim=64,
            batch=4,
            prompts=(64, 128),
            figure_prompt=128,
            completions=(0, 64),
            batches=(1, 4),
            segments=6,
            prefill=512,
            prefill_runs=(1, 4),
            plan_requests=8,
            modules=50,
            runs=1,
            quick=True,
        )


def measure_attention(setting: AttentionSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Measure every part; returns ``{"table3": […], …, "ceilings": …, "machine": …}``. Raises ParameterError."""
    backend = get_backend(setting.backend)
    ceilings, flush = measure_ceilings(list(setting.dtypes), quick=setting.quick), CacheFlush(quick=setting.quick)
    work = [(part, case) for part in setting.parts for case in _cases(part, setting)]
    result: dict[str, Any] = {part: [] for part in setting.parts}
    with torch.inference_mode():
        for number, (part, case) in enumerate(work):
            if isinstance(case, SegmentCase):
                result[part].append(measure_segments(case, backend, setting.runs, flush))
            elif isinstance(case, PrefillCase):
                result[part].append(measure_prefill(case, backend, setting.runs, flush))
            elif case is None:
                sizes = (setting.plan_requests, setting.modules, setting.recomputed)
                result[part] += measure_plans(*sizes, setting.runs)
            else:
                result[part].append(_measure(case, setting, backend, ceilings, flush))
            if progress is not None:
                progress(number + 1, len(work))
    about = {"backend": backend.name, "head_dim": setting.head_dim, "chunk": setting.chunk, "quick": setting.quick}
    return result | about | {"ceilings": ceilings.report(), "machine": describe_machine()}


def _cases(part: str, setting: AttentionSetting) -> Iterator[Case | SegmentCase | PrefillCase | None]:
    """The rows of a part, in the order of its table. None stands for plans, which have neither dtype nor heads."""
    if part == "plan":
        yield None
        return
    for dtype in setting.dtypes:
        for heads, kv_heads in setting.heads:
            shape = (dtype, heads, kv_heads, setting.head_dim)
            if part == "prefill":
                yield PrefillCase(*shape, setting.prefill, setting.prefill_runs, setting.chunk)
            elif part == "segments":
                for query in ("decode", "batch", "prefill"):
                    yield SegmentCase(*shape, query, setting.segments, setting.segment_tokens, setting.chunk)
            else:
                for batch, context, shared in _sizes(part, setting):
                    yield Case(*shape, batch, context, shared, setting.chunk)


def _sizes(part: str, setting: AttentionSetting) -> Iterator[tuple[int, int, int]]:  # batch, context, shared
    if part == "table3":
        yield from ((setting.batch, prompt, int(prompt * share)) for prompt in setting.prompts for share in FRACTIONS)
    elif part == "figure3":
        for completion in setting.completions:
            yield setting.batch, setting.figure_prompt + completion, setting.figure_prompt
    else:
        yield from ((batch, setting.figure_prompt, setting.figure_prompt) for batch in setting.batches)


def _measure(
    case: Case, setting: AttentionSetting, backend: Backend, ceilings: Ceilings, flush: CacheFlush
) -> dict[str, Any]:
    """One row: all columns of one case."""
    content = Content(case)
    cells: dict[str, Any] = {}
    for columns, reason in _groups(case, setting.columns):
        if reason is not None:
            cells.update((column, {"skipped": reason}) for column in columns)
            continue
        stored = {memory: store(memory, case, content) for memory in dict.fromkeys(MEMORY[c] for c in columns)}
        steps = {column: clocked(step(column, stored[MEMORY[column]], backend), flush) for column in columns}
        for column, timing in in_turns(steps, setting.runs).items():
            cells[column] = _cell(case, column, timing, ceilings)
        del stored, steps
        gc.collect()
    sizes = {"batch": case.batch, "context": case.context, "shared": case.shared}
    shape = {"dtype": case.dtype, "heads": case.heads, "kv_heads": case.kv_heads}
    return shape | sizes | {"columns": {column: cells[column] for column in setting.columns}}


def _groups(case: Case, columns: tuple[str, ...]) -> Iterator[tuple[list[str], str | None]]:
    """Groups of columns that fit in memory together, for timing in turns.

    A column that does not fit alone comes with the reason. Free memory is read again for each group, after the group
    before it is freed.
    """
    waiting = {memory: case.kv_bytes(copies=memory != "shared") for memory in dict.fromkeys(MEMORY[c] for c in columns)}
    while waiting:
        room = free = int(psutil.virtual_memory().available * _USABLE)
        chosen = []
        for memory, needed in waiting.items():
            if needed <= room:
                chosen.append(memory)
                room -= needed
        reason = None
        if not chosen:
            chosen = [next(iter(waiting))]
            reason = f"its keys and values take {waiting[chosen[0]] / GB:.1f} GB, and {free / GB:.1f} GB may be used"
        for memory in chosen:
            del waiting[memory]
        yield [column for column in columns if MEMORY[column] in chosen], reason


def _cell(case: Case, column: str, timing: Timing, ceilings: Ceilings) -> dict[str, Any]:
    read = case.kv_bytes(copies=MEMORY[column] != "shared")
    least, bound = ceilings.seconds(case.flops, read, case.dtype)
    gb_s = read / timing.seconds / GB
    return {
        "ms": round(timing.ms, 4),
        "fastest_ms": round(timing.fastest * 1000, 4),
        "runs": timing.runs,
        "gflops": round(case.flops / timing.seconds / 1e9, 2),
        "gb_s": round(gb_s, 2),
        "distinct_gb": round(read / GB, 4),
        "ceiling_ms": round(least * 1000, 4),
        "of_ceiling": round(least / timing.seconds, 4),
        "bound": bound,
        "of_copy": round(gb_s / ceilings.copy_gb_s, 4),
        "tokens_s": round(case.batch / timing.seconds, 1),
    }
