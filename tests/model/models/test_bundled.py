"""The model in the package: small, loadable by anything, and right about documents that it never saw."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from inlay import LLM
from inlay.cli.main import main
from inlay.models.load import MODEL_DIRECTORY
from inlay_lab.eval.modular_qa import Setting, measure_modular_qa
from inlay_lab.eval.questions import TASKS
from inlay_lab.train.lessons import Encoder

EXAMPLES = Path(__file__).parents[3] / "examples"


@cache
def llm() -> LLM:
    return LLM("demo")


def test_bundled_model_fits_into_the_package():
    assert sum(file.stat().st_size for file in MODEL_DIRECTORY.iterdir()) < 25e6
    assert llm().loaded.spec.max_positions >= 4096


def test_bundled_models_logits_equal_the_stock_model():
    stock = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype="float32")
    messages = [{"role": "user", "content": "Bravel is a town. It was founded in 1687.\nWhen was Bravel founded?"}]
    ids = llm().tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    said = [7, 8, 9]
    with torch.no_grad():
        expected = stock(torch.tensor([ids + said])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    (found,) = llm().distributions([messages], [said], reuse="off")
    assert (found - expected).abs().max() < 1e-4


def test_names_in_its_tokenizer_are_syllables():
    encode = Encoder(llm().tokenizer)
    assert len(encode("Bravel")) == len(encode(" Bravel")) == len(encode("BRAVEL")) == 2


@pytest.mark.long
def test_bundled_model_answers_most_questions_on_new_documents():
    """A floor far below what docs/internals/results.md gives: it falls when answers ignore the documents."""
    rows = measure_modular_qa(llm(), Setting(reuse=("off", "anchored"), documents=3, questions=50))["rows"]
    for reuse in ("off", "anchored"):
        right = {row["task"]: row["exact_match"] for row in rows if row["reuse"] == reuse}
        assert right.keys() == {*TASKS, "all"}
        assert right["all"] > 0.4
        assert right["single"] > 0.4


@pytest.mark.parametrize(
    ("schema", "answer"), [("records/records", "Rolan Fader"), ("docs/docs", "Pavel Brinos")], ids=["records", "docs"]
)
def test_bundled_model_answers_the_examples(capsys: pytest.CaptureFixture[str], schema: str, answer: str):
    file = EXAMPLES / f"{schema}.xml"
    arguments = ["run", str(file), "--prompt", str(file.parent / "prompt.xml"), "--compare", "--json"]
    assert main(arguments) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["text"] == row["baseline"]["text"] == answer
    assert row["cached_tokens"] > row["computed_tokens"]
