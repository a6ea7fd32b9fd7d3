"""Reading comprehension over real passages: what each reuse policy does to a model's answers.

Every question is asked over several passages in random order, the gold passage at every place in turn. Passages are
marked parts of the user's message, so policies may read them from earlier questions. The reference is full prefill.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inlay.check.run import divergence
from inlay.check.statistics import mean_interval, wilson_interval
from inlay.client.llm import LLM
from inlay.errors import ParameterError
from inlay.policy import ReusePolicy
from inlay.sampling.params import SamplingParams
from inlay_lab.eval.longbench.metrics import f1

#: Policies that are compared by default.
POLICIES = (
    "isolated",
    "anchored",
    "anchored+profiled:0.15",
    "primed",
    "primed+profiled:0.15",
    "primed+profiled*query:0.15",
)

_SYSTEM = "Answer the question with a few words copied from the passages."
_TOKENS = 24  # of an answer
_MARK = {"cache_control": {"type": "ephemeral"}}

Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A question about a passage. ``answers`` are right ones; ``other`` is an answer to another question."""

    text: str
    passage: str
    answers: tuple[str, ...]
    other: str


@dataclass(frozen=True)
class Data:
    """Passages by name, and questions with answers in them."""

    passages: dict[str, str]
    questions: tuple[Question, ...]


def read_data(folder: Path) -> Data:
    """Read ``passages.jsonl`` (name, text) and ``questions.jsonl`` (passage, question, answers). Raises ParameterError.

    Questions without an answer are left out.
    """
    passages = {row["name"]: row["text"] for row in _rows(folder / "passages.jsonl", ("name", "text"))}
    asked = [row for row in _rows(folder / "questions.jsonl", ("passage", "question", "answers")) if row["answers"]]
    for row in asked:
        if row["passage"] not in passages:
            raise ParameterError(f"{folder}: a question is about passage {row['passage']!r}, which is not there")
    if len(asked) < 2 or len(passages) < 2:
        raise ParameterError(f"{folder} has too little; give at least 2 passages and 2 questions with answers")
    draw = random.Random(0)
    questions = []
    for row in asked:
        others = [one["answers"][0] for one in asked if not set(one["answers"]) & set(row["answers"])]
        other = draw.choice(others or ["nothing"])
        questions.append(Question(row["question"], row["passage"], tuple(row["answers"]), other))
    draw.shuffle(questions)
    return Data(passages, tuple(questions))


def _rows(path: Path, keys: Sequence[str]) -> Iterator[Row]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ParameterError(f"{path}: cannot be read ({error.strerror}); give a folder with it") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ParameterError(f"{path}:{number}: this is not JSON ({error})") from None
        if missing := [key for key in keys if key not in row]:
            raise ParameterError(f"{path}:{number}: {missing[0]!r} is missing")
        yield row


@dataclass(frozen=True)
class Asked:
    """One answer under one policy: its text, log-probabilities of fixed tokens, and counts of prompt tokens."""

    text: str
    own: torch.Tensor
    gold: float
    other: float
    computed: int
    prompt: int

    @property
    def chooses_gold(self) -> bool:
        """True if the gold answer is more probable, per token, than the answer to another question."""
        return self.gold >= self.other


def messages_of(data: Data, question: Question, count: int, number: int) -> list[Row]:
    """Return a chat of ``count`` passages and a question, with the gold passage at place ``number % count``."""
    draw = random.Random(number)
    others = draw.sample(sorted(name for name in data.passages if name != question.passage), count - 1)
    others.insert(number % count, question.passage)
    parts = [{"type": "text", "text": f"{data.passages[name]}\n\n", **_MARK} for name in others]
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": [*parts, {"type": "text", "text": f"Question: {question.text}"}]},
    ]


