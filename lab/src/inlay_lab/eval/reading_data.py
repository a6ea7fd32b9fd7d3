"""The data of ``inlay eval reading``: real passages, questions about them, and the prompts made of both."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from inlay.errors import ParameterError
from inlay.pml import PromptBuilder, Schema
from inlay_lab.eval.collection import Retriever, generated, joined

SYSTEM = "Answer the question with a few words copied from the passages."
_DOCUMENTS = 400  # in a collection of generated ones
_MARK = {"cache_control": {"type": "ephemeral"}}

Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A question about passages.

    Attributes:
        passage: The name of the passage with the answer. Empty if several have it, or if it is not known.
        answers: Right answers.
        other: An answer to another question.
        contexts: The names of the passages of its prompt, in order. Empty to draw them.
        every: True if a right answer contains all ``answers``, not one of them.
    """

    text: str
    passage: str
    answers: tuple[str, ...]
    other: str
    contexts: tuple[str, ...] = ()
    every: bool = False

    @property
    def gold(self) -> str:
        """The text of a right answer."""
        return ", ".join(self.answers) if self.every else self.answers[0]


@dataclass(frozen=True)
class Data:
    """Passages by name, and questions with answers in them."""

    passages: dict[str, str]
    questions: tuple[Question, ...]

    def names(self, question: Question, count: int, number: int) -> tuple[str, ...]:
        """Return the passages of a prompt: the question's own, or ``count`` with the gold one at ``number % count``."""
        if question.contexts:
            return question.contexts
        others = sorted(name for name in self.passages if name != question.passage)
        drawn = random.Random(number).sample(others, count - 1)
        drawn.insert(number % count, question.passage)
        return tuple(drawn)


def read_data(path: Path) -> Data:
    """Read a folder with passages and questions, or a file of LMCache's benchmark ``rag-qa-quality``.

    The folder has ``passages.jsonl`` (name, text) and ``questions.jsonl`` (passage, question, answers). The file is a
    JSON list of objects with ``question``, ``answers`` and ``ctxs``, a list of objects with ``title`` and ``text``.
    Questions without an answer are left out.

    Raises:
        ParameterError: If something is missing or wrong, with its place.
    """
    passages, asked = _of_folder(path) if path.is_dir() or not path.suffix else _of_file(path)
    if len(asked) < 2 or len(passages) < 2:
        raise ParameterError(f"{path} has too little; give at least 2 passages and 2 questions with answers")
    draw = random.Random(0)
    questions = list(_with_others(asked, draw))
    draw.shuffle(questions)
    return Data(passages, tuple(questions))


