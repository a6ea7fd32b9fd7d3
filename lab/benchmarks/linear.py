"""How long does a linear layer take: stock, packed for oneDNN, and with our own kernel, in bfloat16 and float32?

    python lab/benchmarks/linear.py --rows 1,4,16,32,64,256

Each shape is a set of layers larger than the last-level cache, read one after the other as in a model. The last line of
stdout is one JSON object. Times are in microseconds a layer, medians of runs in turns.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import torch

from inlay.models.linear import DirectLinear, PackedLinear, can_multiply, can_pack, stock
from inlay_lab.bench.machine import clocked, describe_machine, in_turns, measure_ceilings

SHAPES = [(9728, 896), (896, 4864), (1152, 896)]  # (outputs, inputs): Qwen2.5-0.5B's gate and up, down, and qkv
SET_BYTES = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,32,64,256", help="numbers of rows, with commas")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    rows = [int(part) for part in arguments.rows.split(",")]
    with torch.inference_mode():
        table = [measured(shape, count, arguments.runs) for shape in SHAPES for count in rows]
    for row in table:
        print(row)
    ceilings = measure_ceilings(["bfloat16"])
    print(json.dumps({"rows": table, "gemm_gflops": ceilings.gemm_gflops, "machine": describe_machine()}))


def measured(shape: tuple[int, int], rows: int, runs: int) -> dict[str, object]:
    """One shape at one number of rows: microseconds of every form that this processor supports, and our rates."""
    outputs, inputs = shape
    count = max(1, SET_BYTES // (2 * outputs * inputs))
    weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(count)]
    forms = {"stock": [stock(weight, None) for weight in weights]}
    if can_pack(torch.bfloat16):
        forms["packed"] = [PackedLinear(weight) for weight in weights]
    if can_multiply(weights[0]):
        forms["direct"] = [DirectLinear(weight) for weight in weights]
    forms["float32_packed"] = [PackedLinear(weight.float()) for weight in weights]
    if can_multiply(weights[0].float()):
        forms["float32_direct"] = [DirectLinear(weight.float()) for weight in weights]
    x = torch.randn(rows, inputs)
    timed = in_turns(
        {
            name: clocked(partial(through, layers, x if name.startswith("float32") else x.bfloat16()))
            for name, layers in forms.items()
        },
        runs,
    )
    row: dict[str, object] = {"outputs": outputs, "inputs": inputs, "rows": rows}
    row |= {name: round(timed[name].seconds / count * 1e6) for name in forms}
    if "direct" in timed:
        seconds = timed["direct"].seconds / count
        row |= {
            "gb_s": round(2 * outputs * inputs / seconds / 1e9, 1),
            "gflops": round(2 * rows * outputs * inputs / seconds / 1e9),
        }
    return row


def through(layers: list[torch.nn.Module], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


if __name__ == "__main__":
    main()
