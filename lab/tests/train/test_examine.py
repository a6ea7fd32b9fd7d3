"""Examination in training agrees with greedy generation on held-out questions."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from inlay.models.load import MODEL_DIRECTORY
from inlay_lab.eval.conversations import Conversation
from inlay_lab.eval.words import Split
from inlay_lab.train.lessons import Encoder, Exercise, Lesson, answering
from inlay_lab.train.train import examine

pytestmark = pytest.mark.long

TOKENS = 1000
CLEAR = 0.5  # of logits up to 15: bfloat16 in training changes them by up to 0.4


@dataclass
class Tally:
    """Questions of one task: all of them, and those clearly answered right or wrong."""

    asked: int = 0
    right: int = 0
    wrong: int = 0


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(AutoTokenizer.from_pretrained(MODEL_DIRECTORY))


def bundled(attention: str) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype="float32", attn_implementation=attention).eval()


def answer_all(model: LlamaForCausalLM, encoder: Encoder, drawn: Conversation) -> list[tuple[str, bool | None]]:
    """The task of every question, and whether the model's answer is right; None if two tokens nearly tie."""
    runs, turns = encoder.conversation(drawn)
    before = [token for run in runs for token in run]
    results = []
    for question, (asked, answer) in zip(drawn.questions, turns, strict=True):
        prompt = before + asked
        said = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=len(answer),
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = said.sequences[0, len(prompt) :].tolist()
        clear = [float(best - second) > CLEAR for best, second in (step[0].topk(2).values for step in said.logits)]
        if tokens == answer:
            results.append((question.task, True if all(clear) else None))
        else:
            differs = next(at for at, (ours, right) in enumerate(zip(tokens, answer, strict=False)) if ours != right)
            results.append((question.task, False if clear[differs] else None))
        before = prompt + answer
    return results


@torch.no_grad()
@pytest.mark.parametrize(("counts", "exercise", "right"), [((1, 2), None, 15), ((2, 3), Exercise.SHARED, 0)])
def test_examining_agrees_with_generation(
    encoder: Encoder, counts: tuple[int, ...], exercise: Exercise | None, right: int
):
    stock = bundled("sdpa")
    tallies: dict[str, Tally] = {}
    for count in counts:
        lesson = Lesson((count, count), 8, exercise=exercise)
        _, conversations = answering(random.Random(0), encoder, Split.HELD_OUT, lesson, tokens=TOKENS, gapped=0.0)
        for drawn in conversations:
            for task, right in answer_all(stock, encoder, drawn):
                tally = tallies.setdefault(f"{count} {task}", Tally())
                tally.asked += 1
                tally.right += right is True
                tally.wrong += right is False
    scores = examine(bundled("causal"), encoder, counts, (exercise,), tokens=TOKENS)
    assert scores.keys() == tallies.keys()
    asked = sum(tally.asked for tally in tallies.values())
    assert asked >= 8
    for name, tally in tallies.items():
        low, high = tally.right / tally.asked, 1 - tally.wrong / tally.asked
        assert low - 0.001 <= scores[name] <= high + 0.001
    assert sum(tally.right for tally in tallies.values()) >= right
    assert sum(tally.right + tally.wrong for tally in tallies.values()) > asked / 2
