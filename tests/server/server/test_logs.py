"""Logs: one line a request with its result, its id in every record, and no confidential text of clients."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from io import StringIO
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inlay import SamplingParams
from inlay.api.failures import Failure
from inlay.server.logs import Line, RequestLogMiddleware, configure, current_line
from inlay.server.metrics import Metrics
from tests.pages import DOCS, blocks
from tests.server.server.asgi import send
from tests.server.server.watching import model, records, server, service

CANARY = "canary7f3a"


class Counted:
    """The reports of a RequestLogMiddleware."""

    def __init__(self) -> None:
        self.began = 0
        self.lines: list[Line] = []

    def http_began(self) -> None:
        self.began += 1

    def http_ended(self, line: Line) -> None:
        self.lines.append(line)


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Leaves logging as it was."""
    root, names = logging.getLogger(), ("inlay", "uvicorn")
    kept = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    for handler in kept[0]:
        root.addHandler(handler)
    root.setLevel(kept[1])
    for name in names:
        logging.getLogger(name).setLevel(logging.NOTSET)


def logging_to(format: str = "json", level: str = "info") -> StringIO:
    # basicConfig closes the handlers that it replaces, and pytest's are still needed
    for handler in logging.getLogger().handlers[:]:
        logging.getLogger().removeHandler(handler)
    stream = StringIO()
    configure(format=format, level=level, stream=stream)
    return stream


def answering(status: int = 200, body: bytes = b"{}", during: Callable[[], None] | None = None) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if during is not None:
            during()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app


def line_of(app: ASGIApp, **request: Any) -> Line:
    """The line of one request to an application."""
    counted = Counted()
    with suppress(RuntimeError):
        send(RequestLogMiddleware(app, counted), **request)
    (line,) = counted.lines
    assert counted.began == 1
    return line


class TestRequestIds:
    @given(st.one_of(st.text(), st.from_regex(r"[A-Za-z0-9._:-]{1,140}", fullmatch=True)).filter(str.isascii))
    def test_valid_id_is_kept_and_any_other_replaced(self, given_id):
        found = send(RequestLogMiddleware(answering(), Counted()), headers=[("X-Request-Id", given_id)])
        kept = re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given_id) is not None
        assert (found.headers["x-request-id"] == given_id) is kept
        if not kept:
            assert re.fullmatch(r"req-[0-9a-f]{32}", found.headers["x-request-id"])

    def test_two_ids_are_replaced(self):
        found = send(
            RequestLogMiddleware(answering(), Counted()), headers=[("X-Request-Id", "a"), ("X-Request-Id", "b")]
        )
        assert found.headers["x-request-id"].startswith("req-")

    def test_every_record_has_the_id_of_its_request(self):
        """Requests that run at the same time, their tasks and their threads."""
        stream = logging_to()
        log = logging.getLogger("inlay.test")

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def part(name: str) -> None:
                await asyncio.sleep(0.001)
                log.info("%s %s", scope["path"], name)

            await asyncio.gather(part("one"), part("two"), asyncio.to_thread(log.info, "%s three", scope["path"]))
            await answering()(scope, receive, send)

        async def ask(number: int) -> None:
            headers = [(b"x-request-id", f"id-{number}".encode())]
            scope = {"type": "http", "method": "GET", "path": f"/{number}", "headers": headers}

            async def sent(message: Message) -> None: ...

            await RequestLogMiddleware(app, Counted())(scope, None, sent)  # type: ignore[arg-type]
            assert current_line() is None

        async def all_of_them() -> None:
            await asyncio.gather(*(ask(number) for number in range(20)))
            log.info("nobody's")

        asyncio.run(all_of_them())
        seen: dict[str | None, int] = {}
        for record in records(stream):
            seen[record["request_id"]] = seen.get(record["request_id"], 0) + 1
            if record["request_id"] is not None:
                assert f"/{record['request_id'].removeprefix('id-')}" in record["message"].split()
        assert seen == {f"id-{number}": 4 for number in range(20)} | {None: 1}


