"""The effect of reuse on answers: questions over imported documents in every mode, compared with full prefill.

``docs/internals/methods.md`` explains each number and the confidence bounds of counts of right answers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from inlay.check.run import divergence
from inlay.check.statistics import difference_interval, mcnemar, mean_bound, wilson_interval
from inlay.client.llm import LLM
from inlay.errors import ModelError
from inlay.pml.schema import Prompt
from inlay.policy import ReusePolicy
from inlay.prompt.chat import ChatTemplate
from inlay.sampling.params import SamplingParams
from inlay.types import RequestOutput
from inlay_lab.eval.answers import AnswerLog, case_keys
from inlay_lab.eval.modular_cases import Case, Round
from inlay_lab.eval.oracle import is_oracle, served, true_profiles
from inlay_lab.eval.setting import REFERENCE, Mode, Setting, autos, describe_model, modes_of

MAX_TOKENS = 128  # of an answer: somewhat above the longest right one, which sorts three documents
Row = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of one mode on one case.

    Attributes:
        said: The answer, stripped.
        kl: Divergence in nats per token of the reference's answer.
        cached, tokens: Tokens of the prompt that were cached, and all of them.
        modules: Tokens read as encoded in another context.
        recomputed: Recomputed tokens of modules.
        ttft_s: Time to the first token in seconds; requests run one by one.
        checked: Module tokens that passed through layers to select tokens, scaled to a pass through all layers.
    """

    case: Case
    said: str
    kl: float
    cached: int
    tokens: int
    modules: int
    recomputed: int
    ttft_s: float
    checked: int = 0

    @property
    def right(self) -> bool:
        return self.said == self.case.answer

    def kept(self) -> Row:
        """All fields except the case."""
        return {name: value for name, value in vars(self).items() if name != "case"}


