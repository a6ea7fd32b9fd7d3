"""Retrieval that prefers stored documents: what it saves, and what it costs, against epsilon.

Questions about generated documents arrive with Zipf-distributed popularity. A TF-IDF retriever ranks all documents, and
``inlay.retrieval.rerank`` chooses among those of nearly equal relevance. The pool holds a share of the documents.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inlay.check.statistics import wilson_interval
from inlay.client.llm import LLM
from inlay.errors import ParameterError
from inlay.retrieval.parts import marked_parts
from inlay.retrieval.rerank import rerank
from inlay.sampling.params import SamplingParams
from inlay_lab.eval.documents import Document, write_documents
from inlay_lab.eval.questions import Asker
from inlay_lab.eval.words import Split, Words

SYSTEM = "Answer from the documents."
_WORD = re.compile(r"\w+")
_TOKENS = 24  # of an answer


@dataclass(frozen=True)
class RetrievalSetting:
    """The options. Raises ParameterError.

    Attributes:
        documents: in the collection.
        chosen: documents of a prompt.
        candidates: of the retriever, before the choice.
        epsilons: losses of relevance to try. Relevance is a cosine, 0 to 1.
        share: the share of the documents' tokens that the pool holds.
        zipf: the exponent of the documents' popularity.
    """

    documents: int = 2_000
    questions: int = 400
    chosen: int = 4
    candidates: int = 40
    epsilons: tuple[float, ...] = (0.0, 0.01, 0.02, 0.05)
    share: float = 0.1
    zipf: float = 1.0
    reuse: str = "modular"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.chosen <= self.candidates <= self.documents or self.questions < 2:
            raise ParameterError(
                "give 2 or more questions, and chosen ≤ candidates ≤ documents with at least 2 chosen documents"
            )
        if not 0 < self.share <= 1 or any(not epsilon >= 0 for epsilon in self.epsilons):
            raise ParameterError("share is above 0 and at most 1, and no epsilon is negative")


@dataclass(frozen=True)
class Ask:
    """A question about one document of the collection, and its right answer."""

    document: int
    text: str
    answer: str


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


def collection(setting: RetrievalSetting) -> tuple[list[Document], list[Ask]]:
    """Return the documents, and questions about them by popularity."""
    draw = random.Random(setting.seed)
    words = Words(draw, Split.FIRST)
    documents: list[Document] = []
    names: set[str] = set()
    while len(documents) < setting.documents:
        for one in write_documents(words, 12):
            if one.name not in names and len(documents) < setting.documents:
                names.add(one.name)
                documents.append(one)
    draw.shuffle(documents)
    weights = [1 / (rank + 1) ** setting.zipf for rank in range(len(documents))]
    asks: list[Ask] = []
    while len(asks) < setting.questions:
        (index,) = draw.choices(range(len(documents)), weights)
        question = Asker(words, [documents[index]]).single()
        if question is not None:
            asks.append(Ask(index, question.text, question.answer))
    return documents, asks


def joined(documents: Sequence[Document], size: int) -> list[str]:
    """Return longer documents: the texts of ``size`` documents each, as paragraphs without titles."""
    firsts = range(0, len(documents) - size + 1, size)
    return ["".join(f"{one.text}\n\n" for one in documents[first : first + size]) for first in firsts]


def measure_retrieval(
    make: Callable[[float], LLM], setting: RetrievalSetting, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Answer the questions once for each epsilon, each from an empty pool.

    Args:
        make: makes the model, given the tokens of KV that its pool needs.
        progress: called with the number of finished answers and the total.
    """
    documents, asks = collection(setting)
    texts = [f"{document.text}\n" for document in documents]
    retriever = Retriever(texts)
    ranked = [retriever.best(ask.text, setting.candidates) for ask in asks]
    rows, done = [], 0
    llm: LLM | None = None
    for epsilon in setting.epsilons:
        llm = llm or _sized(make, texts, setting)
        llm.reset_prefix_cache()
        one = _Row(setting, epsilon)
        for ask, (best, relevance) in zip(asks, ranked, strict=True):
            one.add(llm, ask, [texts[index] for index in best], best, relevance)
            done += 1
            if progress is not None:
                progress(done, len(asks) * len(setting.epsilons))
        rows.append(one.report())
    assert llm is not None
    return {"model": llm.model_name, "setting": {**setting.__dict__}, "rows": rows}