class TestLines:
    def test_an_answer(self):
        def note() -> None:
            line = current_line()
            assert line is not None
            line.generated_tokens = 3

        line = line_of(answering(201, during=note), method="PUT", path="/v1/x")
        assert (line.method, line.path, line.status, line.generated_tokens) == ("PUT", "/v1/x", 201, 3)
        assert (line.disconnected, line.error, line.tenant) == (False, None, None)
        assert 0 < line.seconds < 60

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            (b'{"error": {"message": "m", "type": "t", "param": null, "code": "queue_full"}}', "queue_full"),
            (b'{"error": {"message": "m", "type": "server_error", "param": null, "code": null}}', "server_error"),
            (b'{"error": {"message": "m", "type": "t", "code": "Not sane"}}', None),
            (b'{"error": "x"}', None),
            (b"[" * 60_000, None),
            (b"\xff", None),
            (b"", None),
        ],
    )
    def test_the_code_of_an_error_is_read_from_its_body(self, body, code):
        assert line_of(answering(429, body)).error == code
        assert line_of(answering(200, body)).error is None

    def test_streamed_pieces_are_not_buffered(self):
        """A stream is neither held back nor gathered."""
        passed: list[bytes] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for number in range(5):
                piece = b"%d" % number
                await send({"type": "http.response.body", "body": piece, "more_body": number < 4})
                assert passed[-1] == piece

        async def run() -> None:
            async def sent(message: Message) -> None:
                passed.append(message.get("body", b""))

            scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
            await RequestLogMiddleware(app, Counted())(scope, None, sent)  # type: ignore[arg-type]

        asyncio.run(run())
        assert passed == [b"", b"0", b"1", b"2", b"3", b"4"]

    def test_disconnect_is_logged(self):
        async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        line = line_of(waiting)
        assert (line.disconnected, line.status) == (True, 499)

        async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await waiting(scope, receive, send)

        line = line_of(streaming)
        assert (line.disconnected, line.status) == (True, 200)

    def test_disconnect_after_the_answer_is_not_logged(self):
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await answering()(scope, receive, send)
            assert (await receive())["type"] == "http.disconnect"

        assert not line_of(app).disconnected

        async def finished(scope: Scope, receive: Receive, send: Send) -> None:
            line = current_line()
            assert line is not None
            line.finish_reasons = ("stop",)
            assert (await receive())["type"] == "http.disconnect"
            await answering()(scope, receive, send)

        assert not line_of(finished).disconnected

    def test_send_error_counts_as_a_disconnect(self):
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def gone(message: Message) -> None:
            raise OSError

        async def run() -> Line:
            counted = Counted()
            scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
            await RequestLogMiddleware(app, counted)(scope, None, gone)  # type: ignore[arg-type]
            return counted.lines[0]

        line = asyncio.run(run())
        assert (line.disconnected, line.error) == (True, None)

    def test_paths_are_short_and_on_one_line(self):
        for path in ("/a\nforged line", "/\x1b[31m", "/" + "x" * 9_000, "/ü\u2028"):
            stream = logging_to("text")
            send(RequestLogMiddleware(answering(), Counted()), path=path)
            (line,) = stream.getvalue().splitlines()
            assert len(line) < 500
            assert line.isascii()
            assert line.isprintable()

    def test_lifespan_events_pass(self):
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope["seen"] = True

        scope: Scope = {"type": "lifespan"}
        asyncio.run(RequestLogMiddleware(app, Counted())(scope, None, None))  # type: ignore[arg-type]
        assert scope["seen"]


