"""How a server is reached: keys of its operator, TLS, Unix domain sockets, a root path in front of all."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import importlib.util
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from inlay import AsyncLLM, ParameterError
from inlay.server.app import build_app
from inlay.server.run import Server, listen, listen_unix, tls_context, url
from inlay.server.settings import ServerSettings
from inlay.server.tenants import editing
from tests.server.clients.site import self_signed
from tests.server.server.conftest import COMPLETIONS, SCHEMA, UnixConnection, running, small_model

ASKED = {"prompt": "Hello", "max_tokens": 2}
KEY, OTHER = "sk-first", "sk-second"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = small_model()
    yield made
    made.shutdown()


@contextmanager
def serving(
    llm: AsyncLLM, listener: socket.socket, tls: ssl.SSLContext | None = None, **settings: Any
) -> Iterator[None]:
    """A server that listens on this socket."""
    ready = threading.Event()
    server = Server(build_app(llm, ServerSettings(served_names=("tiny",), **settings)), ready.set, tls)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert ready.wait(30)
        yield
    finally:
        server.loop.call_soon_threadsafe(server.stop)
        thread.join()


def asked(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    with closing(connection):
        connection.request("POST", COMPLETIONS, json.dumps(ASKED), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


# Keys


def test_keys_of_the_operator_open_everything(llm):
    with running(llm, [SCHEMA], api_keys=(KEY, OTHER)) as site:
        for wrong in ({}, {"Authorization": "Bearer sk-first "[:-2]}, {"Authorization": f"Bearer {KEY}x"}):
            assert site.call("POST", COMPLETIONS, ASKED, **wrong)[0] == 401
        for key in (KEY, OTHER):
            assert site.call("POST", COMPLETIONS, ASKED, Authorization=f"Bearer {key}")[0] == 200
        assert site.call("GET", "/metrics", Authorization=f"Bearer {KEY}")[0] == 200
        assert site.call("GET", "/health")[0] == 200
        assert site.call("GET", "/health", Host="model.example")[0] == 200, "who has a key may come from anywhere"


def test_operator_keys_and_file_keys_both_work(llm, tmp_path):
    path = tmp_path / "keys.json"
    with editing(path) as keys:
        of_file, _ = keys.add("ann")
    with running(llm, api_keys=(KEY,), keys_file=path) as site:
        for key, metrics in ((KEY, 200), (of_file, 403)):
            named = {"Authorization": f"Bearer {key}"}
            assert site.call("POST", COMPLETIONS, ASKED, **named)[0] == 200
            assert site.call("GET", "/metrics", **named)[0] == metrics
        assert site.service.tenants.names == {"public", "ann"}
        assert site.call("POST", COMPLETIONS, ASKED, Authorization="Bearer no")[0] == 401


@pytest.mark.parametrize("key", ["", "two words", "schl\u00fcssel", "line\n"])
def test_unusable_keys_are_rejected(key):
    with pytest.raises(ParameterError, match=r"^an API key is empty, or has a space") as caught:
        ServerSettings(api_keys=(key,))
    assert not key or key.strip() not in str(caught.value)
    assert KEY not in repr(ServerSettings(api_keys=(KEY,)))


# A root path


def test_root_path_is_optional_in_requests(llm):
    with running(llm, [SCHEMA], root_path="/some/llm") as site:
        for root in ("", "/some/llm"):
            assert site.call("POST", root + COMPLETIONS, ASKED)[0] == 200
            assert site.call("GET", f"{root}/health")[0] == 200
            assert site.call("GET", f"{root}/openapi.json")[2]["servers"] == [{"url": "/some/llm"}]
            assert site.call("GET", f"{root}/v1/schemas/none")[0] == 404
            made = {"pml": '<schema name="made">x</schema>', "encode": False}
            status, heads, _ = site.call("POST", f"{root}/v1/schemas", made)
            assert (status, heads["location"]) == (201, "/some/llm/v1/schemas/made")
            assert site.call("DELETE", heads["location"])[0] == 200
        for path in ("/some/llmv1/models", "/some/v1/models", "/some/llm", "/some/llm/some/llm/health"):
            assert site.call("GET", path)[0] == 404


def test_root_path_bypasses_no_key(llm):
    with running(llm, api_keys=(KEY,), root_path="/health") as site:
        assert site.call("GET", "/health/v1/models")[0] == 401
        assert site.call("GET", "/health/metrics")[0] == 401
        assert site.call("GET", "/health/health")[0] == 200


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "//llm", "/a b", "https://x/llm"])
def test_invalid_root_path_is_rejected(path):
    with pytest.raises(ParameterError, match=r"^root_path is .*; write it like '/llm', without a slash at the end"):
        ServerSettings(root_path=path)


# Unix domain sockets


def test_a_unix_domain_socket(llm, tmp_path):
    path = tmp_path / "inlay.sock"
    with listen_unix(path) as listener, serving(llm, listener, uds=path):
        assert url(listener) == f"unix:{path}"
        status, answer = asked(UnixConnection(path))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
        assert asked(UnixConnection(path, "model.example"))[0] == 200, "no web page can reach it, whatever its name"
        with (
            pytest.raises(ParameterError, match="a server listens there already; give another path"),
            listen_unix(path),
        ):
            pass
    assert not path.exists()


def test_stale_socket_is_replaced(tmp_path):
    path = tmp_path / "inlay.sock"
    with closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(str(path))
    assert path.is_socket()
    with listen_unix(path):
        assert path.is_socket()


def test_unusable_socket_paths_are_rejected(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path, reason in (
        (tmp_path / "file", "there is a file of that name; give another path"),
        (tmp_path / "none" / "inlay.sock", "cannot be listened on: No such file or directory; check the path"),
        (tmp_path / ("x" * 120), "cannot be listened on: AF_UNIX path too long; check the path"),
    ):
        with pytest.raises(ParameterError, match=reason), listen_unix(path):
            pass
    assert (tmp_path / "file").read_text() == "mine"


# TLS


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates that sign themselves, and their keys."""
    folder = tmp_path_factory.mktemp("pem")
    for name, password in (("server", ()), ("client", ()), ("locked", ("-passout", "pass:secret"))):
        self_signed(folder, name, *password)
    return folder


