"""Start and shutdown of a server, from its schemas to its last log lines."""

from __future__ import annotations

import json
import threading
import time

import pytest

from inlay import AsyncLLM, CapacityError, ParameterError, Schema
from inlay.engine.core import EngineCore
from inlay.engine.scheduler import Scheduler
from inlay.server.app import build_app
from inlay.server.run import Server, listen
from inlay.server.settings import ServerSettings
from tests.model.sampling.test_defaults import DEFAULTS, SAID, advised
from tests.raising import raises
from tests.server.server.conftest import CHAT, COMPLETIONS, SCHEMA, Site, running, small_model
from tests.server.server.test_completions import ENDLESS, asking, until


def ended(site: Site, path: str = "/ready") -> int:
    return site.call("GET", path)[0]


def test_running_server_reports_health_and_model(site: Site):
    assert site.call("GET", "/health")[::2] == (200, {"status": "alive"})
    assert site.call("GET", "/ready")[::2] == (200, {"status": "ready"})
    assert set(site.call("GET", "/version")[2]) == {"version"}
    model = site.call("GET", "/v1/models/other")[2]
    assert (model["id"], model["root"], model["max_model_len"]) == ("other", "tiny-llama", 2048)
    assert model["default_sampling_params"] == {}
    assert site.call("GET", "/v1/schemas")[2]["data"][0]["name"] == "trip"


def test_model_defaults_apply_to_unset_fields():
    """As its generation configuration has it, and as the list of models says."""
    llm = AsyncLLM(advised(**SAID), kv_memory="16MiB", chunk_size=8)
    with running(llm) as site:
        (model, _) = site.call("GET", "/v1/models")[2]["data"]
        assert model["default_sampling_params"] == DEFAULTS
        unsaid, said, greedy = (
            site.post(COMPLETIONS, prompt="Hello", max_tokens=9, **body)["choices"][0]["text"]
            for body in ({}, {"temperature": 0, "repetition_penalty": 50}, {"temperature": 0, "repetition_penalty": 1})
        )
        assert unsaid == said != greedy
        chat = site.post(CHAT, messages=[{"role": "user", "content": "Hello"}], ignore_eos=True)
        assert chat["usage"]["completion_tokens"] == 9
    llm.shutdown()


