"""Every experiment, in the order of the report, with its settings at each scale."""

from __future__ import annotations

from collections.abc import Mapping

from inlay_lab.reproduce import answers, applications, copies, first_token, kernels, serving, stored
from inlay_lab.reproduce.experiment import Experiment, Scale, Settings
from inlay_lab.reproduce.published import CHUNK_ATTENTION, COMMENTARY, PROMPT_CACHE

_SMALL = "random:qwen2.5-0.5b"
_SHARED = "random:mha-0.4b"  # a key and a value for every head, as in the papers' models


def _scales(quick: Settings, default: Settings, full: Settings) -> dict[Scale, Settings]:
    """Settings by scale. ``default`` and ``full`` have only the differences from the scale before."""
    middle = {**quick, **default}
    return {Scale.QUICK: dict(quick), Scale.DEFAULT: middle, Scale.FULL: {**middle, **full}}


_NONE = _scales({}, {}, {})

_ALL = (
    Experiment(
        "first-token",
        "Time to the first token on LongBench's shapes",
        f"{PROMPT_CACHE}, figures 4, 12 and 13",
        _scales(
            {"model": _SMALL, "longest": 256, "runs": 1}, {"longest": 2500, "runs": 3}, {"longest": 5000, "runs": 5}
        ),
        first_token.measure_longbench_shapes,
        first_token.draw_longbench_shapes,
    ),
    Experiment(
        "growth",
        "Quadratic against linear",
        f"{PROMPT_CACHE}, figure 5",
        _scales(
            {"model": _SMALL, "cached": [64, 128, 256, 512, 1024], "new": 8, "longest_baseline": 1024, "runs": 1},
            {"cached": [256, 512, 1024, 2048, 4096], "longest_baseline": 4096, "runs": 3},
            {"cached": [256, 512, 1024, 2048, 4096, 8192, 16384], "longest_baseline": 16384, "runs": 5},
        ),
        first_token.measure_growth,
        first_token.draw_growth,
    ),
    Experiment(
        "copies",
        "Copies, beside reading in place",
        f"{PROMPT_CACHE}, §5.4",
        _scales({"tokens": 5000, "layers": 2, "runs": 5}, {"layers": 8, "runs": 7}, {"layers": 32, "runs": 9}),
        copies.measure_copies,
    ),
    Experiment(
        "model-size",
        "7B against 13B",
        f"{PROMPT_CACHE}, §5.4",
        _scales(
            {"cached": 256, "new": 8, "layers": 1, "runs": 1},
            {"cached": 3000, "layers": 1, "runs": 1},
            {"layers": 4, "runs": 3},
        ),
        first_token.measure_model_size,
    ),
    Experiment(
        "later-tokens",
        "The first token against later ones",
        f"{PROMPT_CACHE}, §5.4",
        _scales(
            {"model": _SMALL, "cached": 512, "new": 16, "tokens": 8, "runs": 1},
            {"cached": 3000, "tokens": 32, "runs": 3},
            {"runs": 7},
        ),
        first_token.measure_later_tokens,
    ),
    Experiment(
        "token-memory",
        "Memory of a cached token",
        f"{PROMPT_CACHE}, table 2",
        _NONE,
        copies.measure_token_memory,
        copies.draw_token_memory,
        light=True,
    ),
    Experiment(
        "quality",
        "Answers on LongBench",
        f"{PROMPT_CACHE}, tables 1 and 3",
        _scales({"limit": 5}, {"limit": 50}, {"limit": None}),
        answers.measure_longbench_quality,
        given=("longbench", "model"),
    ),
    Experiment(
        "applications",
        "Code, personas and a trip",
        f"{PROMPT_CACHE}, §5.6, figures 6 to 8",
        _scales({"model": _SMALL, "tokens": 64, "runs": 1}, {"tokens": 512, "runs": 3}, {"tokens": 1024, "runs": 5}),
        applications.measure_applications,
        applications.draw_applications,
    ),
    Experiment(
        "gpu-first-token",
        "Time to the first token on GPUs",
        f"{PROMPT_CACHE}, figures 3 and 9 to 11, §5.4",
        _NONE,
        stored.measure_gpu_first_token,
        given=("stored",),
        light=True,
    ),
    Experiment(
        "retrieval",
        "Cache-driven retrieval",
        f"{PROMPT_CACHE}, §6",
        _scales(
            {"documents": 60, "questions": 12, "chosen": 2, "candidates": 20},
            {"documents": 2_000, "questions": 300, "chosen": 4, "candidates": 40},
            {},
        ),
        answers.measure_cached_retrieval,
        answers.draw_cached_retrieval,
    ),
    Experiment(
        "roofline",
        "A layer's operations, bytes and times",
        f"{CHUNK_ATTENTION}, table 1",
        _scales({"batches": [1, 32], "runs": 3}, {"batches": [1, 32, 64], "runs": 5}, {"runs": 15}),
        kernels.measure_roofline,
    ),
    Experiment(
        "kernels",
        "Attention kernels by shared tokens",
        f"{CHUNK_ATTENTION}, table 3",
        _scales(
            {"heads": 32, "batch": 32, "prompts": [1024], "runs": 1},
            {"prompts": [1024, 2048], "runs": 3},
            {"prompts": [1024, 2048, 4096], "runs": 7},
        ),
        kernels.measure_grid,
        kernels.draw_kernels,
    ),
    Experiment(
        "divergence",
        "Sequences that diverge",
        f"{CHUNK_ATTENTION}, figure 3",
        _scales(
            {"heads": 32, "batch": 32, "shared": 2048, "completions": [0, 512], "runs": 1},
            {"completions": [0, 256, 512, 1024, 2048], "runs": 3},
            {"completions": [0, 128, 256, 512, 1024, 1536, 2048], "runs": 7},
        ),
        kernels.measure_divergence,
        kernels.draw_kernels,
    ),
    Experiment(
        "batches",
        "Rate over the batch",
        f"{CHUNK_ATTENTION}, figure 4",
        _scales(
            {"heads": 32, "batch": 32, "shared": 2048, "batches": [1, 4, 16], "runs": 1},
            {"batches": [1, 2, 4, 8, 16, 32, 64, 96], "runs": 3},
            {"runs": 7},
        ),
        kernels.measure_batches,
        kernels.draw_kernels,
    ),
    Experiment(
        "gpu-kernels",
        "Attention kernels on GPUs",
        f"{CHUNK_ATTENTION}, tables 1 and 3, figures 3 and 4",
        _NONE,
        stored.measure_gpu_kernels,
        given=("stored",),
        light=True,
    ),
    Experiment(
        "rates",
        "Rates and memory of many requests",
        f"{CHUNK_ATTENTION}, figure 5 and table 4",
        _scales(
            {"model": _SHARED, "prefixes": [256], "rates": [0.5, 1.0], "requests": 4, "batch": 4, "completion": 8}
            | {"budget_s": 15},
            {"prefixes": [1024, 2048], "rates": [0.5, 1.0], "requests": 16, "batch": 16, "completion": 64}
            | {"budget_s": 60},
            {"prefixes": [1024, 2048, 4096], "rates": [0.25, 0.5, 1.0, 2.0], "requests": 32, "batch": 32}
            | {"completion": 512, "budget_s": 1200},
        ),
        serving.measure_rates,
        serving.draw_rates,
    ),
    Experiment(
        "hit-rates",
        "Documents, passages and summaries by hit rate",
        COMMENTARY,
        _scales(
            {"model": _SMALL, "hits": [0, 65, 95], "requests": 20, "clients": 2, "budget_s": 8}
            | {"sizes": {"document": 256, "system": 128, "text": 64, "passage": 64, "answer": 4, "summary": 8}},
            {"hits": [0, 25, 50, 65, 75, 90, 95], "clients": 4, "budget_s": 30}
            | {"sizes": {"document": 2000, "system": 1000, "text": 500, "passage": 256, "answer": 16, "summary": 64}},
            {"requests": 100, "budget_s": 300},
        ),
        serving.measure_hit_rates,
        serving.draw_hits,
    ),
    Experiment(
        "documents",
        "Memory of resident documents",
        COMMENTARY,
        _scales(
            {"model": _SMALL, "documents": [0, 10], "tokens": 250, "budget_s": 60},
            {"documents": [0, 10, 50], "tokens": 2000, "budget_s": 600},
            {"documents": [0, 10, 50, 100], "budget_s": 1800},
        ),
        serving.measure_documents,
    ),
    Experiment(
        "paired-quality",
        "Answers, tested pair by pair",
        COMMENTARY,
        _scales({"questions": 50}, {"questions": 500}, {"questions": 2000}),
        answers.measure_paired_quality,
    ),
)

EXPERIMENTS: Mapping[str, Experiment] = {each.name: each for each in _ALL}
"""By name."""