def connection(port: int, trusted: Path, client: Path | None = None) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=trusted)
    if client is not None:
        context.load_cert_chain(client, client.with_suffix(".key"))
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)


def test_tls(llm, pem):
    tls = tls_context(pem / "server.pem", pem / "server.key")
    with listen("127.0.0.1", 0, network=False) as listener, serving(llm, listener, tls):
        port = listener.getsockname()[1]
        assert url(listener, tls=True) == f"https://127.0.0.1:{port}/v1"
        status, answer = asked(connection(port, pem / "server.pem"))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
        with pytest.raises(ssl.SSLCertVerificationError):
            asked(connection(port, pem / "client.pem"))
        with pytest.raises((http.client.HTTPException, OSError)):
            asked(http.client.HTTPConnection("127.0.0.1", port, timeout=30))


@pytest.mark.parametrize(("required", "status"), [(1, 200), (2, None)])
def test_certificates_of_clients(llm, pem, required, status):
    tls = tls_context(pem / "server.pem", pem / "server.key", pem / "client.pem", required)
    with listen("127.0.0.1", 0, network=False) as listener, serving(llm, listener, tls):
        port = listener.getsockname()[1]
        assert asked(connection(port, pem / "server.pem", pem / "client.pem"))[0] == 200
        if status is None:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                asked(connection(port, pem / "server.pem"))
        else:
            assert asked(connection(port, pem / "server.pem"))[0] == status


def test_invalid_tls_files_are_rejected(pem, tmp_path):
    server, key = pem / "server.pem", pem / "server.key"
    (tmp_path / "text").write_text("text")
    for given, sentence in (
        ((None, key), "TLS needs a certificate; give --ssl-certfile"),
        ((None, None, server), "TLS needs a certificate; give --ssl-certfile"),
        ((server, tmp_path / "none"), "--ssl-certfile and --ssl-keyfile: cannot be used (no such file: "),
        ((server, pem / "client.key"), "--ssl-certfile and --ssl-keyfile: cannot be used (KEY_VALUES_MISMATCH"),
        ((tmp_path / "text", key), "--ssl-certfile and --ssl-keyfile: cannot be used ("),
        ((pem / "locked.pem", pem / "locked.key"), "--ssl-keyfile: the key is encrypted; give one without a password"),
        ((server, key, tmp_path / "text"), "--ssl-ca-certs: cannot be used ("),
        ((server, key, None, 2), "--ssl-cert-reqs is 2, which needs certificate authorities; give --ssl-ca"),
        ((server, key, None, 3), "--ssl-cert-reqs is 3; use 0 (none), 1 (optional) or 2 (required)"),
    ):
        with pytest.raises(ParameterError) as caught:
            tls_context(*given)
        assert str(caught.value).startswith(sentence)
    assert tls_context(None, None) is None


# OpenAI's client, over either

_HTTP = importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")  # whose client it is
_SAID: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 4,
    "temperature": 0,
}


def talk(client: openai.OpenAI) -> None:
    """Two turns, the second streamed; and a mistake."""
    with client:
        first = client.chat.completions.create(**_SAID).choices[0].message
        messages = [*_SAID["messages"], first, {"role": "user", "content": "And?"}]
        chunks = list(client.chat.completions.create(**{**_SAID, "messages": messages}, stream=True))
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(**{**_SAID, "max_tokens": -1})


async def talk_at_once(client: openai.AsyncOpenAI) -> None:
    async with client:
        answers = await asyncio.gather(*(client.chat.completions.create(**_SAID) for _ in range(4)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_openais_client_over_tls(llm, pem):
    trusted = ssl.create_default_context(cafile=pem / "server.pem")
    tls = tls_context(pem / "server.pem", pem / "server.key")
    with listen("127.0.0.1", 0, network=False) as listener, serving(llm, listener, tls):
        how: dict[str, Any] = {"base_url": url(listener, tls=True), "api_key": "none", "max_retries": 0}
        talk(openai.OpenAI(**how, http_client=openai.DefaultHttpxClient(verify=trusted)))
        asyncio.run(talk_at_once(openai.AsyncOpenAI(**how, http_client=openai.DefaultAsyncHttpxClient(verify=trusted))))
        with pytest.raises(openai.APIConnectionError), openai.OpenAI(**how) as stranger:
            stranger.models.list()


def test_openais_client_over_a_unix_domain_socket(llm, tmp_path):
    path = tmp_path / "inlay.sock"
    how: dict[str, Any] = {"base_url": "http://localhost/v1", "api_key": "none", "max_retries": 0}
    with listen_unix(path) as listener, serving(llm, listener, uds=path):
        transport = _HTTP.HTTPTransport(uds=str(path))
        talk(openai.OpenAI(**how, http_client=openai.DefaultHttpxClient(transport=transport)))
        also = _HTTP.AsyncHTTPTransport(uds=str(path))
        asyncio.run(talk_at_once(openai.AsyncOpenAI(**how, http_client=openai.DefaultAsyncHttpxClient(transport=also))))
