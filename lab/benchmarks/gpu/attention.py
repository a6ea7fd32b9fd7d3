"""ChunkAttention's Table 3 and Figures 3 and 4 (arXiv 2402.15220) on a GPU: one decode step of one layer.

    python lab/benchmarks/gpu/attention.py --part table3 figure3 figure4

32 query heads and 32 or 8 KV heads of 128 dimensions; chunks of 64. Columns: ``shared`` (ours), ``paged`` (ours with
sharing off), ``sdpa`` and ``flex`` (PyTorch's, over dense copies). If FlashInfer is installed, ``flashinfer_paged`` and
``flashinfer_cascade`` too. Each row has its floor, the longer of two times: distinct bytes over the measured copy
bandwidth, and operations over the measured rate of products.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from common import Ceilings, Clock, device_of, options, report

HEADS, HEAD_DIM, CHUNK = 32, 128, 64


@dataclass(frozen=True)
class Case:
    """A batch in which every sequence decodes a token. All share the first ``shared`` of their ``context`` tokens."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    shared: int

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * (self.context + 1) * self.head_dim

    def read(self, itemsize: int) -> int:
        """Distinct bytes of keys and values."""
        tokens = self.shared + self.batch * (self.context - self.shared + 1)
        return 2 * tokens * self.kv_heads * self.head_dim * itemsize


def cases(part: str, dtypes: list[str], dry: bool) -> Iterator[Case]:
    """The paper's grids. Figure 3: answers grow behind a shared prompt. Figure 4: over batch sizes."""
    shapes = [(4, 2, 64)] if dry else [(HEADS, HEADS, HEAD_DIM), (HEADS, 8, HEAD_DIM)]
    for dtype in dtypes:
        for heads, kv_heads, head_dim in shapes:
            for batch, context, shared in sizes(part, dry):
                yield Case(dtype, heads, kv_heads, head_dim, batch, context, shared)


def sizes(part: str, dry: bool) -> Iterator[tuple[int, int, int]]:
    """Batch, context and shared tokens of a part's rows."""
    if dry:
        yield from [(2, 80, 0), (2, 80, 64)]
    elif part == "table3":
        for prompt in (1024, 2048, 4096):
            yield from ((32, prompt, int(prompt * fraction)) for fraction in (0, 0.5, 0.75, 1))
        yield from ((32, shared + 256, shared) for shared in (128, 256, 512))  # where sharing begins to pay
    elif part == "figure3":
        yield from ((32, 2048 + answered, 2048) for answered in (64, 256, 512, 1024, 2048))
    else:
        yield from ((batch, 2048 + 64, 2048) for batch in (1, 2, 4, 8, 16, 32, 64, 96, 128))


