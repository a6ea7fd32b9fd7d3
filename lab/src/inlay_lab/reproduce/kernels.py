"""ChunkAttention's microkernel: table 1's roofline, table 3's grid, and diverging sequences of figures 3 and 4."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from inlay.attention.registry import get_backend
from inlay.models.linear import packed
from inlay.models.load import DTYPES
from inlay_lab.bench.attention.cases import Case, Content
from inlay_lab.bench.attention.measure import AttentionSetting, measure_attention, step, store
from inlay_lab.bench.attention.plot import draw_attention
from inlay_lab.bench.machine import CacheFlush, clocked, fast_dtype, in_turns
from inlay_lab.reproduce import published
from inlay_lab.reproduce.experiment import Data, Outcome, Published, Row, Settings, Table

_WIDTH, _INNER, _HEADS, _HEAD_DIM, _CONTEXT = 4096, 11008, 32, 128, 2048  # Llama-2 7B, as in table 1
_PARTS = ("query, key, value", "self-attention", "feed-forward")
_TWO = 2  # bytes of an element, and operations of a product and a sum
_ON_CPU = "a CPU, where the paper has an A100"


def measure_roofline(settings: Settings) -> Outcome:
    """Table 1: operations and bytes of a layer's parts in a decode step, by formula, and their times here."""
    rows, lines = [], []
    for batch in settings["batches"]:
        took = _layer_times(batch, settings["runs"])
        printed = published.ROOFLINE.get(batch)
        for number, (name, (flops, moved)) in enumerate(zip(_PARTS, complexity(batch), strict=True)):
            intensity = flops / moved
            lines.append(
                [
                    f"{batch}",
                    name,
                    f"{flops / 1e6:,.2f}",
                    f"{moved / 1e6:,.2f}",
                    f"{intensity:.2f}",
                    f"{took[name] * 1e6:,.0f}",
                    "" if printed is None else f"{printed[number][3]:,.2f}",
                ]
            )
            if printed is None:
                continue
            for what, unit, ours, value in (
                ("operations", "10⁶", flops / 1e6, printed[number][0]),
                ("bytes moved", "10⁶", moved / 1e6, printed[number][1]),
                ("operations a byte", "", intensity, printed[number][2]),
                ("time", "µs", took[name] * 1e6, printed[number][3]),
            ):
                on = published.ROOFLINE_ON if what == "time" else ""
                rows.append(Row(f"batch {batch}, {name}: {what}", unit, ours, Published(value, "table 1", on), _ON_CPU))
    header = ["batch", "part", "10⁶ operations", "10⁶ bytes", "operations a byte", "µs here", "µs, A100"]
    return Outcome(
        rows,
        [Table("One layer of Llama-2 7B, 2,048 tokens of context, 16 bit", header, lines)],
        [
            "Operations and bytes are counted as the paper does: weights, inputs and outputs once; for attention "
            "also its scores, written and read, over 2,049 keys, at 16 bit. Times are of layers in inlay's packed "
            f"form, and of its attention over copies of each sequence's own, with nothing shared, in {fast_dtype()}."
        ],
    )


def complexity(batch: int) -> list[tuple[int, int]]:
    """Operations and bytes of a layer's three parts, in a decode step of ``batch`` sequences."""
    keys = _CONTEXT + 1  # and the token itself
    projections = 3 * _WIDTH * _WIDTH
    forward = 3 * _WIDTH * _INNER
    scores = _HEADS * keys
    return [
        (_TWO * batch * projections, _TWO * (projections + batch * 4 * _WIDTH)),
        (_TWO * batch * 2 * keys * _WIDTH, _TWO * batch * (2 * keys * _WIDTH + 2 * _WIDTH + 2 * scores)),
        (_TWO * batch * forward, _TWO * (forward + batch * (3 * _WIDTH + 3 * _INNER))),
    ]


