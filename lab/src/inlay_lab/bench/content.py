"""The tokens that ``find="content"`` reads of repeated text without marks, beside marks and exact prefixes.

The same prompts (content_prompts.py) are asked in three ways, each with an engine of its own, and in turns, so that a
slow moment of the machine affects all ways. Answers have one token.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from inlay.client.llm import LLM
from inlay.errors import ContextError
from inlay.policy import ReusePolicy
from inlay.sampling.params import SamplingParams
from inlay.settings import check_choice
from inlay.types import RequestOutput
from inlay_lab.bench.content_prompts import (
    SIGHTINGS,
    WORKLOADS,
    Messages,
    Sizes,
    repeated_texts,
    without_marks,
    write_prompts,
)
from inlay_lab.bench.machine import Progress, describe_machine

#: Policies by way. Both modular ways recompute the same share.
WAYS = {"exact": "exact", "marks": "modular+profiled:0.1", "content": "modular+content"}

_ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_PROMPTS_OF_ROOM = 4


@dataclass(frozen=True, kw_only=True)
class ContentSetting:
    """Options of the benchmark. Raises ParameterError.

    Attributes:
        workload: one of WORKLOADS.
        kv_memory: of each engine, in bytes. None for room for all repeated texts twice, and four prompts.
    """

    model: str = "demo"
    workload: str = "rag"
    sizes: Sizes = field(default_factory=Sizes)
    dtype: str = "float32"
    quantization: str | None = None
    weights: str | None = None
    kv_memory: int | None = None

    def __post_init__(self) -> None:
        check_choice("workload", self.workload, WORKLOADS)


def measure_content(setting: ContentSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Ask all prompts in all ways. A KeyboardInterrupt keeps the prompts so far.

    Returns:
        The setting and a row for each way. The rows of ``repeat`` have a list of first-token times by sighting.

    Raises:
        ContextError: if a prompt is longer than the model's context.
    """
    prompts = write_prompts(setting.workload, setting.sizes)
    engines = _engines(setting, prompts)
    asked: dict[str, list[RequestOutput]] = {name: [] for name in WAYS}
    names = list(WAYS)
    try:
        for number, messages in enumerate(prompts):
            turn = number % len(names)
            answers = {name: _ask(engines[name], name, messages) for name in (*names[turn:], *names[:turn])}
            for name, answer in answers.items():
                asked[name].append(answer)
            if progress is not None:
                progress(number + 1, len(prompts))
    except KeyboardInterrupt:
        if not asked["exact"]:
            raise
    finally:
        for llm in engines.values():
            llm.shutdown()
    rows = {name: _row(of_way) for name, of_way in asked.items()}
    if setting.workload == "repeat":
        for name, of_way in asked.items():
            rows[name]["sightings_ms"] = [_median_ms(of_way[n::SIGHTINGS]) for n in range(SIGHTINGS)]
    read = {name: row["read"] for name, row in rows.items()}
    return {
        "setting": asdict(setting),
        "prompts": len(asked["exact"]),
        "rows": rows,
        "of_marks": _share(read["content"], read["marks"]),
        "of_marks_beyond_exact": _share(read["content"] - read["exact"], read["marks"] - read["exact"]),
        "machine": describe_machine(),
    }


def _engines(setting: ContentSetting, prompts: list[Messages]) -> dict[str, LLM]:
    given: dict[str, Any] = {
        "dtype": setting.dtype,
        "quantization": setting.quantization,
        "weights": setting.weights,
        "store": "off",
        "promotion_memory": 0,
        "generation_config": "off",
        "seed": 0,
    }
    sizer = LLM(setting.model, kv_memory="64MiB", **given)
    try:
        encode = sizer.encoder.text
        longest = max(prompts, key=lambda messages: sum(len(str(message["content"])) for message in messages))
        tokens, most = len(sizer.lay_out(without_marks(longest), reuse="exact").ids), sizer.loaded.spec.max_positions
        if tokens >= most:
            raise ContextError(
                f"the longest prompt has {tokens:,} tokens and the context of the model {most:,}; use smaller texts"
            )
        room = 2 * sum(len(encode(text)) for text in repeated_texts(prompts)) + _PROMPTS_OF_ROOM * (tokens + 600)
        size = setting.kv_memory or room * sizer.client.model.bytes_per_token
    finally:
        sizer.shutdown()
    return {name: LLM(setting.model, kv_memory=size, **given) for name in WAYS}


def _ask(llm: LLM, way: str, messages: Messages) -> RequestOutput:
    prompt = messages if way == "marks" else without_marks(messages)
    (output,) = llm.generate([prompt], _ONE, reuse=ReusePolicy.parse(WAYS[way]))
    return output


def _row(outputs: list[RequestOutput]) -> dict[str, Any]:
    usages = [output.usage for output in outputs]
    times = [output.metrics.ttft_s or 0.0 for output in outputs]
    return {
        "prompt": sum(usage.prompt_tokens for usage in usages),
        "read": sum(usage.cached_tokens for usage in usages),
        "recomputed": sum(usage.recomputed_tokens for usage in usages),
        "computed": sum(usage.computed_tokens for usage in usages),
        "ttft_p50_ms": _median_ms(outputs),
        "ttft_mean_ms": 1000 * statistics.fmean(times),
        "ttft_p99_ms": 1000 * float(np.quantile(times, 0.99)),
    }


def _median_ms(outputs: list[RequestOutput]) -> float:
    return 1000 * statistics.median(output.metrics.ttft_s or 0.0 for output in outputs) if outputs else 0.0


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None
