"""The benchmark's metrics: the score of an answer, 0 to 1, against one right answer.

Values equal those of the benchmark's own scripts, also in borderline cases, so that tables compare. As there, ROUGE is
from the package ``rouge`` and Chinese words are from ``jieba``.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from types import MappingProxyType
from typing import Any

from inlay.errors import ParameterError
from inlay_lab.eval.longbench.datasets import Dataset

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DIGITS = re.compile(r"\d+")
_NO_CODE = ("`", "#", "//")  # a line with one of them is a comment, or around code

#: Patterns of right answers, for metrics that compare a number in them.
NUMBERED = {"retrieval": r"Paragraph (\d+)", "retrieval_zh": r"段落(\d+)"}

#: Ignored Chinese and typographic punctuation: first and last character of each range.
_PUNCTUATION_ZH = (
    *((0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027)),
    *((0x3001, 0x3003), (0x300B, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F)),
    *((0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64)),
)
_NO_ASCII = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION = _NO_ASCII | {code: None for low, high in _PUNCTUATION_ZH for code in range(low, high + 1)}


def f1(said: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of common words, as in SQuAD: without case, punctuation and articles."""
    return _overlap(_words(said), _words(answer))


def f1_zh(said: str, answer: str, classes: Sequence[str] = ()) -> float:
    """As ``f1``, over Chinese words."""
    return _overlap(_words_zh(said), _words_zh(answer))


def rouge_l(said: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F of the longest common subsequences, sentence by sentence; 0 if one of both is empty.

    Also 0 if ``rouge`` fails, as for an answer of a thousand words without a full stop.
    """
    try:
        scores: list[Mapping[str, Any]] = _rouge().get_scores([said], [answer])
    except (ValueError, RecursionError):
        return 0.0
    return float(scores[0]["rouge-l"]["f"])


def rouge_l_zh(said: str, answer: str, classes: Sequence[str] = ()) -> float:
    """As ``rouge_l``, over Chinese words."""
    return rouge_l(" ".join(_cut(said)), " ".join(_cut(answer)))


def classification(said: str, answer: str, classes: Sequence[str] = ()) -> float:
    """1 / (number of classes in the answer) if the right one is among them, else 0.

    A class whose name is part of the right one's does not count, unless it directly follows another such class.
    """
    named = [name for name in classes if name in said]
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            del named[at]  # this skips the next class, as in the benchmark's loop
        at += 1
    return 1.0 / len(named) if answer in named else 0.0


def count(said: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the answer's numbers that equal the right one."""
    numbers = _DIGITS.findall(said)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(said: str, answer: str, classes: Sequence[str] = ()) -> float:
    """As ``count``, of the number in ``Paragraph 7``."""
    return _retrieval("retrieval", said, answer)


def retrieval_zh(said: str, answer: str, classes: Sequence[str] = ()) -> float:
    """As ``count``, of the number in ``段落7``."""
    return _retrieval("retrieval_zh", said, answer)


def code(said: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line of code to the right one, rounded to hundredths as in ``fuzzywuzzy``.

    It is difflib's ratio, which fuzzywuzzy uses without python-Levenshtein. The benchmark does not require that
    package.
    """
    lines = said.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        label: In tables.
        packages: Its imports that inlay does not install.
    """

    label: str
    value: Callable[[str, str, Sequence[str]], float]
    packages: tuple[str, ...] = ()


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "f1": Metric("F1", f1),
        "f1_zh": Metric("F1", f1_zh, ("jieba",)),
        "rouge_l": Metric("Rouge L", rouge_l, ("rouge",)),
        "rouge_l_zh": Metric("Rouge L", rouge_l_zh, ("jieba", "rouge")),
        "classification": Metric("Acc", classification),
        "count": Metric("Acc", count),
        "retrieval": Metric("Acc", retrieval),
        "retrieval_zh": Metric("Acc", retrieval_zh),
        "code": Metric("Edit Sim", code),
    }
)


def score(dataset: Dataset, said: str, answers: Iterable[str], classes: Sequence[str]) -> float:
    """The score of an answer, 0 to 1, against the nearest right answer.

    Args:
        said: The model's answer.
        answers: The right answers, at least one.
        classes: All possible answers of a classification task.
    """
    if dataset.first_line:
        said = said.lstrip("\n").split("\n")[0]
    value = METRICS[dataset.metric].value
    return max(value(said, answer, classes) for answer in answers)


def check_packages(datasets: Iterable[Dataset]) -> None:
    """Raise ParameterError if a package for scoring these datasets is not installed."""
    missing: dict[str, list[str]] = {}
    for dataset in datasets:
        for package in METRICS[dataset.metric].packages:
            if importlib.util.find_spec(package) is None:
                missing.setdefault(package, []).append(dataset.name)
    if missing:
        told = ", ".join(dict.fromkeys(name for names in missing.values() for name in names))
        raise ParameterError(
            f"{told}: scoring needs {' and '.join(missing)}; install it with: pip install 'inlay-lab[eval]', or leave "
            "these datasets out with --datasets"
        )


def _overlap(said: Sequence[str], answer: Sequence[str]) -> float:
    common = (Counter(said) & Counter(answer)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(said), common / len(answer)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_ASCII)).split()


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_NO_PUNCTUATION).split()) for word in _cut(text))
    return [word for word in words if word]


def _retrieval(metric: str, said: str, answer: str) -> float:
    found = re.search(NUMBERED[metric], answer)
    assert found is not None, "who reads the data has seen to it"
    return count(said, found[1])


def _cut(text: str) -> list[str]:
    return list(_jieba().cut(text, cut_all=False))


@cache
def _jieba() -> Any:
    import jieba

    jieba.setLogLevel(logging.WARNING)  # it logs the load of its dictionary
    return jieba


@cache
def _rouge() -> Any:
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"], stats=["f"])
