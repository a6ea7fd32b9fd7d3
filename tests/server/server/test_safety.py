"""The whole server over HTTP against hostile clients: every refusal is an OpenAI error, with a sentence."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.server.site import CHAT, COMPLETIONS, JSON, PAGE, SCHEMAS, Site, read, refused, serving, with_keys

XML = {"Content-Type": "application/xml"}
MIB = 2**20


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    yield from with_keys(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def open_site() -> Iterator[Site]:
    yield from serving({}, cors_origins=(PAGE,))


@pytest.mark.parametrize("key", [None, "nobody", "inlay-00000000-x"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", SCHEMAS),
        ("GET", "/no"),
    ],
)
def test_request_without_a_valid_key_is_rejected(site: Site, method: str, path: str, key: str | None):
    answer = site.call(method, path, {"prompt": "x"} if method == "POST" else None, key=key)
    refused(answer, 401, "invalid_api_key")
    assert answer[1]["www-authenticate"] == "Bearer"


def test_probes_need_no_key(site: Site):
    for path in ("/health", "/version"):
        assert site.call("GET", path, key=None)[0] == 200


BAD: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, "invalid_value"),
    "half an object": (b"{", 400, "invalid_json"),
    "a list": (b"[]", 400, "invalid_value"),
    "a text": (b'"text"', 400, "invalid_value"),
    "no UTF-8": (b'{"prompt": "\xff\xfe"}', 400, "invalid_json"),
    "half a character": (b'{"prompt": "\\ud800"}', 400, "invalid_json"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', 400, "invalid_json"),
    "Infinity": (b'{"prompt": "x", "temperature": -Infinity}', 400, "invalid_json"),
    "beyond floats": (b'{"prompt": "x", "temperature": 1e999}', 400, "invalid_value"),
    "too cold": (b'{"prompt": "x", "temperature": -1}', 400, "invalid_value"),
    "negative tokens": (b'{"prompt": "x", "max_tokens": -5}', 400, "invalid_value"),
    "very many answers": (b'{"prompt": "x", "n": 1' + b"0" * 30 + b"}", 400, "invalid_value"),
    "a hundred thousand digits": (b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}", 400, "invalid_json"),
    "a key twice": (b'{"prompt": "x", "prompt": "y"}', 400, "invalid_json"),
    "deep lists": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "invalid_json"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400, "invalid_json"),
    "many objects": (b'{"prompt": [' + b"{}," * 200_000 + b"{}]}", 400, "invalid_json"),
    "infinite tokens": (b'{"prompt": [1e999]}', 400, "invalid_value"),
    "negative ids": (b'{"prompt": [-1]}', 400, "prompt.unknown_token"),
    "enormous ids": (b'{"prompt": [' + b"9" * 4000 + b"]}", 400, "prompt.unknown_token"),
    "an infinite schema": (
        b'{"prompt": "x", "structured_outputs": {"json": {"type": "number", "maximum": 1e999}}}',
        400,
        "invalid_value",
    ),
    "another model": (b'{"prompt": "x", "model": "gpt-4"}', 404, "model_not_found"),
    "a salt": (b'{"prompt": "x", "cache_salt": "y"}', 400, "unsupported_field"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_bodies_are_rejected(site: Site, name: str):
    data, status, code = BAD[name]
    refused(site.call("POST", COMPLETIONS, data), status, code)


@given(data=st.binary(max_size=200) | st.text(alphabet='{}[]":,\\0123456789eE.-aprompt ', max_size=80).map(str.encode))
def test_fuzzed_bodies_are_rejected(site: Site, data: bytes):
    for path, kind in ((COMPLETIONS, JSON), (SCHEMAS, JSON), (SCHEMAS, XML)):
        status, _, answer = site.call("POST", path, data, headers=kind)
        assert 400 <= status < 500
        assert answer["error"]["message"]


def test_connection_survives_rejected_requests(site: Site):
    good, bad = json.dumps({"prompt": "x", "max_tokens": 1}).encode(), b"{"
    strange = {"Authorization": "Bearer nobody"}
    with closing(HTTPConnection("127.0.0.1", site.port, timeout=30)) as connection:
        for data, headers, expected in (
            (bad, {}, 400),
            (good, strange, 401),
            (good, {"Content-Type": "x"}, 415),
            (good, {}, 200),
        ):
            connection.request("POST", COMPLETIONS, data, {**JSON, **site.headers("ann"), **headers})
            status, named, _ = read(connection.getresponse())
            assert (status, named.get("connection")) == (expected, None)


def test_unsupported_media_types_are_rejected(site: Site):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/xml"):
        answer = site.call("POST", COMPLETIONS, b'{"prompt": "x"}', headers={"Content-Type": kind})
        refused(answer, 415, "unsupported_media_type")


def test_entity_bomb_and_server_files_are_rejected(site: Site):
    names = zip("abcdefgh", "bcdefghi", strict=True)
    bomb = "".join(f'<!ENTITY {here} "{f"&{before};" * 10}">' for before, here in names)
    for entities in (bomb, '<!ENTITY i SYSTEM "file:///etc/passwd">'):
        data = f'<!DOCTYPE s [{entities}]><schema name="s"><module name="m">&i;</module></schema>'.encode()
        assert "a DOCTYPE is not allowed" in refused(
            site.call("POST", SCHEMAS, data, headers=XML), 400, "invalid_schema"
        )


def upload(site: Site, key: str, framing: str, piece: bytes) -> tuple[bytes, int]:
    """Send 100 MiB without reading meanwhile. Returns the response and the number of bytes sent."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n"
    bearer = f"Authorization: {site.headers(key)['Authorization']}\r\n\r\n"
    sent, answer = 0, b""
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as client:
        with suppress(OSError):
            client.sendall((head + bearer).encode())
            while sent < 100 * MIB:
                client.sendall(piece)
                sent += len(piece)
        with suppress(OSError):
            while more := client.recv(2**16):
                answer += more
    return answer, sent


