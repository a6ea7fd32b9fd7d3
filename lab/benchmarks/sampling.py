"""What does it cost to sample the tokens of one step?

    python lab/benchmarks/sampling.py --rows 256 --vocabulary 151936

Logits are random, with a few hundred heavy tokens over a wide bulk, as in a trained model. With --flat they are those
of an untrained model. --without-kernel runs the code for missing compiled kernels. Times are CPU milliseconds a step,
all threads together. The least of some runs is reported, so that other load matters little. Divide by the number of
threads for the time of a step. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch

from inlay import SamplingParams
from inlay.sampling import compiled
from inlay.sampling.row import Row
from inlay.sampling.sampler import sample

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.2}
CASES: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0)],
    "greedy, penalties": [SamplingParams(temperature=0, **PENALTIES)],
    "temperature": [SamplingParams(temperature=0.8)],
    "top_k": [SamplingParams(top_k=50)],
    "top_p": [SamplingParams(top_p=0.95)],
    "top_p, temperature": [SamplingParams(temperature=0.8, top_p=0.95)],
    "top_p, top_k": [SamplingParams(temperature=0.8, top_p=0.95, top_k=50)],
    "top_p, min_p": [SamplingParams(temperature=0.8, top_p=0.95, min_p=0.05)],
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
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens that the repetition penalty counts")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-kernel", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logits = _logits(options.rows, options.vocabulary, flat=options.flat)
    logits = logits.bfloat16() if options.bf16 else logits
    if options.without_kernel:
        compiled.takes = lambda logits: False  # type: ignore[assignment]
    times = {}
    for name, params in CASES.items():
        each = [params[place % len(params)] for place in range(options.rows)]
        rows = [Row(one, seed, prompt_ids=range(options.prompt)) for seed, one in enumerate(each)]
        times[name] = round(min(_took(partial(sample, logits, rows)) for _ in range(options.runs)), 2)
        print(f"{name:20}{times[name]:8.2f} ms", flush=True)
    print(json.dumps({"rows": options.rows, "vocabulary": options.vocabulary, "ms": times}))


def _took(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return 1000 * (time.process_time() - began)


def _logits(rows: int, vocabulary: int, *, flat: bool) -> torch.Tensor:
    """(rows, vocabulary), fp32."""
    generator = torch.Generator().manual_seed(0)
    if flat:
        return torch.randn(rows, vocabulary, generator=generator)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    heavy = min(200, vocabulary)
    for row in logits:
        row[torch.randperm(vocabulary, generator=generator)[:heavy]] += torch.linspace(14, 2, heavy)
    return logits


if __name__ == "__main__":
    main()
