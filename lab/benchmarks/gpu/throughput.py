"""Tokens a second on a GPU: behind a shared prefix, and over modules in permuted order, by batch size.

    python lab/benchmarks/gpu/throughput.py --model random:llama-2-7b --batch 1 8 64

Columns: ``inlay``; ``off``, inlay without reuse; ``transformers``, its continuous batching; ``vllm`` with automatic
prefix caching, if installed. All have the same random weights and get the same token ids at once. 2,048 tokens are
shared: by all as a prefix (``prefix``), or as 6 of 12 modules in each prompt's own order (``modules``). inlay computes
the modules beforehand (``prepare_s``).

Each column has the whole device in turn, runs every batch once to warm up, and then ``--runs`` times; the median
counts.
The floor is that of inlay's steps: their distinct bytes over the measured copy rate, or their operations over the
measured rate of products. ``as_off`` is the share of tokens equal to those of ``off``. It falls soon with random bf16
weights, and modules encoded alone change answers. ``--dry`` uses small sizes for options that are not given.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Ceilings, Clock, device_of, named, options, report

DEFAULTS = {
    "model": ["random:llama-2-7b"],
    "part": ["prefix", "modules"],
    "batch": [1, 2, 4, 8, 16, 32, 64, 128],
    "shared": 2048,
    "question": 32,
    "completion": 64,
    "limit_s": 600.0,
}
DRY = {"model": ["random:tiny"], "batch": [1, 3], "shared": 96, "question": 8, "completion": 4}
COLUMNS = ("inlay", "off", "transformers", "vllm")


def setting_of(asked: Any, name: str, batch: int) -> Any:
    """The setting for one model and batch size."""
    from inlay_lab.bench.throughput.setting import ThroughputSetting
    from inlay_lab.bench.throughput.workload import CHOSEN

    return ThroughputSetting(
        models=(name,), parts=tuple(asked.part), columns=("inlay", "off", "transformers"), requests=batch, batch=batch,
        prefixes=(asked.shared,), question=asked.question, completion=asked.completion, budget_s=asked.limit_s / 2,
        module_tokens=max(1, round(asked.shared / CHOSEN)), module_completion=asked.completion,
    )  # fmt: skip


@dataclass
class Asked:
    """A workload and its results.

    Attributes:
        about: Fields that identify its row.
        ids: The answers of each column.
    """

    about: dict[str, Any]
    workload: Any
    cells: dict[str, Any] = field(default_factory=dict)
    ids: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The row: cells, ratios, and the floor of all steps in tokens a second."""
        from inlay_lab.bench.throughput.measure import row_of

        for name in self.ids if "off" in self.ids else ():
            pairs = [pair for both in zip(self.ids[name], self.ids["off"]) for pair in zip(*both)]  # noqa: B905
            self.cells[name]["as_off"] = sum(one == other for one, other in pairs) / len(pairs)
        row, steps = row_of(self.about, self.cells), self.cells["inlay"].get("steps")
        if steps is None:  # it could not run, or its layers have windows
            return row | {"floor_tokens_s": None, "of_floor": None}
        tokens, floor = self.workload.completion * len(self.workload.asks), steps["floor_s"]
        return row | {"floor_tokens_s": tokens / floor, "of_floor": floor / self.cells["inlay"]["wall_s"]}

    def measure(self, name: str, column: Any, runs: int, limit_s: float) -> Any:
        """Run a column, once to warm up; returns the median run, or None if it cannot run."""
        from inlay.errors import InlayError
        from inlay_lab.bench.throughput.runs import Bounds, Pace, figures, in_turns

        asks = len(self.workload.asks)
        everything = Pace(token_s=0.0, step_s=0.0, rows=asks)
        bounds = Bounds(turns=runs, batch=asks, budget_s=limit_s, limit_s=limit_s)
        try:
            column.run(self.workload, limit_s)
            ((_, run),) = in_turns({name: column}, self.workload, {name: everything}, bounds)
        except InlayError as error:
            run = str(error)
        if isinstance(run, str):
            self.cells[name] = {"skipped": run}
            return None
        self.cells[name] = figures(run)
        self.ids[name] = [answer.ids for answer in run.answers]
        return run


