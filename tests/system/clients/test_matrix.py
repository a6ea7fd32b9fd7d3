"""Clients as they are, over several turns, against ``inlay serve`` of the bundled model: chats, streams, tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.clients.site import CLIENTS, Client, model_with_tools, run, self_signed, served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(model_with_tools(tmp_path_factory.mktemp("model"))) as url:
        yield url


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The base URL of a server that speaks TLS, and its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    certificate = self_signed(folder)
    options = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate.with_suffix(".key")))
    with served(model_with_tools(folder / "model"), "demo", *options) as url:
        yield url, certificate


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client(base: str, client: Client) -> None:
    check(client, base)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_over_tls(over_tls: tuple[str, Path], client: Client) -> None:
    check(client, *over_tls)


def check(client: Client, base: str, trusted: Path | None = None) -> None:
    if not client.installed:
        pytest.skip(f"{client.name} is not installed; run make clients, or set INLAY_CLIENTS to where its directory is")
    came = run(client, base, trusted)
    assert {"chat", "tools", "streamed_tools", "structured"} <= came.keys()
    failed = {name: error for name, error in came.items() if error is not None}
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
