"""Tokens a second with lookup speculation and without, on answers that copy and on answers that do not.

Two engines share one model, one with ``speculation="lookup"`` and one with "off". They answer the same prompts in
turns.

- ``quotes``: passages, and the request to repeat one of them. The passages are real ones with ``--data``. Without it,
  documents are generated (eval/documents.py).
- ``code``: a function of Python's own library. It is written again with a variable renamed.
- ``agent``: a log of tool calls to be continued. Its calls repeat names, fields and earlier results.
- ``story``: a story drawn at temperature 1. It copies nothing. Its length is drawn, from half the tokens to all:
  answers of one length would all begin in the same passes, but only without drafts.

The prompts are in the cache. All requests of a task wait in line, and as many as the batch run at the same time. The
time is that of the whole line. Earlier answers are forgotten before each turn, so that no answer is copied from the
turn before.
"""

from __future__ import annotations

import inspect
import json
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from inlay.client.llm import LLM
from inlay.config import SPECULATIONS
from inlay.models.spec import dtype_name
from inlay.sampling.params import SamplingParams
from inlay.settings import check_choice
from inlay.types import RequestOutput
from inlay_lab.bench.machine import Meter, Progress, describe_machine, in_turns, part_of
from inlay_lab.eval.documents import write_documents
from inlay_lab.eval.reading_data import read_data
from inlay_lab.eval.words import Split, Words
from inlay_lab.options import check_least

TASKS = ("quotes", "code", "agent", "story")

_DOCUMENTS = 6  # in a prompt
_NAMES = ("values", "items", "series", "numbers", "entries", "rows", "points", "samples")
_TOPICS = ("a dragon", "a lighthouse", "two brothers", "a lost key", "the last train", "a garden", "rain", "a clock")


@dataclass(frozen=True, kw_only=True)
class SpeculationSetting:
    """Options of the benchmark. Raises ParameterError.

    Attributes:
        tasks: Of TASKS.
        batches: Numbers of answers at the same time.
        prompts: The prompts of each task, by answer of the batch.
        tokens: The most tokens of an answer, at least 2.
        data: A folder with passages and questions, see eval/reading.py. None for generated documents.
    """

    model: str
    tasks: tuple[str, ...] = TASKS
    batches: tuple[int, ...] = (1, 16)
    prompts: int = 3
    tokens: int = 128
    data: Path | None = None
    dtype: str = "auto"
    weights: str | None = "packed"
    quantization: str | None = None
    runs: int = 3
    quick: bool = False

    def __post_init__(self) -> None:
        for task in self.tasks:
            check_choice("task", task, TASKS)
        check_least(1, runs=self.runs, prompts=self.prompts, batch=self.batches)
        check_least(2, tokens=self.tokens)


@dataclass(frozen=True)
class Workload:
    """Prompts, each with its parameters. A prompt is a text, or the messages of a chat."""

    prompts: Sequence[Any]
    params: Sequence[SamplingParams]


def measure_speculation(setting: SpeculationSetting, progress: Progress | None = None) -> dict[str, Any]:
    """Measure every task and batch; returns ``{"rows": […], "machine": …}``. Raises InlayError."""
    common: dict[str, Any] = {"store": "off", "profile": "off", "promotion_memory": 0, "seed": 0, "device": "cpu"}
    common |= {"dtype": setting.dtype, "weights": setting.weights, "quantization": setting.quantization}
    loaded = LLM(setting.model, speculation="off", **common).loaded
    kept = ("dtype", "weights", "quantization", "device")
    shared = {name: value for name, value in common.items() if name not in kept}
    rows: list[dict[str, Any]] = []
    total = len(setting.tasks) * len(setting.batches)
    for batch in setting.batches:
        engines = {mode: LLM(loaded, speculation=mode, max_num_seqs=batch, **shared) for mode in SPECULATIONS}
        for task in setting.tasks:
            work = workload(task, batch * setting.prompts, setting)
            measured = _measure(engines, work, setting.runs, part_of(progress, len(rows), total))
            rows.append({"task": task, "batch": batch, **measured})
        for engine in engines.values():
            engine.shutdown()
    return {
        "rows": rows,
        "model": setting.model,
        "dtype": dtype_name(loaded.model.dtype),
        "weights": setting.weights,
        "quantization": setting.quantization,
        "tokens": setting.tokens,
        "quick": setting.quick,
        "machine": describe_machine(),
    }


