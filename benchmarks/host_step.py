"""What does a decode step cost beside the model: scheduling, planning, sampling, taking the tokens in?

    python benchmarks/host_step.py --requests 256

A model of random weights that is next to nothing, so that its forward pass does not hide the rest; it has the demo
model's vocabulary, and benchmarks/sampling.py has the sampler's time at large ones. Times are in milliseconds a step,
medians over steps in which all requests decode; *other* is what no timer sees. With --modules the second table is the
time to build the plan of rows that read so many stored modules each, none of them shared. The last line of stdout is one
JSON object.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

CASES = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}
PARTS = ("schedule", "plan", "forward", "sample", "accept")


class Clock:
    """Adds up the time of calls by the name of their part."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.spent[name] += time.perf_counter() - began

        return timed
