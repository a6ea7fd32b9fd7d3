"""Clients as they are, over several turns, against ``inlay serve`` of the bundled model: chats, streams, tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.site import CLIENTS, Client, model_with_tools, run, served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(model_with_tools(tmp_path_factory.mktemp("model"))) as url:
        yield url


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client(base: str, client: Client) -> None:
    if not client.installed:
        pytest.skip(f"{client.name} is not installed; run make clients, or set INLAY_CLIENTS to where its directory is")
    came = run(client, base)
    assert {"chat", "tools", "streamed_tools", "structured"} <= came.keys()
    failed = {name: error for name, error in came.items() if error is not None}
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