def _layer_times(batch: int, runs: int) -> dict[str, float]:
    """Median seconds of the parts."""
    case = Case(fast_dtype(), _HEADS, _HEADS, _HEAD_DIM, batch, _CONTEXT, 0, 64)
    x, inner = (torch.randn(batch, width).to(DTYPES[case.dtype]) for width in (_WIDTH, _INNER))
    project, up, down = (
        packed(torch.randn(size).to(DTYPES[case.dtype]), None)
        for size in ((3 * _WIDTH, _WIDTH), (2 * _INNER, _WIDTH), (_WIDTH, _INNER))
    )
    attend = step("unshared", store("copies", case, Content(case)), get_backend("auto"))
    flush = CacheFlush()

    def feed_forward() -> None:
        up(x)
        down(inner)

    calls: tuple[Callable[[], object], ...] = (partial(project, x), attend, feed_forward)
    with torch.inference_mode():
        meters = {name: clocked(call, flush) for name, call in zip(_PARTS, calls, strict=True)}
        timed = in_turns(meters, runs)
    return {name: timing.seconds for name, timing in timed.items()}


def measure_grid(settings: Settings) -> Outcome:
    """Table 3: a decode step's attention by context and shared tokens, in all columns."""
    result = measure_attention(_setting(settings, "table3", prompts=tuple(settings["prompts"])))
    rows, lines = [], []
    for row in result["table3"]:
        ms, (context, shared) = _ms(row), (row["context"], row["shared"])
        printed = published.KERNELS.get((context, shared)) if row["batch"] == 32 else None
        lines.append(
            [f"{context:,}", f"{shared:,}", *("" if each is None else f"{each:,.2f}" for each in ms.values())]
            + (["", "", ""] if printed is None else [f"{printed[at]:,.0f}" for at in (0, 4, 5)])
        )
        ours, star, slow = (ms[name] for name in ("ours", "paged", "naive"))
        if printed is None or ours is None or star is None or slow is None:
            continue
        naive, _, _, _, paged, chunk = printed
        where = f"{context:,} tokens, {shared:,} shared"
        why = "an A100's cache keeps shared pages, so that reading them again costs it less; here they come from memory"
        if not shared:
            why = "timings of one kernel with and without its second phase"
        told = Published(round(paged / chunk, 2), "table 3", published.KERNEL_ON)
        rows.append(Row(f"{where}: times as fast as PagedAttn*", "×", star / ours, told, why))
        told = Published(round(naive / chunk, 2), "table 3", published.KERNEL_ON)
        why = "PyTorch's matmul, softmax, matmul on a CPU is further from its limits than on an A100"
        rows.append(Row(f"{where}: times as fast as naive PyTorch", "×", slow / ours, told, why))
    header = ["context", "shared", *(f"{name}, ms" for name in result["table3"][0]["columns"])]
    header += [f"{name}, A100, µs" for name in ("naive", "PagedAttn*", "ChunkAttn")]
    return Outcome(
        rows, [Table(_title(result, "table3"), header, lines)], [_COLUMNS], {"result": _drawn(result, "table3")}
    )


def measure_divergence(settings: Settings) -> Outcome:
    """Figure 3: sequences share a prompt and diverge. Compares rates over a whole answer."""
    setting = _setting(
        settings, "figure3", figure_prompt=settings["shared"], completions=tuple(settings["completions"])
    )
    result = measure_attention(setting)
    steps = {row["context"] - row["shared"]: _ms(row) for row in result["figure3"]}
    rows, lines = [], []
    for tokens in list(steps)[1:]:
        mean = {name: _mean_step(steps, name, tokens) for name in ("ours", "paged", "unshared")}
        paged, unshared = (mean[name] / mean["ours"] for name in ("paged", "unshared"))
        lines.append([f"{tokens:,}", *(f"{each:,.2f}" for each in mean.values()), f"{paged:.2f}×", f"{unshared:.2f}×"])
        for times, name, printed in zip(
            (paged, unshared), ("PagedAttn*", "PagedAttn"), published.DIVERGED.get(tokens, ()), strict=False
        ):
            if settings["shared"] == 2048 and settings["batch"] == 32:
                why = f"{_ON_CPU}; own tokens cost as much with any kernel that waits for memory, and more of it here"
                rows.append(Row(f"{tokens:,} tokens of answer: times {name}'s rate", "×", times, printed, why))
    if not rows:  # a smaller scale has no published figure
        rows = [Row("first and last answer: times PagedAttn*'s rate", "×", f"{lines[0][4]} to {lines[-1][4]}")]
    header = ["tokens of answer", "ours, ms", "PagedAttn*, ms", "PagedAttn, ms", "times PagedAttn*", "times PagedAttn"]
    return Outcome(
        rows,
        [Table(f"Mean step of an answer; {_title(result, 'figure3')}", header, lines)],
        [_COLUMNS, "An answer's mean step is the mean of the steps that were measured, by the trapezoidal rule."],
        {"result": _drawn(result, "figure3")},
    )