def workload(task: str, count: int, setting: SpeculationSetting) -> Workload:
    """The prompts of a task."""
    greedy = SamplingParams(temperature=0, max_tokens=setting.tokens)
    if task == "story":
        topics = [_TOPICS[number % len(_TOPICS)] for number in range(count)]
        prompts = [_chat(f"Write a story about {topic}.") for topic in topics]
        return Workload(prompts, [_free(number, setting.tokens) for number in range(count)])
    made: dict[str, Callable[[int], Any]] = {
        "quotes": partial(_quote, setting.data, _passages(setting.data)),
        "code": _code,
        "agent": _agent,
    }
    return Workload([made[task](number) for number in range(count)], [greedy] * count)


def _free(seed: int, tokens: int) -> SamplingParams:
    """Parameters for a drawn answer, of ``tokens / 2`` to ``tokens`` tokens."""
    length = random.Random(seed).randint(tokens // 2, tokens)
    return SamplingParams(temperature=1, max_tokens=length, ignore_eos=True, seed=seed)


def _chat(text: str, system: str | None = None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def _passages(data: Path | None) -> list[tuple[str, str]]:
    """Passages by name: of a folder, or generated."""
    if data is not None:
        return list(read_data(data).passages.items())
    words = Words(random.Random(0), Split.TRAIN)
    return [(document.name, document.text) for _ in range(8) for document in write_documents(words, _DOCUMENTS)]


def _quote(data: Path | None, passages: Sequence[tuple[str, str]], number: int) -> Any:
    if data is not None:
        _, text = passages[number % len(passages)]
        return _chat(f"Rewrite this text with no change:\n\n{text}")
    first = number // _DOCUMENTS * _DOCUMENTS % len(passages)
    shown = passages[first : first + _DOCUMENTS]
    name = shown[number % _DOCUMENTS][0]
    documents = "".join(f"{text}\n" for _, text in shown)
    return _chat(f"Repeat the document about {name}.", f"Answer from the documents.\n{documents}")


def _code(number: int) -> str:
    """A function to be written again with its first parameter renamed. The start of the answer is given."""
    functions: list[Callable[..., Any]] = [
        *(statistics.fmean, statistics.median, statistics.mode, statistics.quantiles, statistics.harmonic_mean),
        *(textwrap.dedent, textwrap.indent, random.sample),
    ]
    function = functions[number % len(functions)]
    name, other = next(iter(inspect.signature(function).parameters)), _NAMES[number % len(_NAMES)]
    code = inspect.getsource(function)
    head = f"def {function.__name__}({other}"
    return f"A file:\n```python\n{code}```\nThe same file with {name} renamed to {other}:\n```python\n{head}"


def _agent(number: int) -> str:
    """A log of tool calls, with the start of the next one."""
    draw = random.Random(number)
    places = draw.sample(["Lyon", "Oslo", "Cairo", "Quito", "Perth", "Kyoto", "Turin", "Ghent"], 5)
    steps = []
    for place in places[:-1]:
        call = {"name": "weather_of_city", "arguments": {"city": place, "unit": "celsius", "days": 3}}
        result = {"city": place, "unit": "celsius", "temperatures": [draw.randrange(-9, 35) for _ in range(3)]}
        steps.append(f"Call: {json.dumps(call)}\nResult: {json.dumps(result)}\nNote: the city of {place} is done.\n")
    return f"Weather for {', '.join(places)}.\n" + "".join(steps) + "Call:"


def _measure(engines: dict[str, LLM], work: Workload, runs: int, progress: Progress | None) -> dict[str, Any]:
    latest: dict[str, list[RequestOutput]] = {}

    def meter(name: str) -> Meter:
        def once() -> float:
            speculator = engines[name].local.engine.speculator
            if speculator is not None:
                speculator.earlier.clear()
            began = time.perf_counter()
            latest[name] = engines[name].generate(list(work.prompts), list(work.params))
            return time.perf_counter() - began

        return once

    for engine in engines.values():  # the prompts are computed once, before the turns
        engine.generate(list(work.prompts), SamplingParams(max_tokens=1))
    timed = in_turns({name: meter(name) for name in engines}, runs, progress)
    before, after = (latest[name] for name in ("off", "lookup"))
    tokens = sum(len(output.outputs[0].token_ids) for output in before)
    drafted, accepted = (sum(getattr(output.usage, f"{name}_tokens") for output in after) for name in _COUNTED)
    equal = sum(_answer(one) == _answer(other) for one, other in zip(before, after, strict=True))
    rates = {name: tokens / timed[name].seconds for name in engines}
    return {
        "off_tokens_s": round(rates["off"], 1),
        "lookup_tokens_s": round(rates["lookup"], 1),
        "ratio": round(rates["lookup"] / rates["off"], 3),
        "tokens": tokens,
        "drafted": drafted,
        "accepted": accepted,
        "accepted_share": round(accepted / drafted, 3) if drafted else None,
        "equal_answers": equal,
        "answers": len(before),
        "runs": timed["off"].runs,
    }


_COUNTED = ("drafted", "accepted")


def _answer(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids
