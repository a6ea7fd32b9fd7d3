"""The progress of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from inlay.types import RequestOutput


class Stage(StrEnum):
    """The stage of a batch. Reading counts bytes; the other two count requests."""

    READING = "reading"
    SORTING = "sorting"
    ANSWERING = "answering"


#: Called with the stage, the amount done, and the total.
Progress = Callable[[Stage, int, int], None]


@dataclass
class BatchCounts:
    """Counters of a batch and of this run.

    Args:
        requests: lines of the input that are not blank.
        done_before: requests that the output already held.
        answered, failed: requests in the output now.
        prompt_tokens, cached_tokens, completion_tokens: of the requests answered by this run.
        started: the start of answering in seconds of ``perf_counter``. None before.
    """

    requests: int = 0
    done_before: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    started: float | None = field(default=None, compare=False)

    @property
    def done(self) -> int:
        return self.answered + self.failed

    @property
    def seconds(self) -> float:
        """Seconds since answering started."""
        return 0.0 if self.started is None else time.perf_counter() - self.started

    @property
    def tokens_per_s(self) -> float:
        """Prompt and answer tokens per second."""
        tokens = self.prompt_tokens + self.completion_tokens
        return tokens / self.seconds if tokens else 0.0

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that came from the store."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Count an answered request."""
        self.answered += 1
        for output in outputs:
            self.prompt_tokens += output.usage.prompt_tokens
            self.cached_tokens += output.usage.cached_tokens
            self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    def describe(self) -> dict[str, Any]:
        """Return all counters for one line of JSON."""
        return {
            "requests": self.requests,
            "answered": self.answered,
            "failed": self.failed,
            "done_before": self.done_before,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_share": round(self.cached_share, 4),
            "completion_tokens": self.completion_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
        }
