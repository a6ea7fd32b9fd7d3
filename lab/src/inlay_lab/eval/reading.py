"""Reading comprehension over real passages: what each reuse policy does to a model's answers.

Every question is asked over several passages in random order, the gold passage at every place in turn. Passages are
marked parts of the user's message, so policies may read them from earlier questions. The reference is full prefill.
Questions are asked several at a time, because a decode step reads the weights once for all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inlay.check.run import divergence
from inlay.check.statistics import mean_interval, wilson_interval
from inlay.client.llm import LLM
from inlay.errors import ParameterError
from inlay.pml import PromptBuilder
from inlay.policy import ReusePolicy
from inlay.prompt.inputs import PromptInput
from inlay.sampling.params import SamplingParams
from inlay_lab.eval import reading_tasks
from inlay_lab.eval.longbench.metrics import f1
from inlay_lab.eval.reading_data import Data, Question, Row, messages_of, schema_prompt
from inlay_lab.eval.reading_tasks import TASKS, Answered

#: Policies that are compared by default.
POLICIES = (
    "isolated",
    "anchored",
    "anchored+profiled:0.15",
    "primed",
    "primed+profiled:0.15",
    "primed+profiled*query:0.15",
)

#: Questions that are asked at the same time.
AT_ONCE = 8

_TOKENS = 24  # of an answer
_FLOOR = "off, other rounding"


@dataclass(frozen=True)
class Extracted:
    """One answer under one policy: its text, log-probabilities of fixed tokens, and counts of prompt tokens."""

    text: str
    ids: Sequence[int]
    own: torch.Tensor
    gold: float
    other: float
    computed: int
    prompt: int
    read: int

    @property
    def margin(self) -> float:
        """How much more likely the gold answer is than the answer to another question, in nats a token."""
        return self.gold - self.other


def measure_reading(
    llm: LLM,
    data: Data,
    *,
    policies: Sequence[str] = POLICIES,
    passages: int = 6,
    questions: int = 100,
    tasks: Sequence[str] = (),
    floor: LLM | None = None,
    marks: bool = True,
    schema: int = 0,
    progress: Callable[[int, int], None] | None = None,
    partial: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Compare policies with full prefill. A KeyboardInterrupt keeps the questions so far.

    Args:
        llm: The model, with ``promotion_memory=0``.
        data: Passages and questions.
        policies: Reuse policies.
        passages: Passages of a prompt.
        questions: The most questions.
        tasks: Names of reading_tasks.TASKS, measured beside the answers.
        floor: The same model in another rounding. Its full prefill is a row of its own: the noise floor.
        marks: False to ask over plain text, for policies that find it by its content. Excludes ``tasks``.
        schema: Passages of a schema from which each prompt selects its own; the policies read them at the positions of
            the schema. 0 for marked messages, whose passages stand one behind the other. Excludes ``tasks``.
        progress: Called with the number of finished questions and the total.
        partial: Called with the result so far, after each batch of questions.

    Returns:
        The setting, and a row for each policy with intervals.

    Raises:
        ParameterError: For an unknown task or policy, or more passages than there are.
    """
    for policy in policies:
        ReusePolicy.parse(policy)  # before the first question runs
    for task in tasks:
        if task not in TASKS:
            raise ParameterError(f"there is no task {task!r}; use {', '.join(TASKS)}", code="parameter.unknown_choice")
    if tasks and (schema or not marks):
        raise ParameterError(
            "tasks need marked passages; leave tasks out, or keep the marks and use no schema",
            code="parameter.conflict",
        )
    if schema and (not marks or schema < passages):
        raise ParameterError(
            f"schema is {schema}; give at least {passages}, the passages of a prompt, and keep the marks",
            code="parameter.conflict",
        )
    draws = any(not question.contexts for question in data.questions)
    if draws and passages > len(data.passages):
        raise ParameterError(f"passages is {passages} and there are {len(data.passages)}; give less")
    run = _Run(llm, floor, ["off", *([_FLOOR] if floor is not None else []), *policies], passages, tasks, marks, schema)
    chosen = data.questions[:questions]
    try:
        for first in range(0, len(chosen), AT_ONCE):
            run.ask(data, list(enumerate(chosen))[first : first + AT_ONCE])
            if partial is not None:
                partial(run.result())
            if progress is not None:
                progress(len(run.questions), len(chosen))
    except KeyboardInterrupt:
        if not run.questions:
            raise
    return run.result()


