"""Every metric equals the published packages' value on a thousand generated pairs, and in known borderline cases."""

from __future__ import annotations

import difflib
import random
import re
import string
import warnings
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest

from inlay import ParameterError
from inlay_lab.eval.longbench import metrics
from inlay_lab.eval.longbench.datasets import DATASETS
from inlay_lab.eval.longbench.metrics import METRICS, check_packages, score

from .texts import chinese, english, pairs, program

rouge = pytest.importorskip("rouge", reason="rouge is not installed")
jieba = pytest.importorskip("jieba", reason="jieba is not installed")


def published_rouge_l(said: str, right: str) -> float:
    try:
        return rouge.Rouge().get_scores([said], [right], avg=True)["rouge-l"]["f"]
    except ValueError:  # for empty text
        return 0.0


def published_overlap(said: Sequence[str], right: Sequence[str]) -> float:
    """F of common words: ROUGE-1 over lists, not sets."""
    if not said or not right:
        return 0.0
    return rouge.rouge_score.rouge_n([" ".join(said)], [" ".join(right)], n=1, exclusive=False)["f"]


def in_words(text: str) -> list[str]:
    plain = re.sub(f"[{re.escape(string.punctuation)}]", "", text.lower())
    return [word for word in re.split(r"\s+", re.sub(r"\b(?:a|an|the)\b", " ", plain)) if word]


def in_words_zh(text: str) -> list[str]:
    marks = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､"
    marks += "、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
    words = (re.sub(rf"[{re.escape(string.punctuation + marks)}\s]", "", word.lower()) for word in jieba.cut(text))
    return [word for word in words if word]


def test_rouge_l() -> None:
    for said, right in pairs(english):
        assert metrics.rouge_l(said, right) == pytest.approx(published_rouge_l(said, right), abs=1e-12)


def test_rouge_l_of_chinese_words() -> None:
    for said, right in pairs(chinese):
        expected = published_rouge_l(" ".join(jieba.cut(said)), " ".join(jieba.cut(right)))
        assert metrics.rouge_l_zh(said, right) == pytest.approx(expected, abs=1e-12)


def test_f1() -> None:
    for said, right in pairs(english):
        assert metrics.f1(said, right) == pytest.approx(published_overlap(in_words(said), in_words(right)), abs=1e-7)


def test_f1_of_chinese_words() -> None:
    for said, right in pairs(chinese):
        expected = published_overlap(in_words_zh(said), in_words_zh(right))
        assert metrics.f1_zh(said, right) == pytest.approx(expected, abs=1e-7)


def test_similarity_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it prefers python-Levenshtein, which gives other values
        fuzz = pytest.importorskip("fuzzywuzzy.fuzz", reason="fuzzywuzzy is not installed")
    monkeypatch.setattr(fuzz, "SequenceMatcher", difflib.SequenceMatcher)
    for said, right in pairs(program):
        lines = re.sub(r"\A\n+", "", said).split("\n")
        code = [line for line in lines if not re.search("[`#]|//", line)] + [""]
        assert metrics.code(said, right) == fuzz.ratio(code[0], right) / 100


def test_numbers_are_counted() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        said = "".join(rng.choice(("1", "2", "12", " ", "Paragraph ", ", ", "段落")) for _ in range(rng.randint(0, 8)))
        numbers = ["".join(run) for digits, run in groupby(said, str.isdecimal) if digits]
        right = str(rng.choice((1, 2, 12)))
        expected = numbers.count(right) / max(1, len(numbers))
        assert metrics.count(said, right) == expected
        assert metrics.retrieval(said, f"Paragraph {right}") == expected
        assert metrics.retrieval_zh(said, f"段落{right}") == expected


def test_classes_are_counted() -> None:
    rng, names = random.Random(4), ["Date", "Date of birth", "birth", "Place", "Place of birth", "of", "Sport"]
    for _ in range(1000):
        right, said = rng.choice(names), " ".join(rng.choices(names, k=rng.randint(0, 4)))
        named = [name for name in names if name in said]
        for name in named:  # the benchmark also shortens the list while iterating, and skips some names
            if name in right and name != right:
                named.remove(name)
        expected = 1 / len(named) if right in named else 0.0
        assert metrics.classification(said, right, names) == expected


@pytest.mark.parametrize("metric", METRICS)
def test_empty_answer_scores_zero(metric: str) -> None:
    right = {"retrieval": "Paragraph 3", "retrieval_zh": "段落3", "count": "3"}.get(metric, "Rosa")
    assert METRICS[metric].value("", right, ["Rosa"]) == 0
    assert METRICS[metric].value(right, right, ["Rosa"]) == pytest.approx(1, abs=1e-7)


def test_texts_too_long_for_rouge_score_zero() -> None:
    words = " ".join(f"w{number}" for number in range(1100))
    assert metrics.rouge_l(words, "w0") == 0
    assert metrics.rouge_l(words.replace(" w500", ". w500"), "w0") > 0


def test_nearest_answer_and_first_line_are_scored() -> None:
    answers = ("nobody", "Rosa Tilen")
    assert score(DATASETS["qasper"], "Rosa Tilen\nPassage:", answers, ()) == pytest.approx(0.8)
    assert score(DATASETS["triviaqa"], "\n\nRosa Tilen\nPassage:", answers, ()) == 1
    assert score(DATASETS["trec"], "Date\nPlace", ("Date",), ("Date", "Place")) == 1


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> Any:
        return None if name in ("jieba", "rouge") else name

    monkeypatch.setattr("importlib.util.find_spec", found)
    check_packages([DATASETS["qasper"], DATASETS["lcc"]])
    with pytest.raises(ParameterError) as caught:
        check_packages([DATASETS["qasper"], DATASETS["dureader"], DATASETS["vcsum"]])
    assert str(caught.value) == (
        "dureader, vcsum: scoring needs jieba and rouge; install it with: pip install 'inlay-lab[eval]', or leave "
        "these datasets out with --datasets"
    )
