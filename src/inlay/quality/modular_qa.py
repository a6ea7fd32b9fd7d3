"""What reuse does to answers: questions over imported documents, asked in every mode, compared with full prefill.

``docs/quality.md`` says what each number means, and how sure one can be of counts of right answers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from inlay.config import check_choice
from inlay.errors import ModelError, ParameterError
from inlay.llm import LLM
from inlay.models.spec import dtype_name
from inlay.policy import POSITIONS, ReusePolicy
from inlay.prompt.chat import ChatTemplate
from inlay.quality.modular_cases import Case, Round, draw_rounds
from inlay.quality.questions import TASKS
from inlay.types import RequestOutput, SamplingParams

_Z95 = 1.959963984540054  # 95% of a normal distribution lie within this many standard deviations


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95% score interval of a proportion (Wilson 1927): its lower and upper end, both within 0 to 1.

    Arguments:
        successes: how many of the trials succeeded, 0 to trials.
        trials: how many there were, at least 1.
    """
    assert 0 <= successes <= trials, (successes, trials)
    assert trials > 0, "a proportion of nothing"
    share, spread = successes / trials, _Z95**2 / trials
    middle = (share + spread / 2) / (1 + spread)
    reach = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    # At the ends the bound is the proportion itself, which rounding would miss.
    low = 0.0 if successes == 0 else middle - reach
    high = 1.0 if successes == trials else middle + reach
    return low, high


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test on paired answers.

    If both were equally good, each pair that tells them apart would be a fair coin.

    Arguments:
        only_first, only_second: how many pairs only the first, and only the second, got right; both at least 0.
    """
    assert min(only_first, only_second) >= 0, (only_first, only_second)
    pairs = only_first + only_second
    tail, ways = 0, 1
    for k in range(min(only_first, only_second) + 1):
        tail += ways
        ways = ways * (pairs - k) // (k + 1)  # of choosing k + 1 pairs
    p_value: float = 2 * tail / 2**pairs  # of whole numbers, so that many pairs do not overflow
    return min(1.0, p_value)


MAX_TOKENS = 64  # of an answer: about twice the longest right one
_MOST_DOCUMENTS = 1000  # in a schema; made-up names run out somewhere beyond

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured; checked once, here. Raises ParameterError.

    reuse: the policies, in the order of the rows.
    positions: the position policies that each is run with; None for the engine's default of each.
    documents: how many a prompt imports. spare: how many more its schema holds; None for as many.
    questions: over all tasks, rounded up so that each has as many.
    scaffold: whether each modular policy is also run with the documents of every prompt in a scaffold.
    seed: of documents and questions.
    """

    reuse: Sequence[str] = ("off", "isolated", "anchored")
    positions: Sequence[str] | None = None
    documents: int = 6
    questions: int = 200
    spare: int | None = None
    scaffold: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.reuse:
            ReusePolicy.parse(name)
        for name in self.positions or ():
            check_choice("positions", name, POSITIONS)
        _require("documents", self.documents, 2, "one of the tasks compares two of them")
        _require("questions", self.questions, 1, "or there is nothing to measure")
        _require("spare", self.spare_documents, 0, "it counts the documents that no prompt of a schema need import")
        _require("seed", self.seed, 0, "it numbers what is drawn")
        if self.documents + self.spare_documents > _MOST_DOCUMENTS:
            together = f"{self.documents + self.spare_documents:,}"
            raise ParameterError(f"documents and spare are {together} together; use at most {_MOST_DOCUMENTS:,}")
        if self.scaffold and not any(ReusePolicy.parse(name).modular for name in self.reuse):
            told = f"scaffold changes nothing under {', '.join(self.reuse)}"
            raise ParameterError(
                f"{told}: only modules are encoded without each other; add isolated or anchored to reuse"
            )

    @property
    def spare_documents(self) -> int:
        return self.documents if self.spare is None else self.spare


@dataclass(frozen=True)
class Mode:
    """A reuse policy with its positions.

    scaffold: whether the documents of a prompt are encoded seeing each other.
    """

    reuse: str
    positions: str
    scaffold: bool = False


#: Full prefill of the whole prompt, without gaps: what every mode is compared with.
REFERENCE = Mode("off", "packed")


@dataclass(frozen=True)
class Outcome:
    """What one mode made of one case.

    said: the answer, without white space at its ends. kl: nats per token of the reference's answer.
    cached, tokens: of the prompt.
    """

    case: Case
    said: str
    kl: float
    cached: int
    tokens: int

    @property
    def right(self) -> bool:
        return self.said == self.case.answer


