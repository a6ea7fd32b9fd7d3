"""docs/reference/sampling.md: its code runs and prints the shown output, and its tables name every parameter."""

from __future__ import annotations

import dataclasses

import pytest

from inlay import SamplingParams
from tests.pages import DOCS, blocks, rows

PAGE = DOCS / "reference/sampling.md"


def test_code_prints_the_shown_output(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    printed = ""
    for block in blocks(PAGE):
        if block.language == "python":
            exec(compile(block.text, str(block), "exec", dont_inherit=True), names)
            printed = capsys.readouterr().out
        else:
            assert block.language == "text", block
            assert printed == block.text, block


def test_every_parameter_has_a_row_with_its_default() -> None:
    written = {
        name.strip("`"): default for name, default, *_ in rows(PAGE, "parameter", "default", "values", "meaning")
    }
    fields = dataclasses.fields(SamplingParams)
    assert written == {field.name: str(field.default) for field in fields}


def test_every_step_names_existing_parameters() -> None:
    steps = rows(PAGE, "step", "parameters", "greedy rows too")
    named = [name.strip("` ") for _, parameters, _ in steps for name in parameters.split(",")]
    assert len(named) == len(set(named)) == 15
    assert set(named) <= {field.name for field in dataclasses.fields(SamplingParams)}