@pytest.mark.parametrize(("key", "code"), [("ann", "body_too_large"), ("nobody", "invalid_api_key")])
@pytest.mark.parametrize("framing", [f"Content-Length: {100 * MIB}", "Transfer-Encoding: chunked"])
def test_huge_body_is_rejected_early(site: Site, framing: str, key: str, code: str):
    piece = b" " * 2**16
    answer, sent = upload(site, key, framing, piece if "Length" in framing else b"10000\r\n" + piece + b"\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 " if key == "ann" else b"HTTP/1.1 401 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == code
    assert sent < 60 * MIB  # the bytes that are read, thrown away, or buffered by the system


def test_expect_continue_is_rejected_before_the_body_is_sent(site: Site):
    request = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        f"Content-Length: {100 * MIB}\r\nAuthorization: Bearer {site.keys['ann']}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as client:
        client.sendall(request.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_huge_headers_are_refused_by_the_server(site: Site):
    """The bound is h11's, before there is a request: no JSON, but an end."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 70_000)
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        with suppress(ConnectionResetError):
            while client.recv(2**16):
                pass


def test_other_origins_get_no_cors_headers(site: Site, open_site: Site):
    ask = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for server, origin, allowed in (
        (site, PAGE, None),
        (open_site, PAGE, PAGE),
        (open_site, "https://x.example", None),
    ):
        status, headers, _ = server.call("OPTIONS", CHAT, key=None, headers={**ask, "Origin": origin})
        assert headers.get("access-control-allow-origin") == allowed
        assert (status == 200) == (allowed is not None)
    status, headers, _ = open_site.call("GET", "/v1/models", key=None, headers={"Origin": PAGE})
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "access-control-allow-origin" not in site.call("GET", "/v1/models", headers={"Origin": PAGE})[1]


def test_rebound_host_name_is_rejected(site: Site, open_site: Site):
    headers = {"Host": f"evil.example:{open_site.port}"}
    refused(open_site.call("GET", "/v1/models", headers=headers), 421, "misdirected_request")
    assert open_site.call("GET", "/v1/models", headers={"Host": "localhost"})[0] == 200
    assert site.call("GET", "/v1/models", headers=headers)[0] == 200  # it would need a key


def test_head_is_get_without_its_body(open_site: Site):
    for path in ("/health", "/v1/models", "/version", "/metrics", "/openapi.json", SCHEMAS, "/v1/none"):
        (found, named, _), (status, headers, body) = (open_site.call(method, path) for method in ("GET", "HEAD"))
        assert (status, body) == (found, b"")
        assert set(headers) == set(named)
        assert path == "/metrics" or headers["content-length"] == named["content-length"]
    assert open_site.call("HEAD", CHAT)[0] == 405


def test_a_probe_over_an_old_protocol_is_answered(open_site: Site):
    for path, status in (("/health", b"200"), ("/v1/models", b"421")):
        with socket.create_connection(("127.0.0.1", open_site.port), timeout=30) as client:
            client.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert client.recv(100).split()[1] == status


def test_cors_exposes_limit_and_location_headers(open_site: Site):
    exposed = open_site.call("GET", "/v1/models", headers={"Origin": PAGE})[1]["access-control-expose-headers"]
    names = {name.strip().lower() for name in exposed.split(",")}
    limits = {f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")}
    assert {"etag", "location", "retry-after", "x-request-id", *limits} <= names