def measure_reading(
    llm: LLM,
    data: Data,
    *,
    policies: Sequence[str] = POLICIES,
    passages: int = 6,
    questions: int = 100,
    floor: LLM | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compare policies with full prefill, question by question. A KeyboardInterrupt keeps the questions so far.

    Args:
        llm: The model, with ``promotion_memory=0``.
        data: Passages and questions.
        policies: Reuse policies.
        passages: Passages of a prompt.
        questions: The most questions.
        floor: The same model in another rounding. Its full prefill is a row of its own: the noise floor.
        progress: Called with the number of finished questions and the total.

    Returns:
        The setting, and a row for each policy with intervals.
    """
    for policy in policies:
        ReusePolicy.parse(policy)  # before the first question runs
    if passages > len(data.passages):
        raise ParameterError(f"passages is {passages} and there are {len(data.passages)}; give less")
    chosen = data.questions[:questions]
    names = ["off", *(["off, other rounding"] if floor is not None else []), *policies]
    seen: dict[str, list[tuple[Asked, Asked]]] = {name: [] for name in names}
    scores: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in names}
    try:
        for number, question in enumerate(chosen):
            messages = messages_of(data, question, passages, number)
            # exact equals full prefill, and computes the prompt once for its several continuations
            reference, ids = _ask(llm, messages, question, "exact", f"off {number}", None)
            found = {"off": reference}
            for name in names[1:]:
                if name == "off, other rounding":
                    assert floor is not None
                    found[name], _ = _ask(floor, messages, question, "exact", f"off {number}", ids)
                    continue
                salt = f"reading {ReusePolicy.parse(name).without_recompute()}"  # one copy of modules and profiles
                _encode(llm, messages, name, salt)
                found[name], _ = _ask(llm, messages, question, name, salt, ids)
            for name, one in found.items():
                seen[name].append((reference, one))
                scores[name].append(_score(one.text, question.answers))
            if progress is not None:
                progress(number + 1, len(chosen))
    except KeyboardInterrupt:
        if not seen["off"]:
            raise
    rows = [_row(name, seen[name], scores[name]) for name in names]
    return {"model": llm.model_name, "passages": passages, "questions": len(seen["off"]), "rows": rows}


def _encode(llm: LLM, messages: list[Row], policy: str, salt: str) -> None:
    """Store the parts, with profiles if the policy needs them, by asking something else about them."""
    *parts, _ = messages[1]["content"]
    other = [messages[0], {"role": "user", "content": [*parts, {"type": "text", "text": "Thank you."}]}]
    once = SamplingParams(temperature=0, max_tokens=1)
    for _ in range(2):  # profiles of parts are made behind the first request that reads them
        llm.generate([other], once, reuse=ReusePolicy.parse(policy), cache_salt=salt)


def _ask(
    llm: LLM, messages: list[Row], question: Question, policy: str, salt: str, ids: Sequence[int] | None
) -> tuple[Asked, Sequence[int]]:
    """Answer greedily, and score fixed tokens: the reference's answer ``ids`` (its own for None), gold, and other."""
    params = SamplingParams(temperature=0, max_tokens=_TOKENS)
    (output,) = llm.generate([messages], params, reuse=ReusePolicy.parse(policy), cache_salt=salt)
    answer = output.outputs[0]
    own = answer.token_ids if ids is None else ids
    fixed = [own, *(llm.processor.encoder.text(text) for text in (question.answers[0], question.other))]
    taken = llm.distributions([messages] * 3, fixed, reuse=ReusePolicy.parse(policy), cache_salt=salt)
    gold, other = (_per_token(found, tokens) for found, tokens in zip(taken[1:], fixed[1:], strict=True))
    usage = output.usage
    return Asked(answer.text, taken[0], gold, other, usage.recomputed_tokens, usage.prompt_tokens), own


def _per_token(found: torch.Tensor, tokens: Sequence[int]) -> float:
    """Return the mean log-likelihood of tokens in nats. found: log-probabilities (tokens, vocabulary)."""
    return float(found[torch.arange(len(tokens)), torch.tensor(list(tokens))].mean())


def _score(text: str, answers: Sequence[str]) -> tuple[float, float, bool]:
    """Return exact match, F1 and containment, each the best over the right answers (SQuAD's normalisation)."""
    best = max(f1(text, answer) for answer in answers)
    exact = float(any(text.strip(" .\n").lower() == answer.lower() for answer in answers))
    return exact, best, any(answer.lower() in text.lower() for answer in answers)


def _row(name: str, pairs: Sequence[tuple[Asked, Asked]], scores: Sequence[tuple[float, float, bool]]) -> Row:
    count = len(pairs)
    kl = [divergence(reference.own, one.own) for reference, one in pairs]
    gold = [one.gold - reference.gold for reference, one in pairs]
    flips = sum(reference.chooses_gold != one.chooses_gold for reference, one in pairs)
    same = sum(reference.text == one.text for reference, one in pairs)
    held = sum(contains for _, _, contains in scores)
    return {
        "reuse": name,
        "kl": statistics.fmean(kl),
        "kl_95": _interval(kl),
        "gold": statistics.fmean(one.gold for _, one in pairs),
        "gold_difference": statistics.fmean(gold),
        "gold_difference_95": _interval(gold),
        "contains": held / count,
        "contains_95": wilson_interval(held, count),
        "exact_match": statistics.fmean(exact for exact, _, _ in scores),
        "f1": statistics.fmean(score for _, score, _ in scores),
        "same_answers": same / count,
        "flips": flips / count,
        "flips_95": wilson_interval(flips, count),
        "recomputed": sum(one.computed for _, one in pairs) / sum(one.prompt for _, one in pairs),
    }


def _interval(values: Sequence[float]) -> tuple[float, float]:
    return mean_interval(values) if len(values) > 1 else (-math.inf, math.inf)


def table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    head = "| reuse | KL | gold log-likelihood | difference (95%) | contains | F1 | same | flips (95%) | recomputed |"
    lines = [head, "|---" + "|---:" * 8 + "|"]
    for row in result["rows"]:
        low, high = row["gold_difference_95"]
        flip_low, flip_high = row["flips_95"]
        lines.append(
            f"| {row['reuse']} | {row['kl']:.3f} | {row['gold']:.2f} | {row['gold_difference']:+.2f} "
            f"({low:+.2f} to {high:+.2f}) | {row['contains']:.0%} | {row['f1']:.2f} | {row['same_answers']:.0%} | "
            f"{row['flips']:.1%} ({flip_low:.1%} to {flip_high:.1%}) | {row['recomputed']:.0%} |"
        )
    return "\n".join(lines)
