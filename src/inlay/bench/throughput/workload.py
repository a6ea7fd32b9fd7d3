"""What is asked: prompts as token ids and as what inlay is given, what of them is stored, and when each arrives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inlay.pml import Schema
from inlay.prompt.inputs import PromptInput


@dataclass(frozen=True)
class Ask:
    """One request.

    ids: the whole prompt's. prompt: the same as inlay gets it. at: seconds behind the start.
    shared: how many of its tokens are stored when it comes, where stored text is used: those of what was resident, and
        of what was asked before it.
    """

    ids: tuple[int, ...]
    prompt: PromptInput
    at: float = 0.0
    shared: int = 0


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival; every answer has ``completion`` tokens.

    prefix: how many tokens all prompts begin with in common, as far as a baseline is told of it.
    schema: what prompts of modules derive from; None where prompts are ids.
    resident: what is computed before the run, where stored text is used: prompts of which nothing is asked.
    clients: how many callers take turns, each asking when its last request was answered; None where requests come at
        their own times, whoever waits.
    """

    asks: tuple[Ask, ...]
    completion: int
    prefix: int = 0
    schema: Schema | None = None
    resident: tuple[PromptInput, ...] = ()
    clients: int | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(ask.ids) for ask in self.asks) + self.completion

    def prompt_tokens(self, *, sharing: bool) -> int:
        """How many tokens of prompts have to be computed, by whom uses what is stored and by whom does not."""
        return sum(len(ask.ids) - (ask.shared if sharing else 0) for ask in self.asks)

    def arriving(self, rate: float, seed: int) -> Workload:
        """The same requests as a Poisson process of ``rate`` requests a second, the first one at 0."""
        draw = random.Random(seed)
        gaps = (draw.expovariate(rate) for _ in self.asks[1:])
        times = itertools.accumulate(gaps, initial=0.0)
        return replace(self, asks=tuple(replace(ask, at=at) for ask, at in zip(self.asks, times, strict=True)))

    def first(self, requests: int) -> Workload:
        """Its first requests alone."""
        return replace(self, asks=self.asks[:requests])

    def small(self) -> Workload:
        """Its first two requests at once, with short answers: to warm up."""
        few = tuple(replace(ask, at=0.0) for ask in self.asks[:2])
        return replace(self, asks=few, completion=min(2, self.completion))


def random_ids(draw: random.Random, vocabulary: int, tokens: int) -> list[int]:
    """Token ids whose meaning does not matter."""
    return draw.choices(range(min(256, vocabulary)), k=tokens)


def shared_prefix(vocabulary: int, *, requests: int, prefix: int, question: int, completion: int) -> Workload:
    """``prefix`` tokens that all prompts begin with, then ``question`` tokens of each one's own."""
    draw = random.Random(0)
    first = random_ids(draw, vocabulary, prefix)
    prompts = [[*first, *random_ids(draw, vocabulary, question)] for _ in range(requests)]
    return Workload(asked(prompts, [0] + [prefix] * (requests - 1)), completion, prefix)


def asked(prompts: Sequence[Sequence[int]], shared: Sequence[int]) -> tuple[Ask, ...]:
    """Prompts of token ids, each with how many of its tokens are stored by then."""
    return tuple(Ask(tuple(ids), list(ids), shared=stored) for ids, stored in zip(prompts, shared, strict=True))
