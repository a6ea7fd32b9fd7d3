"""The throughput benchmark: every workload through every column, in turns, for each model.

A row of the result has the request, every column's cell, and the ratios of our figures to the others'.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import psutil
from transformers import PreTrainedModel

from inlay.client.async_llm import AsyncLLM
from inlay.errors import CapacityError, ContextError
from inlay.models.load import DTYPES, LoadedModel, load_model
from inlay.models.spec import ModelSpec, dtype_name
from inlay_lab.bench.floor import Rates
from inlay_lab.bench.machine import GB, describe_machine, measure_ceilings
from inlay_lab.bench.stock import check_another_fits, load_stock
from inlay_lab.bench.throughput.columns import Continuous, Ours, Stock
from inlay_lab.bench.throughput.engine_column import EngineColumn, llama_column
from inlay_lab.bench.throughput.ledger import Cell, Ledger
from inlay_lab.bench.throughput.memory import ResidentDocuments
from inlay_lab.bench.throughput.runs import Bounds, Column, Pace, Run, figures, in_turns, pace_of
from inlay_lab.bench.throughput.setting import CHUNK, Case, Group, ThroughputSetting, groups
from inlay_lab.bench.throughput.steps import Cost, summary


def row_of(about: Mapping[str, Any], cells: Mapping[str, Cell]) -> dict[str, Any]:
    """A row of the result.

    ``ratio`` is our tokens a second over theirs, unless arrival rates set them; ``ratio_prepared`` includes the time of
    preparation. ``ttft_ratio`` is their median time to the first token over ours. ``kv_saved`` is the share of the
    unshared column's KV per running request that we save.

    Args:
        about: The settings of the row.
        cells: By column, ours first. A column that could not run has ``skipped``.
    """
    ran = {name: cell for name, cell in cells.items() if "skipped" not in cell}
    ours = ran.pop("inlay", None)
    row: dict[str, Any] = {**about, "columns": dict(cells)}
    row |= {"ratio": None, "ratio_prepared": None, "ttft_ratio": None, "kv_saved": None}
    if ours is None:
        return row
    row["ttft_ratio"] = {name: _over(cell["ttft_ms"]["p50"], ours["ttft_ms"]["p50"]) for name, cell in ran.items()}
    if about["rate"] is None:
        row["ratio"] = {name: _over(ours["tokens_s"], cell["tokens_s"]) for name, cell in ran.items()}
        row["ratio_prepared"] = {name: _over(_prepared(ours), _prepared(cell)) for name, cell in ran.items()}
    if "off" in ran:
        row["kv_saved"] = round(1 - _held(ours) / _held(ran["off"]), 4)
    return row


def _over(one: float, other: float) -> float:
    return round(one / other, 3)


def _prepared(cell: Cell) -> float:
    """Tokens a second including the time of preparation."""
    return float(cell["tokens_s"] * cell["wall_s"] / (cell["wall_s"] + cell["prepare_s"]))


def _held(cell: Cell) -> float:
    """Bytes of KV per running request. Columns may have run different numbers of them."""
    return float(cell["kv_peak_bytes"] / cell["peak_batch"])


_STOCK = {"stock", "transformers"}


@dataclass(frozen=True)
class News:
    """Progress: the latest cell.

    Attributes:
        done, total: Number of cells by now and in all.
        about: The settings of the cell.
        kept: An earlier run measured it.
    """

    done: int
    total: int
    about: Mapping[str, Any]
    cell: Cell
    kept: bool


Tell = Callable[[News], None]


def measure_throughput(setting: ThroughputSetting, tell: Tell | None = None) -> dict[str, Any]:
    """Measure every row; returns ``{"rows": […], …}``. Raises InlayError."""
    machine = describe_machine()
    with Ledger(setting.out, machine) as ledger:
        ceilings = measure_ceilings(list(DTYPES), quick=setting.quick)
        report = _Report(setting, ledger, tell)
        rows: list[dict[str, Any]] = []
        for name in setting.models:
            rows += _Subject(setting, name, report).rows()
            gc.collect()
    return {
        "rows": rows,
        "batch": setting.batch,
        "budget_s": setting.budget_s,
        "kept_cells": report.kept_cells,
        "quick": setting.quick,
        "ceilings": ceilings.report(),
        "machine": machine,
    }


@dataclass
class _Report:
    """Stores cells as they arrive and reports progress."""

    setting: ThroughputSetting
    ledger: Ledger
    tell: Tell | None
    done: int = 0
    kept_cells: int = 0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        setting = self.setting
        cases = [case for part in setting.parts for group in groups(setting, part) for case in group]
        documents = len(set(setting.documents)) if "memory" in setting.parts else 0
        self.total = len(setting.models) * (sum(len(case.columns) for case in cases) + documents)

    def kept(self, about: Mapping[str, Any]) -> Cell | None:
        """The cell of an earlier run of the benchmark, or None."""
        cell = self.ledger.get(about)
        if cell is not None:
            self.kept_cells += 1
            self._say(about, cell, kept=True)
        return cell

    def put(self, about: Mapping[str, Any], cell: Cell) -> Cell:
        self.ledger.put(about, cell)
        self._say(about, cell, kept=False)
        return cell

    def _say(self, about: Mapping[str, Any], cell: Cell, *, kept: bool) -> None:
        self.done += 1
        if self.tell is not None:
            self.tell(News(self.done, self.total, about, cell, kept))


class _Subject:
    """One model and its rows. The stock model is loaded on first use."""

    def __init__(self, setting: ThroughputSetting, name: str, report: _Report) -> None:
        self._setting = setting
        self._report = report
        self._loaded = load_model(
            name,
            dtype=setting.dtype,
            seed=0,
            weights=setting.weights,
            quantization=setting.quantization,
            device="cpu",
        )
        self._about: dict[str, Any] = {
            "model": name,
            "dtype": dtype_name(self._loaded.model.dtype),
            "weights": setting.weights,
            "quantization": setting.quantization,
            "kv_cache_dtype": setting.kv_cache_dtype,
        }
        self._rates = Rates.measured(self._about["dtype"], quick=setting.quick)
        for part in setting.parts:  # an error now, not after minutes of measuring
            _kv_bytes(setting, part, self._loaded)
            if _STOCK & {name for group in groups(setting, part) for name in group[0].columns}:
                model = self._loaded.model
                check_another_fits(model.config, model.dtype, "use a smaller model, or --against off")

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of all parts, in their order."""
        for part in self._setting.parts:
            yield from self._part(part)
            gc.collect()  # frees the memory of the part's engine

    def _part(self, part: str) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            llm = stack.enter_context(_engine(self._setting, part, self._loaded))
            self._llama = stack.enter_context(closing(self._llama_cpp()))
            if part == "memory":
                yield from self._memory(llm)
            for group in groups(self._setting, part):
                yield from self._group(llm, group)

    def _group(self, llm: AsyncLLM, group: Group) -> Iterator[dict[str, Any]]:
        cost = Cost.of(llm, self._setting.longest(group[0].about["part"]))
        paces: dict[str, Pace | str] = {}
        shared: dict[str, Cell] = {}
        for case in group:
            cells = {name: self._report.kept(self._key(case, name)) for name in case.columns}
            missing = {name: self._column(llm, name) for name, cell in cells.items() if cell is None}
            for name, run in self._runs(llm, case, missing, paces):
                cells[name] = self._report.put(self._key(case, name), _cell(run, cost, self._rates))
            made = {name: cell for name, cell in cells.items() if cell is not None}
            shared |= {name: cell | _when(case) for name, cell in made.items() if name != "inlay"}
            yield row_of(self._about | case.about, made | shared)

    def _runs(
        self, llm: AsyncLLM, case: Case, columns: Mapping[str, Column], paces: dict[str, Pace | str]
    ) -> Iterator[tuple[str, Run | str]]:
        if not columns:
            return
        setting, workload = self._setting, asyncio.run(case.make(llm))
        for name, column in columns.items():
            if name not in paces:
                paces[name] = pace_of(column, workload, setting.limit_s)
        bounds = Bounds(turns=setting.runs, batch=setting.batch, budget_s=setting.budget_s, limit_s=setting.limit_s)
        yield from in_turns(columns, workload, paces, bounds)

    def _memory(self, llm: AsyncLLM) -> Iterator[dict[str, Any]]:
        setting, shelf = self._setting, ResidentDocuments(llm, self._setting.users)
        for documents in sorted(set(setting.documents)):
            about = self._about | {"part": "memory", "documents": documents, "document_tokens": setting.users.document}
            key = about | {"question": setting.users.question, "budget_s": setting.budget_s}
            cell = self._report.kept(key)
            if cell is None:
                needed = shelf.seconds_for(documents)
                late = f"its documents take about {needed:.0f} s to compute; give --budget-s as much"
                cell = {"skipped": late} if needed > setting.budget_s else shelf.measure(documents)
                self._report.put(key, cell)
            yield about | cell

    def _column(self, llm: AsyncLLM, name: str) -> Column:
        if name in _STOCK:
            return (Stock if name == "stock" else Continuous)(self._stock, self._setting.batch)
        return self._llama if name == "llama.cpp" else Ours(llm, reuse=name == "inlay")

    def _llama_cpp(self) -> EngineColumn:
        """A column with a cache of the size that a part needs."""
        setting, model = self._setting, self._loaded.model
        size = token_bytes(self._loaded.spec, 2)  # llama.cpp keeps keys and values in 16 bits
        shared = max(setting.prefixes)
        longest = shared + setting.question + setting.completion
        return llama_column(
            model.config, self._about["dtype"], most=setting.batch, longest=longest, shared=shared, token_bytes=size
        )

    @cached_property
    def _stock(self) -> PreTrainedModel:
        return load_stock(self._loaded.name, self._about["dtype"])

    def _key(self, case: Case, column: str) -> dict[str, Any]:
        """All settings that determine a cell."""
        setting = self._setting
        bounds = {"batch": setting.batch, "runs": setting.runs, "budget_s": setting.budget_s, "quick": setting.quick}
        return self._about | case.about | case.sizes | bounds | {"column": column}