def measure_ours(asked: Any, device: Any, name: str, ceilings: Ceilings) -> list[Asked]:
    """All workloads of a model, with the cells of inlay's columns."""
    from inlay.client.async_llm import AsyncLLM
    from inlay.models.load import load_model
    from inlay.models.spec import dtype_name
    from inlay_lab.bench.floor import Rates
    from inlay_lab.bench.throughput.columns import Ours
    from inlay_lab.bench.throughput.measure import token_bytes
    from inlay_lab.bench.throughput.setting import CHUNK, groups
    from inlay_lab.bench.throughput.steps import Cost, summary

    free_memory()
    loaded = load_model(name, dtype=dtype_of(asked), seed=0, weights="stock", device=str(device))
    dtype = dtype_name(loaded.model.dtype)
    largest = setting_of(asked, name, max(asked.batch))
    chunks = max(largest.chunks(part) for part in asked.part)
    room = None if device.type == "cuda" else chunks * CHUNK * token_bytes(loaded.spec, loaded.model.dtype.itemsize)
    gemm = {1 << power: ceilings.gemm_tflop_s[dtype] * 1000 for power in range(12)}  # one rate for all sizes
    rates = Rates(dtype, ceilings.copy_gb_s, gemm)
    llm = AsyncLLM(
        loaded, seed=0, kv_memory=room, chunk_size=CHUNK, max_num_seqs=max(asked.batch), profile="off",
        promotion_memory=0,
    )  # fmt: skip
    found = []
    try:
        for part in asked.part:
            for batch in asked.batch:
                ((case,),) = groups(setting_of(asked, name, batch), part)
                one = Asked({"model": name, "dtype": dtype} | case.about, asyncio.run(case.make(llm)))
                for column in ("off", "inlay"):
                    run = one.measure(column, Ours(llm, reuse=column == "inlay"), asked.runs, asked.limit_s)
                    cost = Cost.of(llm, largest.longest(part))
                    if run is not None and cost is not None:
                        one.cells[column]["steps"] = summary(run.steps, cost, rates)
                found.append(one)
                tell(part, batch, one.cells)
    finally:
        llm.shutdown()
    return found


def free_memory() -> None:
    """Free unused memory of the device."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def dtype_of(asked: Any) -> str:
    return "float32" if asked.dry else "bfloat16"


@contextmanager
def others(asked: Any, device: Any, name: str, column: str, found: list[Asked]) -> Iterator[Any]:
    """Open another engine's column: a function from batch size to column. Raises ModelError."""
    from inlay_lab.bench.stock import load_stock
    from inlay_lab.bench.throughput.columns import Continuous
    from inlay_lab.bench.throughput.engine_column import vllm_column

    on_device = column == "transformers"
    model = load_stock(name, dtype_of(asked), str(device) if on_device else "cpu")
    if on_device:
        yield lambda batch: Continuous(model, batch)
        return
    longest = max(one.workload.longest for one in found)
    with vllm_column(model, most=max(asked.batch), longest=longest) as vllm:
        yield lambda batch: vllm


def measure_others(asked: Any, device: Any, name: str, column: str, found: list[Asked]) -> None:
    """Add the cells of another engine's column."""
    from inlay.errors import ModelError

    free_memory()
    try:
        with others(asked, device, name, column, found) as of_size:
            for one in found:
                batch = len(one.workload.asks)
                one.measure(column, of_size(batch), asked.runs, asked.limit_s)
                tell(one.about["part"], batch, {column: one.cells[column]})
    except ModelError as error:
        print(f"{column} is left out: {error}", flush=True)
        for one in found:
            one.cells[column] = {"skipped": str(error)}


def tell(part: str, batch: int, cells: dict[str, Any]) -> None:
    print(part, batch, {name: cell.get("tokens_s", cell.get("skipped")) for name, cell in cells.items()}, flush=True)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for every model and part: tokens a second over the batch, a line for every column and the floor."""
    from matplotlib.figure import Figure

    from inlay.authoring.plot import save

    panels = list(dict.fromkeys((row["model"], row["part"]) for row in rows))
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, (model, part) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        shown = [row for row in rows if (row["model"], row["part"]) == (model, part)]
        for name in COLUMNS:
            ran = [row for row in shown if "tokens_s" in row["columns"][name]]
            if ran:
                tokens = [row["columns"][name]["tokens_s"] for row in ran]
                axes.plot([row["requests"] for row in ran], tokens, "o-", markersize=4, label=name)
        floors = [(row["requests"], row["floor_tokens_s"]) for row in shown if row["floor_tokens_s"]]
        axes.plot([batch for batch, _ in floors], [tokens for _, tokens in floors], "k:", label="floor")
        axes.set(title=f"{model}, {part}", xlabel="requests at once", ylabel="tokens/s", xscale="log", yscale="log")
        axes.grid(color="#DDDDDD")
        axes.legend(frameon=False)
    save(figure, path, option="--out")


def main() -> None:
    asked = options(__doc__ or "", runs=5, **DEFAULTS)
    if asked.dry:
        for name, small in DRY.items():  # options that the user gave stay
            if getattr(asked, name) == DEFAULTS[name]:
                setattr(asked, name, small)
    device = device_of(asked)
    ceilings = Ceilings.measure(Clock(device, max(3, asked.runs)), device, [dtype_of(asked)], dry=asked.dry)
    rows = []
    for name in asked.model:
        found = measure_ours(asked, device, name, ceilings)
        for column in COLUMNS[2:]:
            measure_others(asked, device, name, column, found)
        for row in (one.row() for one in found):
            rows.append(row)
            told = {each: cell.get("tokens_s") for each, cell in row["columns"].items()}
            print(name, row["part"], row["requests"], "floor", round(row["floor_tokens_s"] or 0), told, flush=True)
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed", flush=True)
    else:
        folder = asked.out / named(device)
        folder.mkdir(parents=True, exist_ok=True)
        draw(rows, folder / "throughput.svg")
    report("throughput", asked, device, ceilings, rows)


if __name__ == "__main__":
    main()
