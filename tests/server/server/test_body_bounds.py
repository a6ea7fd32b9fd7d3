"""Invalid bodies whose checks or messages could grow large: each is a short 400, and none a 500."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from inlay import Schema
from inlay.models.location import public_name
from inlay.server.body import MAX_FIELDS, MAX_VALUES
from tests.server.server.conftest import CHAT, COMPLETIONS, Site, running, small_model

LONG = "x" * 4_000
TURN = {"role": "user", "content": "a"}
MANY = {f"p{i}": {} for i in range(5_000)}


def rejection(site: Site, path: str, body: Any, method: str = "POST") -> tuple[int, str]:
    """Status and sentence of a refusal, all of which is short."""
    status, _, answer = site.call(method, path, body)
    assert len(json.dumps(answer)) < 10_000
    error = answer["error"]
    assert len(error["param"] or "") <= 101
    assert "\n" not in error["message"]
    return status, error["message"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("mib", [9, 30])
def test_client_gets_the_rejection_of_a_large_body(site: Site, mib: int, chunked: bool):
    body = b"x" * mib * 2**20
    with closing(site.open()) as connection:
        connection.request("POST", CHAT, iter([body]) if chunked else body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert (response.status, json.load(response)["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "structure",
    [
        {"json": "[[[["},
        {"json": "[" * 100_000},
        {"json": {"type": LONG}},
        {"json": {"type": "object", "properties": MANY}},
        {"json": {"type": "object", "patternProperties": {f"^{i}": {} for i in range(200)}}},
        {"json": {"enum": [f"value {i}" for i in range(30_000)]}},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"json": {"$ref": "#"}},
        {"regex": "[[[["},
        {"regex": "(" * 60_000},
        {"regex": "a" * 200_000},
        {"regex": "(a{1000}){1000}"},
        {"choice": [f"item {i}" for i in range(30_000)]},
        {"choice": [1] * 3_000},
        {LONG: 1},
    ],
    ids=lambda structure: str(structure)[:40],
)
def test_impossible_grammars_are_rejected(site: Site, structure: dict[str, Any]):
    status, sentence = rejection(site, COMPLETIONS, {"prompt": "a", "max_tokens": 8, "structured_outputs": structure})
    assert (status, "structured_outputs" in sentence) == (400, True), sentence


def test_choice_of_thousands_of_texts_is_answered(site: Site):
    choices = [f"{i} is a number" for i in range(1_000, 4_000)]
    answer = site.post(COMPLETIONS, prompt="a", max_tokens=64, structured_outputs={"choice": choices})
    assert answer["choices"][0]["text"] in choices


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "model": LONG}),
        (COMPLETIONS, {"prompt": "a", "reuse": LONG}),
        (COMPLETIONS, {"prompt": "a", "positions": LONG}),
        (COMPLETIONS, {"prompt": "a", LONG: 1}),
        (COMPLETIONS, {"prompt": {"schema": LONG}}),
        (COMPLETIONS, {"prompt": {"schema": "trip", "imports": [LONG]}}),
        (COMPLETIONS, {"pml": f'<prompt schema="trip"><{LONG[:250]}/></prompt>'}),
        (COMPLETIONS, {"prompt": [10**4_000]}),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**4_000]}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {LONG: 1}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1_000 for i in range(9_000)}}),
        (CHAT, {"messages": [{**TURN, LONG: 1}]}),
        (CHAT, {"messages": [{**TURN, "role": LONG}]}),
        (CHAT, {"messages": [{**TURN, "role": "tool", "tool_call_id": LONG[:256]}]}),
        (CHAT, {"messages": [TURN], "tools": [{"type": "function", "function": {"name": LONG}}]}),
        ("/tokenize", {"prompt": "a", LONG: 1}),
        ("/detokenize", {"tokens": [LONG]}),
        ("/v1/schemas", {LONG: 1}),
        ("/v1/schemas", {f"field {i}": 1 for i in range(9_000)}),
        ("/v1/schemas", {"pml": '<schema name="s"></schema>', "positions": LONG}),
        ("/v1/schemas", {"pml": '<schema name="s"><module name="m" src="/etc/passwd"/></schema>'}),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:40],
)
def test_client_text_in_errors_is_truncated(site: Site, path: str, body: Any):
    status, sentence = rejection(site, path, body)
    assert status in (400, 404)
    assert "x" * 250 not in sentence
    assert "1" * 300 not in sentence
    assert "0" * 300 not in sentence


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/schemas/", "/"])
def test_long_path_in_an_error_is_truncated(site: Site, path: str):
    status, sentence = rejection(site, path + LONG, None, "GET")
    assert (status, "x" * 101 in sentence) == (404, False)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"prompt": ["", *[1] * (MAX_VALUES + 1)]}, f"{MAX_VALUES:,} values"),
        ({"metadata": {str(i): 1 for i in range(MAX_FIELDS + 1)}}, f"{MAX_FIELDS:,} fields"),
    ],
)
def test_bodies_with_too_many_values_are_rejected(site: Site, data: Any, what: str):
    assert rejection(site, COMPLETIONS, data) == (400, f"the body holds more than {what}; send several requests")


def test_no_path_of_the_server_is_shown(tmp_path_factory: pytest.TempPathFactory):
    """A model from a directory is listed by its last name, and a schema from a file without its path."""
    folder = tmp_path_factory.mktemp("secret-place")
    file = folder / "trip.xml"
    file.write_text('<schema name="trip"><module name="miami">Miami has beaches.</module></schema>')
    model = folder / "small"
    model.mkdir()
    assert public_name(str(model)) == "small"
    assert public_name("demo") == "demo"
    assert public_name(str(file)) == file.name
    llm = small_model()
    with running(llm, [Schema.from_file(file)], served_names=(public_name(str(model)),)) as site:
        answers = [
            site.call("GET", "/v1/models")[2],
            site.call("GET", "/v1/schemas/trip?source=true")[2],
            site.call("POST", COMPLETIONS, {"prompt": "a", "model": "other"})[2],
            site.call("POST", COMPLETIONS, {"prompt": {"schema": "trip", "imports": ["rome"]}})[2],
        ]
    llm.shutdown()
    assert "secret-place" not in json.dumps(answers)
