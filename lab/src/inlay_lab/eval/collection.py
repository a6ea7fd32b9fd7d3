"""Documents to retrieve from, generated or real, questions about them, and a retriever."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inlay_lab.eval.documents import Document, write_documents
from inlay_lab.eval.questions import Asker
from inlay_lab.eval.words import Split, Words

SYSTEM = "Answer from the documents."
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Ask:
    """A question about one document of the collection, and right answers."""

    document: int
    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Collection:
    """Documents, and questions about them by popularity.

    Attributes:
        contains: True if an answer is right that contains a right one. False if it must equal one.
    """

    texts: list[str]
    asks: list[Ask]
    system: str
    contains: bool = False

    def is_right(self, answer: str, ask: Ask) -> bool:
        """True if an answer is right."""
        if self.contains:
            return any(each.lower() in answer.lower() for each in ask.answers)
        return answer.strip() in ask.answers


class Retriever:
    """Ranks documents by the cosine of TF-IDF vectors. ``texts`` are the documents."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_WORD.findall(text.lower())) for text in texts]
        seen = Counter(word for each in counts for word in each)
        self._columns = {word: column for column, word in enumerate(seen)}
        self._weights = np.array([math.log(len(texts) / number) for number in seen.values()], np.float32)
        self._rows = np.zeros((len(texts), len(seen)), np.float32)
        for row, each in enumerate(counts):
            for word, number in each.items():
                self._rows[row, self._columns[word]] = number
        self._rows = _unit(self._rows * self._weights)

    def best(self, question: str, count: int) -> tuple[list[int], list[float]]:
        """Return the most relevant documents and their relevance."""
        row = np.zeros(len(self._weights), np.float32)
        for word in _WORD.findall(question.lower()):
            if word in self._columns:
                row[self._columns[word]] += 1
        relevance = self._rows @ _unit(row * self._weights)
        order = np.argsort(-relevance, kind="stable")[:count]
        return order.tolist(), relevance[order].tolist()


def _unit(rows: np.ndarray) -> np.ndarray:
    length: np.ndarray = np.linalg.norm(rows, axis=-1, keepdims=True)
    result: np.ndarray = rows / np.maximum(length, 1e-9)
    return result


def generated(documents: int, questions: int, *, zipf: float = 1.0, seed: int = 0) -> Collection:
    """Return generated documents, and questions about them by popularity, with this exponent."""
    draw = random.Random(seed)
    words = Words(draw, Split.FIRST)
    written: list[Document] = []
    names: set[str] = set()
    while len(written) < documents:
        for one in write_documents(words, 12):
            if one.name not in names and len(written) < documents:
                names.add(one.name)
                written.append(one)
    draw.shuffle(written)
    weights = popularity(len(written), zipf)
    asks: list[Ask] = []
    while len(asks) < questions:
        (index,) = draw.choices(range(len(written)), weights)
        question = Asker(words, [written[index]]).single()
        if question is not None:
            asks.append(Ask(index, question.text, (question.answer,)))
    return Collection([f"{document.text}\n" for document in written], asks, SYSTEM)


def joined(texts: Sequence[str], size: int) -> list[str]:
    """Return longer documents: ``size`` documents each, as paragraphs without titles."""
    firsts = range(0, len(texts) - size + 1, size)
    return ["".join(f"{text.strip()}\n\n" for text in texts[first : first + size]) for first in firsts]


def popularity(count: int, zipf: float) -> list[float]:
    """Return Zipf's weights of documents, the most popular first."""
    return [1 / (rank + 1) ** zipf for rank in range(count)]