class Sequences:
    """The keys and values of a case's sequences, in chunks of a pool and as dense copies."""

    def __init__(self, case: Case, device: Any) -> None:
        import torch

        self.case, self.device = case, device
        self.dtype = getattr(torch, case.dtype)
        self.shared = case.shared // CHUNK * CHUNK
        own = -(-(case.context - self.shared + 1) // CHUNK) * CHUNK
        self.first = [self.shared + n * own for n in range(case.batch)]
        self.slots = self.shared + case.batch * own
        shape = (case.kv_heads, self.slots, case.head_dim)
        self.keys, self.values = (torch.randn(shape, device=device).to(self.dtype) for _ in range(2))
        self.query = torch.randn(case.heads, case.batch, case.head_dim, device=device).to(self.dtype)
        new = (case.kv_heads, case.batch, case.head_dim)
        self.key, self.value = (torch.randn(new, device=device).to(self.dtype) for _ in range(2))

    def ours(self, *, share: bool, costs: Any = None) -> Callable[[], Any]:
        """A call of our kernel.

        Args:
            share: Allow sharing.
            costs: Cost model that decides on sharing. None for the device's measured one, or else the defaults.
        """
        from inlay.attention.backend import AttentionOptions
        from inlay.attention.plan import Part, build_plan, items_at
        from inlay.attention.storage import LayerShape
        from inlay.attention.triton.backend import TritonBackend
        from inlay.slots import SlotRange

        case = self.case
        backend = TritonBackend(self.device, costs=costs)
        pool = backend.make_pool([LayerShape(case.kv_heads, case.head_dim)], self.dtype, self.slots)
        pool.keys[0].copy_(self.keys)
        pool.values[0].copy_(self.values)
        parts = []
        for first in self.first:
            own = case.context - self.shared
            ranges = ([SlotRange(0, self.shared)] if self.shared else []) + ([SlotRange(first, own)] if own else [])
            parts.append(Part.of(case.context, 1, items_at(ranges, 0), (SlotRange(first + own, 1),)))
        plan, attention = build_plan(parts, share=share), AttentionOptions(scale=case.head_dim**-0.5)
        return lambda: backend.attend(self.query, self.key, self.value, pool, plan, 0, attention)

    def dense(self) -> tuple[Any, Any, Any]:
        """query (batch, heads, 1, head_dim), keys and values (batch, kv_heads, context + 1, head_dim)."""
        import torch

        own = self.case.context - self.shared + 1
        rows = [[*range(self.shared), *range(first, first + own)] for first in self.first]
        at = torch.tensor(rows, device=self.device)
        keys, values = (each[:, at].transpose(0, 1).contiguous() for each in (self.keys, self.values))
        keys[:, :, -1], values[:, :, -1] = self.key.transpose(0, 1), self.value.transpose(0, 1)
        return self.query.transpose(0, 1).unsqueeze(2).contiguous(), keys, values

    def sdpa(self) -> Callable[[], Any]:
        from torch.nn.functional import scaled_dot_product_attention

        query, keys, values = self.dense()
        grouped = self.case.heads != self.case.kv_heads
        return lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=grouped).squeeze(2)

    def flex(self) -> Callable[[], Any]:
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        query, keys, values = self.dense()
        attend = flex_attention if self.device.type == "cpu" else torch.compile(flex_attention)
        grouped = self.case.heads != self.case.kv_heads
        return lambda: attend(query, keys, values, enable_gqa=grouped).squeeze(2)

    def pages(self) -> tuple[Any, list[list[int]], list[int]]:
        """FlashInfer's cache, (chunks, 2, chunk, kv_heads, head_dim); own chunks and last length of each sequence."""
        import torch

        case = self.case
        shape = (case.kv_heads, self.slots // CHUNK, CHUNK, case.head_dim)
        cache = torch.stack([each.view(shape).permute(1, 2, 0, 3) for each in (self.keys, self.values)], 1)
        cache = cache.contiguous()
        own = case.context - self.shared + 1
        chunks = [[(first + at) // CHUNK for at in range(0, own, CHUNK)] for first in self.first]
        return cache, chunks, [(own - 1) % CHUNK + 1] * case.batch

    def flashinfer(self, *, cascade: bool) -> Callable[[], Any]:
        import flashinfer
        import torch

        def ints(numbers: list[int]) -> Any:
            return torch.tensor(numbers, dtype=torch.int32, device=self.device)

        def borders(counts: list[int]) -> Any:
            return ints([sum(counts[:n]) for n in range(len(counts) + 1)])

        case, query = self.case, self.query.transpose(0, 1).contiguous()
        cache, own, last = self.pages()
        workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=self.device)
        common = list(range(self.shared // CHUNK))
        heads = (case.heads, case.kv_heads, case.head_dim, CHUNK)
        if cascade and common:
            levels = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
            levels.plan(
                [ints([0, case.batch]), ints(list(range(case.batch + 1)))],
                [ints([0, len(common)]), borders([len(each) for each in own])],
                [ints(common), ints([chunk for each in own for chunk in each])],
                [ints([CHUNK]), ints(last)],
                *heads,
                q_data_type=self.dtype,
            )
            return lambda: levels.run(query, cache)
        paged = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        pages = [common + each for each in own]
        paged.plan(
            borders([len(each) for each in pages]), ints([page for each in pages for page in each]), ints(last), *heads,
            q_data_type=self.dtype,
        )  # fmt: skip
        return lambda: paged.run(query, cache)


def columns(sequences: Sequences) -> dict[str, Callable[[], Callable[[], Any]]]:
    """The columns. Each is made at its turn, so that only one dense copy is in memory."""
    found: dict[str, Callable[[], Callable[[], Any]]] = {
        "shared": lambda: sequences.ours(share=True),
        "paged": lambda: sequences.ours(share=False),
        "sdpa": sequences.sdpa,
        "flex": sequences.flex,
    }
    if importlib.util.find_spec("flashinfer") and sequences.device.type == "cuda":
        found["flashinfer_paged"] = lambda: sequences.flashinfer(cascade=False)
        found["flashinfer_cascade"] = lambda: sequences.flashinfer(cascade=True)
    return found


def measure(part: str, case: Case, device: Any, clock: Clock, ceilings: Ceilings) -> dict[str, Any]:
    """One row: microseconds of each column, each output's difference from the first column's, and ratios."""
    import torch

    sequences, microseconds, apart = Sequences(case, device), {}, {}
    expected = None
    for name, make in columns(sequences).items():
        try:
            call = make()
            output = call().float()
            expected = output if expected is None else expected
            apart[name] = float((output.view_as(expected) - expected).norm() / expected.norm())
            microseconds[name] = clock.seconds(call) * 1e6
        except torch.OutOfMemoryError:
            microseconds[name] = None
    floor = ceilings.floor(case.read(sequences.dtype.itemsize), case.flops, case.dtype) * 1e6
    ours = microseconds["shared"]
    return {
        "part": part,
        **asdict(case),
        "us": microseconds,
        "floor_us": floor,
        "of_floor": None if ours is None else floor / ours,
        "times_as_fast": {name: each / ours for name, each in microseconds.items() if each and ours},
        "difference": apart,
    }


def main() -> None:
    asked = options(__doc__ or "", part=["table3", "figure3", "figure4"], dtype=["float16", "bfloat16"])
    if asked.dry:
        asked.dtype = ["float32"]
    device = device_of(asked)
    clock = Clock(device, asked.runs)
    ceilings = Ceilings.measure(clock, device, asked.dtype, dry=asked.dry)
    rows = []
    for part in asked.part:
        for case in cases(part, asked.dtype, asked.dry):
            rows.append(measure(part, case, device, clock, ceilings))
            told = {name: round(each) for name, each in rows[-1]["us"].items() if each}
            print(part, case, "floor", round(rows[-1]["floor_us"]), told, flush=True)
    report("attention", asked, device, ceilings, rows)


if __name__ == "__main__":
    main()
