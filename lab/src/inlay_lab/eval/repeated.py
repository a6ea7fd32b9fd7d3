"""The promotion curve: the same prompts, asked repeatedly under ``modular`` with idle time between.

In idle time the engine encodes repeated combinations exactly, so each repetition reads more exact KV.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from inlay.check.run import divergence
from inlay.client.llm import LLM
from inlay.policy import BEST
from inlay.sampling.params import SamplingParams
from inlay_lab.eval import modular_qa
from inlay_lab.eval.modular_cases import Round
from inlay_lab.eval.setting import REFERENCE, Setting

Row = dict[str, Any]


def measure_repeated(llm: LLM, setting: Setting, progress: Callable[[int, int], None] | None = None) -> list[Row]:
    """Ask every question ``setting.repeat`` times; returns a row for each number of documents and repetition.

    A repetition sends each prompt twice: for the answer, and for the distributions at the tokens of full prefill's
    answer.
    Idle time follows each repetition.

    Args:
        progress: As in ``measure_modular_qa``.
    """
    rounds = [(documents, each) for documents in setting.counts for each in setting.rounds(documents)]
    total, done = setting.repeat * sum(len(each.cases) for _, each in rounds), 0
    found: dict[tuple[int, int], list[Row]] = {}
    for documents, each in rounds:
        for repetition, figures in enumerate(_repeat(llm, each, setting.repeat), 1):
            found.setdefault((documents, repetition), []).extend(figures)
            done += len(figures)
            if progress is not None:
                progress(done, total)
    return [_row(documents, repetition, figures) for (documents, repetition), figures in sorted(found.items())]


def _repeat(llm: LLM, each: Round, times: int) -> Iterator[list[Row]]:
    """Yield the figures of a round's cases for each repetition."""
    prompts = [each.prompt(case) for case in each.cases]
    params = SamplingParams(temperature=0, max_tokens=modular_qa.MAX_TOKENS)
    reuse = str(BEST)
    llm.add_schema(each.schema(), replace=True, reuse=reuse)
    full = llm.generate(prompts, params, reuse=REFERENCE.reuse, positions=REFERENCE.positions)
    said = [output.outputs[0].token_ids for output in full]
    expected = llm.distributions(prompts, said, reuse=REFERENCE.reuse, positions=REFERENCE.positions)
    for _ in range(times):
        outputs = [llm.generate([prompt], params, reuse=reuse)[0] for prompt in prompts]
        found = llm.distributions(prompts, said, reuse=reuse)
        promoted = llm.promote()
        yield [
            {
                "right": output.outputs[0].text.strip() == case.answer,
                "reference": whole.outputs[0].text.strip() == case.answer,
                "kl": divergence(wanted, here),
                "usage": output.usage,
                "ttft_s": output.metrics.ttft_s,
                "promoted": promoted / len(prompts),
            }
            for case, output, whole, wanted, here in zip(each.cases, outputs, full, expected, found, strict=True)
        ]
    llm.reset_prefix_cache()


def _row(documents: int, repetition: int, figures: list[Row]) -> Row:
    prompts, modules = (
        sum(getattr(each["usage"], name) for each in figures) for name in ("prompt_tokens", "module_tokens")
    )

    def mean(name: str) -> float:
        return statistics.fmean(each[name] for each in figures)

    return {
        "documents": documents,
        "repetition": repetition,
        "questions": len(figures),
        "exact_match": round(mean("right"), 4),
        "reference": round(mean("reference"), 4),
        "kl": float(f"{mean('kl'):.4g}"),
        "most_kl": float(f"{max(each['kl'] for each in figures):.4g}"),
        "approximate": round(modules / prompts, 4),
        "promoted_tokens": round(mean("promoted"), 1),
        "ttft_s": float(f"{statistics.median(each['ttft_s'] for each in figures):.4g}"),
    }