def documents_data(*, questions: int, passages: int, paragraphs: int, seed: int = 0) -> Data:
    """Return questions that the bundled model can answer, over generated documents that a retriever chose.

    Args:
        questions: their number, at least 2.
        passages: documents of a prompt, at least 2. Few documents are in many prompts.
        paragraphs: of a document.

    Raises:
        ParameterError: for too few of something.
    """
    for name, value, least in (("questions", questions, 2), ("passages", passages, 2), ("documents", paragraphs, 1)):
        if value < least:
            raise ParameterError(f"{name} is {value}; give at least {least}", code="parameter.out_of_range")
    count = max(_DOCUMENTS, passages)
    written = generated(count * paragraphs, questions, seed=seed)
    texts = [text.strip() for text in joined(written.texts, paragraphs)]
    retriever, draw = Retriever(texts), random.Random(seed)
    made = []
    for ask in written.asks:
        best, _ = retriever.best(ask.text, passages)
        draw.shuffle(best)
        gold = texts[ask.document // paragraphs]
        made.append(Question(ask.text, gold, ask.answers, "", tuple(texts[index] for index in best)))
    return Data({text: text for text in texts}, _with_others(made, draw))


def _with_others(asked: Sequence[Question], draw: random.Random) -> tuple[Question, ...]:
    """Return questions, each with an answer to another one."""
    questions = []
    for one in asked:
        others = [each.answers[0] for each in asked if not set(each.answers) & set(one.answers)]
        questions.append(replace(one, other=draw.choice(others or ["nothing"])))
    return tuple(questions)


def _of_folder(folder: Path) -> tuple[dict[str, str], list[Question]]:
    passages = {row["name"]: row["text"] for row in _rows(folder / "passages.jsonl", ("name", "text"))}
    rows = [row for row in _rows(folder / "questions.jsonl", ("passage", "question", "answers")) if row["answers"]]
    for row in rows:
        if row["passage"] not in passages:
            raise ParameterError(f"{folder}: a question is about passage {row['passage']!r}, which is not there")
    return passages, [Question(row["question"], row["passage"], tuple(row["answers"]), "") for row in rows]


def _of_file(path: Path) -> tuple[dict[str, str], list[Question]]:
    rows = _json(_text(path), f"{path}")
    if not isinstance(rows, list):
        raise ParameterError(f"{path}: this is no JSON list; give a file of LMCache's rag-qa-quality")
    passages: dict[str, str] = {}
    questions = []
    for number, row in enumerate(rows):
        contexts = []
        _check(row, ("question", "answers", "ctxs"), f"{path}: question {number}")
        for context in row["ctxs"]:
            _check(context, ("title", "text"), f"{path}: question {number}")
            text = f"{context['title']}\n{context['text']}".strip()
            passages[text] = text
            contexts.append(text)
        if row["answers"] and contexts:
            questions.append(Question(row["question"], "", tuple(row["answers"]), "", tuple(contexts)))
    return passages, questions


def _rows(path: Path, keys: Sequence[str]) -> Iterator[Row]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        row = _json(line, f"{path}:{number}")
        _check(row, keys, f"{path}:{number}")
        yield row


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ParameterError(f"{path}: cannot be read ({why}); give a folder with it") from None


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ParameterError(f"{place}: this is not JSON ({error})") from None


def _check(row: Any, keys: Sequence[str], place: str) -> None:
    if not isinstance(row, dict):
        raise ParameterError(f"{place}: this is no JSON object")
    if missing := [key for key in keys if key not in row]:
        raise ParameterError(f"{place}: {missing[0]!r} is missing")


def schema_prompt(
    data: Data, question: Question, count: int, number: int, size: int, ask: str | None = None
) -> tuple[Schema, PromptBuilder]:
    """Return a schema, and the chat of ``messages_of`` as a prompt of it. Both chats have the same text.

    The schema has the passages of the messages in their order, and others between them, ``size`` in all.

    Args:
        ask: The text behind the passages. None for the question.
    """
    wanted, draw = data.names(question, count, number), random.Random(number)
    others = [name for name in data.passages if name not in wanted]
    names = list(wanted)
    for name in draw.sample(others, min(size - len(wanted), len(others))):
        names.insert(draw.randrange(len(names) + 1), name)
    modules = {name: f"p{place}" for place, name in enumerate(names)}
    texts = (f'<module name="{at}">{escape(data.passages[name])}\n\n</module>' for name, at in modules.items())
    schema = Schema.from_string(
        f'<schema name="reading-{number}"><system xml:space="preserve">{escape(SYSTEM)}</system>'
        f'<user xml:space="preserve">{"".join(texts)}</user></schema>'
    )
    prompt = schema.prompt()
    for name in wanted:
        prompt = prompt.use(modules[name])
    return schema, prompt.text(f"Question: {question.text}" if ask is None else ask)


def messages_of(
    data: Data,
    question: Question,
    count: int,
    number: int,
    *,
    ask: str | None = None,
    system: str = SYSTEM,
    numbered: bool = False,
    marks: bool = True,
    turn: int = 0,
    front: str = "",
) -> list[Row]:
    """Return a chat of passages and a question. For ``count`` and ``number`` see Data.names.

    Args:
        ask: The text behind the passages. None for the question.
        numbered: Write "[1] ", "[2] " and so on in front of the passages.
        marks: False for a user's message of one text.
        turn: The number of first passages that go to the end.
        front: Text in front of the passages.
    """
    parts: list[Row] = [{"type": "text", "text": front}] if front else []
    names = data.names(question, count, number)
    for place, name in enumerate((*names[turn:], *names[:turn]), 1):
        parts += [{"type": "text", "text": f"[{place}] "}] if numbered else []
        parts.append({"type": "text", "text": f"{data.passages[name]}\n\n", **_MARK})
    last = f"Question: {question.text}" if ask is None else ask
    content = [*parts, {"type": "text", "text": last}]
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": content if marks else "".join(part["text"] for part in content)},
    ]
