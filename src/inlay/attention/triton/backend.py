"""Attention on a GPU with Triton's kernels (kernels.py), or on the CPU in Triton's interpreter.

``attend`` builds the work tables of a plan for each kind of layer on first use (tables.py) and uploads them in one
copy. After that it only launches kernels and never waits for the device. A decode step that only grows lengths
increments one number on the device.

Launch settings are chosen for a shape and a tile. Shared memory holds a tile of queries, and ``stages`` blocks of keys
and of values. The limit is that of the smallest supported GPUs. Registers hold a tile of outputs and of scores, so
tiles are limited to the heights that compile without spilling, which tests/model/attention/triton/compiled.py checks.
These settings were not tuned on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import triton
from torch import Tensor

from inlay.attention.backend import AttentionOptions
from inlay.attention.mass import attention_mass
from inlay.attention.plan import Part, Plan
from inlay.attention.rope import Rotary
from inlay.attention.storage import LARGEST, DeviceStorage, KVStorage, LayerShape, Scales
from inlay.attention.triton import kernels
from inlay.attention.triton.plain import PlainPrefill, installed
from inlay.attention.triton.tables import (
    BLOCK_KEYS,
    TILES,
    CostModel,
    Device,
    Shape,
    WorkTables,
    build_tables,
    coefficients,
    head_tile,
)
from inlay.attention.triton.work import MOST_STEPS, DeviceTables, Kind, TritonRecording
from inlay.errors import ParameterError

_SHARED_MEMORY = 99 * 1024
_TILE_BYTES, _WIDE_TILE_BYTES = 32 * 1024, 16 * 1024  # smaller for fp32, which has no matrix units of its own
_LEAST_KEYS = 16


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Launch settings.

    Args:
        keys: Keys that a program processes at a time.
        stages: Key blocks that are in flight at the same time.
    """

    keys: int
    warps: int
    stages: int


def block_width(head_dim: int) -> int:
    """Return the number of dimensions of a block: the next power of two, at least 16 as products require."""
    return max(16, int(triton.next_power_of_2(head_dim)))


