"""Retrieval that prefers stored documents: what it saves, and what it costs, against epsilon.

Questions about documents arrive with Zipf-distributed popularity. A TF-IDF retriever ranks all documents, and
``inlay.retrieval.choose_cached`` chooses among those of nearly equal relevance. The pool has room for a share of the
documents. Each epsilon has an engine of its own, and all engines answer each question in turns.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inlay.check.statistics import wilson_interval
from inlay.client.llm import LLM
from inlay.errors import ParameterError
from inlay.retrieval.rerank import choose_cached, marked_parts
from inlay.sampling.params import SamplingParams
from inlay.types import CachedText
from inlay_lab.drawing import figure_style
from inlay_lab.eval.collection import Ask, Collection, Retriever, generated, popularity
from inlay_lab.eval.longbench.metrics import f1
from inlay_lab.eval.reading_data import SYSTEM as SYSTEM_OF_DATA
from inlay_lab.eval.reading_data import Data

_TOKENS = 24  # of an answer
_OWN = 512  # tokens of a prompt beside its documents, with those of its answer, generously


@dataclass(frozen=True)
class RetrievalSetting:
    """The options. Raises ParameterError.

    Attributes:
        documents: the number of generated documents. Real data has its own.
        chosen: documents of a prompt.
        candidates: of the retriever, before the choice.
        epsilons: losses of relevance to try. Relevance is a cosine, 0 to 1.
        share: the share of the documents that the pool has room for.
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
        if not 2 <= self.chosen <= self.candidates or self.questions < 2:
            raise ParameterError("give 2 or more questions, and chosen ≤ candidates with at least 2 chosen documents")
        if not 0 < self.share <= 1 or any(not epsilon >= 0 for epsilon in self.epsilons):
            raise ParameterError("share is above 0 and at most 1, and no epsilon is negative")


def of_data(data: Data, setting: RetrievalSetting) -> Collection:
    """Return the passages of real data, and questions about them by popularity.

    Raises:
        ParameterError: for data without passages of their own for each question.
    """
    draw = random.Random(setting.seed)
    about: dict[str, list[Ask]] = {}
    names = list(data.passages)
    places = {name: index for index, name in enumerate(names)}
    for one in data.questions:
        if one.passage:
            ask = Ask(places[one.passage], f"Question: {one.text}", one.answers)
            about.setdefault(one.passage, []).append(ask)
    if len(about) < 2:
        raise ParameterError("the data names no passages of its questions; give a folder with questions.jsonl")
    popular = sorted(about)
    draw.shuffle(popular)
    drawn = draw.choices(popular, popularity(len(popular), setting.zipf), k=setting.questions)
    texts = [f"{text}\n\n" for text in data.passages.values()]
    return Collection(texts, [draw.choice(about[name]) for name in drawn], SYSTEM_OF_DATA, contains=True)


def measure_retrieval(
    make: Callable[[int], LLM],
    setting: RetrievalSetting,
    progress: Callable[[int, int], None] | None = None,
    *,
    data: Data | None = None,
) -> dict[str, Any]:
    """Answer the questions once for each epsilon, each with a pool that is empty at the start.

    Args:
        make: makes the model with a pool of this many bytes.
        progress: called with the number of finished answers and the total.
        data: real passages and questions. None for generated ones.

    Raises:
        ParameterError: for fewer documents than candidates.
    """
    found = (
        generated(setting.documents, setting.questions, zipf=setting.zipf, seed=setting.seed)
        if data is None
        else of_data(data, setting)
    )
    if len(found.texts) < setting.candidates:
        raise ParameterError(f"candidates is {setting.candidates} of {len(found.texts)} documents; give less")
    retriever = Retriever(found.texts)
    with ExitStack() as stack:
        rows: list[_Row] = []
        size = _room(make, found.texts, setting)
        for epsilon in setting.epsilons:
            llm = make(size)
            stack.callback(llm.shutdown)
            rows.append(_Row(llm, found, setting, epsilon))
        for number, ask in enumerate(found.asks):
            best, relevance = retriever.best(ask.text, setting.candidates)
            turn = number % len(rows)
            for row in (*rows[turn:], *rows[:turn]):
                row.add(ask, best, relevance)
            if progress is not None:
                progress((number + 1) * len(rows), len(found.asks) * len(rows))
        return {
            "model": llm.model_name,
            "setting": {**asdict(setting), "documents": len(found.texts)},
            "right_is": "contains" if found.contains else "equals",
            "rows": [row.report() for row in rows],
        }


def _room(make: Callable[[int], LLM], texts: Sequence[str], setting: RetrievalSetting) -> int:
    """Return the bytes of a pool with room for a share of the documents, in whole chunks, and for one prompt."""
    sizer = make(64 << 20)
    chunk, per_token = sizer.config.chunk_size, sizer.client.model.bytes_per_token
    sizes = sorted(math.ceil(len(sizer.encoder.text(text)) / chunk) * chunk for text in texts)
    sizer.shutdown()
    return per_token * (max(round(setting.share * sum(sizes)), sum(sizes[-setting.chosen :])) + _OWN)


