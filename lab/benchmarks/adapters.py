"""How much longer does a decode step take with an adapter than without?

    python lab/benchmarks/adapters.py --model random:qwen2.5-0.5b --rank 16

Random adapters cover all linear layers, or those of ``--layers``. Batches of 1 and 16 answers are decoded without an
adapter, with one, and with four among the answers. These run in turns, so that other load slows all of them. The last
line of stdout is one JSON object: median milliseconds of a step, and their ratios to a step without an adapter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inlay import LLM, SamplingParams
from inlay.engine.forward import ForwardPass, StepObserver
from inlay.models.load import load_model
from inlay.models.lora.load import linear_places

_PROMPT, _ADAPTERS = 64, 4


class _Steps(StepObserver):
    """Records the seconds of pure decode passes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def computed(self, made: ForwardPass, logits: torch.Tensor, running: Sequence[Any], seconds: float) -> None:
        if len(made.decode) == len(made.work):
            self.seconds.append(seconds)


def main() -> None:
    arguments = _arguments()
    loaded = load_model(arguments.model, dtype=arguments.dtype, quantization=arguments.quantization)
    with tempfile.TemporaryDirectory() as folder:
        folders = {
            str(number): _adapter(Path(folder) / str(number), loaded.model, arguments) for number in range(_ADAPTERS)
        }
        llm = LLM(loaded, adapters=folders, kv_memory="512MiB", reuse="off", seed=0)
    rows = [_measured(llm, batch, arguments.runs, arguments.tokens) for batch in (1, 16)]
    print(json.dumps({"model": arguments.model, "rank": arguments.rank, "layers": arguments.layers, "batches": rows}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", default="all", help="the last words of paths with commas between them, or all")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def _adapter(folder: Path, model: Any, arguments: argparse.Namespace) -> Path:
    """Write a random adapter in PEFT's format."""
    folder.mkdir()
    named = None if arguments.layers == "all" else arguments.layers.split(",")
    weights, rank = {}, arguments.rank
    for path, place in linear_places(model).items():
        if not place.head and (named is None or path.rpartition(".")[2] in named):
            key = f"base_model.model.{path}"
            weights[f"{key}.lora_A.weight"] = torch.randn(rank, place.inputs) * 0.01
            weights[f"{key}.lora_B.weight"] = torch.randn(place.outputs, rank) * 0.01
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": named or "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def _measured(llm: LLM, batch: int, runs: int, tokens: int) -> dict[str, Any]:
    """Median times of a step, by the number of adapters in the batch."""
    cases: dict[str, list[str | None]] = {
        "none": [None] * batch,
        "one": ["0"] * batch,
        "four": [str(number % _ADAPTERS) for number in range(batch)],
    }
    if batch < _ADAPTERS:
        del cases["four"]
    took: dict[str, list[float]] = {name: [] for name in cases}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [[(7 * number + at) % 250 for at in range(_PROMPT)] for number in range(batch)]
    for run in range(runs + 1):
        for name, adapters in cases.items():
            steps = _Steps()
            end = llm.observe(steps)
            llm.generate(prompts, params, adapter=adapters)
            end()
            took[name] += steps.seconds if run else []  # the first run warms up
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    for name, seconds in medians.items():
        print(f"batch {batch}, {name}: {1000 * seconds:.2f} ms", file=sys.stderr)
    ratios = {name: round(seconds / medians["none"], 3) for name, seconds in medians.items() if name != "none"}
    return {"batch": batch, "step_ms": {name: round(1000 * s, 3) for name, s in medians.items()}, "ratio": ratios}


if __name__ == "__main__":
    main()
