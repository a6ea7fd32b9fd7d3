"""Requests made up from the server's own document, right and wrong ones: never a fault of the server's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from tests.server.server.conftest import CHAT, COMPLETIONS, SCHEMA, Site, running, small_model

load_all_checks()
WANTED = CHECKS.get_by_names(
    ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)
UNHURRIED = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
)
OPERATIONS = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /v1/schemas",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "GET /v1/responses/{name}",
    "DELETE /v1/responses/{name}",
    "POST /v1/responses/{name}/cancel",
    "GET /v1/responses/{name}/input_items",
    "GET /v1/schemas",
    "GET /v1/schemas/{name}",
    "PUT /v1/schemas/{name}",
    "DELETE /v1/schemas/{name}",
    "POST /v1/schemas/{name}/warm",
    "PUT /v1/schemas/{name}/pin",
    "DELETE /v1/schemas/{name}/pin",
    "DELETE /v1/schemas/{name}/stored",
    "GET /v1/schemas/{name}/versions/{version}",
    "GET /v1/schemas/{name}/advice",
    "GET /v1/requests",
    "GET /v1/cache",
    "POST /v1/cache/score",
    "GET /v1/cache/segments",
    "DELETE /v1/cache/segments",
    "GET /v1/cache/segments/{key}",
    "DELETE /v1/cache/segments/{key}",
    "PUT /v1/cache/segments/{key}/pin",
    "DELETE /v1/cache/segments/{key}/pin",
    "GET /v1/cache/segments/{key}/file",
    "POST /v1/cache/verify",
    "POST /v1/cache/files",
    "GET /v1/divergence",
    "DELETE /v1/divergence",
    "GET /v1/drift",
    "DELETE /v1/drift",
    "GET /health",
    "GET /ready",
    "GET /version",
)


@pytest.fixture(scope="module")
def made_up_site() -> Iterator[Site]:
    """A server whose answers end soon: requests may ask for any number of tokens."""
    llm = small_model(max_waiting=64)
    with running(llm, [SCHEMA], default_max_tokens=3) as site:
        yield site
    llm.shutdown()


@pytest.fixture(scope="module")
def operations(made_up_site: Site) -> dict[str, Any]:
    document = schemathesis.openapi.from_url(f"http://127.0.0.1:{made_up_site.port}/openapi.json")
    found = [result.ok() for result in document.get_all_operations()]
    return {f"{one.method.upper()} {one.path}": one for one in found}


def try_out(operation: Any, examples: int) -> None:
    """Requests that conform to the document and, where possible, requests that violate it."""
    modes = [GenerationMode.POSITIVE]
    if len(operation.body) or len(operation.query):
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:

        @settings(UNHURRIED, max_examples=examples)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            case.call_and_validate(checks=WANTED, timeout=60)

        check()


def test_the_document_has_every_route(operations: dict[str, Any]):
    assert set(operations) == set(OPERATIONS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_made_up_requests(operations: dict[str, Any], name: str):
    try_out(operations[name], 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_made_up_requests(operations: dict[str, Any], name: str):
    try_out(operations[name], 150)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


PATHS = [
    CHAT,
    COMPLETIONS,
    "/tokenize",
    "/detokenize",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
]


@pytest.mark.parametrize("path", PATHS)
@settings(UNHURRIED, max_examples=20)
@given(data=st.data())
def test_any_json_is_answered_without_a_server_error(made_up_site: Site, path: str, data: st.DataObject):
    fields = [
        "messages",
        "prompt",
        "pml",
        "stop",
        "tools",
        "seed",
        "n",
        "stream",
        "tokens",
        "response_format",
        "input",
        "system",
        "max_tokens",
    ]
    body = data.draw(JSON | st.dictionaries(st.sampled_from(fields), JSON, max_size=3))
    status, _, answer = made_up_site.call("POST", path, body)
    assert status == 200 or (status < 500 and answer["error"]["message"])
