"""docs/guides/writing-schemas.md: its examples run, and the methods that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inlay import LLM
from tests.conftest import tiny
from tests.pages import DOCS, blocks, rows
from tests.unit.pml.examples import outputs

PAGE = DOCS / "guides/writing-schemas.md"
FORMS, THEIRS = [block for block in blocks(PAGE) if block.language == "python"]


def test_equal_forms_give_equal_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS.parent)
    exec(compile(FORMS.text, str(FORMS), "exec"), {})


def test_prompt_cache_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = Path("section.md")
    section.write_text(PAGE.read_text(encoding="utf-8").partition("## Coming from Prompt Cache")[2], encoding="utf-8")
    given = list(outputs(section))
    assert [block.text for block, _ in given] == [text for _, text in given]
    assert len(given) == 1
    names: dict[str, object] = {}
    exec(compile(THEIRS.text, str(THEIRS), "exec"), names)
    output = names["output"]
    assert output.usage.module_tokens + output.usage.exact_tokens > 0  # type: ignore[attr-defined]
    assert output.usage.shifted_tokens == 0  # type: ignore[attr-defined]


def test_named_methods_exist() -> None:
    ours = " ".join(row[1] for row in rows(PAGE, "theirs", "here"))
    llm = LLM(tiny("llama"))
    named = set(re.findall(r"\bllm\.(\w+)\(", ours))
    assert len(named) >= 5
    for method in named:
        assert callable(getattr(llm, method)), method