def test_server_is_not_ready_before_its_schemas_are_encoded(monkeypatch):
    llm = small_model()
    app, go_on = build_app(llm, ServerSettings(served_names=("tiny",)), [SCHEMA]), threading.Event()
    step = EngineCore.step
    monkeypatch.setattr(EngineCore, "step", lambda self, **how: (go_on.wait(20), step(self, **how))[1])
    is_ready = threading.Event()
    with listen("127.0.0.1", 0, network=False) as listener:
        server = Server(app, is_ready.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        site = Site(server, app.state.service, "", listener.getsockname()[1])
        assert site.call("GET", "/health")[0] == 200
        status, heads, answer = site.call("GET", "/ready")
        assert (status, answer["error"]["code"], heads["retry-after"]) == (503, "not_ready", "1")
        assert len(site.service.schemas) == 1, "it can be named all the same"
        go_on.set()
        assert is_ready.wait(20)
        assert ended(site) == 200
        server.loop.call_soon_threadsafe(server.stop)
        thread.join()
    llm.shutdown()


def test_running_requests_finish_and_new_ones_are_rejected_at_shutdown():
    llm = small_model()
    with running(llm, drain_s=20) as site, asking(site, {**ENDLESS, "max_tokens": 1000, "stream": True}) as connection:
        assert until(lambda: llm.stats().running == 1)
        site.server.loop.call_soon_threadsafe(site.server.stop)
        assert until(lambda: ended(site) == 503)
        status, heads, answer = site.call("POST", COMPLETIONS, {"prompt": "x"})
        assert (status, answer["error"]["code"], heads["retry-after"]) == (503, "server_stopping", "5")
        assert ended(site, "/health") == ended(site, "/metrics") == 200
        text = b""
        while part := connection.recv(65536):
            text += part
        assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    llm.shutdown()


@pytest.mark.parametrize("twice", [False, True])
def test_long_requests_get_an_error_at_shutdown(twice):
    llm = small_model()
    began = time.monotonic()
    texts = [b"", b""]
    with (
        running(llm, drain_s=30 if twice else 0.1) as site,
        asking(site, {**ENDLESS, "stream": True}) as streamed,
        asking(site, ENDLESS) as whole,
    ):
        assert until(lambda: llm.stats().running == 2)
        streamed.recv(1000)
        for _ in range(1 + twice):
            site.server.loop.call_soon_threadsafe(site.server.stop)
        for number, connection in enumerate((streamed, whole)):
            while part := connection.recv(65536):
                texts[number] += part
    event = json.loads(texts[0].split(b"data: ")[-1].split(b"\n\n")[0])
    assert event["error"]["code"] == "server_stopping"
    assert b"[DONE]" not in texts[0]
    assert texts[1].startswith(b"HTTP/1.1 503 ")
    assert b"server_stopping" in texts[1]
    assert time.monotonic() - began < 15
    assert llm.stats().running == 0
    llm.shutdown()


def test_conflicting_schemas_are_rejected_before_start():
    llm = small_model()
    with listen("127.0.0.1", 0, network=False) as listener:
        twice = [Schema.from_string(f'<schema name="trip">{text}</schema>') for text in "ab"]
        server = Server(build_app(llm, ServerSettings(), twice))
        with pytest.raises(ParameterError, match="there is a schema 'trip' already"):
            server.run([listener])
    llm.shutdown()


def test_model_that_cannot_answer_ends_the_server():
    llm = small_model()

    async def cannot() -> None:
        raise CapacityError("there is no room")

    with listen("127.0.0.1", 0, network=False) as listener:
        app = build_app(llm, ServerSettings())
        app.state.service.warm_up = cannot
        with pytest.raises(CapacityError, match="there is no room"):
            Server(app).run([listener])
    llm.shutdown()


@pytest.mark.parametrize(
    ("settings", "code", "name"),
    [
        ({"reuse": "anchored", "max_reuse": "exact"}, "parameter.invalid", "max_reuse is 'exact'"),
        ({"reuse": "some"}, "policy.unknown", "reuse"),
        ({"max_reuse": "anchored"}, "parameter.unknown_choice", "max_reuse"),
        ({"served_names": ()}, "parameter.invalid", "served_names"),
        ({"timeout_s": -1.0}, "parameter.out_of_range", "timeout_s"),
        ({"drain_s": float("nan")}, "parameter.out_of_range", "drain_s"),
        ({"drain_s": None}, "parameter.out_of_range", "drain_s"),
        ({"max_body_bytes": 0}, "parameter.invalid_size", "max_body_bytes"),
        ({"default_max_tokens": 0}, "parameter.out_of_range", "default_max_tokens"),
        ({"log_format": "xml"}, "parameter.unknown_choice", "log_format"),
        ({"log_level": "loud"}, "parameter.unknown_choice", "log_level"),
    ],
)
def test_invalid_settings_are_rejected(settings, code, name):
    with raises(code, ParameterError, names=name):
        ServerSettings(**settings)


@pytest.mark.parametrize(
    ("host", "port", "network", "sentence"),
    [
        ("127.0.0.1", 70000, False, "--port is 70000; it must be a number from 1 to 65535, or 0 for any that is free"),
        ("127.0.0.1", -1, False, "--port is -1; it must be a number"),
        ("0.0.0.0", 0, False, "--host 0.0.0.0 can be reached from other machines, and without keys"),
        ("::", 0, False, "--host :: can be reached from other machines"),
        ("no.such.host.invalid", 0, True, "--host 'no.such.host.invalid' is not known here"),
        ("203.0.113.7", 0, True, "--host 203.0.113.7 is not an address of this machine"),
    ],
)
def test_invalid_hosts_are_rejected(host, port, network, sentence):
    with pytest.raises(ParameterError) as caught:
        listen(host, port, network=network)
    assert str(caught.value).startswith(sentence)


def test_a_port_in_use():
    with listen("127.0.0.1", 0, network=False) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ParameterError, match=f"port {port} of 127.0.0.1 is in use, perhaps by another server"):
            listen("127.0.0.1", port, network=False)
    with listen("localhost", 0, network=False), listen("0.0.0.0", 0, network=True):
        pass


def test_dead_engine_is_reported(monkeypatch: pytest.MonkeyPatch):
    llm = small_model()
    with running(llm) as site, asking(site, {**ENDLESS, "stream": True}) as streamed:
        assert until(lambda: llm.stats().running == 1)
        streamed.recv(1000)

        def broken(*_: object) -> None:
            raise RuntimeError("a fault that goes on")

        monkeypatch.setattr(EngineCore, "release", broken)
        monkeypatch.setattr(Scheduler, "step", broken)
        text = b""
        while b'"internal_error"' not in text and (part := streamed.recv(65536)):
            text += part
        assert b'"internal_error"' in text
        assert until(lambda: ended(site, "/health") == 503)
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/ready", None),
            ("POST", COMPLETIONS, {"prompt": "x"}),
        ):
            status, _, answer = site.call(method, path, body)
            assert (status, answer["error"]["code"]) == (503, "engine_dead")
            assert "RuntimeError: a fault that goes on" in answer["error"]["message"]
        assert ended(site, "/metrics") == ended(site, "/version") == 200
