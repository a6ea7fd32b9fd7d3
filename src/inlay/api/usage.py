"""The usage of an answer in a form that is independent of the dialect, and the ``inlay`` object of all dialects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inlay.api.reasoning import ReasoningUse
from inlay.types import RequestMetrics, RequestOutput

_COUNTED = (
    "exact_tokens",
    "module_tokens",
    "scaffold_tokens",
    "anchored_tokens",
    "isolated_tokens",
    "promoted_tokens",
    "shifted_tokens",
    "host_tokens",
    "disk_tokens",
    "shared_tokens",
    "duplicate_tokens",
    "recomputed_tokens",
    "linked_tokens",
    "selecting_tokens",
    "computed_tokens",
    "drafted_tokens",
    "accepted_tokens",
)
_NO_TIMES = RequestMetrics()
_TIMED = ("queue_s", "fetch_s", "compute_s", "ttft_s", "total_s")


@dataclass(frozen=True, slots=True)
class Counts:
    """The tokens of a request, summed over all prompts and answers.

    Args:
        prompt: tokens of the prompts.
        answer: tokens of the answers.
        thought: tokens of reasoning in the answers.
        cached: prompt tokens read from the cache.
        written: prompt tokens written to the cache.
        lasting: written tokens that stay for an hour or longer.
        accepted, rejected: draft tokens that the answers have, and those that were computed in vain.
    """

    prompt: int
    answer: int
    thought: int
    cached: int
    written: int
    lasting: int
    accepted: int
    rejected: int


def counts_of(outputs: Sequence[RequestOutput], reasoning: ReasoningUse | None = None) -> Counts:
    """Count the tokens of outputs. ``reasoning`` is the form of their reasoning."""
    thought = 0
    if reasoning is not None:
        said = [(output.prompt or "", answer.token_ids) for output in outputs for answer in output.outputs]
        thought = sum(reasoning.count(*each) for each in said)
    return Counts(
        prompt=sum(output.usage.prompt_tokens for output in outputs),
        answer=sum(len(answer.token_ids) for output in outputs for answer in output.outputs),
        thought=thought,
        cached=sum(output.usage.cached_tokens for output in outputs),
        written=sum(output.usage.written_tokens for output in outputs),
        lasting=sum(output.usage.lasting_tokens for output in outputs),
        accepted=sum(output.usage.accepted_tokens for output in outputs),
        rejected=sum(output.usage.drafted_tokens - output.usage.accepted_tokens for output in outputs),
    )


def inlay_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the ``inlay`` object: the origin of the prompt tokens, and the times of the slowest prompt.

    The tokens are summed over all prompts (types.Usage). ``repaired_tokens`` is a deprecated name of
    ``recomputed_tokens``. ``reuse`` is the policy of the prompts; several are joined with commas. ``misses``,
    ``across_tokens``, ``reanchored_tokens``, ``primed_tokens``, ``moved_tokens``, ``found_tokens``, ``fallbacks``,
    ``order`` and ``diagnostics`` are left out if empty. ``order`` lists the members of each set in their final order
    (types.SetOrder). ``diagnostics`` has one entry for each prompt (diagnostics.Diagnostics). ``timing`` is in seconds
    (types.RequestMetrics). Unknown times are null, for example in a waiting request.
    """
    slowest = max((output.metrics for output in outputs), key=lambda times: times.total_s or 0.0, default=_NO_TIMES)
    times = {name: getattr(slowest, name) for name in _TIMED}
    misses: Counter[str] = Counter()
    for output in outputs:
        misses.update(dict(output.usage.misses))
    across = sum(output.usage.across_tokens for output in outputs)
    reanchored = sum(output.usage.reanchored_tokens for output in outputs)
    primed = sum(output.usage.primed_tokens for output in outputs)
    moved = sum(output.usage.moved_tokens for output in outputs)
    found = sum(output.usage.found_tokens for output in outputs)
    order = [each.told for output in outputs for each in output.order]
    fallbacks = dict.fromkeys(
        (output.fell_back_from, output.reuse) for output in outputs if output.fell_back_from is not None
    )
    explained = [output.diagnostics.told for output in outputs if output.diagnostics is not None]
    return {
        "reuse": ", ".join(dict.fromkeys(output.reuse for output in outputs if output.reuse is not None)) or None,
        **{name: sum(getattr(output.usage, name) for output in outputs) for name in _COUNTED},
        "repaired_tokens": sum(output.usage.recomputed_tokens for output in outputs),
        **({"across_tokens": across} if across else {}),
        **({"reanchored_tokens": reanchored} if reanchored else {}),
        **({"primed_tokens": primed} if primed else {}),
        **({"moved_tokens": moved} if moved else {}),
        **({"found_tokens": found} if found else {}),
        **({"misses": dict(misses)} if misses else {}),
        **({"order": order} if order else {}),
        **({"fallbacks": [{"asked": asked, "taken": taken} for asked, taken in fallbacks]} if fallbacks else {}),
        **({"diagnostics": explained} if explained else {}),
        "timing": {name: None if seconds is None else round(seconds, 6) for name, seconds in times.items()},
    }
