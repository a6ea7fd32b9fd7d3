"""Connections that bring no request, half of a head, a head with two meanings or a malformed body do not stay."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from inlay.api.failures import BodyError
from inlay.server.errors import refuse
from inlay.server.run import PromptHeads
from tests.server.server.asgi import Echo

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Quick(PromptHeads):
    head_s = 0.3


@contextmanager
def serving(app: ASGIApp) -> Iterator[int]:
    """Serve an application in a thread. Yields the port."""
    config = uvicorn.Config(app, port=0, http=Quick, log_config=None, lifespan="off", timeout_keep_alive=30)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(Echo()) as port:
        yield port


def ended(port: int, *pieces: bytes) -> tuple[bool, bytes]:
    """Send these pieces a little apart. Returns whether the server ended the connection, and its response."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(0.1)
            while more := client.recv(2**16):
                answer += more
        except TimeoutError:
            return False, answer
        except OSError:  # it was while we sent
            pass
    return True, answer


@pytest.mark.parametrize("pieces", [(), (GET[:5],), [bytes([byte]) for byte in GET]])
def test_incomplete_request_head_times_out(port: int, pieces):
    assert ended(port, *pieces) == (True, b"")


def test_incomplete_second_request_head_times_out(port: int):
    closed, answer = ended(port, GET, GET[:5])
    assert closed
    assert answer.count(b"HTTP/1.1 200") == 1


def test_idle_connection_is_kept_between_requests(port: int):
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    closed, answer = ended(port, GET[:5], GET[5:], b"", b"", b"", b"", b"", last)
    assert closed
    assert answer.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(("long", "status"), [(15_000, b"200"), (17_000, b"400"), (100_000, b"400")])
@pytest.mark.parametrize("place", ["target", "header", "spaces", "names"])
def test_a_head_has_at_most_16_kib_even_in_one_write(port: int, place: str, long: int, status: bytes):
    filler, end = b"a" * long, b"\r\nConnection: close\r\n\r\n"
    target = b"/?x=" + filler if place == "target" else b"/"
    header = {
        "header": b"\r\nX-Long: " + filler,
        "spaces": b"\r\nX-Long:" + b" " * long + b"x",
        "names": b"\r\na:" * (long // 4),
    }
    closed, answer = ended(port, b"GET " + target + b" HTTP/1.1\r\nHost: x" + header.get(place, b"") + end)
    assert closed
    assert answer.startswith(b"HTTP/1.1 " + status + b" ")


def _post(*heads: str, body: str = "") -> bytes:
    return "\r\n".join(("POST / HTTP/1.1", "Host: x", *heads, "", body)).encode()


CHUNKED = "2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "heads",
    [
        ("Content-Length: 12", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "content-length: 12"),
        ("TRANSFER-ENCODING: Chunked", "Content-Length: 0", "Connection: keep-alive"),
    ],
)
def test_conflicting_body_lengths_end_the_connection(port: int, heads: tuple[str, ...], together: bool):
    """The second request could be the text of another user, which a proxy sent as a body."""
    pieces = (_post(*heads, body=CHUNKED), GET)
    closed, answer = ended(port, *([b"".join(pieces)] if together else pieces))
    assert closed
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1 ") == 1


def test_conflicting_lengths_after_a_complete_request_end_the_connection(port: int):
    closed, answer = ended(port, GET + _post("Content-Length: 3", "Transfer-Encoding: chunked", body=CHUNKED) + GET)
    assert closed
    assert (answer.count(b"HTTP/1.1 200"), answer.count(b"HTTP/1.1 400"), answer.count(b"HTTP/1.1 ")) == (1, 1, 2)


@pytest.mark.parametrize(
    "post", [_post("Content-Length: 2", body="{}"), _post("Transfer-Encoding: chunked", body=CHUNKED)]
)
def test_single_body_length_keeps_the_connection(port: int, post: bytes):
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    closed, answer = ended(port, post + last)
    assert closed
    assert answer.count(b"HTTP/1.1 200") == 2


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse every request before its body is read."""
    await refuse(BodyError("no key", code="no_key", status=401), scope, receive, send)


@pytest.mark.parametrize(
    ("pieces", "status"),
    [([b"zz\r\n"], b"400"), ([b"", b"zz\r\n"], b"401"), ([b"2\r\n{}\r\n", b"zz\r\n"], b"401")],
    ids=["at once", "after the response began", "in the middle"],
)
def test_malformed_body_of_a_refused_request_logs_no_exception(pieces: list[bytes], status: bytes, caplog):
    with serving(refusing) as port:
        closed, answer = ended(port, _post("Transfer-Encoding: chunked") + pieces[0], *pieces[1:])
    assert closed
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
