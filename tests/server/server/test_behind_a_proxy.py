"""nginx and Caddy in front of a server, with the configurations of deploy/."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.pages import DOCS
from tests.server.clients.site import self_signed
from tests.server.server.conftest import CHAT, COMPLETIONS, Site

DEPLOY = DOCS.parent / "deploy"
HOST = "llm.example.org"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(params=["nginx", "caddy"])
def proxy(request: pytest.FixtureRequest, site: Site, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Return a function that opens a connection to the proxy."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    certificate = self_signed(tmp_path)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    start = _nginx if request.param == "nginx" else _caddy
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    with start(tmp_path, certificate, port, site.port):
        _wait(port)
        yield lambda: http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)


@contextmanager
def _nginx(folder: Path, certificate: Path, port: int, server: int) -> Iterator[None]:
    text = (DEPLOY / "nginx.conf").read_text()
    for old, new in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/llm.example.org.pem", str(certificate)),
        ("/etc/ssl/llm.example.org.key", str(certificate.with_suffix(".key"))),
        ("127.0.0.1:8000", f"127.0.0.1:{server}"),
    ):
        assert old in text
        text = text.replace(old, new)
    paths = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    http_block = f"http {{ access_log off; {paths}\n{text}\n}}"
    user = "user root; " if folder.owner() == "root" else ""
    main = folder / "main.conf"
    main.write_text(f"{user}daemon off; pid {folder}/pid; error_log {folder}/log; events {{}}\n{http_block}")
    command = ["nginx", "-e", f"{folder}/log", "-c", str(main)]
    assert subprocess.run([*command, "-t"], capture_output=True, check=False).returncode == 0
    with _running(command):
        yield


@contextmanager
def _caddy(folder: Path, certificate: Path, port: int, server: int) -> Iterator[None]:
    text = (DEPLOY / "Caddyfile").read_text()
    own = (
        f"https://localhost:{port}, https://127.0.0.1:{port} {{\n\ttls {certificate} {certificate.with_suffix('.key')}"
    )
    for old, new in ((f"{HOST} {{", own), ("127.0.0.1:8000", f"127.0.0.1:{server}")):
        assert old in text
        text = text.replace(old, new)
    file = folder / "Caddyfile"
    file.write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text)
    with _running(["caddy", "run", "--adapter", "caddyfile", "--config", str(file)], HOME=str(folder)):
        yield


@contextmanager
def _running(command: list[str], **environment: str) -> Iterator[None]:
    with subprocess.Popen(
        command, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environment}, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.terminate()


def _wait(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < until, "the proxy does not listen"
            time.sleep(0.1)


def _posted(connection: Any, path: str, body: Any, **headers: str) -> http.client.HTTPResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {**JSON, "Host": "localhost", **headers})
    response: http.client.HTTPResponse = connection.getresponse()
    return response


def test_a_request_and_its_answer_pass(proxy: Callable[[], Any]) -> None:
    with closing(proxy()) as connection:
        response = _posted(connection, COMPLETIONS, {"prompt": "Hello", "max_tokens": 2})
        assert (response.status, json.loads(response.read())["usage"]["completion_tokens"]) == (200, 2)


def test_events_arrive_while_the_answer_is_written(proxy: Callable[[], Any], site: Site) -> None:
    """The client reads one event and leaves. The server then ends the answer, which would take 1,500 tokens."""
    body = {"prompt": "Hello", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with closing(proxy()) as connection:
        response = _posted(connection, COMPLETIONS, body)
        assert response.readline().startswith(b"data: ")
        assert site.service.llm.stats().running > 0, "the first event arrived with the last one"
    until = time.monotonic() + 20
    while site.service.llm.stats().running:
        assert time.monotonic() < until, "the proxy did not pass on that the client has left"
        time.sleep(0.05)


def test_bodies_up_to_the_servers_bound_pass(proxy: Callable[[], Any]) -> None:
    big = b'{"messages": "' + b"x" * (7 * 2**20) + b'"}'
    with closing(proxy()) as connection:
        assert _posted(connection, CHAT, big).status == 400, "the server reads it, and refuses its form"
    with closing(proxy()) as connection:
        try:
            status = _posted(connection, CHAT, big + b" " * 2**21).status
        except (OSError, http.client.HTTPException):
            status = 413  # the proxy has closed the connection before it had read everything
        assert status in (413, 502)


def test_forwarding_headers_change_nothing(proxy: Callable[[], Any], site: Site) -> None:
    """The server builds no links from them: a path with a slash too many is unknown, or moved to the same scheme."""
    told = {"X-Forwarded-For": "10.0.0.1", "X-Forwarded-Proto": "gopher", "Forwarded": "for=10.0.0.1;proto=gopher"}
    answers = []
    for headers in ({}, told):
        with closing(proxy()) as connection:
            connection.request("GET", "/v1/models/", headers={"Host": "localhost", **headers})
            response = connection.getresponse()
            answers.append((response.status, response.getheader("Location"), response.read()))
    assert answers[0] == answers[1]