def measure_modular_qa(
    llm: LLM,
    setting: Setting,
    progress: Callable[[int, int], None] | None = None,
    tell: Callable[[Row], None] | None = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """Ask the same questions in every mode; returns ``{"rows": […], "model": …, "seed": …, "tasks": …}``.

    Args:
        progress: Called with the number of prompts answered and their total.
        tell: Called with every answer of the requested modes as soon as it is known. The row has the mode, the
            question,
            its documents, the right answer, the answer in ``said``, and this answer's figures.
        log: A file that stores the answers. Answers in it from an earlier run are not asked again.

    Raises:
        InlayError: The model cannot run a mode (before anything runs), or the engine failed.
    """
    modes = modes_of(llm, setting)
    _check_turns(llm)
    run = _Run(
        llm, modes, [(count, each) for count in setting.counts for each in setting.rounds(count)], progress, tell
    )
    with AnswerLog(log, describe_model(llm) | {"fingerprint": llm.loaded.fingerprint.hex()}) as kept:
        run.answer(kept)
    return {
        "rows": [row for count in setting.counts for mode in modes for row in run.rows(setting, count, mode)],
        **describe_model(llm),
        "seed": setting.seed,
        "order": setting.order,
        "tasks": list(setting.tasks),
        **autos(llm, setting.reuse),
    }


class _Run:
    """The rounds of all numbers of documents, and the results of every mode on their cases."""

    def __init__(
        self,
        llm: LLM,
        modes: Sequence[Mode],
        rounds: Sequence[tuple[int, Round]],
        progress: Callable[[int, int], None] | None,
        tell: Callable[[Row], None] | None,
    ) -> None:
        self._llm, self._asked, self._rounds = llm, modes, rounds
        self._modes = list(dict.fromkeys((REFERENCE, *modes)))
        self._progress, self._tell = progress, tell
        self._outcomes: dict[tuple[int, Mode], list[Outcome]] = {}
        self._done = 0

    def answer(self, log: AnswerLog) -> None:
        """Answer every case in every mode, except for those in the log."""
        for documents, each in self._rounds:
            for mode, outcomes in self._round(each, log):
                self._outcomes.setdefault((documents, mode), []).extend(outcomes)
                self._told(mode, each, outcomes)

    def rows(self, setting: Setting, documents: int, mode: Mode) -> list[Row]:
        """A row for each task and one for all."""
        pairs = list(zip(self._outcomes[documents, mode], self._outcomes[documents, REFERENCE], strict=True))
        return [
            {
                **asdict(mode),
                "task": task,
                "documents": documents,
                "spare": setting.spare_of(documents),
                **_summary([pair for pair in pairs if task in ("all", pair[0].case.task)]),
            }
            for task in (*setting.tasks, "all")
        ]

    def _round(self, each: Round, log: AnswerLog) -> Iterator[tuple[Mode, list[Outcome]]]:
        keys = case_keys(each)
        found: dict[Mode, list[Row]] = {}
        for mode in self._modes:
            rows = log.find(asdict(mode), keys)
            if rows is not None:
                found[mode] = rows
                yield mode, [Outcome(case, **row) for case, row in zip(each.cases, rows, strict=True)]
        missing = [mode for mode in self._modes if mode not in found]
        if missing:  # the other modes are compared on the reference's answers, so ask it again
            for mode, outcomes in ask(self._llm, each, list(dict.fromkeys((REFERENCE, *missing)))):
                if mode in missing:
                    log.add(asdict(mode), keys, [outcome.kept() for outcome in outcomes])
                    yield mode, outcomes

    def _told(self, mode: Mode, each: Round, outcomes: Sequence[Outcome]) -> None:
        if self._tell is not None and mode in self._asked:
            for outcome in outcomes:
                self._tell(_answer(mode, each, outcome))
        self._done += len(outcomes)
        if self._progress is not None:
            self._progress(self._done, len(self._modes) * sum(len(each.cases) for _, each in self._rounds))


def _check_turns(llm: LLM) -> None:
    try:
        ChatTemplate(llm.tokenizer).pieces(("system", "user"), generation=True)
    except ModelError as error:
        raise ModelError(f"modular-qa asks in a system and a user turn, but {error}") from error


def ask(llm: LLM, each: Round, modes: Sequence[Mode]) -> Iterator[tuple[Mode, list[Outcome]]]:
    """Answer a round's cases in every mode. The reference must be first."""
    assert modes[0] == REFERENCE, "what it said is what the others are measured on"
    prompts = [each.prompt(case) for case in each.cases]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    said: list[tuple[int, ...]] = []
    expected: list[Tensor] = []
    for mode in modes:
        schema, reuse, positions = (
            each.schema(scaffolds=mode.scaffold),
            ReusePolicy.parse(served(mode.reuse)),
            mode.positions,
        )
        llm.add_schema(schema, encode=not mode.scaffold, replace=True, reuse=reuse, positions=positions)
        if mode.scaffold:  # encode documents together, as prompts read them
            for prompt in prompts:
                llm.warm(prompt, reuse=reuse, positions=positions)
        if not is_oracle(mode.reuse):
            _make_profiles(llm, prompts, mode)
        outputs: list[RequestOutput] = []
        found: list[Tensor] = []
        for number, prompt in enumerate(prompts):
            with _choosing(llm, prompt, mode):
                # One by one, so that the time to the first token is that of the request alone.
                outputs += llm.generate([prompt], params, reuse=reuse, positions=positions)
                if is_oracle(mode.reuse):
                    found += llm.distributions([prompt], [said[number]], reuse=reuse, positions=positions)
        said = said or [output.outputs[0].token_ids for output in outputs]
        found = found or llm.distributions(prompts, said, reuse=reuse, positions=positions)
        expected = expected or found
        llm.reset_prefix_cache()
        by_keys = _checks(mode)
        yield (
            mode,
            [_outcome(*every, by_keys=by_keys) for every in zip(each.cases, outputs, expected, found, strict=True)],
        )


def _make_profiles(llm: LLM, prompts: Sequence[Prompt], mode: Mode) -> None:
    """Compute the deviation profiles for a mode, so that no module starts without one."""
    policy = llm.policy(served(mode.reuse), mode.positions)
    if policy.profiled:
        if mode.scaffold:  # no schema was encoded before
            read = (llm.processor.segments_of(prompt, policy) for prompt in prompts)
            llm.local.profile(list({spec.key: spec for specs in read for spec in specs}.values()))
        llm.local.finish_profiles()


def _choosing(llm: LLM, prompt: Prompt, mode: Mode) -> AbstractContextManager[None]:
    """A context with the true profiles of a prompt, for an oracle mode."""
    return true_profiles(llm, prompt, mode.reuse, mode.positions) if is_oracle(mode.reuse) else nullcontext()


def _checks(mode: Mode) -> bool:
    """True if module tokens pass through layers only to select some of them."""
    recompute = ReusePolicy.parse(served(mode.reuse)).recompute
    return recompute is not None and recompute.by_keys


def _outcome(case: Case, output: RequestOutput, reference: Tensor, found: Tensor, *, by_keys: bool) -> Outcome:
    usage, ttft_s = output.usage, output.metrics.ttft_s
    assert ttft_s is not None, "it has answered"
    return Outcome(
        case,
        output.outputs[0].text.strip(),
        divergence(reference, found),
        usage.cached_tokens,
        usage.prompt_tokens,
        usage.module_tokens,
        usage.recomputed_tokens,
        ttft_s,
        usage.selecting_tokens if by_keys else 0,
    )


def _answer(mode: Mode, each: Round, outcome: Outcome) -> Row:
    """One answer of one mode, with everything needed to judge it."""
    case = outcome.case
    return {
        **asdict(mode),
        "task": case.task,
        "subtask": case.subtask,
        "question": case.question,
        "answer": case.answer,
        "said": outcome.said,
        "right": outcome.right,
        "kl": float(f"{outcome.kl:.4g}"),
        "cached_tokens": outcome.cached,
        "prompt_tokens": outcome.tokens,
        "instruction": each.instructions.get(case.form),
        "documents": [each.documents[number].text for number in case.imported],
    }


def _summary(pairs: Sequence[tuple[Outcome, Outcome]]) -> Row:
    """The figures of a row. ``pairs`` are outcomes of a mode and of the reference, case by case."""
    right, expected = (sum(pair[side].right for pair in pairs) for side in (0, 1))
    low, high = wilson_interval(right, len(pairs))
    only_reference = sum(other.right and not this.right for this, other in pairs)
    only_this = sum(this.right and not other.right for this, other in pairs)
    least, most = difference_interval(only_reference, only_this, len(pairs))
    return {
        "questions": len(pairs),
        "exact_match": round(right / len(pairs), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "reference": round(expected / len(pairs), 4),
        "difference": round((right - expected) / len(pairs), 4),
        "difference_low": round(least, 4),
        "difference_high": round(most, 4),
        "kl": float(f"{statistics.fmean(this.kl for this, _ in pairs):.4g}"),
        "kl_high": float(f"{mean_bound([[this.kl for this, _ in pairs]]):.4g}") if len(pairs) > 1 else None,
        "only_reference": only_reference,
        "only_this": only_this,
        "p_value": float(f"{mcnemar(only_reference, only_this):.4g}"),
        "cached": round(sum(this.cached for this, _ in pairs) / sum(this.tokens for this, _ in pairs), 4),
        "recomputed": _recomputed([this for this, _ in pairs]),
        "ttft_s": float(f"{statistics.median(this.ttft_s for this, _ in pairs):.4g}"),
    }


def _recomputed(outcomes: Sequence[Outcome]) -> float | None:
    """The recomputed share of the modules' tokens, or None if no module was read."""
    recomputed, modules = (sum(getattr(each, name) for each in outcomes) for name in ("recomputed", "modules"))
    checked = sum(each.checked for each in outcomes)
    return round((recomputed + checked) / (recomputed + modules), 4) if recomputed + modules else None
