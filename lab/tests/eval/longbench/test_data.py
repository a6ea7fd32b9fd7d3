"""The benchmark's files are read as published, and an error names its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inlay import ParameterError
from inlay_lab.eval.longbench.data import Template, open_suite
from inlay_lab.eval.longbench.datasets import DATASETS

EXAMPLE = Path(__file__).parents[4] / "examples" / "longbench"
#: Datasets with a template in the example: the question is after the context, as in the bundled model's training.
PLAIN = {"narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"}
ROW: dict[str, Any] = {
    "input": "Who?",
    "context": "Rosa is here.",
    "answers": ["Rosa"],
    "length": 3,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "x1",
}


def folder(path: Path, *rows: Any, name: str = "qasper", **config: Any) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (path / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    (path / "config").mkdir(exist_ok=True)
    for file, value in config.items():
        (path / "config" / f"{file}.json").write_text(json.dumps(value))
    return path


def test_the_example_has_all_datasets() -> None:
    suite = open_suite(EXAMPLE)
    assert tuple(suite.files) == tuple(DATASETS)
    assert len(DATASETS) == 21
    assert set(DATASETS) - set(suite.own) == PLAIN
    assert not suite.absent
    assert not suite.unlimited
    for dataset in suite.datasets:
        samples = list(suite.samples(dataset))
        assert len(samples) == 2
        assert samples[0].name == f"{dataset.name}-1"
        assert bool(samples[0].classes) == (dataset.metric == "classification")


def test_files_and_configuration_may_be_in_separate_folders(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    folder(tmp_path / "data", ROW)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps({"qasper": "{context} {input}"}))
    for place in (tmp_path, tmp_path / "data"):
        suite = open_suite(place)
        assert suite.own == ()
        assert suite.unlimited == ("qasper",)
        assert suite.limits == {"qasper": 128}
        assert len(suite.absent) == 20
        (sample,) = suite.samples(DATASETS["qasper"])
        assert suite.templates["qasper"].around(sample) == ("", " Who?")
        assert (sample.name, sample.context, sample.answers) == ("x1", "Rosa is here.", ("Rosa",))


def test_templates_and_limits_of_the_benchmark_are_used(tmp_path: Path) -> None:
    place = folder(tmp_path, ROW, ROW, dataset2prompt={"qasper": "Read {{this}}: {context}\n{input}?"})
    folder(tmp_path, ROW, name="lcc", dataset2maxlen={"lcc": 7})
    suite = open_suite(place)
    assert (suite.own, suite.unlimited) == (("lcc",), ("qasper",))
    assert suite.limits == {"qasper": 128, "lcc": 7}
    (sample,) = suite.samples(DATASETS["qasper"], 1)
    assert suite.templates["qasper"].around(sample) == ("Read {this}: ", "\nWho??")
    assert suite.templates["lcc"].around(sample)[0]


def test_template_may_start_with_the_question() -> None:
    assert Template.parse("{input}: {context}") == Template((None, ": "), ())


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{input}", "it has 0 places for the context"),
        ("{context}{context}", "it has 2 places for the context"),
        ("{context} {question}", "it has the field {question}"),
        ("{context!r}", "it has the field {context}"),
        ("{context", "expected '}' before end of string"),
        (3, "it is the number 3"),
    ],
)
def test_invalid_template_is_named(tmp_path: Path, template: Any, sentence: str) -> None:
    with pytest.raises(ParameterError) as caught:
        open_suite(folder(tmp_path, ROW, dataset2prompt={"qasper": template}))
    assert str(caught.value) == (
        f"dataset2prompt.json of {tmp_path} has no template for qasper ({sentence}); it must be a text with "
        "{context} once, and {input} where the question goes"
    )


@pytest.mark.parametrize("limit", [0, "64", True, 100_001, 1.5])
def test_invalid_limit_is_named(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(ParameterError, match=r"dataset2maxlen\.json of .* for qasper; it must be a number of tokens"):
        open_suite(folder(tmp_path, ROW, dataset2maxlen={"qasper": limit}))


@pytest.mark.parametrize("text", ["[1]", "{", '{"qasper": 1, "qasper": 2}'])
def test_a_damaged_configuration_is_named(tmp_path: Path, text: str) -> None:
    folder(tmp_path, ROW)
    (tmp_path / "config" / "dataset2maxlen.json").write_text(text)
    with pytest.raises(ParameterError, match=r"config/dataset2maxlen\.json"):
        open_suite(tmp_path)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{", "it is not JSON"),
        ("[1]", "holds a list of 1; it must be an object"),
        ({**ROW, "context": None}, "context is null; it must be a text"),
        ({**ROW, "input": ["a"]}, "input is a list of 1; it must be a text"),
        ({**ROW, "answers": "Rosa"}, 'answers is the text "Rosa"; it must be a list of texts'),
        ({**ROW, "answers": [1]}, "answers is a list of 1; it must be a list of texts"),
        ({**ROW, "answers": []}, "answers is empty; a row needs one that counts as right"),
        ({**ROW, "answers": ["x" * 50_001]}, "an answer has more than 50,000 characters"),
    ],
)
def test_invalid_row_is_located(tmp_path: Path, row: Any, sentence: str) -> None:
    suite = open_suite(folder(tmp_path, ROW, row))
    with pytest.raises(ParameterError) as caught:
        list(suite.samples(DATASETS["qasper"]))
    assert str(caught.value).startswith(f"{tmp_path}/qasper.jsonl:2")
    assert sentence in str(caught.value)


def test_rows_with_unscorable_answers_are_named(tmp_path: Path) -> None:
    suite = open_suite(folder(tmp_path, ROW, name="trec"))
    with pytest.raises(ParameterError, match="all_classes is null; it must be a list of texts"):
        list(suite.samples(DATASETS["trec"]))
    suite = open_suite(folder(tmp_path, ROW, name="passage_retrieval_en"))
    with pytest.raises(ParameterError, match="answers are Rosa; they must name a number"):
        list(suite.samples(DATASETS["passage_retrieval_en"]))


def test_missing_files_are_reported_with_a_download_command(tmp_path: Path) -> None:
    get = r"get it with: hf download THUDM/LongBench data\.zip"
    with pytest.raises(ParameterError, match=rf"nowhere: there is no such folder; {get}"):
        open_suite(tmp_path / "nowhere")
    with pytest.raises(ParameterError, match=rf"has none of the benchmark's files, such as qasper\.jsonl; {get}"):
        open_suite(tmp_path)
    with pytest.raises(ParameterError, match=rf"has no trec\.jsonl, nor has its data folder; {get}"):
        open_suite(folder(tmp_path, ROW), ["qasper", "trec"])
    with pytest.raises(ParameterError, match="datasets is 'squad'; use some of narrativeqa, qasper"):
        open_suite(tmp_path, ["squad"])