def failing(*, after: int = 0) -> ASGIApp:
    """An application that fails after so many chunks of its answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for number in range(after):
            if not number:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        try:
            raise KeyError(f"{CANARY} of a prompt")
        except KeyError as error:
            raise RuntimeError(f"{CANARY} again") from error

    return app


class TestSurprises:
    def test_exception_is_answered_with_500_and_logged(self):
        stream = logging_to()
        found = send(RequestLogMiddleware(failing(), Counted()))
        assert found.status == 500
        assert found.error["code"] == "internal_error"
        assert CANARY not in found.body.decode()
        surprise, line = records(stream)
        assert surprise["request_id"] == line["request_id"] == found.headers["x-request-id"]
        assert (line["status"], line["error"], line["level"]) == (500, "internal_error", "error")
        assert "builtins.KeyError\nand then:\n" in surprise["exception"]
        assert surprise["exception"].endswith("builtins.RuntimeError")
        assert 'raise KeyError(f"{CANARY} of a prompt")' in surprise["exception"]
        assert CANARY not in stream.getvalue()

    def test_exception_message_is_logged_only_at_debug_level(self):
        for format in ("text", "json"):
            stream = logging_to(format, "debug")
            send(RequestLogMiddleware(failing(), Counted()))
            assert f"builtins.RuntimeError: {CANARY} again" in stream.getvalue()

    def test_groups_of_them_are_shown_whole(self):
        stream = logging_to("text")

        def several() -> None:
            raise ExceptionGroup(CANARY, [ValueError(CANARY), KeyError(CANARY)])

        send(RequestLogMiddleware(answering(during=several), Counted()))
        assert "builtins.ExceptionGroup\nbuiltins.ValueError\nbuiltins.KeyError\n" in stream.getvalue()
        assert CANARY not in stream.getvalue()

    def test_exception_after_the_first_byte_keeps_the_status(self):
        line = line_of(failing(after=1))
        assert (line.status, line.error, line.disconnected) == (200, "internal_error", False)


@pytest.fixture
def listening() -> Iterator[Callable[[ASGIApp], int]]:
    """Starts real servers, and ends them."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: ASGIApp) -> int:
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        one = uvicorn.Server(config)
        thread = threading.Thread(target=one.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        running.append((one, thread))
        while not one.started:
            time.sleep(0.01)
        return int(bound.getsockname()[1])

    yield start
    for one, thread in running:
        one.should_exit = True
        thread.join()


def test_uvicorn_records_have_the_id_and_no_prompt(listening):
    stream = logging_to()
    port = listening(RequestLogMiddleware(failing(after=2), Counted()))
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(4096), b""))
    assert b"x-request-id: mine\r\n" in received.lower()
    assert not received.endswith(b"0\r\n\r\n"), "what has failed does not look whole"
    found = {record["logger"]: record for record in records(stream) if record["request_id"] == "mine"}
    assert set(found) == {"inlay.access", "uvicorn.error"}
    assert found["uvicorn.error"]["message"] == "Exception in ASGI application"
    assert CANARY not in stream.getvalue()
    assert sum(record["logger"] == "uvicorn.access" for record in records(stream)) == 0


def test_confidential_text_is_never_logged():
    """Prompts, schemas, keys, headers and queries, for any result of the request, at every level but debug."""
    llm = model()
    made = service(llm)
    for format in ("text", "json"):
        stream = logging_to(format)
        with TestClient(server(made), raise_server_exceptions=False) as client:
            headers = {"X-Secret": CANARY, "User-Agent": CANARY, "Cookie": CANARY, "X-Request-Id": f"{CANARY} {CANARY}"}
            key = {"Authorization": "Bearer ann"}
            pml = f'<schema name="s">{CANARY}<module name="{CANARY}">{CANARY}</module></schema>'
            for method, path, rest in (
                ("POST", "/v1/schemas", {"json": {"pml": pml}}),
                ("POST", "/v1/schemas", {"json": {"pml": f"<schema>{CANARY}"}}),
                ("PUT", "/v1/schemas/s", {"json": {"pml": pml.replace("</", f"{CANARY}</")}}),
                ("POST", f"/v1/schemas?x={CANARY}", {"json": {"pml": pml}}),
                ("GET", f"/v1/schemas?{CANARY}={CANARY}", {}),
                ("POST", "/v1/schemas", {"content": CANARY, "headers": {"Content-Type": "application/json"}}),
                ("GET", "/v1/schemas/s?source=true", {}),
            ):
                given_headers = headers | key | rest.pop("headers", {})
                client.request(method, path, headers=given_headers, **rest)
            assert client.get("/v1/schemas", headers={"Authorization": f"Bearer {CANARY}"}).status_code == 401
            client.delete("/v1/schemas/s", headers=headers | key)
        assert len(stream.getvalue().splitlines()) >= 9
        assert CANARY not in stream.getvalue()
    llm.shutdown()


