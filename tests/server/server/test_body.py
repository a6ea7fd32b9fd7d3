"""The guard of bodies: accepted bodies reach a route, and others are refused before they are read in full."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from inlay import InlayError, Schema
from inlay.server.body import BodyMiddleware
from inlay.server.limits import Tenant
from tests.raising import raises
from tests.server.server.asgi import Echo, Exchange, send

JSON = {"content-type": "application/json", "transfer-encoding": "chunked"}
XML = {"content-type": "application/xml", "transfer-encoding": "chunked"}
MIB = 2**20


def guarded(pieces=(), *, headers=JSON, guard: dict[str, Any] | None = None, **request: Any) -> tuple[Exchange, list]:
    """A request through the guard, and the bodies that got past it."""
    app = Echo()
    found = send(BodyMiddleware(app, **(guard or {})), pieces, headers=headers, **request)
    return found, [state["body"] for state in app.states]


def refused(status: int, code: str, *arguments: Any, closed: bool = True, **request: Any) -> str:
    """The sentence that a request is refused with. closed: whether the connection ends with it."""
    found, bodies = guarded(*arguments, **request)
    assert not bodies
    assert (found.status, found.error["code"]) == (status, code)
    assert found.error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert (found.headers.get("connection") == "close") == closed
    return found.error["message"]


def test_a_body_in_pieces_is_parsed_once():
    body = {"messages": [{"role": "user", "content": "Grüße 🙂"}], "n": 2}
    data = json.dumps(body, ensure_ascii=False).encode()
    found, bodies = guarded([data[i : i + 7] for i in range(0, len(data), 7)])
    assert (found.status, bodies) == (200, [body])


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"']
)
def test_json_media_types_are_accepted(kind: str):
    assert guarded([b"{}"], headers={**JSON, "content-type": kind})[1] == [{}]


@pytest.mark.parametrize(
    "headers", [{}, {"content-length": "0"}, {"content-length": "0", "content-type": "application/json"}]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_missing_body_is_none(method: str, headers):
    assert guarded(method=method, headers=headers)[1] == [None]


def test_application_receives_the_disconnect_and_not_the_body():
    heard = []

    async def app(scope, receive, send):
        heard.append(await receive())

    send(BodyMiddleware(app), [b"[1", b"]"], headers=JSON)
    assert heard == [{"type": "http.disconnect"}]


def test_lifespan_events_pass_the_guard():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    asyncio.run(BodyMiddleware(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == [{"type": "lifespan"}]


def test_too_large_content_length_is_rejected_at_once():
    headers = {**JSON, "content-length": str(100 * MIB)}
    sentence = refused(413, "body_too_large", [b"x" * MIB] * 100, headers=headers)
    assert sentence == "the body has more than 8,388,608 bytes; send less, or several requests"
    for length in ("9" * 5000, str(8 * MIB + 1)):
        refused(413, "body_too_large", headers={**JSON, "content-length": length})
    assert guarded([b"1"], headers={**JSON, "content-length": str(8 * MIB)})[1] == [1]


def test_body_without_a_length_is_read_up_to_the_limit():
    pieces = (b"x" * (MIB // 4) for _ in range(400))
    found, _ = guarded(pieces, headers=JSON)
    assert (found.status, found.error["code"]) == (413, "body_too_large")
    assert found.taken == 33 + 4 * 32 + 1  # 8 MiB, the piece that was too much, and 32 MiB that are thrown away
    assert found.headers["connection"] == "close"


def test_understated_content_length_does_not_bypass_the_limit():
    """Servers check lengths themselves; the guard counts the bytes anyway."""
    headers = {**JSON, "content-length": "6"}
    pieces, guard = [b"x" * 6] * 3, {"max_body_bytes": 10}
    refused(413, "body_too_large", pieces, headers=headers, guard=guard, closed=False)


def test_the_limit_itself_is_allowed():
    assert guarded([b"12345", b"67890"], guard={"max_body_bytes": 10})[1] == [1234567890]
    refused(413, "body_too_large", [b"12345", b"678901"], guard={"max_body_bytes": 10})


def test_concurrent_bodies_of_one_tenant_share_a_byte_limit():
    """Each holds its part until it is whole, or its client leaves; other tenants have parts of their own."""
    guard = BodyMiddleware(Echo(), max_body_bytes=10)

    async def request(rest: asyncio.Future[Message], tenant: str) -> list[Message]:
        coming, sent = iter([{"type": "http.request", "body": b"[1,1,1,1", "more_body": True}]), []

        async def receive() -> Message:
            return next(coming, None) or await rest

        async def sending(message: Message) -> None:
            sent.append(message)

        headers = [(b"transfer-encoding", b"chunked"), (b"content-type", b"application/json")]
        state = {"tenant": Tenant(tenant)}
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "state": state}
        await guard(scope, receive, sending)
        return sent

    async def all_requests() -> None:
        rests: list[asyncio.Future[Message]] = [asyncio.get_running_loop().create_future() for _ in range(22)]
        tasks = [asyncio.create_task(request(rest, "b" if rest is rests[-1] else "a")) for rest in rests]
        await asyncio.sleep(0)
        rests[0].set_result({"type": "http.disconnect"})
        for rest in rests[1:]:
            rest.set_result({"type": "http.request", "body": b"]"})
        sent = await asyncio.gather(*tasks)
        assert [messages[0]["status"] if messages else None for messages in sent] == [None] + [200] * 19 + [429, 200]
        refusal = dict(sent[-2][0]["headers"])
        assert (refusal[b"retry-after"], refusal[b"connection"]) == (b"1", b"close")

    for _ in range(2):  # all that was held has been given back
        asyncio.run(all_requests())


def test_a_slow_body_is_refused():
    guard = {"slow_s": 0.1, "slow_bytes_per_s": 1e9}
    sentence = refused(408, "request_timeout", [b" "] * 1000, guard=guard, pause_s=0.03)
    assert sentence.startswith("the body came too slowly, ")


def test_a_large_body_has_more_time():
    guard = {"slow_s": 0.3, "slow_bytes_per_s": 1000}
    assert guarded([b" " * 1000] * 5 + [b"1"], guard=guard, pause_s=0.07)[1] == [1]


def test_client_that_disconnects_gets_no_answer():
    found, bodies = guarded([b"[1", b","], cut=True)
    assert (found.status, bodies) == (None, [])


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({"content-type": ""}, "there is no Content-Type; send JSON with 'Content-Type: application/json'"),
        ({"content-type": "text/plain"}, "Content-Type is 'text/plain'; send JSON with"),
        (
            {"content-type": "application/x-www-form-urlencoded"},
            "Content-Type is 'application/x-www-form-urlencoded'; ",
        ),
        ({"content-type": "application/xml"}, "Content-Type is 'application/xml'; send JSON with"),
        ({"content-type": "application/json; charset=latin-1"}, "the body is in 'latin-1'; encode it as UTF-8"),
        ({"content-encoding": "gzip"}, "the body is compressed; send it as it is, without Content-Encoding"),
    ],
)
def test_other_types_are_refused(headers, sentence: str):
    assert refused(415, "unsupported_media_type", [b"{}"], headers={**JSON, **headers}).startswith(sentence)


def test_pages_cannot_write_schemas_unasked():
    """These types go from any web page to any server without a question (the Fetch standard's simple requests)."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        headers = {**JSON, "content-type": kind}
        refused(415, "unsupported_media_type", [b"<schema/>"], headers=headers, path="/v1/schemas")


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_some_methods_take_no_body(method: str):
    assert refused(400, "unexpected_body", [b"{}"], method=method) == f"{method} takes no body; leave it out"


def test_pml_text_is_accepted_on_schema_routes():
    text = '<schema name="s">Grüße</schema>'
    found, bodies = guarded([text.encode()], headers=XML, path="/v1/schemas")
    assert (found.status, bodies) == (200, [text])
    assert "is not UTF-8 from byte 1 on" in refused(
        400, "invalid_json", [b"\xff<"], headers=XML, path="/v1/schemas", closed=False
    )
    refused(413, "body_too_large", [b"<s>"] * 5, headers=XML, path="/v1/schemas/s", guard={"max_body_bytes": 10})


def test_xml_entity_bomb_makes_no_schema():
    bomb = '<!DOCTYPE s [<!ENTITY a "aaaaaaaaaa">' + "".join(
        f'<!ENTITY {here} "{f"&{before};" * 10}">' for before, here in zip("abcdefgh", "bcdefghi", strict=True)
    )
    _, (text,) = guarded([f'{bomb}]><schema name="s">&i;</schema>'.encode()], headers=XML, path="/v1/schemas")
    with raises("pml.forbidden_xml", InlayError):
        Schema.from_string(text)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"{", "the body is not JSON ("),
        (b'{"a": NaN}', "the body holds NaN"),
        (b'"\xc3"', "the body is not UTF-8 from byte 2 on"),
        (b"[" * 100_000, "the body nests lists and objects more than 64 deep"),
        (b"9" * 100_000, "the body holds a number of more than 4,300 digits"),
        (b'{"a": 1, "a": 2}', 'the body gives "a" twice'),
    ],
)
def test_invalid_json_is_rejected(data: bytes, sentence: str):
    assert refused(400, "invalid_json", [data], closed=False).startswith(sentence)


def test_slow_rejected_body_does_not_hold_the_connection():
    headers = {"content-type": "text/plain", "content-length": "1000000"}
    found, _ = guarded([b"x"] * 200, headers=headers, pause_s=0.1)
    assert (found.status, found.headers["connection"]) == (415, "close")
    assert found.taken < 20, "it was not read for longer than a second"


def test_small_rejected_body_keeps_the_connection():
    headers = {"content-type": "text/plain", "content-length": "65536"}
    found, _ = guarded([b"x" * 2**15] * 2, headers=headers)
    assert (found.status, found.taken, "connection" in found.headers) == (415, 2, False)
    found, _ = guarded([b"x"] * 65537, headers={**headers, "content-length": "65537"})
    assert (found.status, found.headers["connection"]) == (415, "close")
