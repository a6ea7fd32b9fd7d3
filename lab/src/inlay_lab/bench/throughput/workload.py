"""Workloads: prompts as token ids and in inlay's form, their stored text, and their arrival times.

``shared_prefix`` and ``permuted_modules`` share a prefix or modules in random order. User workloads have a target hit
rate:

- ``documents``: questions about documents at the start of the prompt. A hit asks about a stored document; a miss
  brings a new one.
- ``passages``: retrieval. Every prompt has a few passages in random order and a question. A passage's frequency falls
  with its rank (Zipf). The most popular passages are stored before the run, others after their first use.
- ``summaries``: each request's own text behind a system prompt. A hit has the stored system prompt, a miss a new one.

Hits are spread evenly over the requests, so that the first few have about the same rate.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from inlay.client.async_llm import AsyncLLM
from inlay.pml import Prompt, Schema
from inlay.prompt.inputs import PromptInput
from inlay.prompt.layout import SchemaLayout
from inlay_lab.bench.stock import exact_text


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        ids: The whole prompt.
        prompt: The same in inlay's form.
        at: Seconds after the start.
        shared: Number of its tokens that are stored when it arrives, from resident text and earlier requests.
    """

    ids: tuple[int, ...]
    prompt: PromptInput
    at: float = 0.0
    shared: int = 0


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. Every answer has ``completion`` tokens.

    Attributes:
        prefix: Tokens of the common prefix that baselines may share.
        schema: Schema of the prompts' modules; None if prompts are ids.
        resident: Prompts whose KV is computed before a run with reuse.
        clients: Number of callers that each send a request after their last answer. None if requests have own times.
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
        """Number of prompt tokens to compute, with or without use of stored text."""
        return sum(len(ask.ids) - (ask.shared if sharing else 0) for ask in self.asks)

    def arriving(self, rate: float, seed: int) -> Workload:
        """The same requests as a Poisson process of ``rate`` requests a second, the first one at 0."""
        draw = random.Random(seed)
        gaps = (draw.expovariate(rate) for _ in self.asks[1:])
        times = itertools.accumulate(gaps, initial=0.0)
        return replace(self, asks=tuple(replace(ask, at=at) for ask, at in zip(self.asks, times, strict=True)))

    def first(self, requests: int) -> Workload:
        """A workload of only the first requests."""
        return replace(self, asks=self.asks[:requests])

    def small(self) -> Workload:
        """The first two requests at once, with short answers, to warm up."""
        few = tuple(replace(ask, at=0.0) for ask in self.asks[:2])
        return replace(self, asks=few, completion=min(2, self.completion))


def random_ids(draw: random.Random, vocabulary: int, tokens: int) -> list[int]:
    """Random token ids."""
    return draw.choices(range(min(256, vocabulary)), k=tokens)


def shared_prefix(vocabulary: int, *, requests: int, prefix: int, question: int, completion: int) -> Workload:
    """Prompts with a common prefix of ``prefix`` tokens and ``question`` tokens of their own."""
    draw = random.Random(0)
    first = random_ids(draw, vocabulary, prefix)
    prompts = [[*first, *random_ids(draw, vocabulary, question)] for _ in range(requests)]
    return Workload(asked(prompts, [0] + [prefix] * (requests - 1)), completion, prefix)


def asked(prompts: Sequence[Sequence[int]], shared: Sequence[int]) -> tuple[Ask, ...]:
    """Prompts of token ids, each with its number of stored tokens on arrival."""
    return tuple(Ask(tuple(ids), list(ids), shared=stored) for ids, stored in zip(prompts, shared, strict=True))


MODULES, CHOSEN = 12, 6  # of the permuted modules: in the schema, and in each prompt
REUSE, POSITIONS = "isolated", "packed"  # encoding and positions of modules
_TOGETHER = 8  # modules that one resident prompt encodes


