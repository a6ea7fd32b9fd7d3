"""What does promotion cost running requests when there is no idle time?

    python lab/benchmarks/promotion.py --turns 10 --seconds 4

Two engines over the same model, one with promotion and one without (``promotion_memory=0``). In turns, clients keep one
of them busy. Each client asks its next question right after an answer, over six of twelve documents in one of a few
combinations, so that every combination repeats. Both policies are ``modular``, which reads promoted segments. After the
turns there is idle time, and one more turn each, which shows the gain of promotion.

Prints a table. The last line of stdout is one JSON object: milliseconds to the first token and between tokens (median
and 99th percentile over requests), tokens a second, promoted tokens, and the medians' ratios over the pairs of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field

from inlay import AsyncLLM, Schema
from inlay.pml import Prompt, PromptBuilder
from inlay.sampling.params import SamplingParams
from inlay_lab.eval.documents import write_documents
from inlay_lab.eval.words import Split, Words

DOCUMENTS, IMPORTED, COMBINATIONS = 12, 6, 24
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SIDES = ("promoting", "not promoting")


@dataclass
class Seen:
    """The clients' times of one turn, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def prompts() -> tuple[str, list[Prompt]]:
    """A schema of documents, and a prompt for each combination."""
    rng = random.Random(5)
    written = write_documents(Words(rng, Split.HELD_OUT), DOCUMENTS)
    modules = "".join(f'<module name="d{number}">{each.text}\n</module>' for number, each in enumerate(written))
    schema = f'<schema name="documents"><user>{modules}</user></schema>'
    asked = []
    for _ in range(COMBINATIONS):
        numbers = sorted(rng.sample(range(DOCUMENTS), IMPORTED))
        builder = PromptBuilder.for_schema("documents")
        for number in numbers:
            builder = builder.use(f"d{number}")
        asked.append(builder.text(f"What is said about {written[numbers[0]].name}?").build())
    return schema, asked


async def turn(llm: AsyncLLM, asked: list[Prompt], clients: int, seconds: float, seed: int) -> Seen:
    """Keep an engine busy for ``seconds``."""
    seen, began = Seen(), time.perf_counter()

    async def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.perf_counter() - began < seconds:
            sent, last = time.perf_counter(), 0.0
            async for output in llm.generate(rng.choice(asked), PARAMS, reuse="modular"):
                now = time.perf_counter()
                if not last:
                    seen.first.append(now - sent)
                else:
                    seen.between.append(now - last)
                last = now
                if output.finished:
                    seen.tokens += len(output.outputs[0].token_ids)

    await asyncio.gather(*(client(number) for number in range(clients)))
    seen.seconds = time.perf_counter() - began
    return seen


def figures(turns: list[Seen]) -> dict[str, float]:
    first = sorted(1000 * value for seen in turns for value in seen.first)
    between = sorted(1000 * value for seen in turns for value in seen.between)
    return {
        "requests": len(first),
        "first_ms": round(statistics.median(first), 2),
        "first_p99_ms": round(first[int(0.99 * len(first))], 2),
        "between_ms": round(statistics.median(between), 2),
        "between_p99_ms": round(between[int(0.99 * len(between))], 2),
        "tokens_per_s": round(sum(seen.tokens for seen in turns) / sum(seen.seconds for seen in turns), 1),
    }


def ratios(one: list[Seen], other: list[Seen]) -> dict[str, list[float]]:
    """The minimum, median and maximum ratio of the medians over pairs of turns."""
    found: dict[str, list[float]] = {}
    for name in ("first", "between"):
        each = [
            statistics.median(getattr(a, name)) / statistics.median(getattr(b, name))
            for a, b in zip(one, other, strict=True)
        ]
        found[name] = [round(value, 3) for value in (min(each), statistics.median(each), max(each))]
    return found


async def measure(model: str, turns: int, seconds: float, clients: int) -> dict[str, object]:
    schema, asked = prompts()
    engines = dict(zip(SIDES, (AsyncLLM(model), AsyncLLM(model, promotion_memory=0.0)), strict=True))
    for llm in engines.values():
        await llm.add_schema(Schema.from_string(schema))
        await turn(llm, asked, clients, seconds / 4, seed=-1)
    seen: dict[str, list[Seen]] = {name: [] for name in SIDES}
    for number in range(turns):
        for name in SIDES if number % 2 else reversed(SIDES):
            before = engines[name].stats().promoted_tokens
            seen[name].append(await turn(engines[name], asked, clients, seconds, number))
            promoted = engines[name].stats().promoted_tokens - before
            print(f"turn {number + 1} of {turns}, {name}: {promoted} tokens promoted", flush=True)
    busy = {
        name: figures(each) | {"promoted_tokens": engines[name].stats().promoted_tokens} for name, each in seen.items()
    }
    await asyncio.sleep(10)
    rested = {name: figures([await turn(llm, asked, clients, seconds, turns)]) for name, llm in engines.items()}
    promoted = engines[SIDES[0]].stats().promoted_tokens
    for llm in engines.values():
        llm.shutdown()
    return {
        "busy": busy,
        "ratios": ratios(seen[SIDES[0]], seen[SIDES[1]]),
        "after_idle_time": rested,
        "promoted_tokens": promoted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    found = asyncio.run(measure(options.model, options.turns, options.seconds, options.clients))
    print(json.dumps({"model": options.model, "clients": options.clients, **found}))


if __name__ == "__main__":
    main()
