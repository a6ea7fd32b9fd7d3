"""The cost of one tenant's requests for others: answers, tokens, log-probabilities, queue slots, and silence."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from inlay import CapacityError
from inlay.api.openai import OpenAI
from inlay.server import completions, threads
from inlay.server.errors import json_bytes
from inlay.server.limits import Limits
from inlay.server.tenants import editing
from inlay.server.threads import json_pieces, json_response
from inlay.types import RequestOutput
from tests.server.server.conftest import CHAT, COMPLETIONS, SCHEMA, Site, running, small_model
from tests.server.server.test_completions import ENDLESS, asking, until

LIMITS = {
    "bob": Limits(),
    "mallory": Limits(),
    "tokens": Limits(tokens_per_minute=500),
    "slow": Limits(tokens_per_minute=64),
    "four": Limits(max_concurrent=4),
    "few": Limits(requests_per_minute=3),
}


class Keyed:
    """A server with keys, asked by the name of a tenant."""

    def __init__(self, site: Site, keys: dict[str, str]) -> None:
        self.site = site
        self.llm = site.service.llm
        self._keys = keys

    def headers(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._keys[tenant]}"}

    def post(self, tenant: str, path: str = COMPLETIONS, **body: Any) -> tuple[int, dict[str, str], Any]:
        return self.site.call("POST", path, body, **self.headers(tenant))

    def get(self, tenant: str, path: str) -> tuple[int, dict[str, str], Any]:
        return self.site.call("GET", path, **self.headers(tenant))


@contextmanager
def keyed(folder: Path, **settings: Any) -> Iterator[Keyed]:
    path = folder / "keys.json"
    with editing(path) as file:
        keys = {name: file.add(name)[0] for name in LIMITS}
        for name, limits in LIMITS.items():
            file.tenants[name].limits = limits
    llm = small_model(max_num_seqs=4, max_waiting=8, **settings)
    with running(llm, [SCHEMA], keys_file=path) as site:
        yield Keyed(site, keys)
    llm.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed(tmp_path_factory.mktemp("keys")) as found:
        yield found


def code(answer: tuple[int, dict[str, str], Any]) -> tuple[int, str]:
    return answer[0], answer[2]["error"]["code"]


def test_concurrent_requests_stay_within_the_minute_plus_one_request(server: Keyed):
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: server.post("tokens", **body), range(16)))
    answered = [answer for status, _, answer in found if status == 200]
    assert {status for status, _, _ in found} == {200, 429}
    assert sum(answer["usage"]["total_tokens"] for answer in answered) <= 500 + 401
    refused = next(answer for answer in found if answer[0] == 429)
    assert code(refused) == (429, "rate_limit_exceeded")
    assert int(refused[1]["retry-after"]) >= 1


def test_tokens_are_charged_while_they_are_generated(server: Keyed):
    """A tenant is in debt as soon as an answer has used what there was, not when it ends."""
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    connection = server.site.open()
    headers = {"Content-Type": "application/json", **server.headers("slow")}
    connection.request("POST", COMPLETIONS, body, headers)
    response = connection.getresponse()
    assert response.status == 200
    refused = server.post("slow", prompt="x", max_tokens=1)
    assert code(refused) == (429, "rate_limit_exceeded")
    assert until(lambda: "are used up" in server.post("slow", prompt="x", max_tokens=1)[2]["error"]["message"])
    assert server.llm.stats().running == 1, "it goes on all the same"
    connection.close()
    assert server.site.quiet()


def test_prompts_times_n_are_answers(server: Keyed):
    body = {"max_tokens": 2, "ignore_eos": True}
    never = server.post("four", prompt=["a", "b"], n=3, **body)
    assert code(never) == (403, "max_concurrent_not_allowed")
    assert never[2]["error"]["message"].startswith("the request asks for 6 answers, but your key allows 4 at the same")
    assert server.post("four", prompt=["a", "b"], n=2, **body)[0] == 200
    assert code(server.post("bob", prompt=["a"] * 7, **body)) == (400, "invalid_value")
    assert server.post("bob", prompt=["a"] * 6, **body)[0] == 200


def test_tenant_that_fills_its_queue_share_leaves_slots(tmp_path: Path):
    with keyed(tmp_path) as server:
        site, llm = server.site, server.llm
        body = {**ENDLESS, "prompt": ["Once"] * 6, "stream": True}
        connection = site.open()
        connection.request(
            "POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json", **server.headers("mallory")}
        )
        assert until(lambda: llm.stats().running + llm.stats().waiting == 6)
        full = server.post("mallory", prompt="x", max_tokens=1)
        assert (code(full), full[1]["retry-after"]) == ((429, "queue_full"), "1")
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(server.post, "bob", prompt="Hi", max_tokens=1) for _ in range(3)]
            assert until(lambda: llm.stats().waiting >= 3)
            connection.close()
            assert [one.result()[0] for one in found] == [200] * 3


def test_log_probabilities_are_bounded(site: Site):
    wide = {"n": 16, "logprobs": True, "top_logprobs": 20, "messages": [{"role": "user", "content": "x"}]}
    status, error = site.refusal(CHAT, {**wide, "max_tokens": 1000})
    assert (status, error["param"]) == (400, "logprobs")
    assert error["message"].startswith("the request asks for 336,000 log-probabilities (answers × tokens × altern")
    assert "ask for at most 780 tokens" in error["message"]


def test_default_answer_length_is_bounded_by_log_probabilities(monkeypatch, site: Site):
    monkeypatch.setattr("inlay.server.metrics.MAX_LOGPROBS", 100)
    body = {"prompt": "x", "ignore_eos": True, "logprobs": 19, "n": 1}
    assert site.post(COMPLETIONS, **body)["usage"]["completion_tokens"] == 5
    assert site.post(COMPLETIONS, **{**body, "logprobs": 0})["usage"]["completion_tokens"] == 16


def test_schema_reads_count_as_requests(server: Keyed):
    paths = ("/v1/schemas", "/v1/schemas/trip", "/v1/schemas/trip?source=true")
    assert [server.get("few", path)[0] for path in paths] == [200] * 3
    assert code(server.get("few", paths[0])) == code(server.get("few", paths[1])) == (429, "rate_limit_exceeded")


class Late:
    """A model whose answers start on command. failure: raised in place of an answer."""

    def __init__(self, site: Site, failure: Exception | None = None) -> None:
        self._generate = site.service.llm.generate
        self._loop = site.server.loop
        self._begin = asyncio.Event()
        self._failure = failure

    async def generate(self, *given: Any, **named: Any) -> AsyncGenerator[RequestOutput, None]:
        await self._begin.wait()
        if self._failure is not None:
            raise self._failure
        async for output in self._generate(*given, **named):
            yield output

    def begin(self) -> None:
        self._loop.call_soon_threadsafe(self._begin.set)


@pytest.mark.parametrize("failure", [None, CapacityError("there is no room")])
def test_waiting_stream_sends_keep_alive_comments(monkeypatch, failure: Exception | None):
    llm = small_model()
    with running(llm, keep_alive_s=0.05) as site:
        late = Late(site, failure)
        monkeypatch.setattr(llm, "generate", late.generate)
        with asking(site, {"prompt": "x", "max_tokens": 3, "stream": True}) as connection:
            connection.settimeout(20)
            text = b""
            while text.count(b": keep-alive\n\n") < 2:
                text += connection.recv(4096)
            assert text.startswith(b"HTTP/1.1 200 ")
            late.begin()
            while not text.endswith(b"\r\n0\r\n\r\n"):
                text += connection.recv(4096)
        assert text.count(b"HTTP/1.1") == 1
        assert (b"data: [DONE]" in text) == (failure is None)
        assert (b'"code":"kv_memory_exceeded"' in text) == (failure is not None)
    llm.shutdown()


def test_early_failure_of_a_stream_has_an_error_status(monkeypatch, site: Site):
    late = Late(site, CapacityError("there is no room"))
    late.begin()
    monkeypatch.setattr(site.service.llm, "generate", late.generate)
    assert site.refusal(COMPLETIONS, {"prompt": "x", "stream": True})[0] == 400


def test_non_streamed_answer_has_no_comments(monkeypatch):
    llm = small_model()
    with running(llm, keep_alive_s=0.01) as site:
        late = Late(site)
        monkeypatch.setattr(llm, "generate", late.generate)
        timer = threading.Timer(0.1, late.begin)
        timer.start()
        assert site.post(COMPLETIONS, prompt="x", max_tokens=2)["choices"]
    llm.shutdown()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES, st.integers(0, 3))
def test_pieces_of_json_join_to_the_whole(value: Any, depth: int):
    assert b"".join(json_pieces(value, depth)) == json_bytes(value)


@pytest.mark.parametrize("large", [False, True])
def test_large_json_is_made_on_a_thread_and_sent_in_pieces(large: bool):
    value, threads, sent = {"data": ["x" * 1000] * 1000}, [], []

    async def test() -> None:
        async def send(message: Message) -> None:
            sent.append(message)

        size = 10**6 if large else 10
        response = await json_response(lambda: (threads.append(threading.current_thread()), value)[1], size, 201)
        await response({"type": "http"}, None, send)  # type: ignore[arg-type]

    asyncio.run(test())
    start, *bodies = sent
    assert (threads[0] is not threading.current_thread()) == large
    assert (start["status"], len(bodies)) == (201, 4 if large else 1)
    assert dict(start["headers"])[b"content-length"] == str(len(json_bytes(value))).encode()
    assert b"".join(body["body"] for body in bodies) == json_bytes(value)
    assert [body.get("more_body", False) for body in bodies] == [True] * (len(bodies) - 1) + [False]


def test_answers_with_many_log_probabilities_are_made_on_a_thread(monkeypatch, site: Site):
    made = []
    respond = OpenAI.respond

    def noted(*given: Any, **named: Any) -> Any:
        made.append(threading.current_thread().name)
        return respond(*given, **named)

    monkeypatch.setattr(OpenAI, "respond", staticmethod(noted))
    body = {"prompt": "x", "n": 4, "max_tokens": 100, "ignore_eos": True, "logprobs": 20, "seed": 1}
    large, small = site.post(COMPLETIONS, **body), site.post(COMPLETIONS, **{**body, "logprobs": None})
    assert [name.startswith("inlay-json") for name in made] == [True, False]
    assert [one["text"] for one in large["choices"]] == [one["text"] for one in small["choices"]]
    monkeypatch.setattr(threads, "LARGE", 0)
    monkeypatch.setattr(completions, "LARGE", 0)
    events = site.stream(COMPLETIONS, **{**body, "logprobs": 1})
    assert sum(len(c["logprobs"]["tokens"]) for e in events for c in e["choices"] if c["logprobs"]) == 400
