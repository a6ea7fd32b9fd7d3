"""Tasks beside extraction for ``inlay eval reading``: multiple choice, citation and summaries of the same passages.

A decision is the most likely of a few given answers. So it needs no answer that a small model gets right, and the share
of decisions that change between full prefill and a policy is known exactly.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inlay.check.statistics import mean_interval, wilson_interval
from inlay.client.llm import LLM
from inlay.errors import ParameterError
from inlay.policy import ReusePolicy
from inlay.sampling.params import SamplingParams
from inlay_lab.eval.reading_data import Data, Question, Row, messages_of

_SYSTEM = "Read the passages, then do what the user asks."
_LETTERS = ("A", "B", "C", "D")
_SUMMARY_TOKENS = 64


@dataclass(frozen=True)
class Asked:
    """A prompt of a task.

    Attributes:
        options: the answers to decide between. Empty for a summary.
        right: the number of the right one.
    """

    messages: list[Row]
    options: tuple[str, ...] = ()
    right: int = 0


@dataclass(frozen=True)
class Answered:
    """The number of the decision, or the text of a summary."""

    decision: int
    text: str


def choice(data: Data, question: Question, count: int, number: int) -> Asked:
    """Return a question with four answers, three of them to other questions."""
    draw = random.Random(number)
    wrong = sorted({other.gold for other in data.questions if not set(other.answers) & set(question.answers)})
    options = [question.gold, *draw.sample(wrong, min(3, len(wrong)))]
    draw.shuffle(options)
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(_LETTERS, options, strict=False))
    ask = f"Question: {question.text}\n{listed}\nAnswer with one letter."
    messages = messages_of(data, question, count, number, ask=ask, system=_SYSTEM)
    return Asked(messages, _LETTERS[: len(options)], options.index(question.gold))


def citation(data: Data, question: Question, count: int, number: int) -> Asked:
    """Return a question that is answered with the number of the passage. The numbers stand between the passages."""
    names = data.names(question, count, number)
    if question.passage not in names:
        message = "citation needs questions with the name of their passage; leave this task out"
        raise ParameterError(message, code="parameter.conflict")
    ask = f"Which passage answers this question: {question.text}\nAnswer with its number."
    messages = messages_of(data, question, count, number, ask=ask, system=_SYSTEM, numbered=True)
    return Asked(messages, tuple(str(place + 1) for place in range(len(names))), names.index(question.passage))


def summary(data: Data, question: Question, count: int, number: int) -> Asked:
    """Return a request for a summary of the passages."""
    return Asked(
        messages_of(data, question, count, number, ask="Summarize the passages in a few words.", system=_SYSTEM)
    )


#: Name of a task → the function that makes its prompts.
TASKS = {"choice": choice, "citation": citation, "summary": summary}


def answer(llm: LLM, asked: Sequence[Asked], policy: str, salt: str) -> list[Answered]:
    """Answer prompts of one task at the same time: take the most likely option, or write a summary greedily."""
    reuse = ReusePolicy.parse(policy)
    messages = [one.messages for one in asked]
    if not asked[0].options:
        params = SamplingParams(temperature=0, max_tokens=_SUMMARY_TOKENS)
        outputs = llm.generate(messages, params, reuse=reuse, cache_salt=salt)
        return [Answered(0, output.outputs[0].text) for output in outputs]
    prompts = [one.messages for one in asked for _ in one.options]
    forced = [llm.processor.encoder.text(option) for one in asked for option in one.options]
    found = iter(llm.distributions(prompts, forced, reuse=reuse, cache_salt=salt))
    tokens = iter(forced)
    decisions = []
    for one in asked:
        likely = [float(_of(next(found), next(tokens)).sum()) for _ in one.options]
        decisions.append(max(range(len(likely)), key=likely.__getitem__))
    return [Answered(decision, one.options[decision]) for decision, one in zip(decisions, asked, strict=True)]


def _of(found: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-likelihood of each token in nats. found: log-probabilities (tokens, vocabulary)."""
    return found[torch.arange(len(tokens)), torch.tensor(list(tokens))]


def figures(task: str, asked: Sequence[Asked], reference: Sequence[Answered], given: Sequence[Answered]) -> Row:
    """Return the figures of a policy on one task, against full prefill's answers."""
    count = len(asked)
    if task == "summary":
        likeness = [rouge_l(one.text, other.text) for one, other in zip(given, reference, strict=True)]
        low, high = mean_interval(likeness) if count > 1 else (0.0, 1.0)
        return {"rouge_l": statistics.fmean(likeness), "rouge_l_95": (low, high)}
    right = sum(one.decision == prompt.right for one, prompt in zip(given, asked, strict=True))
    flips = sum(one.decision != other.decision for one, other in zip(given, reference, strict=True))
    return {
        "accuracy": right / count,
        "accuracy_95": wilson_interval(right, count),
        "flips": flips / count,
        "flips_95": wilson_interval(flips, count),
    }


def rouge_l(said: str, reference: str) -> float:
    """Return ROUGE-L: the F1 of the longest common subsequence of words, 0 to 1. Two empty texts have 1."""
    one, other = (re.findall(r"\w+", text.lower()) for text in (said, reference))
    if not one or not other:
        return float(one == other)
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for at, match in enumerate(other, 1):
            before, row[at] = row[at], before + 1 if word == match else max(row[at], row[at - 1])
    return 2 * row[-1] / (len(one) + len(other))


def table(rows: Sequence[dict[str, Any]], tasks: Sequence[str]) -> str:
    """Return the figures of these tasks as a Markdown table."""
    heads = {"choice": ("choice", "choice flips (95%)"), "citation": ("citation", "citation flips (95%)")}
    names = [name for task in tasks for name in heads.get(task, ("summary, ROUGE-L",))]
    lines = [f"| reuse | {' | '.join(names)} |", "|---" + "|---:" * len(names) + "|"]
    for row in rows:
        cells = []
        for task in tasks:
            found = row[task]
            if task == "summary":
                cells.append(f"{found['rouge_l']:.2f}")
                continue
            low, high = found["flips_95"]
            cells += [f"{found['accuracy']:.0%}", f"{found['flips']:.1%} ({low:.1%} to {high:.1%})"]
        lines.append(f"| {row['reuse']} | {' | '.join(cells)} |")
    return "\n".join(lines)
