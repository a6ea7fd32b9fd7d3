"""The columns of the attention tables: the same decode step, done in six ways.

- ``ours``: shared chunks stored once, read by all rows together (chunk-first), then what each row has alone.
- ``paged``: the paper's PagedAttn*: shared chunks stored once, and every row reads them for itself.
- ``unshared``: our kernel, every sequence with a copy of its own.
- ``sdpa``: one call of torch's scaled_dot_product_attention over all sequences' own keys; KV heads are not expanded.
- ``flash``: torch's flash kernel for the CPU, a call per sequence; query heads of one KV head are rows of one call.
- ``naive``: matmul, softmax, matmul in torch.

A step writes the new tokens' keys and values and attends: (batch, heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inlay.attention.contract import Backend
from inlay.attention.plan import build_plan
from inlay.bench.attention.case import Case, Content, Dense, Pages

#: One decode step: (batch, heads, head_dim).
Step = Callable[[], Tensor]

#: What a column keeps keys and values in: "shared" or "copies" (chunks of a pool), or "dense" (one tensor).
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
    """Keys and values of a case, in one of the kinds of memory."""
    return Dense(case, content) if memory == "dense" else Pages(case, content, copies=memory == "copies")


def step(column: str, stored: Pages | Dense, backend: Backend) -> Step:
    """The step of a column; ``stored`` is of the memory that the column needs."""
    if isinstance(stored, Dense):
        return {"sdpa": _sdpa, "flash": _flash_each, "naive": _naive}[column](stored)
    return _attend(stored, backend, share=column != "paged")


def _attend(pages: Pages, backend: Backend, *, share: bool) -> Step:
    plan = build_plan(pages.spans, share=share)  # once for all layers and steps, as in the engine
    content = pages.content
    return lambda: backend.attend(content.query, content.key, content.value, pages.pool, plan, 0, pages.options)


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
