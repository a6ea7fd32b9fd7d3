"""The whole server over HTTP, on a tiny model, with tenants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from inlay import AsyncLLM
from inlay.server.app import build_app
from inlay.server.limits import Limits
from inlay.server.settings import ServerSettings
from inlay.server.tenants import editing
from tests.conftest import tiny

JSON = {"Content-Type": "application/json"}
CHAT, COMPLETIONS, SCHEMAS = "/v1/chat/completions", "/v1/completions", "/v1/schemas"
PAGE = "https://page.example"
LIMITS = {
    "few": Limits(requests_per_minute=2, tokens_per_minute=1000),
    "one": Limits(max_concurrent=1),
    "plain": Limits(max_tokens=4, max_reuse="exact"),
}

Answer = tuple[int, dict[str, str], Any]  # status, headers, and the value where it is JSON, else the bytes


@dataclass
class Site:
    """A server that runs, and the keys of its tenants by name."""

    port: int
    keys: dict[str, str]
    app: FastAPI

    def headers(self, key: str | None) -> dict[str, str]:
        return {} if key is None else {"Authorization": f"Bearer {self.keys.get(key, key)}"}

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = "ann",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """An answer. body: a value for JSON, or bytes as they are. key: a tenant's, or any other text."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, data, {**JSON, **self.headers(key), **(headers or {})})
            return read(connection.getresponse())

    def cached(self, prompt: Any, *, key: str | None = "ann", **fields: Any) -> int:
        """How many tokens of a completion's prompt had been computed before."""
        body = {"prompt": prompt, "max_tokens": 1, **fields}
        status, _, answer = self.call("POST", COMPLETIONS, body, key=key)
        assert status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def read(response: HTTPResponse) -> Answer:
    text = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, json.loads(text) if text and "json" in headers.get("content-type", "") else text


def with_keys(folder: Path, **engine: Any) -> Iterator[Site]:
    """A server whose tenants are ann, bob, root (an admin) and those of LIMITS. engine: settings of its model."""
    path = folder / "keys.json"
    with editing(path) as file:
        keys = {name: file.add(name, admin=name == "root")[0] for name in ("ann", "bob", "root", *LIMITS)}
        for name, limits in LIMITS.items():
            file.tenants[name].limits = limits
    yield from serving(keys, engine, keys_file=path)


def serving(keys: dict[str, str], engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Site]:
    llm = AsyncLLM(tiny("llama"), kv_memory="16MiB", chunk_size=8, **(engine or {}))
    with serving_app(build_app(llm, ServerSettings(**settings)), keys) as site:
        yield site
    llm.shutdown()


@contextmanager
def serving_app(app: FastAPI, keys: dict[str, str]) -> Iterator[Site]:
    """A server that runs as long as the block."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, http="h11", log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Site(server.servers[0].sockets[0].getsockname()[1], keys, app)
    finally:
        server.should_exit = True
        thread.join()


def refused(answer: Answer, status: int, code: str) -> str:
    """The sentence of a refusal in OpenAI's form."""
    found, headers, body = answer
    assert found == status, body
    error = body["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["code"] == code, error
    assert len(error["message"]) > 20
    assert "\n" not in error["message"]
    assert headers["x-request-id"]
    return error["message"]
