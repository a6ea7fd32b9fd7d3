"""Work before the engine: the requests that wait for it, and for how long."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inlay import AsyncLLM, SamplingParams
from inlay.workpool import WorkPool
from tests.model.client.test_async_llm import PARAMS, engine, last
from tests.server.server.conftest import CHAT, COMPLETIONS, running, small_model

LONG_S = 20.0
ROOT = Path(__file__).parents[3]


class Held:
    """Calls of one method that block until they are released, except where ``unless`` is true."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, *, unless: Any = lambda *given: False):
        real = getattr(target, name)
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()

        def held(*given: Any, **named: Any) -> Any:
            if not unless(*given):
                self.begun.release()
                self.go.wait(LONG_S)
            return real(*given, **named)

        monkeypatch.setattr(target, name, held)


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    llm = small_model()
    yield llm
    llm.shutdown()


def test_slow_prompt_processing_does_not_block_other_requests(monkeypatch):
    async def ask() -> None:
        llm = engine()
        held = Held(monkeypatch, llm.processor, "lay_out", unless=lambda prompt, *_: prompt != "slow")
        slow = asyncio.create_task(last(llm.generate("slow", PARAMS)))
        await asyncio.to_thread(held.begun.acquire, timeout=LONG_S)
        other = await asyncio.wait_for(last(llm.generate("quick", PARAMS)), LONG_S / 2)
        assert other.finished
        assert not slow.done()
        assert len(llm.lay_out("quick").ids) == 5
        assert not llm.remove_schema("none")
        held.go.set()
        assert (await slow).finished

    asyncio.run(ask())


def test_grammars_of_one_tenant_do_not_block_others(monkeypatch):
    async def ask() -> None:
        llm = engine()
        held = Held(monkeypatch, llm.client, "compile_grammar", unless=lambda params, salt: salt != "mallory")
        structured = SamplingParams(max_tokens=2, structured_outputs={"choice": ["a", "b"]})
        streams = [llm.generate(f"{n}", structured, cache_salt="mallory") for n in range(12)]
        bombs = [asyncio.create_task(last(stream)) for stream in streams]
        await asyncio.to_thread(held.begun.acquire, timeout=LONG_S)
        for params in (PARAMS, structured):
            bob = await asyncio.wait_for(last(llm.generate("Hi", params, cache_salt="bob")), LONG_S / 2)
            assert bob.finished
        assert not any(bomb.done() for bomb in bombs)
        held.go.set()
        assert all(output.finished for output in await asyncio.gather(*bombs))

    asyncio.run(ask())


def test_time_counts_from_the_arrival(llm):
    async def ask() -> None:
        with pytest.raises(Exception, match="deadline has passed"):
            await last(llm.generate("x", PARAMS, timeout_s=60, arrival=time.perf_counter() - 61))
        assert (await last(llm.generate("x", PARAMS, timeout_s=60, arrival=time.perf_counter()))).finished

    asyncio.run(ask())


@pytest.mark.parametrize("held_name", ["lay_out", "compile_grammar"])
def test_deadline_applies_during_prompt_processing(llm, monkeypatch, held_name):
    structured = {"response_format": {"type": "json_object"}} if held_name == "compile_grammar" else {}
    with running(llm) as site:
        held = Held(monkeypatch, llm.client if held_name == "compile_grammar" else llm.processor, held_name)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **structured}
        began = time.monotonic()
        status, heads, answer = site.call("POST", CHAT, body, X_Request_Timeout="0.2")
        assert (status, answer["error"]["code"], heads["x-should-retry"]) == (504, "deadline_exceeded", "false")
        assert time.monotonic() - began < LONG_S / 2
        held.go.set()


def test_not_ready_while_no_prompt_starts(llm, monkeypatch):
    with running(llm) as site:
        monkeypatch.setattr(WorkPool, "stuck_s", property(lambda pool: 12.3))
        status, heads, answer = site.call("GET", "/ready")
        assert (status, answer["error"]["code"], heads["retry-after"]) == (503, "not_ready", "10")
        assert answer["error"]["message"].startswith("no waiting prompt has started for 12 seconds")
        monkeypatch.setattr(WorkPool, "stuck_s", property(lambda pool: 9.0))
        assert site.call("GET", "/ready")[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        (COMPLETIONS, {"prompt": "x" * 100_000}, "the text has 100,000 bytes, which are"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}, "bytes, which are"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 100_000}]}]}, "bytes, which"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}] * 3000},
            "the prompt has 3,000 messages and the model's",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}] * 3},
            "the prompt has 3,000 parts of messages and the model's context is 2,048 tokens long",
        ),
        (COMPLETIONS, {"prompt": {"schema": "s", "content": ["a"] * 3000}}, "the prompt has 3,000 new texts and"),
        (COMPLETIONS, {"prompt": {"schema": "s", "content": ["a" * 50_000] * 2}}, "the text has 100,000 bytes, which"),
    ],
)
def test_overlong_prompt_is_rejected_before_tokenization(llm, monkeypatch, path, body, sentence):
    with running(llm) as site:
        schema = {"pml": '<schema name="s">Go.</schema>', "encode": False}
        assert site.call("POST", "/v1/schemas", schema)[0] == 201
        for name in ("text", "template"):
            monkeypatch.setattr(llm.encoder, name, lambda text: pytest.fail("it was tokenized"))
        monkeypatch.setattr(llm.tokenizer, "encode", lambda *given, **named: pytest.fail("it was tokenized"))
        status, error = site.refusal(path, {**body, "max_tokens": 1})
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert sentence in error["message"]


def test_overlong_schema_text_is_rejected(llm):
    with running(llm) as site:
        pml = f'<schema name="s"><module name="m">{"x" * 100_000}</module></schema>'
        status, error = site.refusal("/v1/schemas", {"pml": pml})
        assert status == 400
        assert "the text has 100,000 bytes" in error["message"]


def test_second_signal_ends_the_process_at_once():
    program = """if True:
        import os, signal, socket, sys, threading, time
        from inlay import AsyncLLM
        from inlay.server.app import build_app
        from inlay.server.run import listen
        from inlay.server.run import Server
        from inlay.server.settings import ServerSettings

        llm = AsyncLLM("random:tiny", dtype="float32", kv_memory="16MiB")
        ready, begun = threading.Event(), threading.Event()
        with listen("127.0.0.1", 0, network=False) as listener:
            server = Server(build_app(llm, ServerSettings(drain_s=600)), ready.set)

            def ask():
                assert ready.wait(60)
                llm.processor.lay_out = lambda *given: (begun.set(), time.sleep(600))
                llm.client.call(lambda: time.sleep(600))
                connection = socket.create_connection(listener.getsockname())
                body = b'{"prompt": "x"}'
                heads = b"Host: localhost\\r\\nContent-Type: application/json\\r\\nContent-Length: %d" % len(body)
                connection.sendall(b"POST /v1/completions HTTP/1.1\\r\\n" + heads + b"\\r\\n\\r\\n" + body)
                assert begun.wait(60)
                os.kill(os.getpid(), signal.SIGTERM)
                while not server._service.in_flight.stopping:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(600)

            threading.Thread(target=ask, daemon=True).start()
            server.run([listener])
        print("serving ended", flush=True)
        llm.shutdown()
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120, check=False, capture_output=True)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
