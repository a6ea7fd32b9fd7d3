"""Recorded bodies of clients: the server still accepts them, without the clients installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from inlay import AsyncLLM
from tests.pages import DOCS, rows
from tests.server.clients.site import CLIENTS, RECORDED, model_with_tools
from tests.server.server.conftest import Site, running


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = model_with_tools(tmp_path_factory.mktemp("model"))
    llm = AsyncLLM(str(directory), kv_memory="64MiB", reuse="exact", seed=0)
    with running(llm, served_names=("demo",)) as found:
        yield found
    llm.shutdown()


def recorded(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", [one.name for one in CLIENTS if (RECORDED / f"{one.name}.json").exists()])
def test_recorded_client_request_is_answered(site: Site, name: str) -> None:
    bodies = recorded(name)
    assert any(len(one["body"].get("messages", ())) > 2 for one in bodies), "second turns are what clients differ in"
    for one in bodies:
        field = "max_completion_tokens" if "max_completion_tokens" in one["body"] else "max_tokens"
        status, _, answer = site.call("POST", one["path"], {**one["body"], field: 4})
        assert status == 200, (one["body"], answer)
        anthropic = one["path"] == "/v1/messages"
        if one["body"].get("stream"):
            assert answer.endswith('data: {"type":"message_stop"}\n\n' if anthropic else "data: [DONE]\n\n")
        else:
            assert answer["content" if anthropic else "choices"]


def test_matrix_lists_clients_with_tools_and_a_schema() -> None:
    header = ("client", "chats, streams", "tools, also streamed", "answers of a schema", "tools beside a schema")
    said = {row[0].split()[0]: row[-1] for row in rows(DOCS / "guides" / "run-a-server.md", *header)}
    assert {name: has_both(name) for name in said} == {name: cell == "yes" for name, cell in said.items()}


def has_both(name: str) -> bool:
    bodies = [one["body"] for one in recorded(name)]
    return any(body.get("tools") and {"response_format", "output_config"} & body.keys() for body in bodies)