def run_in(app: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """The access record of a request that an application answers like this."""
    stream = logging_to()

    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        await app()
        await answering()(scope, receive, send)

    send(RequestLogMiddleware(whole, Counted()))
    return records(stream)[-1]


def test_result_of_a_request_is_in_its_log_line():
    async def ask() -> None:
        llm = model()
        metrics = Metrics(llm, model_name="demo", longest=2048, schemas=())
        params = SamplingParams(temperature=0, max_tokens=4, n=1, ignore_eos=True)
        for _ in range(2):
            watch = metrics.begin("/v1/completions", None)
            outputs = [output async for output in llm.generate("Twelve chars", params, reuse="exact")]
            watch.end(outputs[-1:], None)
        llm.shutdown()

    record = run_in(ask)
    assert record["prompt_tokens"] == record["cached_tokens"] + 1
    assert record["cached_tokens"] >= 11
    assert (record["module_tokens"], record["generated_tokens"], record["finish_reasons"]) == (0, 4, ["length"])
    assert 0 < record["ttft_s"] < record["seconds"]


@pytest.mark.parametrize(
    ("failure", "error", "disconnected"),
    [(Failure(504, CANARY, None, "deadline_exceeded"), "deadline_exceeded", False), (None, None, True)],
)
def test_stream_failure_is_in_its_log_line(failure, error, disconnected):
    async def ask() -> None:
        llm = model()
        Metrics(llm, model_name="demo", longest=2048, schemas=()).begin("/v1/completions", None).end(None, failure)
        llm.shutdown()

    record = run_in(ask)
    assert (record["error"], record["disconnected"], record["finish_reasons"]) == (error, disconnected, None)
    assert CANARY not in json.dumps(record)


def test_text_format_is_readable():
    stream = logging_to("text")

    def note() -> None:
        line = current_line()
        assert line is not None
        line.ttft_s, line.prompt_tokens, line.finish_reasons = 0.0384, 12, ("stop", "length")

    send(RequestLogMiddleware(answering(during=note), Counted()), path="/v1/x", headers=[("x-request-id", "mine")])
    pattern = (
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info \[mine\] POST /v1/x 200 "
        r"seconds=0\.\d{3} ttft_s=0\.038 prompt_tokens=12 finish_reasons=stop,length\n"
    )
    assert re.fullmatch(pattern, stream.getvalue())


def test_log_level_applies_to_the_server_and_other_libraries_are_quiet():
    stream = logging_to("text", "info")
    for name in ("inlay.x", "uvicorn.error", "asyncio"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "%s %d", name, level)
    said = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    assert said == ["inlay.x 20", "inlay.x 30", "uvicorn.error 20", "uvicorn.error 30", "asyncio 30"]


def test_message_cannot_forge_log_lines():
    for format in ("text", "json"):
        stream = logging_to(format)
        logging.getLogger("inlay.x").info("one\n2026-01-01T00:00:00.000Z info forged\x1b[2J\r")
        (line,) = stream.getvalue().splitlines()
        assert "\x1b" not in line


def test_docs_page_shows_all_fields_of_a_log_line():
    (shown,) = (json.loads(block.text) for block in blocks(DOCS / "reference/metrics.md") if block.note == "line")
    stream = logging_to()
    send(RequestLogMiddleware(answering(), Counted()))
    assert list(shown) == list(records(stream)[0])
