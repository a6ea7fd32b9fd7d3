"""Prompt Cache's section 5.4: copies beside reading in place; and its table 2: memory of a cached token."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from inlay.attention.registry import get_backend
from inlay.authoring.memory import ARCHITECTURES, codec_named
from inlay.authoring.plot import Sizes, draw_memory
from inlay.models.load import DTYPES
from inlay_lab.bench.attention.cases import Case, Content
from inlay_lab.bench.attention.measure import step, store
from inlay_lab.bench.machine import GB, CacheFlush, clocked, in_turns
from inlay_lab.reproduce import published
from inlay_lab.reproduce.experiment import Data, Outcome, Published, Row, Settings, Table

_MIB = 2**20
_LLAMA_HEADS, _LLAMA_WIDTH, _LLAMA_LAYERS = 32, 128, 32
_DTYPE = "bfloat16"


def measure_copies(settings: Settings) -> Outcome:
    """Time to copy one layer's keys and values in Llama-2 7B's shape, and to attend to them in place."""
    tokens, layers = settings["tokens"], settings["layers"]
    case = Case(_DTYPE, _LLAMA_HEADS, _LLAMA_HEADS, _LLAMA_WIDTH, batch=1, context=tokens, shared=0, chunk=64)
    size = tokens * case.token_bytes
    sources = [torch.ones(size // 2, dtype=DTYPES[_DTYPE]) for _ in range(layers)]
    targets = [torch.zeros_like(source) for source in sources]
    flush, pages = CacheFlush(), store("shared", case, Content(case))

    def copy_all() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    meters = {
        "one": clocked(partial(targets[0].copy_, sources[0]), flush),
        "all": clocked(copy_all, flush),
        "in place": clocked(step("ours", pages, get_backend("auto")), flush),
    }
    with torch.inference_mode():
        ms = {name: timing.ms for name, timing in in_turns(meters, settings["runs"]).items()}
    rate = size / (published.COPY_HOST_TO_HOST_MS / 1000) / GB
    whole = ms["all"] * _LLAMA_LAYERS / layers
    of_one = (
        f"the paper does not say of how many layers: {published.COPY_HOST_TO_HOST_MS} ms for one layer's "
        f"{size / _MIB:.0f} MiB is {rate:.0f} GB/s, and for all {_LLAMA_LAYERS} {_LLAMA_LAYERS * rate:.0f} GB/s, "
        "which no memory of that machine has"
    )
    return Outcome(
        [
            Row("host to host, one layer", "ms", ms["one"], published.COPY_HOST_TO_HOST, f"other memory; {of_one}"),
            Row("host to host, all 32 layers", "ms", whole, published.COPY_HOST_TO_HOST, of_one),
            Row("read in place: copied", "bytes", 0),
            Row("read in place: one layer's attention of a new token", "ms", ms["in place"]),
        ],
        notes=[
            f"{tokens:,} tokens of Llama-2 7B's shape in {_DTYPE}, {size / _MIB:.0f} MiB a layer; {layers} of "
            f"{_LLAMA_LAYERS} layers were copied one after another. A copy comes before attention, which reads the "
            "same keys and values once more; inlay's attention reads them where they lie. Copies between host and "
            "device: see `gpu-first-token`."
        ],
    )


def measure_token_memory(_: Settings) -> Outcome:
    """Table 2, computed from configurations."""
    sixteen_bit, rows, lines = codec_named("bf16"), [], []
    for name, one in ARCHITECTURES.items():
        every_head = one.every_head().bytes_per_token(sixteen_bit) / _MIB
        kept = None if one.encoder else one.shape().bytes_per_token(sixteen_bit) / _MIB
        printed = Published(one.paper, "table 2")
        rows.append(Row(one.label, "MiB", every_head, printed, "the paper cuts off after two decimals"))
        lines.append(
            [name, f"{one.paper:.2f}", f"{every_head:.4f}", "" if kept is None else f"{kept:.4f}", one.reason()]
        )
    header = ["model", "paper", "every head", "kept here", "why less"]
    sizes = [[line[0], float(line[3]) if line[3] else None, float(line[2])] for line in lines]
    return Outcome(
        rows,
        [Table("MiB a token at 16 bit", header, lines)],
        ["Ours count every head, as the paper does; the table also has what these models really keep."],
        {"sizes": sizes},
    )


def draw_token_memory(data: Data, path: Path) -> None:
    """Draw the sizes as ``inlay memory --table2 --plot`` does."""
    sizes = [Sizes(*one) for one in data["sizes"]]
    draw_memory(sizes, path, kept="kept at 16 bit", other="every head counted, as the paper does")
