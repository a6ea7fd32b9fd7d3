"""Workloads of the kinds that users have, each at a hit rate that is aimed at.

- ``documents``: questions about documents that stand in front of them. A hit asks about a document that was computed
  before; a miss brings a document that nobody has seen.
- ``passages``: retrieval. Every prompt is a few passages in any order and a question; how often a passage is asked for
  falls with its rank (Zipf). The most popular passages are warm; one that is not becomes so with its first use.
- ``summaries``: a text of each request's own behind a system prompt. A hit has the system prompt that was computed
  before; a miss has one that nobody has seen.

Hits are spread evenly over the requests, so that the first few of them have about the same rate.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from inlay.async_llm import AsyncLLM
from inlay.bench.texts import exact_text
from inlay.bench.throughput.modules import Modules
from inlay.bench.throughput.workload import Workload, asked, random_ids

KINDS = ("documents", "passages", "summaries")
POOL = 1000  # passages, of which a run needs those alone that it asks for
ZIPF = 0.8  # web pages have 0.64 to 0.83 (Breslau et al., Web Caching and Zipf-like Distributions, INFOCOM 1999)


@dataclass(frozen=True)
class Sizes:
    """Tokens of what these workloads are made of; ``passages`` is how many of them a prompt has."""

    document: int = 2000
    system: int = 1000
    text: int = 500
    passage: int = 256
    passages: int = 4
    question: int = 32
    answer: int = 16
    summary: int = 64

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, and a few more, since texts do not cut exactly."""
        passages = self.passages * self.passage + self.question + 16
        return max(self.document + self.question, passages, self.system + self.text) + max(self.answer, self.summary)


async def user_workload(
    kind: str, llm: AsyncLLM, sizes: Sizes, *, requests: int, hit_rate: float, clients: int
) -> Workload:
    """Requests of one of ``KINDS``, a share ``hit_rate`` of which finds its text stored."""
    if kind == "passages":
        return await _passages(llm, sizes, requests, hit_rate, clients)
    document, own, answer = {
        "documents": (sizes.document, sizes.question, sizes.answer),
        "summaries": (sizes.system, sizes.text, sizes.summary),
    }[kind]
    return _beginnings(llm.vocab_size, document, own, answer, requests, hit_rate, clients)


def hits(requests: int, rate: float) -> Iterator[bool]:
    """Which requests are hits: of the first n, n × rate, rounded."""
    before = 0
    for number in range(1, requests + 1):
        now = int(number * rate + 0.5)
        yield now > before
        before = now


def _beginnings(
    vocabulary: int, shared: int, own: int, completion: int, requests: int, rate: float, clients: int
) -> Workload:
    """Prompts of ``shared`` tokens, stored ones or new ones, and ``own`` tokens of their own."""
    draw = random.Random(0)
    stored = random_ids(draw, vocabulary, shared)
    prompts, known = [], []
    for hit in hits(requests, rate):
        first = stored if hit else random_ids(draw, vocabulary, shared)
        prompts.append([*first, *random_ids(draw, vocabulary, own)])
        known.append(shared if hit else 0)
    return Workload(asked(prompts, known), completion, resident=(stored,) if any(known) else (), clients=clients)


async def _passages(llm: AsyncLLM, sizes: Sizes, requests: int, rate: float, clients: int) -> Workload:
    draw = random.Random(0)
    drawn = [_zipf(draw, sizes.passages) for _ in range(requests)]
    needed = sorted(set(chain.from_iterable(drawn)))
    modules = await Modules.of(llm, [exact_text(llm, sizes.passage, random.Random(rank)) for rank in needed])
    number = {rank: place for place, rank in enumerate(needed)}
    stored = {number[rank] for rank in warm_passages(drawn, rate)}
    resident = modules.resident(sorted(stored))
    asks = []
    for ranks in drawn:
        order = [number[rank] for rank in ranks]
        asks.append(modules.ask(order, exact_text(llm, sizes.question, draw), stored))
        stored.update(order)
    return Workload(tuple(asks), sizes.answer, schema=modules.schema, resident=resident, clients=clients)


def warm_passages(drawn: Sequence[Collection[int]], rate: float) -> set[int]:
    """The most popular passages, as many as make up this share of those asked for. drawn: ranks, 0 is the first."""
    asked_for = Counter(chain.from_iterable(drawn))
    goal, covered = rate * asked_for.total(), 0
    warm: set[int] = set()
    for rank in sorted(asked_for):
        if covered >= goal:
            break
        warm.add(rank)
        covered += asked_for[rank]
    return warm


def _zipf(draw: random.Random, count: int) -> list[int]:
    """Distinct ranks below ``POOL``, the more popular the likelier, in any order.

    The largest of u^(1/weight) are a weighted sample without replacement (Efraimidis and Spirakis, 2006).
    """
    keys = [draw.random() ** ((rank + 1) ** ZIPF) for rank in range(POOL)]
    return draw.sample(sorted(range(POOL), key=lambda rank: keys[rank], reverse=True)[:count], count)
