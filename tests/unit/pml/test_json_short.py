"""Prompts in the short form: the same nodes as in the long one, and located problems."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.pml import Prompt
from inlay.pml import nodes as limits
from inlay.pml.json_form import json_schema
from tests.generated import examples
from tests.unit.pml.helpers import faults
from tests.unit.pml.json_documents import SHORT
from tests.unit.pml.node_strategies import bare

VALIDATOR = jsonschema.Draft202012Validator(json_schema())
PAGE = (Path(__file__).parents[3] / "docs/reference/pml-json.md").read_text(encoding="utf-8")


def long_form(document: dict[str, Any]) -> dict[str, Any]:
    """The same prompt with content."""

    def imported(one: Any) -> dict[str, Any]:
        if isinstance(one, str):
            return {"import": one}
        return {
            "import": one["name"],
            "arguments": one.get("arguments"),
            "content": [imported(inner) for inner in one.get("imports") or ()],
        }

    text = document.get("text")
    content = [*map(imported, document.get("imports") or ()), *([] if text is None else [text])]
    return {"schema": document["schema"], "content": content}


names = st.sampled_from(["plan", "miami", "unit.py", "é"])
imports = st.recursive(
    names | st.fixed_dictionaries({"name": names}),
    lambda inner: st.fixed_dictionaries(
        {"name": names},
        optional={
            "arguments": st.none() | st.dictionaries(names, st.text(max_size=5), max_size=2),
            "imports": st.none() | st.lists(inner, max_size=3),
        },
    ),
    max_leaves=6,
)
prompts = st.fixed_dictionaries(
    {"schema": st.sampled_from(["trip", "a b"])},
    optional={"imports": st.none() | st.lists(imports, max_size=3), "text": st.none() | st.text(max_size=5)},
)


@settings(max_examples=examples(100), deadline=None)
@given(prompts)
def test_short_form_equals_the_long_form(document: dict[str, Any]) -> None:
    VALIDATOR.validate(document)
    prompt = Prompt.from_json(document)
    assert bare(prompt) == bare(Prompt.from_json(long_form(document)))
    assert bare(Prompt.from_json(prompt.to_json())) == bare(prompt)


def test_the_page() -> None:
    short, long = (
        re.search(rf"^```json {kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) for kind in ("short", "prompt")
    )
    assert short is not None
    assert long is not None
    assert bare(Prompt.from_json(short[1])) == bare(Prompt.from_json(long[1]))


def test_locations_are_json_paths() -> None:
    prompt = Prompt.from_json(SHORT, source="p.json")
    budget, plan, text = prompt.children
    assert str(budget.place) == 'p.json: imports[0].import "budget"'
    assert str(plan.place) == 'p.json: imports[1].import "plan"'
    assert str(plan.children[0].place) == 'p.json: imports[1].import "plan".imports[0].import "miami"'  # type: ignore[union-attr]
    assert str(text.place) == "p.json: text"


PROBLEMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "both forms": (
        {"content": "a", "imports": ["m"]},
        ["pml.conflicting_keys"],
    ),
    "both forms, one of them empty": (
        {"content": [], "text": ""},
        ["pml.conflicting_keys"],
    ),
    "no list": ({"imports": "m"}, ["pml.wrong_type imports"]),
    "no text": ({"text": ["a"]}, ["pml.wrong_type text"]),
    "members of other types": (
        {"imports": [3, None, []]},
        [
            "pml.wrong_type imports[0]",
            "pml.wrong_type imports[1]",
            "pml.wrong_type imports[2]",
        ],
    ),
    "names": (
        {"imports": ["a b", {"name": "user"}, {"name": 5}]},
        [
            "pml.invalid_name imports[0]",
            'pml.invalid_name imports[1].import "user".name',
            "pml.wrong_type imports[2].name",
        ],
    ),
    "keys": (
        {"imports": [{"nam": "a"}, {"name": "a", "content": "b"}, {}]},
        [
            "pml.unknown_key imports[0]",
            'pml.unknown_key imports[1].import "a"',
            "pml.missing_key imports[2]",
        ],
    ),
    "arguments": (
        {"imports": [{"name": "a", "arguments": {"x": 1}}]},
        ['pml.wrong_type imports[0].import "a".arguments "x"'],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("document", "expected"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_problems(document: dict[str, Any], expected: list[str]) -> None:
    written = json.dumps({"schema": "s", **document})
    assert faults(lambda: Prompt.from_json(written, source="p.json")) == expected


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = "m"
    for _ in range(31):
        deep = {"name": "m", "imports": [deep]}
    Prompt.from_json({"schema": "s", "imports": [deep]})
    (problem,) = faults(lambda: Prompt.from_json({"schema": "s", "imports": [{"name": "m", "imports": [deep]}]}))
    assert problem.startswith("pml.too_deep imports[0]")
    monkeypatch.setattr(limits, "MAX_ELEMENTS", 9)
    Prompt.from_json({"schema": "s", "imports": ["m"] * 8})
    assert faults(lambda: Prompt.from_json({"schema": "s", "imports": ["m"] * 9})) == ["pml.too_large imports[8]"]
