"""Running a workload through every column in turns, each with as many requests as its budget of time allows.

Prompts of modules: a schema of texts, and prompts that import some of them in an order of their own.

Workloads of the kinds that users have, each at a hit rate that is aimed at.

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
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from inlay.async_llm import AsyncLLM
from inlay.bench.stock import exact_text
from inlay.bench.throughput.steps import Run
from inlay.bench.throughput.workload import Ask, Workload, asked, random_ids
from inlay.errors import DeadlineError, ModelError
from inlay.pml import Prompt, Schema
from inlay.prompt.layout import SchemaLayout


class Column(Protocol):
    """Runs a workload. Raises ModelError where it cannot, DeadlineError where it takes longer than ``limit_s``."""

    def prompt_tokens(self, workload: Workload) -> int:
        """How many tokens of prompts it computes in a run."""
        ...

    def run(self, workload: Workload, limit_s: float) -> Run: ...


@dataclass(frozen=True)
class Pace:
    """What a small run says of a large one: seconds of a prompt's token, and of a step of ``rows`` answers."""

    token_s: float
    step_s: float
    rows: int

    @classmethod
    def of(cls, run: Run, prompt_tokens: int) -> Pace:
        """The pace of a run that computed that many tokens of prompts."""
        first = max(answer.times[0] for answer in run.answers) - run.started
        steps = [(answer.times[-1] - answer.times[0]) / max(1, len(answer.times) - 1) for answer in run.answers]
        return cls(first / prompt_tokens, min(steps), len(run.answers))

    def seconds(self, workload: Workload, prompt_tokens: int, batch: int) -> float:
        """The most that a workload should take. A step is taken to be as long as its rows are many, which it rarely is.

        prompt_tokens: those that are computed. batch: the most requests that run at once.
        """
        requests = len(workload.asks)
        rows = min(requests, workload.clients or batch)
        steps = -(-requests // rows) * (workload.completion - 1)
        answering = steps * self.step_s * max(1.0, rows / self.rows)
        return max(prompt_tokens * self.token_s + answering, workload.asks[-1].at)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much is run.

    turns: runs of each column. batch: the most requests that run at once. budget_s, limit_s: see ThroughputSetting.
    """

    turns: int
    batch: int
    budget_s: float
    limit_s: float


def pace_of(column: Column, workload: Workload, limit_s: float) -> Pace | str:
    """Warm a column up with a small run; returns the pace of that, or why it cannot run."""
    small = workload.small()
    try:
        return Pace.of(column.run(small, limit_s), column.prompt_tokens(small))
    except (ModelError, DeadlineError) as error:
        return str(error)


def affordable(column: Column, workload: Workload, pace: Pace, bounds: Bounds) -> Workload:
    """The workload, or as many of its first requests as fit the budget, at least one."""

    def seconds(requests: int) -> float:
        fewer = workload.first(requests)
        return pace.seconds(fewer, column.prompt_tokens(fewer), bounds.batch)

    more = range(2, len(workload.asks) + 1)
    return workload.first(1 + bisect_right(more, bounds.budget_s, key=seconds))


def in_turns(
    columns: Mapping[str, Column], workload: Workload, paces: Mapping[str, Pace | str], bounds: Bounds
) -> Iterator[tuple[str, Run | str]]:
    """Each column with its run of median time as soon as that is known, or with why it could not run.

    Every turn has an order of its own, since what ran before leaves caches and threads behind in some state.
    """
    runs: dict[str, list[Run]] = {}
    for name in columns:
        pace = paces[name]
        if isinstance(pace, str):
            yield name, pace
        else:
            runs[name] = []
    shuffle = random.Random(0).shuffle
    for turn in range(bounds.turns):
        order = list(runs)
        shuffle(order)
        for name in order:
            pace = paces[name]
            assert isinstance(pace, Pace), "a column without a pace has been left out"
            try:
                runs[name].append(columns[name].run(affordable(columns[name], workload, pace, bounds), bounds.limit_s))
            except (ModelError, DeadlineError) as error:
                del runs[name]
                yield name, str(error)
                continue
            if turn == bounds.turns - 1:
                yield name, _median(runs[name])


def _median(runs: list[Run]) -> Run:
    middle = statistics.median_low(run.wall_s for run in runs)
    return next(run for run in runs if run.wall_s == middle)


MODULES, CHOSEN = 12, 6  # of the workload of permuted modules: in the schema, and in each prompt
REUSE, POSITIONS = "isolated", "packed"  # how modules are encoded, and where they are read
_TOGETHER = 8  # modules that are encoded for one prompt that is not asked


@dataclass(frozen=True)
class Modules:
    """A schema of modules ``m0``, ``m1``, … that an engine knows."""

    llm: AsyncLLM
    schema: Schema
    layout: SchemaLayout

    @classmethod
    async def of(cls, llm: AsyncLLM, texts: Sequence[str]) -> Modules:
        """Make them of texts, and known, and encode none."""
        modules = "".join(f'<module name="m{number}">{each}</module>' for number, each in enumerate(texts))
        schema = Schema.from_string(f'<schema name="bench">{modules}</schema>', source="bench.xml")
        return cls(llm, schema, await llm.add_schema(schema, encode=False, reuse=REUSE, positions=POSITIONS))

    def ask(self, order: Sequence[int], question: str, stored: Collection[int]) -> Ask:
        """A prompt of these modules and a question. stored: the modules whose KV is there by then."""
        runs = [run.ids for run in self.layout.runs if run.owner]
        encoder = self.llm.encoder
        ids = [*encoder.bos, *(token for number in order for token in runs[number]), *encoder.text(question)]
        shared = sum(len(runs[number]) for number in order if number in stored)
        return Ask(tuple(ids), self._prompt(order, question), shared=shared)

    def resident(self, numbers: Sequence[int]) -> tuple[Prompt, ...]:
        """Prompts whose warming encodes these modules, several at a time."""
        parts = (numbers[at : at + _TOGETHER] for at in range(0, len(numbers), _TOGETHER))
        return tuple(self._prompt(part, "") for part in parts)

    def _prompt(self, order: Sequence[int], question: str) -> Prompt:
        imports = "".join(f"<m{number}/>" for number in order)
        return Prompt.from_string(f'<prompt schema="bench">{imports}{question}</prompt>', source="bench-prompt.xml")


async def permuted_modules(llm: AsyncLLM, *, requests: int, tokens: int, question: int, completion: int) -> Workload:
    """Prompts of 6 out of 12 modules of ``tokens`` tokens, in an order of their own, and a question behind them."""
    draw = random.Random(0)
    modules = await Modules.of(llm, [exact_text(llm, tokens, draw) for _ in range(MODULES)])
    everything = range(MODULES)
    asks = []
    for _ in range(requests):
        order = draw.sample(everything, CHOSEN)
        asks.append(modules.ask(order, exact_text(llm, question, draw), everything))
    return Workload(tuple(asks), completion, schema=modules.schema, resident=modules.resident(everything))


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
