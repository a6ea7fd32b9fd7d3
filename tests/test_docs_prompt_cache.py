"""docs/prompt-cache.md: its examples run, its names exist, and the links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import inlay
from inlay import LLM, Prompt, Schema
from tests.conftest import tiny
from tests.pages import DOCS, blocks, rows
from tests.pml.examples import outputs

PAGE = DOCS / "prompt-cache.md"


def test_its_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = list(outputs(PAGE))
    assert [block.text for block, _ in given] == [text for _, text in given]
    assert len(given) == 1
    (code,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    output = names["output"]
    assert output.usage.module_tokens + output.usage.exact_tokens > 0  # type: ignore[attr-defined]
    assert output.usage.shifted_tokens == 0  # type: ignore[attr-defined]


def test_its_python_is_there() -> None:
    ours = " ".join(row[1] for row in rows(PAGE, "theirs", "here"))
    llm = LLM(tiny("llama"))
    for method in set(re.findall(r"\bllm\.(\w+)\(", ours)):
        assert callable(getattr(llm, method)), method
    assert {"generate", "stream", "add_schema", "schema", "remove_schema"} <= set(re.findall(r"\bllm\.(\w+)\(", ours))
    assert {Schema.from_file, Prompt.from_string, inlay.LLM}


def test_its_links() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!http)([^)#]+)(?:#([^)]*))?\)", text):
        file = (DOCS / target).resolve()
        assert file.is_file(), target
        titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, f"{target}#{anchor}"