@cache
def settings_of(shape: Shape, tile: int) -> LaunchSettings | None:
    """Return the settings with the largest key block that fits beside a tile of this height, or None."""
    width = block_width(shape.head_dim) * (4 if shape.wide else max(shape.itemsize, 2))  # 8-bit numbers are widened
    if tile > TILES[0] and tile * width > (_WIDE_TILE_BYTES if shape.wide else _TILE_BYTES):
        return None
    for stages in (2, 1):
        for keys in (BLOCK_KEYS, BLOCK_KEYS // 2, _LEAST_KEYS):
            if tile * width + 2 * stages * keys * width <= _SHARED_MEMORY:
                return LaunchSettings(keys, 8 if tile >= 64 else 4, stages)
    return None


@cache
def largest_tile(shape: Shape) -> int:
    """Return the height of the largest tile that fits."""
    return max(tile for tile in TILES if settings_of(shape, tile) is not None)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 512
FP8_CAPABILITY = (8, 9)

#: True if kernels run in Triton's interpreter, that is, if TRITON_INTERPRET=1 was set when Triton was imported.
INTERPRETED = bool(triton.knobs.runtime.interpret)

_MOST_PARTIALS = 256 * 2**20
_INTERPRETED_PROCESSORS = 4  # enough for splits to occur
_FURTHEST = 2**31 - 1
_BLOCK_ROWS = 16  # rows that one program stores


class TritonBackend:
    """The backend "triton".

    Args:
        device: None: the current CUDA device, or the CPU if kernels are interpreted.
        processors: Number of programs that run at the same time. None: the number of multiprocessors of the device.
        costs: Cost model that decides about sharing. None: the one measured on this machine, else the defaults.
        most_partials: Upper bound of the bytes of partial results in a call.
        plain: Libraries for plain passes. None: those that are installed.

    Raises:
        ParameterError: If there is no such device.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        processors: int | None = None,
        costs: CostModel | None = None,
        most_partials: int = _MOST_PARTIALS,
        plain: PlainPrefill | None = None,
    ) -> None:
        self.device = device or torch.device("cpu" if INTERPRETED else "cuda")
        if not INTERPRETED and self.device.type != "cuda":
            raise ParameterError(
                f"attention backend 'triton' needs a CUDA device, not {self.device}; use 'auto', or set "
                "TRITON_INTERPRET=1 to try the kernels on the CPU, very slowly",
                code="parameter.unavailable_backend",
            )
        self.costs = costs or coefficients()
        self._processors = processors or _processors(self.device)
        self._most_partials = most_partials
        self._plain = plain or installed(self.device)
        self._partials = torch.empty(0, dtype=torch.float32, device=self.device)  # reused by all calls
        self._none = torch.zeros(1, dtype=torch.float32, device=self.device)  # for pointers that are not read

    @property
    def scratch_bytes(self) -> int:
        """See Backend."""
        return self._most_partials

    def make_pool(self, layers: Sequence[LayerShape], dtype: torch.dtype, slots: int) -> KVStorage:
        """See Backend.make_pool. Raises ParameterError for a dtype or a head size that the kernels do not support."""
        if dtype not in DTYPES and dtype not in LARGEST:
            raise ParameterError(
                f"attention backend 'triton' keeps KV in float32, float16, bfloat16, int8 or fp8, not in {dtype}; "
                "leave kv_cache_dtype at 'auto'",
                code="parameter.unavailable_dtype",
            )
        if dtype == torch.float8_e4m3fn:
            _check_fp8(self.device)
        # a model that is served without reuse has no layers here
        widest = max((layer.head_dim for layer in layers), default=0)
        if widest > LARGEST_HEAD:
            raise ParameterError(
                f"attention backend 'triton' takes heads of at most {LARGEST_HEAD} dimensions, and this model has "
                f"{widest}; use attention_backend 'torch'",
                code="parameter.unavailable_backend",
            )
        return DeviceStorage(layers, dtype, slots, self.device)

    def prepare(self, plan: Plan) -> None:
        """See Backend.prepare. The tables for a kind of layer are built on first use."""
        work = plan.work.get(self.name)
        if not isinstance(work, DeviceTables) or (work.steps >= MOST_STEPS and not work.recorded):
            plan.work[self.name] = DeviceTables.of(plan, self.device)

    def capture(self, plan: Plan, rows: int) -> TritonRecording:
        """See RecordingBackend.capture."""
        return TritonRecording(self.name, rows, plan, self._build, self.device)

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
        keys, values = pool.keys[layer], pool.values[layer]
        scales = pool.scales[layer] if isinstance(pool, DeviceStorage) else None
        if scales is None:
            key, value = key.to(pool.dtype), value.to(pool.dtype)
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        _check(query, key, value, keys, plan, options)
        self.prepare(plan)
        work = cast(DeviceTables, plan.work[self.name])
        self._store(key, value, keys, values, scales, work)
        heads, rows, head_dim = query.shape
        window = options.window if options.window is not None and options.window < _FURTHEST else None
        shape = Shape(heads, keys.shape[0], head_dim, keys.dtype.itemsize, window, _is_wide(query, keys))
        make = torch.zeros if work.recorded else torch.empty  # padding rows of a recorded pass are not written

        def ours() -> Tensor:
            output = make(rows, heads, head_dim, dtype=query.dtype, device=query.device)
            kind = work.kind(plan, shape, self._build)
            self._attend(query, keys, values, scales, output, work, kind, options)
            return output

        if self._plain is not None and work.plain is not None and self._plain.takes(query, keys, values, options):
            return self._plain.attend(query, keys, values, work.plain, options, ours)
        return ours()

    def attention_mass(
        self, query: Tensor, pool: KVStorage, part: Part, layer: int, options: AttentionOptions
    ) -> Tensor:
        """See Backend.attention_mass."""
        return attention_mass(query, pool, part, layer, options)

    def shared_keys(self, plan: Plan) -> int:
        """Return the number of keys read for several requests at once, for the kind of layer that ran first."""
        kinds = cast(DeviceTables, plan.work[self.name]).kinds.values()
        return next((kind.made.shared_keys for kind in kinds), 0)

    def _build(self, plan: Plan, shape: Shape) -> WorkTables:
        return build_tables(plan, shape, self._limits(shape), self.costs)

    def _limits(self, shape: Shape) -> Device:
        return Device(self._processors, largest_tile(shape), self._most_partials)

    def _room(self, kind: Kind) -> tuple[Tensor, Tensor]:
        """Memory for the partial results: outputs and log-sum-exps, fp32, both flat."""
        outputs = kind.made.partials * kind.shape.heads * kind.shape.head_dim
        numbers = outputs + kind.made.partials * kind.shape.heads
        if kind.partials is None and self._partials.numel() < numbers:
            self._partials = torch.empty(numbers, dtype=torch.float32, device=self.device)
        memory = self._partials if kind.partials is None else kind.partials
        return memory[:outputs], memory[outputs:numbers]

    # Launches

    def _store(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scales: Scales | None, work: DeviceTables
    ) -> None:
        kv_heads, rows, head_dim = key.shape
        key_scales, value_scales = scales or (self._none, self._none)
        kernels.store[(triton.cdiv(rows, _BLOCK_ROWS), kv_heads)](
            key, value, keys, values, key_scales, value_scales, work.slots, work.step,
            rows, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), key_scales.stride(0),
            HEAD_DIM=head_dim, BLOCK_D=block_width(head_dim), BLOCK_ROWS=_BLOCK_ROWS, SHARED=values is keys,
            LARGEST=LARGEST.get(keys.dtype, 0.0), enable_fp_fusion=False,  # each step rounds, as in the specification
        )  # fmt: skip

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scales: Scales | None,
        output: Tensor,
        work: DeviceTables,
        kind: Kind,
        options: AttentionOptions,
    ) -> None:
        shape, tables = kind.shape, kind.there
        cos, sin, pairs = self._none, self._none, 0
        if len(kind.made.shifts) > 1:
            assert options.rotary is not None, "a shift needs positions that move"
            pairs = options.rotary.rotated // 2
        if pairs:
            cos, sin = kind.turns_of(cast(Rotary, options.rotary))
        partial, lse = self._room(kind)
        key_scales, value_scales = scales or (self._none, self._none)
        sinks, slopes = (self._floats(each) for each in (options.sinks, options.slopes))
        height, width = head_tile(shape, self._limits(shape)), block_width(shape.head_dim)
        for launch in kind.made.launches:
            settings = settings_of(shape, launch.tile)
            assert settings is not None, "tables have no tiles that do not fit"
            kernels.attend[(launch.count, shape.kv_heads * triton.cdiv(shape.group, height))](
                query, keys, values, key_scales, value_scales, output, partial, lse,
                tables["work"], tables["lanes"], tables["pieces"], work.positions, work.step, cos, sin, slopes, sinks,
                launch.first, float(options.scale), float(options.softcap or 1.0), shape.window or 0,
                query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
                key_scales.stride(0), output.stride(0), output.stride(1),
                GROUP=shape.group, HEAD_TILE=height, HEAD_DIM=shape.head_dim, BLOCK_D=width,
                BLOCK_M=launch.tile, BLOCK_N=settings.keys, PAIRS=pairs,
                INTERLEAVED=options.rotary is not None and options.rotary.interleaved,
                SOFTCAP=options.softcap is not None, WINDOW=shape.window is not None,
                SLOPES=options.slopes is not None, SINKS=options.sinks is not None, WIDE=shape.wide,
                QUANTIZED=scales is not None,
                num_warps=settings.warps, num_stages=settings.stages,
            )  # fmt: skip
        if kind.made.partials:
            kernels.merge[(len(kind.made.merged_rows), shape.heads)](
                partial, lse, output, tables["merged_rows"], tables["merged_first"], tables["merged_index"], sinks,
                output.stride(0), output.stride(1),
                HEADS=shape.heads, HEAD_DIM=shape.head_dim, BLOCK_D=width,
                SINKS=options.sinks is not None, num_warps=4,
            )  # fmt: skip

    def _floats(self, tensor: Tensor | None) -> Tensor:
        """One fp32 number for each head, as the kernels read them."""
        return self._none if tensor is None else tensor.detach().to(self.device, torch.float32).contiguous()


def _check_fp8(device: torch.device) -> None:
    """Raise ParameterError if a GPU has no fp8."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        needed, found = ("{}.{}".format(*each) for each in (FP8_CAPABILITY, capability))
        raise ParameterError(
            f"kv_cache_dtype 'fp8' needs a GPU of compute capability {needed}, and {device} has {found}; use 'int8', "
            "which takes as much memory",
            code="parameter.unavailable_dtype",
        )


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _is_wide(query: Tensor, keys: Tensor) -> bool:
    """Return True if products must be in fp32.

    They are if the queries are, because narrower products would lose precision. The interpreter multiplies the bits of
    bf16 numbers as integers (tests/model/attention/triton/test_interpreter.py), so it uses fp32 for them too.
    """
    return query.dtype == torch.float32 or (INTERPRETED and torch.bfloat16 in (query.dtype, keys.dtype))


def _check(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, plan: Plan, options: AttentionOptions) -> None:
    kv_heads, _, head_dim = keys.shape
    expected = (kv_heads, plan.rows, head_dim)
    if key.shape != expected or value.shape != expected or query.shape[1:] != expected[1:]:
        raise ValueError(
            f"a plan of {plan.rows} rows and a pool of {kv_heads} heads of {head_dim} do not fit "
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
    if query.shape[0] % kv_heads:
        raise ValueError(f"{query.shape[0]} query heads cannot share {kv_heads} heads of keys evenly")
    for name, per_head in (("sinks", options.sinks), ("slopes", options.slopes)):
        if per_head is not None and per_head.numel() != query.shape[0]:
            raise ValueError(f"there are {query.shape[0]} heads and {per_head.numel()} {name}")
