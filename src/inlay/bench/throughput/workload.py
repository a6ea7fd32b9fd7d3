"""What is asked: prompts as token ids and as what inlay is given, and when each of them arrives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inlay.async_llm import AsyncLLM
from inlay.bench.texts import exact_text
from inlay.inputs import PromptInput
from inlay.layout import SchemaLayout
from inlay.pml import Prompt, Schema

MODULES, CHOSEN = 12, 6  # of the workload of permuted modules: in the schema, and in each prompt


@dataclass(frozen=True)
class Ask:
    """One request. ids: the whole prompt's. prompt: the same as inlay gets it. at: seconds behind the start."""

    ids: tuple[int, ...]
    prompt: PromptInput
    at: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival; every answer has ``completion`` tokens.

    prefix: how many tokens all prompts begin with in common, as far as a baseline is told of it.
    schema: what prompts of modules derive from; None where prompts are ids.
    """

    asks: tuple[Ask, ...]
    completion: int
    prefix: int = 0
    schema: Schema | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(ask.ids) for ask in self.asks) + self.completion

    def arriving(self, rate: float, seed: int) -> Workload:
        """The same requests as a Poisson process of ``rate`` requests a second, the first one at 0."""
        draw = random.Random(seed)
        gaps = (draw.expovariate(rate) for _ in self.asks[1:])
        times = itertools.accumulate(gaps, initial=0.0)
        return replace(self, asks=tuple(replace(ask, at=at) for ask, at in zip(self.asks, times, strict=True)))

    def small(self) -> Workload:
        """Its first two requests at once, with short answers: to warm up."""
        few = tuple(replace(ask, at=0.0) for ask in self.asks[:2])
        return replace(self, asks=few, completion=min(2, self.completion))


def shared_prefix(vocabulary: int, *, requests: int, prefix: int, question: int, completion: int) -> Workload:
    """``prefix`` tokens that all prompts begin with, then ``question`` tokens of each one's own."""
    draw = random.Random(0)
    ids = range(min(256, vocabulary))
    first = draw.choices(ids, k=prefix)
    prompts = [[*first, *draw.choices(ids, k=question)] for _ in range(requests)]
    return Workload(tuple(Ask(tuple(prompt), prompt) for prompt in prompts), completion, prefix)


async def permuted_modules(llm: AsyncLLM, *, requests: int, tokens: int, question: int, completion: int) -> Workload:
    """Prompts of 6 out of 12 modules of ``tokens`` tokens, in an order of their own, and a question behind them."""
    draw = random.Random(0)

    def text(size: int) -> str:
        return exact_text(llm, size, draw)  # type: ignore[arg-type]  # takes what LLM and AsyncLLM have in common

    texts = [text(tokens) for _ in range(MODULES)]
    modules = "".join(f'<module name="m{number}">{each}</module>' for number, each in enumerate(texts))
    schema = Schema.from_string(f'<schema name="bench">{modules}</schema>', source="bench.xml")
    layout = await llm.add_schema(schema, encode=False, reuse="isolated", positions="packed")
    asks = []
    for _ in range(requests):
        order = draw.sample(range(MODULES), CHOSEN)
        asks.append(_ask(llm, layout, order, text(question)))
    return Workload(tuple(asks), completion, schema=schema)


def _ask(llm: AsyncLLM, layout: SchemaLayout, order: Sequence[int], question: str) -> Ask:
    runs = [run.ids for run in layout.runs if run.owner]
    ids = [*llm.encoder.bos, *(token for number in order for token in runs[number]), *llm.encoder.text(question)]
    imports = "".join(f"<m{number}/>" for number in order)
    prompt = Prompt.from_string(f'<prompt schema="bench">{imports}{question}</prompt>', source="bench-prompt.xml")
    return Ask(tuple(ids), prompt)