def measure_modular_qa(
    llm: LLM,
    setting: Setting,
    progress: Callable[[int, int], None] | None = None,
    tell: Callable[[Row], None] | None = None,
) -> dict[str, Any]:
    """Ask the same questions in every mode; returns ``{"rows": […], "model": …, "seed": …, "tasks": …}``.

    progress: called with the number of prompts answered and to answer.
    tell: called with every answer of the modes asked for, as soon as it is there: the mode, the task, the question, its
    documents and instruction, the right answer and what was ``said``, and the figures of this answer alone.
    Raises InlayError, before anything runs where the model cannot do what is asked.
    """
    modes = _modes(llm, setting)
    _check_turns(llm)
    rounds = draw_rounds(
        documents=setting.documents, spare=setting.spare_documents, questions=setting.questions, seed=setting.seed
    )
    outcomes: dict[Mode, list[Outcome]] = {mode: [] for mode in dict.fromkeys((REFERENCE, *modes))}
    total = len(outcomes) * sum(len(each.cases) for each in rounds)
    for each in rounds:
        for mode, answered in _ask(llm, each, list(outcomes)):
            outcomes[mode] += answered
            if tell is not None and mode in modes:
                for outcome in answered:
                    tell(_answer(mode, each, outcome))
            if progress is not None:
                progress(sum(map(len, outcomes.values())), total)
    return {
        "rows": [row for mode in modes for row in _rows(setting, mode, outcomes[mode], outcomes[REFERENCE])],
        "model": llm.model_name,
        "dtype": dtype_name(llm.loaded.model.dtype),
        "quantization": llm.loaded.form.quantization,
        "seed": setting.seed,
        "spare": setting.spare_documents,
        "tasks": list(TASKS),
    }


def divergence(reference: Tensor, other: Tensor) -> float:
    """KL(reference ‖ other) in nats, the mean over tokens.

    reference, other: (tokens, vocabulary), natural log-probabilities.
    """
    expected, found = reference.double(), other.double()
    weights = expected.exp()
    terms = torch.where(weights > 0, weights * (expected - found), 0.0)
    # Rounding may take the divergence of almost equal distributions below zero, where none is.
    return float(terms.sum(dim=-1).clamp(min=0.0).mean())


def _require(name: str, value: int, least: int, reason: str) -> None:
    if value < least:
        raise ParameterError(f"{name} is {value}; it must be at least {least}: {reason}")


def _modes(llm: LLM, setting: Setting) -> list[Mode]:
    """The modes asked for, each once. Raises ParameterError where the model refuses one."""
    asked = [
        REFERENCE if reuse == REFERENCE.reuse else Mode(reuse, llm.positions_for(reuse, positions), scaffold)
        for reuse in setting.reuse
        for positions in setting.positions or (None,)
        for scaffold in ((False, True) if setting.scaffold and ReusePolicy.parse(reuse).modular else (False,))
    ]
    return list(dict.fromkeys(asked))


def _check_turns(llm: LLM) -> None:
    try:
        ChatTemplate(llm.tokenizer).pieces(("system", "user"), generation=True)
    except ModelError as error:
        raise ModelError(f"modular-qa asks in a system and a user turn, but {error}") from error


def _ask(llm: LLM, each: Round, modes: Sequence[Mode]) -> Iterator[tuple[Mode, list[Outcome]]]:
    """Answer a round's cases in every mode; the reference comes first."""
    assert modes[0] == REFERENCE, "what it said is what the others are measured on"
    prompts = [each.prompt(case) for case in each.cases]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    said: list[tuple[int, ...]] = []
    expected: list[Tensor] = []
    for mode in modes:
        schema = each.schema(scaffolds=mode.scaffold)
        llm.add_schema(schema, encode=not mode.scaffold, replace=True, reuse=mode.reuse, positions=mode.positions)
        if mode.scaffold:  # what prompts read, rather than each document alone
            for prompt in prompts:
                llm.warm(prompt, reuse=mode.reuse, positions=mode.positions)
        outputs = llm.generate(prompts, params, reuse=mode.reuse, positions=mode.positions)
        said = said or [output.outputs[0].token_ids for output in outputs]
        found = llm.distributions(prompts, said, reuse=mode.reuse, positions=mode.positions)
        expected = expected or found
        llm.client.reset_prefix_cache().result()
        yield mode, list(map(_outcome, each.cases, outputs, expected, found))


def _outcome(case: Case, output: RequestOutput, reference: Tensor, found: Tensor) -> Outcome:
    said, usage = output.outputs[0].text.strip(), output.usage
    return Outcome(case, said, divergence(reference, found), usage.cached_tokens, usage.prompt_tokens)


def _answer(mode: Mode, each: Round, outcome: Outcome) -> Row:
    """One answer of one mode, with all that it takes to judge it."""
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


def _rows(setting: Setting, mode: Mode, outcomes: Sequence[Outcome], reference: Sequence[Outcome]) -> list[Row]:
    """A row for each task and one for all."""
    pairs = list(zip(outcomes, reference, strict=True))
    return [
        {
            **asdict(mode),
            "task": task,
            "documents": setting.documents,
            **_summary([pair for pair in pairs if task in ("all", pair[0].case.task)]),
        }
        for task in (*TASKS, "all")
    ]


def _summary(pairs: Sequence[tuple[Outcome, Outcome]]) -> Row:
    """The figures of a row; pairs: of a mode and of the reference, case by case."""
    right = sum(this.right for this, _ in pairs)
    low, high = wilson_interval(right, len(pairs))
    only_reference = sum(other.right and not this.right for this, other in pairs)
    only_this = sum(this.right and not other.right for this, other in pairs)
    return {
        "questions": len(pairs),
        "exact_match": round(right / len(pairs), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "kl": float(f"{statistics.fmean(this.kl for this, _ in pairs):.4g}"),
        "only_reference": only_reference,
        "only_this": only_this,
        "p_value": float(f"{mcnemar(only_reference, only_this):.4g}"),
        "cached": round(sum(this.cached for this, _ in pairs) / sum(this.tokens for this, _ in pairs), 4),
    }
