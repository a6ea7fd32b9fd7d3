"""Prompts, what the model says to each alone, and whether an answer among many is the same."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from inlay.bench.serve.wire import Wire

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
_DOCUMENTS = 4
_NEAR_TIE = 1e-3  # between the two best logits: rounding may turn such a step (DESIGN.md, invariant 1)


class Verdict(StrEnum):
    """What an answer is beside the one that was given alone."""

    EQUAL = "equal"
    NEAR_TIE = "near_ties"
    WRONG = "wrong"


@dataclass
class Case:
    """One prompt. text: the answer to it alone. tokens: each with its text, and its lead over the second best one."""

    path: str
    body: dict[str, Any]
    text: str = ""
    tokens: list[tuple[str, float]] = field(default_factory=list)

    def said(self, answer: dict[str, Any]) -> str:
        """The text of a whole response."""
        (choice,) = answer["choices"]
        return str(choice["text"] if self.path == _COMPLETIONS else choice["message"]["content"])

    def news(self, chunk: dict[str, Any]) -> str:
        """The text of a chunk that has a choice."""
        (choice,) = chunk["choices"]
        return choice["text"] if self.path == _COMPLETIONS else choice["delta"].get("content") or ""

    def judge(self, said: str) -> Verdict:
        """Hold an answer against the one that was given alone."""
        if said == self.text:
            return Verdict.EQUAL
        pairs = enumerate(zip(said, self.text, strict=False))
        at = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(said), len(self.text)))
        reached = 0
        for token, lead in self.tokens:
            reached += len(token)
            if reached > at:
                return Verdict.NEAR_TIE if lead < _NEAR_TIE else Verdict.WRONG
        return Verdict.WRONG

    def difference(self, said: str) -> str:
        """An answer that is wrong, around its first mistake."""
        at = next((i for i, (ours, theirs) in enumerate(zip(said, self.text, strict=False)) if ours != theirs), 0)
        shown = slice(max(0, at - 20), at + 20)
        return f"{said[shown]!r} in place of {self.text[shown]!r}"


def make_cases(number: int, max_tokens: int, draw: random.Random) -> list[Case]:
    """Greedy prompts: two thirds of them conversations about one of four documents, the others sharing nothing."""
    common = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    documents = [" ".join(draw.choices(_WORDS, k=200)) for _ in range(_DOCUMENTS)]
    found = []
    for place in range(number):
        if place % 3:
            text = f"{documents[place % _DOCUMENTS]}\n{' '.join(draw.choices(_WORDS, k=8))} {place}?"
            found.append(Case(_CHAT, {**common, "messages": [{"role": "user", "content": text}]}))
        else:
            text = f"{place} {' '.join(draw.choices(_WORDS, k=40))}"
            found.append(Case(_COMPLETIONS, {**common, "prompt": text}))
    return found


async def ask_alone(url: str, case: Case) -> None:
    """Fill in what the model says with nothing beside it and nothing reused. Raises ValueError where it is refused."""
    asked = {"logprobs": True, "top_logprobs": 2} if case.path == _CHAT else {"logprobs": 2}
    wire = Wire(url)
    status, answer = await wire.ask("POST", case.path, {**case.body, **asked, "reuse": "off"})
    wire.leave()
    if status != 200:
        raise ValueError(f"a prompt was refused: {answer.decode()}")
    body = json.loads(answer)
    case.text, logprobs = case.said(body), body["choices"][0]["logprobs"]
    if case.path == _CHAT:
        steps = [(one["token"], [top["logprob"] for top in one["top_logprobs"]]) for one in logprobs["content"]]
    else:
        steps = list(zip(logprobs["tokens"], [step.values() for step in logprobs["top_logprobs"]], strict=True))
    case.tokens = [(token, _lead(sorted(best, reverse=True))) for token, best in steps]


def _lead(best: list[float]) -> float:
    """How far the best token is ahead of the next that is written otherwise: the form lists those alike once."""
    return best[0] - best[1] if len(best) > 1 else math.inf
