"""The throughput benchmark: every workload through every column, in turns, for each model."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import psutil

from inlay.async_llm import AsyncLLM
from inlay.bench.machine import GB, Ceilings, describe_machine, measure_ceilings
from inlay.bench.stock import check_another_fits, load_stock
from inlay.bench.throughput.continuous import Continuous
from inlay.bench.throughput.ours import Ours
from inlay.bench.throughput.record import Run, figures
from inlay.bench.throughput.steps import Cost, summary
from inlay.bench.throughput.stock import Stock
from inlay.bench.throughput.workload import CHOSEN, MODULES, Workload, permuted_modules, shared_prefix
from inlay.bench.timing import Progress
from inlay.config import check_choice
from inlay.errors import CapacityError, ContextError, ModelError, ParameterError
from inlay.models.adapter import ModelSpec, dtype_name
from inlay.models.load import DTYPES, LoadedModel, load_model

PARTS = ("prefix", "modules")
COLUMNS = ("inlay", "off", "stock", "transformers")
ARRIVALS = ("batch", "poisson")
_CHUNK = 64


class Column(Protocol):
    """Runs a workload. Raises ModelError where it cannot."""

    def run(self, workload: Workload) -> Run: ...


@dataclass(frozen=True, kw_only=True)
class ThroughputSetting:
    """What to measure. Raises ParameterError.

    prefixes: shared tokens. question: each request's own. completion, module_completion: tokens of an answer.
    module_tokens: of each of 12 modules, 6 of which stand in a prompt. batch: the most requests that run at once.
    rates: requests a second, for Poisson arrivals. columns: who runs; ``inlay`` always does.
    """

    models: tuple[str, ...]
    parts: tuple[str, ...] = PARTS
    columns: tuple[str, ...] = COLUMNS
    arrivals: tuple[str, ...] = ("batch",)
    rates: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    requests: int = 16
    batch: int = 16
    prefixes: tuple[int, ...] = (0, 512, 1024, 2048)
    question: int = 32
    completion: int = 64
    module_tokens: int = 256
    module_completion: int = 16
    dtype: str = "auto"
    runs: int = 1
    quick: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("parts", PARTS), ("columns", COLUMNS), ("arrivals", ARRIVALS)):
            for word in getattr(self, name):
                check_choice(name if name == "arrivals" else name.removesuffix("s"), word, allowed)
        for name in ("requests", "batch", "question", "completion", "module_tokens", "module_completion", "runs"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if min(self.prefixes) < 0:
            raise ParameterError(f"prefix is {min(self.prefixes)}; it must be at least 0")
        if not all(rate > 0 and math.isfinite(rate) for rate in self.rates):
            raise ParameterError(f"rate is {min(self.rates)}; it must be a number of requests a second above 0")

    def small(self) -> ThroughputSetting:
        """The same questions at a size that takes seconds; such figures say little."""
        return replace(
            self,
            requests=4,
            batch=2,
            prefixes=(0, 64),
            question=8,
            completion=4,
            module_tokens=16,
            module_completion=4,
            rates=(50.0,),
            runs=1,
            quick=True,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its answer, and a few more, since texts do not cut exactly."""
        prefix = max(self.prefixes) + self.question + self.completion
        modules = CHOSEN * self.module_tokens + self.question + self.module_completion + 16
        return max({"prefix": prefix, "modules": modules}[part] for part in self.parts)


@dataclass(frozen=True)
class Case:
    """A workload and what its row says of it. rate: None where all requests are there at once."""

    part: str
    workload: Workload
    rate: float | None
    prefix: int | None


