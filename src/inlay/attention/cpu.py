"""Attention on the CPU with the compiled kernel (csrc/). This module checks tensors and passes their addresses.

The kernel turns a plan's groups into tasks, once for all layers (csrc/plan.cpp, csrc/attend.cpp). It reads keys and
values in place in the pool and merges partial results in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.kernel import kernel
from inlay.attention.mass import attention_mass
from inlay.attention.plan import Part, Plan
from inlay.attention.rope import Rotary
from inlay.attention.storage import KVStorage, LayerShape, row_width
from inlay.errors import ParameterError

_MOST_OPTIONS = 1024
_MOST_PARTIALS = 64 * 2**20
_OF_A_THREAD = 2**22  # scratch memory of one thread: a few tiles of queries and sums
_DTYPES = (torch.float32, torch.bfloat16)
_TYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*_DTYPES, torch.int8)}  # names in the kernel
_STILL = Rotary(torch.zeros(1))  # stands for UNTURNED: the kernel rotates at least one pair, here by zero


class CpuBackend:
    """The backend "cpu": the compiled kernel.

    Args:
        instruction_set: One of ``instruction_sets()``. None: the best one that runs on this processor.
        most_partials: Upper bound of the bytes of partial results. A larger call is processed in slices.

    Raises:
        ParameterError: If the kernel was not built or has no such version.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, instruction_set: str | None = None, most_partials: int = _MOST_PARTIALS) -> None:
        if kernel is None:
            raise ParameterError(
                "attention backend 'cpu' was not built with this install; use 'torch', or install "
                "inlay where a C++17 compiler is found",
                code="parameter.unavailable_backend",
            )
        if instruction_set is not None and instruction_set not in instruction_sets():
            known = ", ".join(instruction_sets())
            raise ParameterError(
                f"the kernel has no version '{instruction_set}' that runs here; use one of {known}",
                code="parameter.unavailable_backend",
            )
        self._instruction_set = instruction_set or ""
        self._key = self.name if instruction_set is None else f"{self.name} {instruction_set}"  # key in ``Plan.work``
        self._most_partials = most_partials
        self._workspace = kernel.Workspace(most_partials)
        self._options: dict[tuple[object, ...], tuple[AttentionOptions, Any, list[Tensor]]] = {}

    @property
    def scratch_bytes(self) -> int:
        """See Backend."""
        return self._most_partials + torch.get_num_threads() * _OF_A_THREAD

    def make_pool(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> KVStorage:
        """See Backend.make_pool."""
        return KVStorage(layers, dtype, slots)

    def prepare(self, plan: Plan) -> None:
        """See Backend.prepare."""
        if self._key not in plan.work:
            groups, threads = plan.groups, torch.get_num_threads()
            plan.work[self._key] = kernel.Attention(
                plan.positions, plan.slots, groups.rows, groups.row_first, groups.stretches, groups.stretch_first,
                groups.growing, self._instruction_set, threads,
            )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: KVStorage,
        plan: Plan,
        layer: int,
        options: AttentionOptions,
    ) -> Tensor:
        """See Backend.attend."""
        heads, rows, head_dim = query.shape
        keys, values = pool.keys[layer], pool.values[layer]
        _check(query, key, value, pool, plan, layer, options)
        output = torch.empty(rows, heads, head_dim, dtype=query.dtype)
        self.prepare(plan)
        cast(Any, plan.work[self._key]).attend(
            self._workspace, _heads(query), _heads(key), _heads(value), _heads(keys), _heads(values),
            _heads(output.transpose(0, 1)), heads, keys.shape[0], head_dim, keys.shape[1], self._native(options),
        )  # fmt: skip
        return output

    def planned(self, plan: Plan, rows: int) -> tuple[Any, Any]:
        """Return a pass's arguments for all layers in one call (csrc/decoder.cpp): the plan and the workspace.

        They are valid for this pass only. ``rows`` is the number of rows of the call, which must be the plan's.
        """
        if rows != plan.rows:
            raise ValueError(f"a plan of {plan.rows} rows does not fit {rows}")
        self.prepare(plan)
        return plan.work[self._key], self._workspace

    def stored(
        self, pool: KVStorage, layer: int, options: AttentionOptions
    ) -> tuple[tuple[Any, Any, int, Any], list[Tensor]]:
        """Return a layer's arguments of the call for all layers (csrc/decoder.cpp).

        Returns:
            Keys, values, number of slots and options, and the tensors of the options. The arguments are valid as long
            as the pool and these tensors.
        """
        keys = pool.keys[layer]
        native, kept = _native_options(options)
        return (_heads(keys), _heads(pool.values[layer]), keys.shape[1], native), kept

    def attention_mass(
        self, query: Tensor, pool: KVStorage, part: Part, layer: int, options: AttentionOptions
    ) -> Tensor:
        """See Backend.attention_mass."""
        return attention_mass(query, pool, part, layer, options)

    def _native(self, options: AttentionOptions) -> Any:
        """The kernel's form of a layer's options. It is cached, because every pass uses the same options."""
        # the cache keeps these objects alive, so their ids stay unique
        parts = (id(options.sinks), id(options.slopes), id(options.rotary))
        key = (options.scale, options.window, options.softcap, *parts)
        if key not in self._options:
            if len(self._options) >= _MOST_OPTIONS:  # a model that creates options in every pass
                self._options.clear()
            self._options[key] = (options, *_native_options(options))
        return self._options[key][1]


