"""The published JSON Schema describes the reader's input; for any input, the only exception is PMLError."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import inlay.pml
from inlay.errors import PMLError
from inlay.pml import Prompt, Schema
from inlay.pml.json_form import json_schema
from tests.generated import examples
from tests.unit.pml.json_documents import PROBLEMS, SHORT, SURF, TRIP, inside
from tests.unit.pml.node_strategies import bare

VALIDATOR = jsonschema.Draft202012Validator(json_schema())
PUBLISHED = Path(inlay.pml.__file__).parent / "pml.schema.json"


def test_the_published_json_schema_is_up_to_date() -> None:
    VALIDATOR.check_schema(json_schema())
    assert json.loads(PUBLISHED.read_text(encoding="utf-8")) == json_schema()


@pytest.mark.parametrize("document", [TRIP, SURF, SHORT, inside("a"), {"name": "s", "content": None}, {"schema": "s"}])
def test_json_schema_accepts_valid_documents(document: dict[str, Any]) -> None:
    VALIDATOR.validate(document)


RULES = {
    "rules of turns",
    "rules of src",
    "a blank name",
    "names",
    "a module twice",
    "a parameter twice",
    "beside turns",
    "src",
    "a prompt",
    "a schema",
}
STRUCTURAL = {name: document for name, (document, _) in PROBLEMS.items() if name not in RULES}


@pytest.mark.parametrize("document", STRUCTURAL.values(), ids=STRUCTURAL.keys())
def test_json_schema_rejects_wrong_structure(document: Any) -> None:
    assert not VALIDATOR.is_valid(document)


# mutations

VALUES = st.sampled_from(
    [None, True, 0, 1, -1, 5.0, 1e300, "", " ", "a", "user", "m\0", [], ["a"], [[]], {}, {"module": "x"},
     {"role": "user"}, {"import": "a"}, {"param": "p", "len": 1}, {"union": []}, {"name": "s"}, {"schema": "s"}]
)  # fmt: skip
KEYS = st.sampled_from(
    ["name", "schema", "content", "scaffolds", "module", "src", "param", "len", "default", "union", "role", "import",
     "arguments", "imports", "text", "contents", "x", ""]
)  # fmt: skip


def containers(value: Any) -> Iterator[dict[str, Any] | list[Any]]:
    if isinstance(value, dict | list):
        yield value
        for member in value.values() if isinstance(value, dict) else value:
            yield from containers(member)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A valid document with members put in, replaced and taken out."""
    document = copy.deepcopy(draw(st.sampled_from([TRIP, SURF, SHORT])))
    for _ in range(draw(st.integers(1, 3))):
        spots = list(containers(document))
        spot = spots[draw(st.integers(0, len(spots) - 1))]
        value = copy.deepcopy(draw(VALUES))
        if isinstance(spot, dict):
            key = draw(KEYS | st.sampled_from(sorted(spot))) if spot else draw(KEYS)
        else:
            key = draw(st.integers(0, len(spot)))
            spot.insert(key, value)
        if draw(st.booleans()):
            spot[key] = value
        elif isinstance(spot, list) or key in spot:
            del spot[key]
    return document


@settings(max_examples=examples(300), deadline=None)
@given(mutated())
def test_mutated_documents(document: Any) -> None:
    """Only PMLError is raised, and the JSON Schema accepts every document that the reader accepts."""
    for kind in (Schema, Prompt):
        try:
            read = kind.from_json(json.dumps(document), source="x.json")
        except PMLError as error:
            for problem in error.problems:
                assert problem.place.source == "x.json"
                assert "\n" not in problem.message
                assert len(problem.message) < 500
        else:
            VALIDATOR.validate(document)
            assert bare(kind.from_json(read.to_json())) == bare(read)


@settings(max_examples=examples(200), deadline=None)
@given(st.text(), st.integers(0, 300), st.integers(0, 20))
def test_mutated_text(piece: str, start: int, length: int) -> None:
    text = json.dumps(TRIP)
    text = text[:start] + piece + text[start + length :]
    for document in (text, text.encode("utf-8", "surrogatepass"), text.encode("utf-16", "surrogatepass")):
        for kind in (Schema, Prompt):
            with suppress(PMLError):
                kind.from_json(document, source="x.json")