def _sized(make: Callable[[float], LLM], texts: Sequence[str], setting: RetrievalSetting) -> LLM:
    """Make the model with room for a share of the documents, and for one prompt."""
    sizer = make(4_096)
    per_text = statistics.fmean(len(sizer.encoder.text(text)) for text in texts[:200])
    sizer.shutdown()
    return make(setting.share * per_text * len(texts) + 2 * (setting.chosen * per_text + 600))


class _Row:
    """The figures of one epsilon."""

    def __init__(self, setting: RetrievalSetting, epsilon: float) -> None:
        self._setting, self._epsilon = setting, epsilon
        self._times: list[float] = []
        self._found = self._held = self._tokens = self._right = 0
        self._lost: list[float] = []

    def add(self, llm: LLM, ask: Ask, texts: Sequence[str], best: Sequence[int], relevance: Sequence[float]) -> None:
        """Choose documents for a question and answer it."""
        setting = self._setting
        system = {"role": "system", "content": SYSTEM}
        begun = time.perf_counter()
        scores = llm.score_cached(texts, messages=[system], reuse=setting.reuse)
        if not self._epsilon:  # a retriever that does not ask
            begun = time.perf_counter()
        value = [float(score.resident_tokens) for score in scores]
        chosen = rerank(relevance, value, epsilon=self._epsilon, most=setting.chosen)
        self._tokens += sum(scores[index].tokens for index in chosen)
        self._held += sum(scores[index].resident_tokens for index in chosen)
        parts = marked_parts([texts[index] for index in chosen], ask.text)
        chat: list[dict[str, Any]] = [system, {"role": "user", "content": parts}]
        params = SamplingParams(max_tokens=_TOKENS, temperature=0)
        text, first = "", 0.0
        for output in llm.stream(chat, params, reuse=setting.reuse):
            first = first or time.perf_counter() - begun
            text = output.outputs[0].text
        self._times.append(first)
        self._found += ask.document in [best[index] for index in chosen]
        self._right += text.strip() == ask.answer
        ideal = relevance[: setting.chosen]
        self._lost.append(max(a - relevance[b] for a, b in zip(ideal, chosen, strict=True)))

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        count = len(self._times)
        return {
            "epsilon": self._epsilon,
            "hit_share": self._held / self._tokens,
            "ttft_p50_ms": 1000 * statistics.median(self._times),
            "ttft_p99_ms": 1000 * float(np.quantile(self._times, 0.99)),
            "recall": self._found / count,
            "recall_95": wilson_interval(self._found, count),
            "right": self._right / count,
            "right_95": wilson_interval(self._right, count),
            "most_lost": max(self._lost),
        }


def retrieval_table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    chosen = result["setting"]["chosen"]
    lines = [
        f"| epsilon | document tokens found | first token, p50, ms | p99, ms | recall@{chosen} | right answers (95%) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        low, high = row["right_95"]
        lines.append(
            f"| {row['epsilon']:g} | {row['hit_share']:.0%} | {row['ttft_p50_ms']:.1f} | {row['ttft_p99_ms']:.1f} | "
            f"{row['recall']:.1%} | {row['right']:.1%} ({low:.1%} to {high:.1%}) |"
        )
    return "\n".join(lines)


def draw_retrieval(result: dict[str, Any], path: Path) -> None:
    """Draw the share of found tokens, the time to the first token, and the right answers over epsilon."""
    from matplotlib.figure import Figure

    from inlay.authoring.plot import save

    rows = result["rows"]
    x = [row["epsilon"] for row in rows]
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(x, [row["hit_share"] for row in rows], "o-", color="#0072B2")
    left.set_title("document tokens found", fontsize=10)
    middle.plot(x, [row["ttft_p50_ms"] for row in rows], "o-", color="#0072B2", label="median")
    middle.plot(x, [row["ttft_p99_ms"] for row in rows], "s-", color="#D55E00", label="99th percentile")
    middle.set_title("time to the first token, ms", fontsize=10)
    middle.legend(frameon=False, fontsize=9)
    bounds = [[row["right"] - row["right_95"][0] for row in rows], [row["right_95"][1] - row["right"] for row in rows]]
    right.errorbar(x, [row["right"] for row in rows], yerr=bounds, fmt="o-", color="#0072B2", label="right answers")
    right.plot(x, [row["recall"] for row in rows], "s-", color="#009E73", label="recall")
    right.set_title("answers and recall", fontsize=10)
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.set_ylim(0, 1.02)
    middle.set_ylim(bottom=0)
    for axes in (left, middle, right):
        axes.set_xlabel("epsilon", fontsize=9)
        axes.grid(color="#DDDDDD", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    save(figure, path)
