"""A server for its own machine alone answers to that machine's names."""

from __future__ import annotations

import pytest

from inlay.server.tenants import LocalHostMiddleware
from tests.server.server.asgi import Echo, send


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST.:80", "127.0.0.1", "127.0.0.1:8000", "127.3.4.5", "[::1]:8000"]
)
def test_local_host_names_are_accepted(host: str):
    assert send(LocalHostMiddleware(Echo()), headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::2]",
        "1",
    ],
)
def test_other_host_names_are_rejected(host: str):
    app = Echo()
    found = send(LocalHostMiddleware(app), headers={"host": host} if host else {})
    assert not app.states
    assert (found.status, found.error["code"]) == (421, "misdirected_request")
    assert found.error["message"].startswith(f"the Host is {host!r}, but a server without keys ")


def test_health_checks_without_a_host_are_accepted():
    for path in ("/health", "/ready"):
        assert send(LocalHostMiddleware(Echo()), method="GET", path=path).status == 200
        assert (
            send(LocalHostMiddleware(Echo()), method="GET", path=path, headers={"host": "evil.example"}).status == 421
        )
    assert send(LocalHostMiddleware(Echo()), method="GET", path="/v1/models").status == 421