def measure_throughput(setting: ThroughputSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Measure every row; returns ``{"rows": […], …}``. Raises InlayError."""
    ceilings = measure_ceilings(list(DTYPES), quick=setting.quick)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(setting.models):
        for done, total, row in _model_rows(setting, name, ceilings):
            rows.append(row)
            if progress is not None:
                progress(number * total + done, len(setting.models) * total)
        gc.collect()
    return {
        "rows": rows,
        "batch": setting.batch,
        "quick": setting.quick,
        "ceilings": ceilings.report(),
        "machine": describe_machine(),
    }


def _model_rows(setting: ThroughputSetting, name: str, ceilings: Ceilings) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The rows of one model, each with how many there are by now and in all."""
    llm = _engine(setting, load_model(name, dtype=setting.dtype, seed=0))
    try:
        columns = _columns(setting, llm)
        cases = asyncio.run(_cases(setting, llm))
        cost = Cost.of(llm)
        for done, case in enumerate(cases):
            runs, left_out = _in_turns(columns, case.workload, setting.runs)
            cells = {column: _cell(run, cost, ceilings) for column, run in runs.items()} | left_out
            yield done + 1, len(cases), _row(name, cost.dtype, case, {column: cells[column] for column in columns})
    finally:
        llm.shutdown()


def _engine(setting: ThroughputSetting, loaded: LoadedModel) -> AsyncLLM:
    """An engine with room for a full batch in which nothing is shared, and for all modules."""
    longest = loaded.spec.max_positions
    if setting.longest >= longest:
        raise ContextError(f"requests of {setting.longest} tokens do not fit the model's context of {longest}")
    chunks = setting.batch * (-(-setting.longest // _CHUNK) + CHOSEN + 2)
    chunks += -(-MODULES * setting.module_tokens // _CHUNK) + MODULES
    needed = chunks * _CHUNK * token_bytes(loaded.spec, loaded.model.dtype.itemsize)
    free = psutil.virtual_memory().available
    if needed > free:
        raise CapacityError(
            f"{setting.batch} requests of {setting.longest} tokens take {needed / GB:.1f} GB of KV where nothing is "
            f"shared, and {free / GB:.1f} GB are free; give a smaller batch or shorter prompts"
        )
    return AsyncLLM(loaded, seed=0, kv_memory=needed, chunk_size=_CHUNK, max_num_seqs=setting.batch)


def token_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return sum(2 * layer.kv_heads * layer.head_dim for layer in spec.layers) * itemsize


def _columns(setting: ThroughputSetting, llm: AsyncLLM) -> dict[str, Column]:
    made: dict[str, Column] = {"inlay": Ours(llm, reuse=True)}
    if "off" in setting.columns:
        made["off"] = Ours(llm, reuse=False)
    if {"stock", "transformers"} & set(setting.columns):
        model = llm.loaded.model
        check_another_fits(model.config, model.dtype, "use a smaller model, or --against off")
        stock = load_stock(llm.model_name, dtype_name(model.dtype))
        others: dict[str, Callable[[], Column]] = {
            "stock": lambda: Stock(stock, setting.batch),
            "transformers": lambda: Continuous(stock, setting.batch),
        }
        made |= {column: make() for column, make in others.items() if column in setting.columns}
    return made


async def _cases(setting: ThroughputSetting, llm: AsyncLLM) -> list[Case]:
    """The rows of a model, in the order of its tables."""
    cases = []
    for part in setting.parts:
        for prefix, workload in await _workloads(part, setting, llm):
            if "batch" in setting.arrivals:
                cases.append(Case(part, workload, None, prefix))
            if "poisson" in setting.arrivals:
                cases += [Case(part, workload.arriving(rate, 0), rate, prefix) for rate in setting.rates]
    return cases


async def _workloads(part: str, setting: ThroughputSetting, llm: AsyncLLM) -> list[tuple[int | None, Workload]]:
    """The workloads of a part, each with its shared prefix where it has one."""
    sizes = {"requests": setting.requests, "question": setting.question}
    if part == "modules":
        tokens, completion = setting.module_tokens, setting.module_completion
        return [(None, await permuted_modules(llm, tokens=tokens, completion=completion, **sizes))]
    return [
        (prefix, shared_prefix(llm.vocab_size, prefix=prefix, completion=setting.completion, **sizes))
        for prefix in setting.prefixes
    ]


def _in_turns(
    columns: dict[str, Column], workload: Workload, turns: int
) -> tuple[dict[str, Run], dict[str, dict[str, Any]]]:
    """Each column's run of median time, and a cell with the reason for those that cannot run.

    A first, small run of each warms up and does not count. Every turn has an order of its own.
    """
    runs: dict[str, list[Run]] = {name: [] for name in columns}
    left_out: dict[str, dict[str, Any]] = {}
    shuffle = random.Random(0).shuffle
    for turn in range(turns + 1):
        order = [name for name in columns if name not in left_out]
        shuffle(order)
        for name in order:
            try:
                run = columns[name].run(workload if turn else workload.small())
            except ModelError as error:
                left_out[name] = {"skipped": str(error)}
                continue
            if turn:
                runs[name].append(run)
    done = {name: sorted(each, key=lambda run: run.wall_s) for name, each in runs.items() if name not in left_out}
    return {name: each[len(each) // 2] for name, each in done.items()}, left_out


def _cell(run: Run, cost: Cost, ceilings: Ceilings) -> dict[str, Any]:
    return figures(run) | {"steps": summary(run.steps, cost, ceilings) if run.steps else None}


def _row(model: str, dtype: str, case: Case, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row of the JSON, with our figures against the others'.

    ratio: our tokens a second over theirs, where all requests were there at once; with what was prepared before
    counted in as ``ratio_prepared``. kv_saved: the share of the unshared column's KV that we do without.
    """
    ours, off = cells["inlay"], cells.get("off", {})
    saved = 1 - ours["kv_peak_bytes"] / off["kv_peak_bytes"] if off.get("kv_peak_bytes") else None
    others = {name: cell for name, cell in cells.items() if name != "inlay" and "skipped" not in cell}
    row: dict[str, Any] = {"model": model, "dtype": dtype, "part": case.part, "prefix": case.prefix, "rate": case.rate}
    row |= {"arrivals": "batch" if case.rate is None else "poisson", "requests": len(case.workload.asks)}
    row |= {"completion": case.workload.completion, "columns": cells, "ratio": None, "ratio_prepared": None}
    if case.rate is None:
        whole = ours["wall_s"] + ours["prepare_s"]
        row["ratio"] = {name: round(cell["wall_s"] / ours["wall_s"], 3) for name, cell in others.items()}
        row["ratio_prepared"] = {
            name: round((cell["wall_s"] + cell["prepare_s"]) / whole, 3) for name, cell in others.items()
        }
    return row | {"kv_saved": None if saved is None else round(saved, 4)}
