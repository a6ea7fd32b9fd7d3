"""The cost of a decode step with int8 KV beside KV in the model's dtype, in turns.

    python lab/benchmarks/kv_cache_dtype.py [MODEL] [BATCHxCONTEXT …]

Both pools contain the same noise; sequences share nothing. Attention is timed through all layers with the cache flushed
before each pass. Its GB/s of keys and values read is compared with the rate of copying, bytes read and written, from
the same run. Steps are whole forward passes. Prints a table of medians, then JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from inlay.attention.backend import AttentionOptions
from inlay.attention.plan import Part, build_plan, items_at
from inlay.attention.registry import get_backend
from inlay.attention.storage import KVStorage, LayerShape, bytes_per_token
from inlay.engine.allocation import Work
from inlay.engine.runner import Runner
from inlay.models.load import LoadedModel, load_model
from inlay.models.spec import dtype_name
from inlay.slots import SlotRange
from inlay_lab.bench.machine import GB, CacheFlush, clocked, describe_machine, in_turns, measure_ceilings

RUNS = 25


@dataclass(frozen=True)
class Case:
    """A step of ``batch`` sequences with ``context`` stored tokens each."""

    batch: int
    context: int

    @property
    def slots(self) -> int:
        return self.batch * (self.context + 1)

    def parts(self) -> list[Part]:
        found = []
        for first in range(0, self.slots, self.context + 1):
            stored = items_at((SlotRange(first, self.context),), 0)
            found.append(Part.of(self.context, 1, stored, (SlotRange(first + self.context, 1),)))
        return found


def fill(storage: KVStorage, layers: tuple[LayerShape, ...]) -> None:
    """Fill all slots with noise, the same for any dtype."""
    generator = torch.Generator().manual_seed(0)
    slots = storage.keys[0].shape[1]
    for number, layer in enumerate(layers):
        keys, values = (torch.randn(layer.kv_heads, slots, layer.head_dim, generator=generator) for _ in range(2))
        storage.write(number, SlotRange(0, slots), keys, values)


def measure(loaded: LoadedModel, case: Case) -> dict[str, Any]:
    """One row."""
    model, shapes = loaded.model, loaded.spec.shapes
    dtypes = {dtype_name(model.dtype): model.dtype, "int8": torch.int8}
    ceilings = measure_ceilings([dtype_name(model.dtype)])
    flush = CacheFlush()
    steps, passes = {}, {}
    heads = model.config.num_attention_heads
    for name, dtype in dtypes.items():
        backend = get_backend("cpu")
        runner = Runner(loaded, backend, case.slots, kv_dtype=dtype)
        fill(runner.storage, tuple(shapes))
        parts = case.parts()
        work = [Work((number,), part) for number, part in enumerate(parts)]
        steps[f"{name} step"] = clocked(partial(runner.run, work, list(range(case.batch))))
        plan = build_plan(parts)
        query = torch.randn(heads, case.batch, shapes[0].head_dim).to(model.dtype)
        new = torch.randn(shapes[0].kv_heads, case.batch, shapes[0].head_dim).to(model.dtype)

        def attend(backend=backend, storage=runner.storage, plan=plan, query=query, new=new) -> None:
            for layer, described in enumerate(loaded.spec.layers):
                options = AttentionOptions(scale=described.head_dim**-0.5, rotary=described.rotary)
                backend.attend(query, new, new, storage, plan, layer, options)

        passes[f"{name} attention"] = clocked(attend, before=flush)
    with torch.inference_mode():
        timed = in_turns(steps | passes, RUNS)
    row: dict[str, Any] = {"batch": case.batch, "context": case.context, "copy_gb_s": ceilings.copy_gb_s}
    for name, dtype in dtypes.items():
        read = case.slots * bytes_per_token(shapes, dtype)
        rate = read / timed[f"{name} attention"].seconds / GB
        row[name] = {
            "step_ms": round(timed[f"{name} step"].ms, 2),
            "attention_ms": round(timed[f"{name} attention"].ms, 2),
            "attention_fastest_ms": round(timed[f"{name} attention"].fastest * 1000, 2),
            "kv_mb": round(read / 1e6, 1),
            "gb_s": round(rate, 2),
            "of_copy": round(rate / ceilings.copy_gb_s, 3),
        }
    return row


def head(dtype: str) -> str:
    """The head of the table. ``dtype`` is the model's."""
    columns = f"{dtype}: step, attention | `int8`: step, attention | `int8` against {dtype}"
    return f"| model, batch × tokens | {columns} | share of copying, {dtype} and `int8` |\n|---|---|---|---|---|"


def line(model: str, dtype: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    ours, ints = row[dtype], row["int8"]
    times = [f"{each['step_ms']:.4g}, {each['attention_ms']:.4g} ms" for each in (ours, ints)]
    ratios = [f"{ints[name] / ours[name]:.2f}" for name in ("step_ms", "attention_ms")]
    shares = [f"{each['of_copy']:.2f}" for each in (ours, ints)]
    name = f"`{model}`, {row['batch']} × {row['context']:,}"
    return f"| {' | '.join([name, *times, ', '.join(ratios), ', '.join(shares)])} |"


def main(model: str, cases: list[Case]) -> None:
    loaded = load_model(model, seed=0, weights="packed", device="cpu")
    dtype = dtype_name(loaded.model.dtype)
    print(head(dtype))
    rows = []
    for case in cases:
        rows.append(measure(loaded, case))
        print(line(model, dtype, rows[-1]), flush=True)
    print(json.dumps({"model": model, "rows": rows, "machine": describe_machine()}))


if __name__ == "__main__":
    asked = [Case(*map(int, each.split("x"))) for each in sys.argv[2:]] or [Case(8, 4096), Case(1, 8192)]
    main(sys.argv[1] if len(sys.argv) > 1 else "random:qwen2.5-0.5b", asked)
