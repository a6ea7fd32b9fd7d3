"""The benchmark's questions under full prefill and reuse policies, compared question by question."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inlay.check.statistics import mean_interval, permutation_test
from inlay.client.llm import LLM
from inlay.errors import ParameterError
from inlay.policy import ReusePolicy
from inlay.sampling.params import SamplingParams
from inlay_lab.eval.answers import AnswerLog
from inlay_lab.eval.longbench.data import Sample, Suite
from inlay_lab.eval.longbench.datasets import Dataset
from inlay_lab.eval.longbench.metrics import METRICS, check_packages, score
from inlay_lab.eval.longbench.prompts import Case, fitted, has_turns
from inlay_lab.eval.setting import REFERENCE, Mode, autos, describe_model, taken_of

Row = dict[str, Any]
_LEAST_LENGTH = 64  # tokens of a prompt, if a limit is given


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of the benchmark. Raises ParameterError.

    Attributes:
        reuse: The policies, in the order of the columns. Full prefill always runs.
        limit: First rows of each dataset to use; None for all.
        longest: Tokens of a prompt without its chat template; None for as many as leave room for an answer.
    """

    reuse: Sequence[str] = ("off", "anchored", "modular")
    limit: int | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        for name in self.reuse:
            ReusePolicy.parse(name)
        if self.limit is not None and self.limit < 1:
            raise ParameterError(f"limit is {self.limit}; it must be at least 1, or there is nothing to measure")
        if self.longest is not None and self.longest < _LEAST_LENGTH:
            raise ParameterError(f"max-length is {self.longest}; it must be at least {_LEAST_LENGTH} tokens")

    def modes(self, llm: LLM) -> list[Mode]:
        """Full prefill first, then each other policy once. Raises ParameterError if the model refuses one."""
        taken = taken_of(llm, self.reuse).values()
        asked = [Mode(reuse, llm.positions_for(reuse)) for reuse in taken if reuse != REFERENCE.reuse]
        return list(dict.fromkeys((REFERENCE, *asked)))


@dataclass(frozen=True)
class Outcome:
    """The result of one mode on one case.

    Attributes:
        said: The answer.
        score: 0 to 1.
        cached, tokens: Tokens of the prompt that were cached, and all of them.
        modules: Tokens read as encoded in another context.
        repaired: Recomputed tokens of modules.
        ttft_s: Time to the first token in seconds.
        documents: Number of modules in the prompt.
        cut: The middle of the prompt was left out.
    """

    said: str
    score: float
    cached: int
    tokens: int
    modules: int
    recomputed: int
    ttft_s: float
    documents: int
    cut: bool


Pairs = list[tuple[Outcome, Outcome]]  # of a mode and of full prefill, question by question


def measure_longbench(
    llm: LLM,
    suite: Suite,
    setting: Setting,
    progress: Callable[[int, int], None] | None = None,
    log: Path | None = None,
) -> Row:
    """Ask the rows of every dataset in every mode; returns ``{"rows": […], "model": …, …}``.

    Args:
        progress: Called with the number of answers done and their total.
        log: A file that stores the answers. Answers in it from an earlier run are not asked again.

    Raises:
        InlayError: A row cannot be read or scored (before anything runs), or the engine failed.
    """
    check_packages(suite.datasets)
    run = _Run(llm, suite, setting, progress)
    with AnswerLog(log, describe_model(llm) | {"fingerprint": llm.loaded.fingerprint.hex()}) as kept:
        run.answer(kept)
    return {
        "rows": run.rows(),
        **describe_model(llm),
        "limit": setting.limit,
        "max_length": setting.longest,
        "max_model_len": llm.processor.model.max_positions,
        "chat": run.chat,
        "own_templates": list(suite.own),
        "own_limits": list(suite.unlimited),
        "absent": list(suite.absent),
        **autos(llm, setting.reuse),
    }


class _Run:
    """The datasets of a suite, and the results of every mode on their rows."""

    def __init__(self, llm: LLM, suite: Suite, setting: Setting, progress: Callable[[int, int], None] | None) -> None:
        self._llm, self._suite, self._setting, self._progress = llm, suite, setting, progress
        self._modes = setting.modes(llm)
        self.chat = has_turns(llm)
        counts = {dataset: sum(1 for _ in self._samples(dataset)) for dataset in suite.datasets}  # reads every row once
        for dataset, count in counts.items():
            if not count:
                raise ParameterError(f"{suite.files[dataset.name]} is empty; get it anew, or leave it out")
        self._total = sum(counts.values()) * len(self._modes)
        self._outcomes: dict[tuple[str, Mode], list[Outcome]] = {}
        self._done = 0

    def answer(self, log: AnswerLog) -> None:
        """Ask every row in every mode, except for those in the log. A row runs in all modes before the next one."""
        for dataset in self._suite.datasets:
            for sample in self._samples(dataset):
                case = self._fitted(dataset, sample)
                for mode in self._modes:
                    self._outcomes.setdefault((dataset.name, mode), []).append(self._one(dataset, case, mode, log))
                    self._done += 1
                    if self._progress is not None:
                        self._progress(self._done, self._total)

    def rows(self) -> list[Row]:
        """A row for each dataset and mode, and one for each mode over all datasets with equal weights."""
        rows: list[Row] = []
        scaled: dict[Mode, list[float]] = {mode: [] for mode in self._modes}
        for dataset in self._suite.datasets:
            for mode in self._modes:
                pairs = self._pairs(dataset, mode)
                differences = [this.score - other.score for this, other in pairs]
                rows.append({"dataset": dataset.name, **_summary(dataset, mode, pairs, differences)})
                scaled[mode] += [each / len(pairs) for each in differences]
        return rows + [_mean(mode, rows, scaled[mode]) for mode in self._modes]

    def _samples(self, dataset: Dataset) -> Iterator[Sample]:
        return self._suite.samples(dataset, self._setting.limit)

    def _pairs(self, dataset: Dataset, mode: Mode) -> Pairs:
        return list(zip(self._outcomes[dataset.name, mode], self._outcomes[dataset.name, REFERENCE], strict=True))

    def _fitted(self, dataset: Dataset, sample: Sample) -> Case:
        template, most = self._suite.templates[dataset.name], self._suite.limits[dataset.name]
        return fitted(self._llm, dataset, template, sample, most, chat=self.chat, longest=self._setting.longest)

    def _one(self, dataset: Dataset, case: Case, mode: Mode, log: AnswerLog) -> Outcome:
        most = self._suite.limits[dataset.name]
        key = [f"{dataset.name} {case.sample.name} {case.key(most)}"]
        found = log.find(asdict(mode), key)
        if found is not None:
            return Outcome(**found[0])
        outcome = ask(self._llm, dataset, case, mode, most)
        log.add(asdict(mode), key, [asdict(outcome)])
        return outcome


