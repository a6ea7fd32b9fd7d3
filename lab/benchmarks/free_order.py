"""The gain of a free document order in retrieval: hit ratio, time to the first token, and the effect on answers.

    python lab/benchmarks/free_order.py [MODEL] [REQUESTS] [QUESTIONS]

Each request reads 6 of 12 documents in their random order of retrieval and asks something new. The same requests go to
two engines in turns; one of them may choose the order. It runs under ``exact`` and under ``modular``, with promotion
between requests. Then it asks the counting questions of ``modular-qa`` behind documents as written, and in the order of
an earlier request. Prints a line for each, then a line of JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from typing import Any

from inlay import LLM, SamplingParams, Schema
from inlay.pml import PromptBuilder
from inlay_lab.eval.modular_cases import Round, draw_rounds

DOCUMENTS, READ = 12, 6
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
ANSWER = SamplingParams(temperature=0, max_tokens=24)


def retrieval(model: str, reuse: str, requests: int, *, skewed: bool) -> dict[str, Any]:
    """Hit ratios and times of two engines: one keeps the order of retrieval, one may choose it.

    Args:
        skewed: Retrieve some documents far more often than others (weights 1, 1/2, 1/3, …).
    """
    (each,) = draw_rounds(documents=READ, spare=DOCUMENTS - READ, questions=1, seed=5, tasks=("count",))
    schema, rng = each.schema(), random.Random(7)
    names = _documents(each)
    engines = {name: LLM(model, seed=0, kv_memory="2GiB") for name in ("as retrieved", "free")}
    for llm in engines.values():
        llm.add_schema(schema, encode=reuse != "exact", reuse=reuse)
    cached, total = dict.fromkeys(engines, 0), 0
    times: dict[str, list[float]] = {name: [] for name in engines}
    exact = dict.fromkeys(engines, 0)
    for number in range(requests):
        weights = {name: rng.random() ** (rank + 1 if skewed else 1) for rank, name in enumerate(names)}
        found = sorted(names, key=lambda name: -weights[name])[:READ]
        rng.shuffle(found)
        question = f"Question {number}: what do they say of it?"
        for name in sorted(engines, key=lambda _: rng.random()):
            prompt = schema.prompt().any_order(*found) if name == "free" else _fixed(schema, found)
            (output,) = engines[name].generate(prompt.text(question), ONE, reuse=reuse)
            cached[name] += output.usage.cached_tokens
            exact[name] += output.usage.exact_tokens
            times[name].append(output.metrics.ttft_s or 0.0)
            if reuse != "exact":
                engines[name].promote()
        total += output.usage.prompt_tokens
    half = requests // 2  # without the first requests, which find nothing
    medians = {name: statistics.median(each[half:]) for name, each in times.items()}
    return {
        "reuse": reuse,
        "retrieval": "skewed" if skewed else "uniform",
        "hits": {name: round(tokens / total, 3) for name, tokens in cached.items()},
        "exact": {name: round(tokens / total, 3) for name, tokens in exact.items()},
        "ttft_ms": {name: round(seconds * 1e3, 1) for name, seconds in medians.items()},
        "ratio": round(medians["free"] / medians["as retrieved"], 3),
    }


def counting(model: str, questions: int) -> dict[str, Any]:
    """The share of right answers to counting questions behind documents as written, and in another request's order."""
    llm, rng = LLM(model, seed=0, kv_memory="2GiB"), random.Random(3)
    right, moved, asked = {"as written": 0, "order taken": 0}, 0, 0
    for each in draw_rounds(
        documents=READ, spare=DOCUMENTS - READ, questions=questions, seed=11, tasks=("count",), permuted=True
    ):
        schema = each.schema()
        llm.add_schema(schema, encode=False, replace=True)
        modules = _documents(each)
        for case in each.cases:
            found = [modules[number] for number in case.imported]
            begun = schema.prompt().use(case.form.value) if case.form in each.instructions else schema.prompt()
            answers = {}
            plain = llm.generate(_fixed(schema, found, begun).text(case.question), ANSWER, reuse="off")[0]
            answers["as written"] = plain
            other = rng.sample(found, len(found))
            llm.generate(_fixed(schema, other, begun).text("Something else?"), ONE, reuse="exact")
            free = begun.any_order(*found).text(case.question)
            answers["order taken"] = taken = llm.generate(free, ANSWER, reuse="exact")[0]
            moved += list(taken.order[0].members) != found
            for name, output in answers.items():
                right[name] += output.outputs[0].text.strip() == case.answer
            asked += 1
        llm.reset_prefix_cache()
    return {"questions": asked, "moved": moved, **{name: round(count / asked, 3) for name, count in right.items()}}


def _documents(each: Round) -> list[str]:
    return [name for name in each.schema().modules if name not in {form.value for form in each.instructions}]


def _fixed(schema: Schema, names: list[str], begun: PromptBuilder | None = None) -> PromptBuilder:
    prompt = begun or schema.prompt()
    for name in names:
        prompt = prompt.use(name)
    return prompt


def main(model: str = "demo", requests: str = "200", questions: str = "200") -> None:
    rows = []
    for reuse in ("exact", "modular"):
        for skewed in (False, True):
            rows.append(retrieval(model, reuse, int(requests), skewed=skewed))
            print(rows[-1], flush=True)
    rows.append(counting(model, int(questions)))
    print(rows[-1])
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