def measure_batches(settings: Settings) -> Outcome:
    """Figure 4: all tokens are shared, over the batch size."""
    batches = tuple(settings["batches"])
    result = measure_attention(_setting(settings, "figure4", figure_prompt=settings["shared"], batches=batches))
    rate = {row["batch"]: row["columns"]["ours"]["tokens_s"] for row in result["figure4"]}
    lines = [
        [f"{row['batch']}", *(f"{cell['tokens_s']:,.0f}" if "ms" in cell else "" for cell in row["columns"].values())]
        for row in result["figure4"]
    ]
    first, last = (16, 96) if {16, 96} <= rate.keys() else (min(rate), max(rate))
    printed = published.BATCH_GROWS if (first, last) == (16, 96) and settings["shared"] == 2048 else None
    why = f"{_ON_CPU}: few cores are at their limit of products sooner, from where a batch takes as long as it is large"
    return Outcome(
        [Row(f"rate at a batch of {last}, times that at {first}", "×", rate[last] / rate[first], printed, why)],
        [Table(_title(result, "figure4", "tokens/s of one layer"), ["batch", *result["figure4"][0]["columns"]], lines)],
        [_COLUMNS],
        {"result": _drawn(result, "figure4")},
    )


_COLUMNS = (
    "Columns: *ours* reads shared chunks once for all rows; *paged* is the paper's PagedAttn*, our kernel with every "
    "row reading the shared chunks for itself; *unshared* has a copy for each sequence, as PagedAttn has; *sdpa* and "
    "*flash* are PyTorch's kernels over copies, *naive* its matmul, softmax, matmul. What does not fit into memory is "
    "left out."
)


def _setting(settings: Settings, part: str, **sizes: Any) -> AttentionSetting:
    shape = (settings["heads"], settings["heads"])
    return AttentionSetting(
        parts=(part,), dtypes=(fast_dtype(),), heads=(shape,), batch=settings["batch"], runs=settings["runs"], **sizes
    )


def _title(result: Data, part: str, unit: str = "") -> str:
    row = result[part][0]
    batch = "" if part == "figure4" else f", batch of {row['batch']}"
    return f"{row['heads']} heads of {result['head_dim']}, {row['dtype']}{batch}{', ' if unit else ''}{unit}"


def _ms(row: Data) -> dict[str, float | None]:
    return {name: cell.get("ms") for name, cell in row["columns"].items()}


def _mean_step(steps: dict[int, dict[str, float | None]], name: str, tokens: int) -> float:
    """Milliseconds of the mean step of an answer of ``tokens`` tokens."""
    points = [(at, ms[name]) for at, ms in steps.items() if at <= tokens]
    return sum((one + other) / 2 * (b - a) for (a, one), (b, other) in pairwise(_known(points))) / tokens


def _known(points: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    return [(at, ms) for at, ms in points if ms is not None]


def _drawn(result: Data, part: str) -> Data:
    """The part of a result that its drawing needs."""
    return {part: result[part]}


def draw_kernels(data: Data, path: Path) -> None:
    """Draw the result as ``inlay bench attention --plot`` does."""
    draw_attention(data["result"], path)
