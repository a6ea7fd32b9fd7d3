"""Conversations over generated documents: a system message, the documents, and questions with their answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from inlay.demo.documents import Document, write_documents
from inlay.demo.questions import INSTRUCTIONS, Asker, Form, Question
from inlay.demo.words import Split

SYSTEM = ("Answer from the documents.", "Answer the question from the documents.", "Use the documents to answer.")
_MIX = {"single": 0.4, "compare": 0.2, "count": 0.25, "unstated": 0.15}
_FORM_MIX = {"form": 0.85, "unstated": 0.15}
_FORMS = {Form.PLAIN: 0.64, Form.CAPITALS: 0.14, Form.WORD: 0.08, Form.SENTENCE: 0.14}


@dataclass(frozen=True)
class Conversation:
    """system: the system message with the instruction, if any. questions: asked one after another."""

    system: str
    instruction: str | None
    documents: list[Document]
    questions: list[Question]


def draw_conversation(
    rng: random.Random,
    split: Split,
    *,
    documents: int,
    questions: int,
    form: Form | None = None,
    mix: dict[str, float] | None = None,
) -> Conversation:
    """Draw documents and questions on them, none twice.

    form: what the instruction asks for, or None to draw it. mix: the weight of each task, or None for that of training.
    """
    form = form or rng.choices(list(_FORMS), weights=list(_FORMS.values()))[0]
    written = write_documents(rng, split, documents)
    asker = Asker(rng, split, written, form)
    mix = mix or (_MIX if form is Form.PLAIN else _FORM_MIX)
    asked: dict[str, Question] = {}
    for _ in range(8 * questions):  # some tasks have no question on some documents
        question = asker.ask(rng.choices(list(mix), weights=list(mix.values()))[0])
        if question is not None:
            asked.setdefault(question.text, question)
        if len(asked) == questions:
            break
    instruction = None if form is Form.PLAIN else rng.choice(INSTRUCTIONS[form].of(split))
    lines = [rng.choice(SYSTEM)] + ([instruction] if instruction else [])
    return Conversation("".join(line + "\n" for line in lines), instruction, written, list(asked.values()))