class _Run:
    """The answers so far, by name of the row. All rows have the same questions."""

    def __init__(
        self,
        llm: LLM,
        floor: LLM | None,
        names: Sequence[str],
        passages: int,
        tasks: Sequence[str],
        marks: bool,
        schema: int,
    ) -> None:
        self._marks, self._schema = marks, schema
        self._llm, self._floor, self._names, self._passages, self._tasks = llm, floor, names, passages, tasks
        self.questions: list[Question] = []
        self._extracted: dict[str, list[Extracted]] = {name: [] for name in names}
        self._asked: dict[str, list[reading_tasks.Asked]] = {task: [] for task in tasks}
        self._answered: dict[tuple[str, str], list[Answered]] = {(n, task): [] for n in names for task in tasks}

    def ask(self, data: Data, batch: Sequence[tuple[int, Question]]) -> None:
        """Ask a batch of numbered questions in every way. The result counts only once all ways have ended."""
        questions = [question for _, question in batch]
        messages = [
            messages_of(data, question, self._passages, number, marks=self._marks) for number, question in batch
        ]
        asked = {
            task: [TASKS[task](data, question, self._passages, number) for number, question in batch]
            for task in self._tasks
        }
        extracted: dict[str, list[Extracted]] = {}
        answered: dict[tuple[str, str], list[Answered]] = {}
        for name in self._names:
            llm, policy, salt = self._way(name, batch[0][0])
            reuse = ReusePolicy.parse(policy, "schema" if self._schema and policy != "exact" else None)
            prompts: Sequence[PromptInput] = messages
            if policy != "exact" and self._schema:
                prompts = [self._imported(data, question, number, reuse, salt) for number, question in batch]
            elif policy != "exact" and self._marks:
                _encode(llm, messages, policy, salt)
            elif policy != "exact":
                self._find(data, batch, policy, salt)
            ids = None if name == "off" else [one.ids for one in extracted["off"]]
            extracted[name] = _extract(llm, prompts, questions, reuse, salt, ids)
            for task in self._tasks:
                if policy != "exact":
                    _encode(llm, [one.messages for one in asked[task]], policy, salt)
                answered[name, task] = reading_tasks.answer(llm, asked[task], policy, salt)
        self.questions += questions
        for name in self._names:
            self._extracted[name] += extracted[name]
            for task in self._tasks:
                self._answered[name, task] += answered[name, task]
        for task in self._tasks:
            self._asked[task] += asked[task]

    def _imported(self, data: Data, question: Question, number: int, reuse: ReusePolicy, salt: str) -> PromptBuilder:
        """Add the schema of a question, and return its prompt."""
        schema, prompt = schema_prompt(data, question, self._passages, number, self._schema)
        self._llm.add_schema(schema, reuse=reuse, cache_salt=salt, replace=True)
        _, other = schema_prompt(data, question, self._passages, number, self._schema, ask="Thank you.")
        once = SamplingParams(temperature=0, max_tokens=1)
        self._llm.generate([other], once, reuse=reuse, cache_salt=salt)  # makes the profiles that the policy needs
        return prompt

    def _find(self, data: Data, batch: Sequence[tuple[int, Question]], policy: str, salt: str) -> None:
        """Ask something else about the passages behind two other texts, so that they are stored with profiles."""
        once, reuse = SamplingParams(temperature=0, max_tokens=1), ReusePolicy.parse(policy)
        for turn, front in ((1, ""), (2, "Once more.\n\n")):
            prompts = [
                messages_of(
                    data, question, self._passages, number, ask="Thank you.", marks=False, turn=turn, front=front
                )
                for number, question in batch
            ]
            self._llm.generate(prompts, once, reuse=reuse, cache_salt=salt)

    def result(self) -> dict[str, Any]:
        """Return the setting and the figures of each row, for the questions so far."""
        return {
            "model": self._llm.model_name,
            "passages": self._passages,
            "schema": self._schema,
            "questions": len(self.questions),
            "tasks": list(self._tasks),
            "rows": self._rows(),
        }

    def _rows(self) -> list[Row]:
        return [
            _row(name, self._extracted["off"], self._extracted[name], self.questions)
            | {
                task: reading_tasks.figures(
                    task, self._asked[task], self._answered["off", task], self._answered[name, task]
                )
                for task in self._tasks
            }
            for name in self._names
        ]

    def _way(self, name: str, number: int) -> tuple[LLM, str, str]:
        """Return the engine, the policy and the salt of a row.

        exact equals full prefill, and computes a prompt once for its several continuations.
        """
        if name == "off":
            return self._llm, "exact", f"off {number}"
        if name == _FLOOR:
            assert self._floor is not None, "the row has an engine"
            return self._floor, "exact", f"off {number}"
        # one copy of modules and profiles for all recomputations
        policy = ReusePolicy.parse(name)
        return self._llm, name, f"reading {replace(policy.without_recompute(), find=policy.find)}"


def _encode(llm: LLM, messages: Sequence[list[Row]], policy: str, salt: str) -> None:
    """Store the parts, with profiles if the policy needs them, by asking something else about them."""
    other = [
        [system, {"role": "user", "content": [*user["content"][:-1], {"type": "text", "text": "Thank you."}]}]
        for system, user in messages
    ]
    once = SamplingParams(temperature=0, max_tokens=1)
    for _ in range(2):  # profiles of parts are made behind the first request that reads them
        llm.generate(other, once, reuse=ReusePolicy.parse(policy), cache_salt=salt)


