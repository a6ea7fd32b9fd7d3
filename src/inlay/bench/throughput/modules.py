"""Prompts of modules: a schema of texts, and prompts that import some of them in an order of their own."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inlay.async_llm import AsyncLLM
from inlay.bench.texts import exact_text
from inlay.bench.throughput.workload import Ask, Workload
from inlay.layout import SchemaLayout
from inlay.pml import Prompt, Schema

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