def available() -> bool:
    """Return True if the kernel was built."""
    return kernel is not None


def instruction_sets() -> list[str]:
    """Return the versions of the kernel that run on this processor, best first."""
    return [] if kernel is None else list(kernel.instruction_sets())


def _native_options(options: AttentionOptions) -> tuple[Any, list[Tensor]]:
    """Return the kernel's options, and the tensors that their addresses point to."""
    rotary = options.rotary
    if rotary is not None and not rotary.rotated:
        rotary = _STILL
    frequencies = None if rotary is None else rotary.inverse_frequencies
    kept = [_floats(tensor) for tensor in (options.sinks, options.slopes, frequencies)]
    sinks, slopes, turns = (0 if tensor is None else tensor.data_ptr() for tensor in kept)
    native = kernel.Options(
        options.scale, options.window or 0, options.softcap or 0.0, sinks, slopes, turns,
        0 if rotary is None else rotary.rotated, rotary is not None and rotary.interleaved,
    )  # fmt: skip
    return native, [tensor for tensor in kept if tensor is not None]


def _floats(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", torch.float32).contiguous()


def _heads(tensor: Tensor) -> Any:
    kind = getattr(kernel.Type, _TYPES[tensor.dtype])
    return kernel.Heads(tensor.data_ptr(), kind, tensor.stride(0), tensor.stride(1))


def _check(
    query: Tensor, key: Tensor, value: Tensor, pool: KVStorage, plan: Plan, layer: int, options: AttentionOptions
) -> None:
    keys, values = pool.keys[layer], pool.values[layer]
    kv_heads, head_dim = keys.shape[0], keys.shape[2] - row_width(0, pool.dtype)
    expected = (kv_heads, plan.rows, head_dim)
    if (
        key.shape != expected
        or value.shape != expected
        or query.shape[1:] != expected[1:]
        or values.shape != keys.shape
    ):
        raise ValueError(
            f"a plan of {plan.rows} rows and a pool of {kv_heads} heads of {head_dim} do not fit "
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
    if keys.dtype != values.dtype or keys.dtype not in _TYPES:
        raise ValueError(f"the kernel reads pools of fp32, bf16 or int8, not {keys.dtype} and {values.dtype}")
    for tensor, dtypes in ((query, _DTYPES), (key, _DTYPES), (value, _DTYPES), (keys, _TYPES), (values, _TYPES)):
        if tensor.dtype not in dtypes or tensor.stride(2) != 1 or tensor.device.type != "cpu":
            raise ValueError(
                f"the kernel takes fp32 or bf16 on the CPU with a contiguous head dimension, not {tensor.dtype} on "
                f"{tensor.device} with strides {tensor.stride()}"
            )
    for name, per_head in (("sinks", options.sinks), ("slopes", options.slopes)):
        if per_head is not None and per_head.numel() != query.shape[0]:
            raise ValueError(f"there are {query.shape[0]} heads and {per_head.numel()} {name}")