def _extract(
    llm: LLM,
    prompts: Sequence[PromptInput],
    questions: Sequence[Question],
    reuse: ReusePolicy,
    salt: str,
    ids: Sequence[Sequence[int]] | None,
) -> list[Extracted]:
    """Answer greedily, and score fixed tokens: the reference's answers ``ids`` (the own for None), gold, and other."""
    params = SamplingParams(temperature=0, max_tokens=_TOKENS)
    outputs = llm.generate(prompts, params, reuse=reuse, cache_salt=salt)
    own = [output.outputs[0].token_ids for output in outputs] if ids is None else ids
    encode = llm.processor.encoder.text
    fixed = [
        (said, encode(question.gold), encode(question.other)) for said, question in zip(own, questions, strict=True)
    ]
    three_times = [prompt for prompt in prompts for _ in range(3)]
    taken = llm.distributions(three_times, [each for three in fixed for each in three], reuse=reuse, cache_salt=salt)
    found = []
    for number, (output, three) in enumerate(zip(outputs, fixed, strict=True)):
        rows = taken[3 * number : 3 * number + 3]
        gold, other = (_per_token(row, tokens) for row, tokens in zip(rows[1:], three[1:], strict=True))
        usage, text = output.usage, output.outputs[0].text
        found.append(
            Extracted(
                text, three[0], rows[0], gold, other, usage.recomputed_tokens, usage.prompt_tokens, usage.module_tokens
            )
        )
    return found


def _per_token(found: torch.Tensor, tokens: Sequence[int]) -> float:
    """Return the mean log-likelihood of tokens in nats. found: log-probabilities (tokens, vocabulary)."""
    return float(found[torch.arange(len(tokens)), torch.tensor(list(tokens))].mean())


def _score(text: str, question: Question) -> tuple[float, float, bool]:
    """Return exact match, F1 and containment, each the best over the right answers (SQuAD's normalisation)."""
    right = (question.gold,) if question.every else question.answers
    best = max(f1(text, answer) for answer in right)
    exact = float(any(text.strip(" .\n").lower() == answer.lower() for answer in right))
    held = (answer.lower() in text.lower() for answer in question.answers)
    return exact, best, all(held) if question.every else any(held)


def _row(name: str, reference: Sequence[Extracted], given: Sequence[Extracted], questions: Sequence[Question]) -> Row:
    count, pairs = len(given), list(zip(reference, given, strict=True))
    scores = [_score(one.text, question) for one, question in zip(given, questions, strict=True)]
    kl = [divergence(full.own, one.own) for full, one in pairs]
    gold = [one.gold - full.gold for full, one in pairs]
    flips = sum((full.margin >= 0) != (one.margin >= 0) for full, one in pairs)
    change = math.sqrt(statistics.fmean((one.margin - full.margin) ** 2 for full, one in pairs))
    same = sum(full.text == one.text for full, one in pairs)
    held = sum(contains for _, _, contains in scores)
    return {
        "reuse": name,
        "kl": statistics.fmean(kl),
        "kl_95": _interval(kl),
        "gold": statistics.fmean(one.gold for one in given),
        "gold_difference": statistics.fmean(gold),
        "gold_difference_95": _interval(gold),
        "contains": held / count,
        "contains_95": wilson_interval(held, count),
        "exact_match": statistics.fmean(exact for exact, _, _ in scores),
        "f1": statistics.fmean(score for _, score, _ in scores),
        "same_answers": same / count,
        "flips": flips / count,
        "flips_95": wilson_interval(flips, count),
        "margin_change": change,
        "expected_flips": expected_flips([full.margin for full in reference], change),
        "recomputed": sum(one.computed for one in given) / sum(one.prompt for one in given),
        "read": sum(one.read for one in given) / sum(one.prompt for one in given),
    }


def expected_flips(margins: Sequence[float], change: float) -> float:
    """Return the share of margins that change their sign if normal noise of this standard deviation is added.

    All questions count in it, so it has a narrower interval than the few flips themselves.
    """
    if not change:
        return 0.0
    noise = statistics.NormalDist(0, change)
    return statistics.fmean(noise.cdf(-abs(margin)) for margin in margins)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    return mean_interval(values) if len(values) > 1 else (-math.inf, math.inf)


def table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    names = (
        "reuse | KL | gold log-likelihood | difference (95%) | contains | F1 | same | flips (95%) | margin change | "
        "expected flips | recomputed | read"
    )
    lines = [f"| {names} |", "|---" + "|---:" * 11 + "|"]
    for row in result["rows"]:
        low, high = row["gold_difference_95"]
        flip_low, flip_high = row["flips_95"]
        lines.append(
            f"| {row['reuse']} | {row['kl']:.3f} | {row['gold']:.2f} | {row['gold_difference']:+.2f} "
            f"({low:+.2f} to {high:+.2f}) | {row['contains']:.0%} | {row['f1']:.2f} | {row['same_answers']:.0%} | "
            f"{row['flips']:.1%} ({flip_low:.1%} to {flip_high:.1%}) | {row['margin_change']:.3f} | "
            f"{row['expected_flips']:.1%} | {row['recomputed']:.0%} | {row['read']:.0%} |"
        )
    tasks = result.get("tasks", [])
    return "\n".join([*lines, "", reading_tasks.table(result["rows"], tasks)] if tasks else lines)