def ask(llm: LLM, dataset: Dataset, case: Case, mode: Mode, max_tokens: int) -> Outcome:
    """Answer a case in one mode, greedily, with its modules encoded before and nothing else in the store."""
    policy = ReusePolicy.parse(mode.reuse)
    llm.add_schema(case.schema(), replace=True, reuse=policy, positions=mode.positions)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **_ending(llm, dataset))
    (output,) = llm.generate([case.prompt()], params, reuse=policy, positions=mode.positions)
    llm.reset_prefix_cache()
    usage, ttft_s, said = output.usage, output.metrics.ttft_s, output.outputs[0].text
    assert ttft_s is not None, "it has answered"
    return Outcome(
        said=said,
        score=score(dataset, said, case.sample.answers, case.sample.classes),
        cached=usage.cached_tokens,
        tokens=usage.prompt_tokens,
        modules=usage.module_tokens,
        recomputed=usage.recomputed_tokens,
        ttft_s=ttft_s,
        documents=len(case.documents),
        cut=case.cut,
    )


def _ending(llm: LLM, dataset: Dataset) -> dict[str, Any]:
    """Stop tokens besides the end of the sequence: for some datasets, a line break after the first token."""
    if not dataset.until_newline:
        return {}
    return {"stop_token_ids": [llm.tokenizer.encode("\n", add_special_tokens=False)[-1]], "min_tokens": 1}


def _summary(dataset: Dataset, mode: Mode, pairs: Pairs, differences: Sequence[float]) -> Row:
    """The figures of a row. Scores and differences are 0 to 100, as in the paper."""
    these = [this for this, _ in pairs]
    tokens = sum(this.tokens for this in these)
    read = sum(this.modules + this.recomputed for this in these)
    low, high = mean_interval(differences)
    return {
        "metric": METRICS[dataset.metric].label,
        "reuse": mode.reuse,
        "positions": mode.positions,
        "samples": len(pairs),
        "score": _percent(statistics.fmean(this.score for this in these)),
        "reference": _percent(statistics.fmean(other.score for _, other in pairs)),
        "difference": _percent(statistics.fmean(differences)),
        "difference_low": _percent(low),
        "difference_high": _percent(high),
        "better": sum(each > 0 for each in differences),
        "worse": sum(each < 0 for each in differences),
        "p_value": float(f"{permutation_test(differences):.4g}"),
        "same_answers": sum(this.said == other.said for this, other in pairs),
        "documents": round(statistics.fmean(this.documents for this in these), 1),
        "cut": sum(this.cut for this in these),
        "cached": round(sum(this.cached for this in these) / tokens, 4),
        "recomputed": round(sum(this.recomputed for this in these) / read, 4) if read else None,
        "ttft_s": float(f"{statistics.median(this.ttft_s for this in these):.4g}"),
    }


def _mean(mode: Mode, rows: Sequence[Row], scaled: Sequence[float]) -> Row:
    """The mean over datasets.

    Args:
        scaled: Differences, each divided by the number of rows of its dataset.
    """
    of_mode = [row for row in rows if (row["reuse"], row["positions"]) == (mode.reuse, mode.positions)]
    # Scaled so that their mean is the mean over datasets.
    differences = [each * len(scaled) / len(of_mode) for each in scaled]
    low, high = mean_interval(differences)
    return {
        "dataset": "all",
        "metric": "mean",
        "reuse": mode.reuse,
        "positions": mode.positions,
        **{name: sum(row[name] for row in of_mode) for name in ("samples", "better", "worse", "same_answers", "cut")},
        **{name: round(statistics.fmean(row[name] for row in of_mode), 2) for name in ("score", "reference")},
        "difference": _percent(statistics.fmean(differences)),
        "difference_low": _percent(low),
        "difference_high": _percent(high),
        "p_value": float(f"{permutation_test(differences):.4g}"),
    }


def _percent(share: float) -> float:
    return round(100 * share, 2)
