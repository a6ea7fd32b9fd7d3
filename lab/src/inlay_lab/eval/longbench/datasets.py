"""The 21 datasets: their metric, their longest answer, and the marker that starts a document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType


@dataclass(frozen=True)
class Dataset:
    """One dataset of the benchmark.

    Attributes:
        title: Name in tables.
        metric: Name in ``metrics.METRICS``.
        max_tokens: Longest answer, if the benchmark's file of limits is missing.
        marker: Regular expression for the start of a document's first line. A group matches its number if documents are
            numbered from 1. "" if the context is one document.
        chat: Put the prompt into the model's chat template. False if examples show the continuation.
        first_line: Only the first line of an answer counts.
        until_newline: A line break ends the answer.
    """

    name: str
    title: str
    metric: str
    max_tokens: int
    marker: str = ""
    chat: bool = True
    first_line: bool = False
    until_newline: bool = False

    def documents(self, context: str) -> tuple[str, ...]:
        """The context in pieces, one for each document. Text before the first document belongs to it.

        A context without markers is one document. Where documents are numbered, only the next number begins another
        one.
        """
        starts = [0]
        if self.marker:
            found = 0
            for match in self._begins.finditer(context):
                if match.lastindex is None or int(match[1]) == found + 1:
                    found += 1
                    if found > 1:
                        starts.append(match.start())
        pieces = [context[start:end] for start, end in zip(starts, [*starts[1:], len(context)], strict=True)]
        return tuple(piece for piece in pieces if piece)

    @cached_property
    def _begins(self) -> re.Pattern[str]:
        return re.compile("^" + self.marker, re.MULTILINE)


_PASSAGES = r"Passage ([0-9]{1,4}):"
_PARAGRAPHS = r"Paragraph ([0-9]{1,4}):"


def _examples(
    name: str, title: str, metric: str, max_tokens: int, marker: str, *, until_newline: bool = False
) -> Dataset:
    return Dataset(name, title, metric, max_tokens, marker, chat=False, first_line=True, until_newline=until_newline)


_ALL = (
    Dataset("narrativeqa", "NarrativeQA", "f1", 128),
    Dataset("qasper", "Qasper", "f1", 128),
    Dataset("multifieldqa_en", "MultiFieldQA (en)", "f1", 64),
    Dataset("multifieldqa_zh", "MultiFieldQA (zh)", "f1_zh", 64),
    Dataset("hotpotqa", "HotpotQA", "f1", 32, _PASSAGES),
    Dataset("2wikimqa", "2WikiMultihopQA", "f1", 32, _PASSAGES),
    Dataset("musique", "MuSiQue", "f1", 32, _PASSAGES),
    Dataset("dureader", "DuReader", "rouge_l_zh", 128, r"文章([0-9]{1,4})(?![0-9])"),
    Dataset("gov_report", "GovReport", "rouge_l", 512),
    Dataset("qmsum", "QMSum", "rouge_l", 512),
    Dataset("multi_news", "MultiNews", "rouge_l", 512, _PASSAGES),
    Dataset("vcsum", "VCSUM", "rouge_l_zh", 512),
    _examples("trec", "TREC", "classification", 64, "Question:"),
    _examples("triviaqa", "TriviaQA", "f1", 32, "Passage:"),
    _examples("samsum", "SAMSum", "rouge_l", 128, "Dialogue:", until_newline=True),
    _examples("lsht", "LSHT", "classification", 64, "新闻内容："),
    Dataset("passage_count", "PassageCount", "count", 32, _PARAGRAPHS),
    Dataset("passage_retrieval_en", "PassageRetrieval (en)", "retrieval", 32, _PARAGRAPHS),
    Dataset("passage_retrieval_zh", "PassageRetrieval (zh)", "retrieval_zh", 32, r"段落([0-9]{1,4})[：:]"),
    Dataset("lcc", "LCC", "code", 64, chat=False),
    Dataset("repobench-p", "RepoBench-P", "code", 64, r"(?:#|//)? ?Path: ", chat=False),
)

DATASETS: Mapping[str, Dataset] = MappingProxyType({dataset.name: dataset for dataset in _ALL})
"""Datasets by name, in the benchmark's order."""
