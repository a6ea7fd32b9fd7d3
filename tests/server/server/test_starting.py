"""A server while its model loads: it is alive, reports progress, and then serves requests."""

from __future__ import annotations

import threading

import pytest

from inlay import ModelError
from inlay.api.anthropic import error_body
from inlay.api.failures import Failure
from inlay.models.load import MODEL_DIRECTORY, load_model, weights_progress
from inlay.server.app import build_app
from inlay.server.run import Loading, Server, StartingApp, listen
from inlay.server.settings import ServerSettings
from tests.server.server.conftest import COMPLETIONS, SCHEMA, Site, small_model


def test_probes_are_answered_while_the_model_loads():
    llm = small_model()
    reported, go_on, is_ready = threading.Event(), threading.Event(), threading.Event()

    def load(loading: Loading):
        loading.report("its weights", 12, 56)
        reported.set()
        assert go_on.wait(30)
        return build_app(llm, ServerSettings(served_names=("tiny",)), [SCHEMA])

    with listen("127.0.0.1", 0, network=False) as listener:
        server = Server(StartingApp(load), is_ready.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        site = Site(server, None, "", listener.getsockname()[1])
        assert reported.wait(20)
        assert site.call("GET", "/health")[::2] == (200, {"status": "alive"})
        for method, path, body in (("GET", "/ready", None), ("POST", COMPLETIONS, {"prompt": "x"})):
            status, heads, answer = site.call(method, path, body)
            assert (status, heads["retry-after"], answer["error"]["code"]) == (503, "1", "not_ready")
            assert answer["error"]["message"].startswith("the server loads its weights, 12 of 56 (")
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            status, heads, answer = site.call("POST", path, {"messages": []})
            assert (status, heads["retry-after"], answer["type"]) == (503, "1", "error")
            expected = error_body(Failure(503, answer["error"]["message"], None, "not_ready"))
            assert answer == expected
        go_on.set()
        assert is_ready.wait(30)
        assert site.call("GET", "/ready")[::2] == (200, {"status": "ready"})
        assert site.post(COMPLETIONS, prompt="Hello", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert site.call("GET", "/v1/schemas")[2]["data"][0]["name"] == "trip"
        server.loop.call_soon_threadsafe(server.stop)
        thread.join(30)
        assert not thread.is_alive()
    llm.shutdown()


def test_model_that_cannot_be_loaded_ends_the_server():
    def load(_: Loading):
        raise ModelError("there is no such model")

    with listen("127.0.0.1", 0, network=False) as listener, pytest.raises(ModelError, match="there is no such model"):
        Server(StartingApp(load)).run([listener])


def test_loaded_weights_are_reported():
    told: list[tuple[int, int]] = []
    with weights_progress(lambda done, total: told.append((done, total))):
        load_model(str(MODEL_DIRECTORY))
    assert told[0] == (0, told[-1][1])
    assert told[-1][0] == told[-1][1] > 10
    before = len(told)
    load_model(str(MODEL_DIRECTORY))
    assert len(told) == before
