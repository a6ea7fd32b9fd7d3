"""What does it cost to choose the tokens of one step?

    python benchmarks/sampling.py --rows 16 --vocabulary 151936

Logits are made up, with a few hundred heavy tokens over a wide bulk, as a trained model's have. The last line of stdout
is one JSON object; times are in milliseconds a step, medians of runs in turns.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import torch

from inlay import SamplingParams
from inlay.bench.machine import clocked, in_turns
from inlay.engine.sampler.row import Row
from inlay.engine.sampler.sampler import sample

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.2}
CASES: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0)],
    "greedy, penalties": [SamplingParams(temperature=0, **PENALTIES)],
    "temperature": [SamplingParams(temperature=0.8)],
    "top_k": [SamplingParams(top_k=50)],
    "top_p": [SamplingParams(top_p=0.95)],
    "min_p": [SamplingParams(min_p=0.05)],
    "typical_p": [SamplingParams(typical_p=0.9)],
    "mixed": [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.95, temperature=0.7),
        SamplingParams(top_k=50),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(temperature=0.8, logprobs=5),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens that the repetition penalty counts")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    logits = _logits(options.rows, options.vocabulary)
    meters = {}
    for name, params in CASES.items():
        each = [params[place % len(params)] for place in range(options.rows)]
        rows = [Row(one, seed, prompt_ids=range(options.prompt)) for seed, one in enumerate(each)]
        meters[name] = clocked(partial(sample, logits, rows))
    times = {name: round(timing.ms, 2) for name, timing in in_turns(meters, options.runs).items()}
    for name, ms in times.items():
        print(f"{name:20}{ms:8.2f} ms")
    print(json.dumps({"rows": options.rows, "vocabulary": options.vocabulary, "ms": times}))


def _logits(rows: int, vocabulary: int) -> torch.Tensor:
    """(rows, vocabulary), bfloat16."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    heavy = min(200, vocabulary)
    for row in logits:
        row[torch.randperm(vocabulary, generator=generator)[:heavy]] += torch.linspace(14, 2, heavy)
    return logits.bfloat16()


if __name__ == "__main__":
    main()