class _Row:
    """The figures of one epsilon."""

    def __init__(self, llm: LLM, collection: Collection, setting: RetrievalSetting, epsilon: float) -> None:
        self._llm, self._collection, self._setting, self._epsilon = llm, collection, setting, epsilon
        self._system = {"role": "system", "content": collection.system}
        self._times: list[float] = []
        self._choices: list[float] = []
        self._found = self._held = self._tokens = self._right = self._scored = 0
        self._f1: list[float] = []
        self._lost: list[float] = []

    def _scores(self, texts: Sequence[str]) -> list[CachedText]:
        return self._llm.score_cached(texts, messages=[self._system], reuse=self._setting.reuse)

    def _value(self, texts: Sequence[str]) -> list[float]:
        self._scored += len(texts)
        return [float(score.resident_tokens) for score in self._scores(texts)]

    def add(self, ask: Ask, best: Sequence[int], relevance: Sequence[float]) -> None:
        """Choose documents for a question and answer it."""
        texts = [self._collection.texts[index] for index in best]
        begun = time.perf_counter()
        chosen = choose_cached(texts, relevance, self._value, epsilon=self._epsilon, most=self._setting.chosen)
        chose = time.perf_counter() - begun
        scores = self._scores([texts[index] for index in chosen])  # for the figures alone
        self._tokens += sum(score.tokens for score in scores)
        self._held += sum(score.resident_tokens for score in scores)
        parts = marked_parts([texts[index] for index in chosen], ask.text)
        chat: list[dict[str, Any]] = [self._system, {"role": "user", "content": parts}]
        params = SamplingParams(max_tokens=_TOKENS, temperature=0)
        text, first = "", 0.0
        begun = time.perf_counter()
        for output in self._llm.stream(chat, params, reuse=self._setting.reuse):
            first = first or time.perf_counter() - begun
            text = output.outputs[0].text
        self._choices.append(chose)
        self._times.append(chose + first)
        self._found += ask.document in [best[index] for index in chosen]
        self._right += self._collection.is_right(text, ask)
        self._f1.append(max(f1(text, answer) for answer in ask.answers))
        ideal = relevance[: self._setting.chosen]
        self._lost.append(max(a - relevance[b] for a, b in zip(ideal, chosen, strict=True)))

    def _stored_share(self) -> float:
        """Return the share of the collection's tokens that is stored now."""
        texts = self._collection.texts
        scores = [one for first in range(0, len(texts), 500) for one in self._scores(texts[first : first + 500])]
        return sum(one.resident_tokens for one in scores) / sum(one.tokens for one in scores)

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        count = len(self._times)
        return {
            "epsilon": self._epsilon,
            "hit_share": self._held / self._tokens,
            "ttft_p50_ms": 1000 * statistics.median(self._times),
            "ttft_p99_ms": 1000 * float(np.quantile(self._times, 0.99)),
            "choice_p50_ms": 1000 * statistics.median(self._choices),
            "scored": self._scored / count,
            "stored_share": self._stored_share(),
            "recall": self._found / count,
            "recall_95": wilson_interval(self._found, count),
            "right": self._right / count,
            "right_95": wilson_interval(self._right, count),
            "f1": statistics.fmean(self._f1),
            "mean_lost": statistics.fmean(self._lost),
            "most_lost": max(self._lost),
        }


def retrieval_table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    chosen = result["setting"]["chosen"]
    lines = [
        "| epsilon | document tokens found | first token, p50, ms | p99, ms | of it the choice, p50, ms | scored texts "
        f"| recall@{chosen} | right answers (95%) | F1 | stored at the end |",
        "|---|" + "---:|" * 9,
    ]
    for row in result["rows"]:
        low, high = row["right_95"]
        lines.append(
            f"| {row['epsilon']:g} | {row['hit_share']:.0%} | {row['ttft_p50_ms']:.1f} | {row['ttft_p99_ms']:.1f} | "
            f"{row['choice_p50_ms']:.1f} | {row['scored']:.1f} | {row['recall']:.1%} | "
            f"{row['right']:.1%} ({low:.1%} to {high:.1%}) | {row['f1']:.2f} | {row['stored_share']:.1%} |"
        )
    return "\n".join(lines)


@figure_style()
def draw_retrieval(result: dict[str, Any], path: Path) -> None:
    """Draw the share of found tokens, the time to the first token, and the right answers over epsilon."""
    from matplotlib.figure import Figure

    from inlay.authoring.plot import save

    rows = result["rows"]
    x = [row["epsilon"] for row in rows]
    figure = Figure(figsize=(9.5, 3.2))
    left, middle, right = figure.subplots(1, 3)
    left.plot(x, [row["hit_share"] for row in rows], "o-", color="#0072B2")
    left.set_title("document tokens found")
    middle.plot(x, [row["ttft_p50_ms"] for row in rows], "o-", color="#0072B2", label="median")
    middle.plot(x, [row["ttft_p99_ms"] for row in rows], "s-", color="#D55E00", label="99th percentile")
    middle.set_title("time to the first token, ms")
    middle.legend()
    bounds = [[row["right"] - row["right_95"][0] for row in rows], [row["right_95"][1] - row["right"] for row in rows]]
    right.errorbar(x, [row["right"] for row in rows], yerr=bounds, fmt="o-", color="#0072B2", label="right answers")
    right.plot(x, [row["recall"] for row in rows], "s-", color="#009E73", label="recall")
    right.set_title("answers and recall")
    right.legend()
    for axes in (left, right):
        axes.set_ylim(0, 1.02)
    middle.set_ylim(bottom=0)
    for axes in (left, middle, right):
        axes.set_xlabel("epsilon")
    save(figure, path)