@dataclass(frozen=True)
class Modules:
    """A schema of modules ``m0``, ``m1``, … in an engine."""

    llm: AsyncLLM
    schema: Schema
    layout: SchemaLayout

    @classmethod
    async def of(cls, llm: AsyncLLM, texts: Sequence[str]) -> Modules:
        """Add a schema of these texts to the engine without encoding it."""
        modules = "".join(f'<module name="m{number}">{each}</module>' for number, each in enumerate(texts))
        schema = Schema.from_string(f'<schema name="bench">{modules}</schema>', source="bench.xml")
        return cls(
            llm, schema, await llm.add_schema(schema, encode=False, replace=True, reuse=REUSE, positions=POSITIONS)
        )

    def ask(self, order: Sequence[int], question: str, stored: Collection[int]) -> Ask:
        """A prompt of these modules and a question.

        Args:
            stored: The modules with stored KV on arrival.
        """
        runs = [run.ids for run in self.layout.runs if run.owner]
        encoder = self.llm.encoder
        ids = [*encoder.bos, *(token for number in order for token in runs[number]), *encoder.text(question)]
        shared = sum(len(runs[number]) for number in order if number in stored)
        return Ask(tuple(ids), self._prompt(order, question), shared=shared)

    def resident(self, numbers: Sequence[int]) -> tuple[Prompt, ...]:
        """Prompts that encode these modules, several at a time."""
        parts = (numbers[at : at + _TOGETHER] for at in range(0, len(numbers), _TOGETHER))
        return tuple(self._prompt(part, "") for part in parts)

    def _prompt(self, order: Sequence[int], question: str) -> Prompt:
        imports = "".join(f"<m{number}/>" for number in order)
        return Prompt.from_string(f'<prompt schema="bench">{imports}{question}</prompt>', source="bench-prompt.xml")


async def permuted_modules(llm: AsyncLLM, *, requests: int, tokens: int, question: int, completion: int) -> Workload:
    """Prompts of 6 out of 12 modules of ``tokens`` tokens in random order, and a question."""
    draw = random.Random(0)
    modules = await Modules.of(llm, [exact_text(llm, tokens, draw) for _ in range(MODULES)])
    everything = range(MODULES)
    asks = []
    for _ in range(requests):
        order = draw.sample(everything, CHOSEN)
        asks.append(modules.ask(order, exact_text(llm, question, draw), everything))
    return Workload(tuple(asks), completion, schema=modules.schema, resident=modules.resident(everything))


KINDS = ("documents", "passages", "summaries")
POOL = 1000  # passages; a run needs only the drawn ones
ZIPF = 0.8  # web pages have 0.64 to 0.83 (Breslau et al., Web Caching and Zipf-like Distributions, INFOCOM 1999)


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens of the user workloads' texts. ``passages`` is the number of passages in a prompt."""

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
        """Tokens of the longest prompt with its answer, plus a few, since texts are cut inexactly."""
        passages = self.passages * self.passage + self.question + 16
        return max(self.document + self.question, passages, self.system + self.text) + max(self.answer, self.summary)


async def user_workload(
    kind: str, llm: AsyncLLM, sizes: Sizes, *, requests: int, hit_rate: float, clients: int
) -> Workload:
    """Requests of one of ``KINDS``; a share ``hit_rate`` of them finds its text stored."""
    if kind == "passages":
        return await _passages(llm, sizes, requests, hit_rate, clients)
    document, own, answer = {
        "documents": (sizes.document, sizes.question, sizes.answer),
        "summaries": (sizes.system, sizes.text, sizes.summary),
    }[kind]
    return _beginnings(llm.vocab_size, document, own, answer, requests, hit_rate, clients)


def hits(requests: int, rate: float) -> Iterator[bool]:
    """Yield whether each request is a hit: round(n × rate) of the first n are."""
    before = 0
    for number in range(1, requests + 1):
        now = int(number * rate + 0.5)
        yield now > before
        before = now


def _beginnings(
    vocabulary: int, shared: int, own: int, completion: int, requests: int, rate: float, clients: int
) -> Workload:
    """Prompts of ``shared`` tokens, stored or new, and ``own`` tokens of their own."""
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
    drawn = [zipf(draw, sizes.passages) for _ in range(requests)]
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
    """The most popular passages that make up a share ``rate`` of those drawn.

    Args:
        drawn: Ranks of each prompt; 0 is the most popular.
    """
    asked_for = Counter(chain.from_iterable(drawn))
    goal, covered = rate * asked_for.total(), 0
    warm: set[int] = set()
    for rank in sorted(asked_for):
        if covered >= goal:
            break
        warm.add(rank)
        covered += asked_for[rank]
    return warm


def zipf(draw: random.Random, count: int) -> list[int]:
    """Distinct ranks below ``POOL``, in random order; popular ones are more likely.

    The largest of u^(1/weight) are a weighted sample without replacement (Efraimidis and Spirakis, 2006).
    """
    keys = [draw.random() ** ((rank + 1) ** ZIPF) for rank in range(POOL)]
    return draw.sample(sorted(range(POOL), key=lambda rank: keys[rank], reverse=True)[:count], count)
