"""How large is the deviation of module tokens behind other text, and how well do deviation profiles predict it?

    python lab/benchmarks/profiles.py --tasks count --documents 6 --questions 60

It uses the prompts of ``inlay eval modular-qa`` with documents in random order. True deviations are each prompt's,
against full prefill. A profile was computed once behind a sample of other documents. The first table has the mean true
deviation of tokens and of their profile, by the number of documents before them. The second one weighs the profile by
powers of the number of preceding tokens that the module's encoding has not seen. It shows the share of the tokens of
largest deviation that each finds.

Two tables, and the last line of stdout is one JSON object: ``moves`` by the number of documents before, ``found`` by
exponent and share.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from statistics import fmean

import numpy as np

from inlay import LLM, SamplingParams
from inlay.prompt.composed import compose, expected_deviations, inexact_modules
from inlay_lab.eval.modular_cases import draw_rounds
from inlay_lab.eval.oracle import true_moves

EXPONENTS, SHARES = (0.0, 0.15, 0.25, 0.35, 0.5), (0.05, 0.15)
ONES = np.ones(1, np.float16)


def measure(llm: LLM, asked: argparse.Namespace) -> tuple[dict[int, tuple[float, float]], dict[str, list[float]]]:
    """Mean deviations, true and by profile, by number of documents before; and the share found by each exponent."""
    moves: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    found: defaultdict[tuple[float, float], list[float]] = defaultdict(list)
    engine, policy = llm.local.engine, llm.policy("modular+profiled:0.15", "packed")
    for each in draw_rounds(
        documents=asked.documents,
        spare=asked.documents,
        questions=asked.questions,
        seed=asked.seed,
        tasks=asked.tasks.split(","),
        permuted=True,
    ):
        llm.add_schema(each.schema(), replace=True, reuse="modular", positions="packed")
        llm.local.finish_profiles()
        for case in each.cases:
            request = llm.processor.process(each.prompt(case), SamplingParams(max_tokens=1), policy)
            composed, true = compose(request), true_moves(engine, request)
            modules = inexact_modules(composed)
            known = [engine.kv_manager.profiles[part.spec.lossless.key][: part.length] for part in modules]
            for number, (part, profile) in enumerate(zip(modules, known, strict=True), 1):
                moves[number].append((float(true[part.start].mean()), float(profile.mean(dtype=np.float64))))
            weights = expected_deviations(composed, {part.spec.lossless.key: ONES for part in modules})
            unseen = np.concatenate([np.full(part.length, float(weights[part.start][0]) ** 4) for part in modules])
            moved = np.concatenate([true[part.start] for part in modules]).astype(np.float64)
            by_profile = np.concatenate(known).astype(np.float64)
            for share in SHARES:
                count = round(share * moved.size)
                most = set(np.argsort(-moved)[:count].tolist())
                for exponent in EXPONENTS:
                    chosen = np.argsort(-(by_profile * unseen**exponent))[:count].tolist()
                    found[exponent, share].append(len(most.intersection(chosen)) / count)
        llm.reset_prefix_cache()
    means = {number: (fmean(true for true, _ in all_), fmean(own for _, own in all_)) for number, all_ in moves.items()}
    return means, {f"{exponent}": [fmean(found[exponent, share]) for share in SHARES] for exponent in EXPONENTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tasks", default="count", help="of inlay eval modular-qa, with commas")
    parser.add_argument("--documents", type=int, default=6, help="that a prompt imports; its schema has twice as many")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=11)
    asked = parser.parse_args()
    moves, found = measure(LLM(asked.model, dtype="float32", store="off", promotion_memory=0, seed=0), asked)
    print("| documents before | true move | profile |\n|---|---|---|")
    for number, (true, own) in sorted(moves.items()):
        print(f"| {number} | {true:.3f} | {own:.3f} |")
    print("\n| exponent | " + " | ".join(f"found of {share:.0%}" for share in SHARES) + " |\n|---|---|---|")
    for exponent, shares in found.items():
        print(f"| {exponent} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
    print(json.dumps({"moves": {str(number): both for number, both in sorted(moves.items())}, "found": found}))


if __name__ == "__main__":
    main()
