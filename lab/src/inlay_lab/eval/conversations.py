"""Conversations over generated documents: a system message, the documents, and questions with their answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from inlay.errors import ParameterError
from inlay_lab.eval.documents import FACTS, Document, write_documents
from inlay_lab.eval.questions import INSTRUCTIONS, Asker, Form, Question
from inlay_lab.eval.words import Split, Words

SYSTEM = ("Answer from the documents.", "Answer the question from the documents.", "Use the documents to answer.")
_MIX = {"single": 0.45, "compare": 0.2, "count": 0.2, "unstated": 0.15}
_FORM_MIX = {"form": 0.85, "unstated": 0.15}
_FORMS = {Form.PLAIN: 0.52, Form.CAPITALS: 0.16, Form.WORD: 0.12, Form.SENTENCE: 0.2}

_TRIES = 100  # at documents that allow a question


@dataclass(frozen=True)
class Conversation:
    """A conversation.

    Attributes:
        system: The system message with the instruction, if any.
        questions: Asked one after another.
    """

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
    facts: tuple[int, ...] = FACTS,
    alike: bool = False,
) -> Conversation:
    """Draw documents and distinct questions on them.

    Args:
        form: The form that the instruction asks for, or None to draw it.
        mix: The weight of each task, or None for training's weights.
        facts: The numbers of facts that a document may state.
        alike: Make many names begin or end like others.

    Raises:
        ParameterError: So few documents allow no such question.
    """
    form = form or rng.choices(list(_FORMS), weights=list(_FORMS.values()))[0]
    mix = mix or (_MIX if form is Form.PLAIN else _FORM_MIX)
    for _ in range(_TRIES):  # a few documents may allow no such question
        words = Words.alike(rng, split) if alike else Words(rng, split)
        written = write_documents(words, documents, facts)
        asked = _ask(Asker(words, written, form), questions, mix)
        if asked:
            break
    else:
        raise ParameterError(f"no question of {', '.join(mix)} can be asked on {documents} documents; take more")
    instruction = None if form is Form.PLAIN else rng.choice(INSTRUCTIONS[form].of(split))
    lines = [rng.choice(SYSTEM)] + ([instruction] if instruction else [])
    return Conversation("".join(line + "\n" for line in lines), instruction, written, asked)


def _ask(asker: Asker, count: int, mix: dict[str, float]) -> list[Question]:
    """``count`` different questions, or fewer if the documents allow no more."""
    asked: dict[str, Question] = {}
    for _ in range(8 * count):  # some tasks have no question on some documents
        question = asker.ask(asker.rng.choices(list(mix), weights=list(mix.values()))[0])
        if question is not None:
            asked.setdefault(question.text, question)
        if len(asked) == count:
            break
    return list(asked.values())