@contextmanager
def _engine(setting: ThroughputSetting, part: str, loaded: LoadedModel) -> Iterator[AsyncLLM]:
    """An engine for one part. A shared engine would report memory that another part has touched."""
    room = _kv_bytes(setting, part, loaded)
    # Background work between two runs would leave KV for the next one.
    idle: dict[str, Any] = {"profile": "off", "promotion_memory": 0, "kv_cache_dtype": setting.kv_cache_dtype}
    llm = AsyncLLM(loaded, seed=0, kv_memory=room, chunk_size=CHUNK, max_num_seqs=setting.batch, **idle)
    try:
        yield llm
    finally:
        llm.shutdown()


def _kv_bytes(setting: ThroughputSetting, part: str, loaded: LoadedModel) -> int:
    """Bytes of KV that a part needs. Raises ContextError or CapacityError if it cannot run."""
    longest, most = setting.longest(part), loaded.spec.max_positions
    if longest >= most:
        raise ContextError(f"{part}: requests of {longest} tokens do not fit the model's context of {most}")
    needed = setting.chunks(part) * CHUNK * token_bytes(loaded.spec, loaded.model.dtype.itemsize)
    free = psutil.virtual_memory().available
    if needed > free:
        raise CapacityError(
            f"{part}: {setting.chunks(part) * CHUNK} tokens take {needed / GB:.1f} GB of KV where nothing is shared, "
            f"and {free / GB:.1f} GB are free; give a smaller batch, shorter prompts or fewer documents"
        )
    return needed


def token_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return sum(shape.elements for shape in spec.shapes) * itemsize


def _when(case: Case) -> dict[str, Any]:
    """The hit rate of a cell that stands in the rows of all hit rates."""
    return {name: value for name, value in case.about.items() if name == "aimed_hit_rate"}


def _cell(run: Run | str, cost: Cost | None, rates: Rates) -> Cell:
    """A run's figures for a row, or the reason for no run."""
    if isinstance(run, str):
        return {"skipped": run}
    return figures(run) | {"steps": None if cost is None or not run.steps else summary(run.steps, cost, rates)}
