"""Servers that run: over sockets, in a thread of this process, with tiny models."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from inlay import AsyncLLM, Schema
from inlay.server.app import build_app
from inlay.server.run import Server, listen, url
from inlay.server.service import Service
from inlay.server.settings import ServerSettings
from tests.conftest import tiny

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = Schema.from_string('<schema name="trip">Plan. <module name="miami">Miami has beaches.</module></schema>')


@dataclass(frozen=True)
class Site:
    """A server that runs."""

    server: Server
    service: Service
    base: str
    port: int

    def open(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=30)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers, and the body: a value where it is JSON, else text. ``X_Y`` is the header X-Y."""
        data = None if body is None else json.dumps(body)
        named = {"Content-Type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
        with closing(self.open()) as connection:
            connection.request(method, path, data, named)
            response = connection.getresponse()
            text = response.read().decode()
            heads = {key.lower(): value for key, value in response.getheaders()}
            return response.status, heads, json.loads(text) if "json" in heads.get("content-type", "") else text

    def post(self, path: str, **body: Any) -> Any:
        """The answer to a request that is right."""
        status, _, answer = self.call("POST", path, body)
        assert status == 200, answer
        return answer

    def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream that ends as it should."""
        status, heads, text = self.call("POST", path, {"stream": True, **body})
        assert (status, heads["content-type"]) == (200, "text/event-stream; charset=utf-8"), text
        *said, last, rest = text.split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in said]

    def refusal(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that is wrong."""
        status, heads, answer = self.call("POST", path, body, **headers)
        assert heads["x-request-id"]
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return status, answer["error"]

    def quiet(self, seconds: float = 5.0) -> bool:
        """Whether the engine comes to rest within this time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stats = self.service.llm.stats()
            if not (stats.running or stats.waiting or stats.held_chunks):
                return True
            time.sleep(0.002)
        return False


class UnixConnection(HTTPConnection):
    """A connection to a Unix domain socket. host: the Host header of its requests."""

    def __init__(self, path: Path, host: str = "localhost") -> None:
        super().__init__(host, timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(str(self._path))


@contextmanager
def running(llm: AsyncLLM, schemas: Sequence[Schema] = (), **settings: Any) -> Iterator[Site]:
    """A server over a model, until the end of the block."""
    made = ServerSettings(**{"port": 0, "served_names": ("tiny", "other"), "drain_s": 5.0, **settings})
    with listen(made.host, made.port, network=False) as listener:
        app = build_app(llm, made, schemas)
        is_ready = threading.Event()
        server = Server(app, is_ready.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            assert is_ready.wait(30)
            yield Site(server, app.state.service, url(listener), listener.getsockname()[1])
        finally:
            if thread.is_alive():
                server.loop.call_soon_threadsafe(server.stop)
            thread.join()


def small_model(**settings: Any) -> AsyncLLM:
    return AsyncLLM(tiny("llama"), **{"kv_memory": "16MiB", "chunk_size": 8, "reuse": "exact", "seed": 1, **settings})


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """A server shared by tests that do not change its state."""
    llm = small_model(max_waiting=64)
    with running(llm, [SCHEMA]) as found:
        yield found
    llm.shutdown()
