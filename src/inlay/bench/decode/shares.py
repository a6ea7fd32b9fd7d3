"""What a decode step spends its time on: timers around the calls of the engine, in runs of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from inlay.attention.dispatch import get_backend
from inlay.engine import engine
from inlay.llm import LLM
from inlay.models.linear import FrozenLinear
from inlay.types import SamplingParams

SHARES = ("plan", "attention", "linear", "sampling", "rest")


class Stopwatch:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(SHARES, 0.0)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return timed


def step_shares(llm: LLM, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Milliseconds a token by kind of work, and their sum, which holds the timers' own cost too.

    ``rest`` is what no timer sees: norms, rotary embeddings, activations, residuals, transformers' Python and ours.
    """
    watch = Stopwatch()
    params = SamplingParams(max_tokens=tokens + 1, temperature=0, ignore_eos=True)
    with _timers(llm, watch):
        answer = llm.stream(prompt, params)
        next(answer)
        watch.seconds = dict.fromkeys(SHARES, 0.0)
        started = time.perf_counter()
        for _ in answer:
            pass
        total = time.perf_counter() - started
    watch.seconds["rest"] = total - sum(watch.seconds.values())
    per_token = {name: round(seconds / tokens * 1000, 4) for name, seconds in watch.seconds.items()}
    return {
        "how": "timers around calls",
        "ms_per_token": round(total / tokens * 1000, 3),
        "ms": per_token,
        "share": {name: round(seconds / total, 4) for name, seconds in watch.seconds.items()},
    }


@contextmanager
def _timers(llm: LLM, watch: Stopwatch) -> Iterator[None]:
    backend = type(get_backend(llm.config.attention_backend))
    calls = ((engine, "build_plan", "plan"), (engine, "advance", "plan"), (engine, "sample", "sampling"))
    with ExitStack() as stack:
        for owner, attribute, name in (*calls, (backend, "attend", "attention")):
            stack.enter_context(_replaced(owner, attribute, watch.around(name, getattr(owner, attribute))))
        for module in llm.loaded.model.modules():
            if isinstance(module, (nn.Linear, FrozenLinear)):
                stack.enter_context(_replaced(module, "forward", watch.around("linear", module.forward)))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute within a block, and the one before it afterwards, of the owner itself or of its class."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
