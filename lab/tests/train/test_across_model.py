"""The model in the checkout answers questions across documents under full prefill."""

from __future__ import annotations

from pathlib import Path

import pytest

from inlay import LLM
from inlay_lab.eval.modular_qa import measure_modular_qa
from inlay_lab.eval.setting import Setting

pytestmark = pytest.mark.long

MODEL = Path(__file__).parents[2] / "models" / "across"


def test_contradictions_are_found_far_more_often_than_by_chance():
    llm = LLM(str(MODEL))
    tasks = ("conflict", "single")
    setting = Setting(documents=6, questions=60, tasks=tasks, reuse=("off",), order="permuted", seed=5)
    found = {row["task"]: row["exact_match"] for row in measure_modular_qa(llm, setting)["rows"]}
    assert found["conflict"] > 0.4
    assert found["single"] > 0.8
