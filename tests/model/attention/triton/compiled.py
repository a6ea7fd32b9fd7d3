"""Compile the kernels for GPUs that need not be there, and print what each takes: run with TRITON_INTERPRET=0.

One JSON object a kernel: its settings, bytes of shared memory, registers of a thread and bytes that these spill.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from inlay.attention.triton import kernels
from inlay.attention.triton.backend import block_width, settings_of
from inlay.attention.triton.tables import Shape

PLAIN = {"SOFTCAP": False, "WINDOW": False, "SLOPES": False, "SINKS": False}
EVERYTHING = dict.fromkeys(PLAIN, True)
NUMBERS = {"scale": "fp32", "softcap": "fp32"}
ODD = dict.fromkeys(["first_work", "window", "rows", "scale", "softcap"])  # all else is aligned when it is launched
NARROW = {
    "work_ptr": "*i32", "lane_ptr": "*i32", "piece_ptr": "*i32", "position_ptr": "*i32", "step_ptr": "*i32",
    "slot_ptr": "*i32", "row_ptr": "*i32", "first_ptr": "*i32", "index_ptr": "*i32",
    "partial_ptr": "*fp32", "lse_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "slope_ptr": "*fp32",
    "sink_ptr": "*fp32", "key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32",
}  # fmt: skip


def compiled(
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    target: GPUTarget,
    pointers: dict[str, str] | None = None,
    **options: int,
) -> dict[str, Any]:
    """The arguments of a kernel. pointers: those to another dtype."""
    known = NARROW | (pointers or {})
    signature, aligned = {}, {}
    for number, name in enumerate(kernel.arg_names):
        pointer = known.get(name, f"*{dtype}") if name.split("_")[-1] == "ptr" else NUMBERS.get(name, "i32")
        signature[name] = "constexpr" if name in constants else pointer
        if name not in {**constants, **ODD}:
            aligned[number,] = [["tt.divisibility", 16]]
    made = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    return {"shared": made.metadata.shared, **usage(made.asm["cubin"], made.name)}


def usage(cubin: bytes, name: str) -> dict[str, int]:
    """Registers and bytes of local memory, as cuobjdump prints them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return {"registers": int(found[1]), "stack": int(found[2])}


def main(capability: int, quick: bool) -> None:
    target = GPUTarget("cuda", capability, 32)
    widths = (128,) if quick else (64, 128, 256, 512)
    dtypes = ("fp16",) if quick else ("bf16", "fp32")
    for head_dim, dtype, options in product(widths, dtypes, (PLAIN, EVERYTHING)):
        wide = dtype == "fp32"
        shape = Shape(32, 8, head_dim, 4 if wide else 2, wide=wide)
        for tile in (16, 128) if quick else (16, 64, 128):
            settings = settings_of(shape, tile)
            if settings is None:
                continue
            constants = {
                "QUANTIZED": False, "GROUP": shape.group, "HEAD_TILE": shape.group, "HEAD_DIM": head_dim,
                "BLOCK_D": block_width(head_dim), "BLOCK_M": tile, "BLOCK_N": settings.keys,
                "PAIRS": head_dim // 2 if options is EVERYTHING else 0, "INTERLEAVED": False,
                "WIDE": wide, **options,
            }  # fmt: skip
            found = compiled(
                kernels.attend, dtype, constants, target, num_warps=settings.warps, num_stages=settings.stages
            )
            about = {"kernel": "attend", "head_dim": head_dim, "dtype": dtype, "tile": tile}
            print(json.dumps(about | {"everything": options is EVERYTHING} | found), flush=True)
    width = {"HEAD_DIM": 128, "BLOCK_D": 128}
    found = compiled(kernels.store, "bf16", width | {"BLOCK_ROWS": 16, "SHARED": False, "LARGEST": 0.0}, target)
    print(json.dumps({"kernel": "store"} | found))
    for largest, kind in ((127.0, "i8"), (448.0, "fp8e4nv")):
        if kind != "i8" and (quick or capability < 89):  # these have no fp8
            continue
        narrow = {"keys_ptr": f"*{kind}", "values_ptr": f"*{kind}"}
        constants = width | {"BLOCK_ROWS": 16, "SHARED": False, "LARGEST": largest}
        found = compiled(kernels.store, "bf16", constants, target, narrow)
        print(json.dumps({"kernel": "store"} | found), flush=True)
        shape = Shape(32, 8, 128, 1)
        for tile in (16,) if quick else (16, 128):
            settings = settings_of(shape, tile)
            assert settings is not None
            constants = {
                "QUANTIZED": True, "GROUP": 4, "HEAD_TILE": 4, **width,
                "BLOCK_M": tile, "BLOCK_N": settings.keys, "PAIRS": 0, "INTERLEAVED": False, "WIDE": False, **PLAIN,
            }  # fmt: skip
            found = compiled(
                kernels.attend, "bf16", constants, target, narrow, num_warps=settings.warps, num_stages=settings.stages
            )
            print(
                json.dumps({"kernel": "attend", "dtype": kind, "tile": tile, "everything": False} | found), flush=True
            )
    found = compiled(kernels.merge, "bf16", width | {"HEADS": 32, "SINKS": True}, target)
    print(json.dumps({"kernel": "merge"} | found))


if __name__ == "__main__":
    main(int(sys.argv[1]), "--quick" in sys.argv)
