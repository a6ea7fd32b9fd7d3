"""The tenant of a key, 401 for unknown keys, and changes of the file while the server runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from inlay import ParameterError
from inlay.api.failures import BodyError, failure_of
from inlay.server.limits import EVERYBODY, Limits
from inlay.server.routes import ROUTES
from inlay.server.tenants import AuthMiddleware, Tenants, editing
from tests.clock import ManualClock
from tests.server.server.asgi import Echo, send


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def key(path: Path) -> str:
    return add(path, "acme")


def add(path: Path, tenant: str, *, admin: bool = False) -> str:
    with editing(path) as keys:
        return keys.add(tenant, admin=admin)[0]


def revoke(path: Path, key: str) -> None:
    with editing(path) as keys:
        del keys.keys[key.split("-")[1]]


def known(tenants: Tenants, key: str) -> bool:
    try:
        tenants.of(f"Bearer {key}")
    except BodyError:
        return False
    return True


def test_key_determines_the_tenant(path: Path, key: str):
    with editing(path) as keys:
        keys.tenants["acme"].limits = Limits(max_tokens=7)
        salt = keys.tenants["acme"].salt
    other = add(path, "other", admin=True)
    tenants = Tenants.from_file(path)
    for header in (f"Bearer {key}", f"bearer   {key} "):
        tenant = tenants.of(header)
        assert (tenant.name, tenant.salt, tenant.limits, tenant.admin) == ("acme", salt, Limits(max_tokens=7), False)
    tenant = tenants.of(f"Bearer {other}")
    assert (tenant.name, tenant.admin) == ("other", True)
    assert tenant.salt not in (None, salt)
    assert tenants.names == {"acme", "other"}


def test_without_keys_every_request_is_accepted():
    tenants = Tenants.open()
    for header in (None, "Bearer sk-anything", "nonsense"):
        assert tenants.of(header) is EVERYBODY
    assert (EVERYBODY.name, EVERYBODY.salt, EVERYBODY.limits, EVERYBODY.admin) == ("public", None, Limits(), True)
    assert tenants.names == {"public"}


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (None, "there is no API key; send the header 'Authorization: Bearer KEY'"),
        ("", "the Authorization header is not of the form 'Bearer KEY'"),
        ("Bearer", "the Authorization header is not of the form 'Bearer KEY'"),
        ("Bearer ", "the Authorization header is not of the form 'Bearer KEY'"),
        ("Basic {key}", "the Authorization header is not of the form 'Bearer KEY'"),
        ("{key}", "the Authorization header is not of the form 'Bearer KEY'"),
        ("Bearer {key}x", "the API key is wrong or was revoked"),
        ("Bearer sk-secret", "the API key is wrong or was revoked"),
        ("Bearer inlay-00000000-\xff\xfe", "the API key is wrong or was revoked"),
    ],
)
def test_missing_or_wrong_key_gets_401(path: Path, key: str, header: str | None, sentence: str):
    app = Echo()
    headers = [] if header is None else [("authorization", header.format(key=key))]
    found = send(AuthMiddleware(app, Tenants.from_file(path)), headers=headers)
    assert not app.states
    assert (found.status, found.headers["www-authenticate"]) == (401, "Bearer")
    assert (found.error["type"], found.error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert found.error["message"].startswith(sentence)
    assert "secret" not in found.error["message"]
    assert "connection" not in found.headers  # nothing follows on it


@pytest.mark.parametrize("value", ["", "  "])
def test_empty_api_key_header_is_named(path: Path, key: str, value: str):
    app = Echo()
    found = send(AuthMiddleware(app, Tenants.from_file(path)), headers=[("x-api-key", value)])
    assert not app.states
    assert (found.status, found.error["code"]) == (401, "invalid_api_key")
    assert "x-api-key" in found.error["message"]
    assert "Authorization" not in found.error["message"]
    assert send(AuthMiddleware(app, Tenants.open()), headers=[("x-api-key", value)]).status == 200


def test_two_headers_are_refused(path: Path, key: str):
    headers = [("authorization", f"Bearer {key}"), ("authorization", "Bearer other")]
    found = send(AuthMiddleware(Echo(), Tenants.from_file(path)), headers=headers)
    assert (found.status, found.error["message"]) == (401, "there are several Authorization headers; send one")


def test_body_of_an_unknown_caller_is_dropped_within_bounds(path: Path, key: str):
    pieces = (b"x" * 2**16 for _ in range(10_000))
    found = send(AuthMiddleware(Echo(), Tenants.from_file(path)), pieces, headers={"transfer-encoding": "chunked"})
    assert (found.status, found.headers["connection"]) == (401, "close")
    assert found.taken == 32 * 16 + 1  # dropped, so that the client reads its answer


def test_tenant_is_passed_to_routes(path: Path, key: str):
    app = Echo()
    found = send(AuthMiddleware(app, Tenants.from_file(path)), headers={"authorization": f"Bearer {key}"})
    assert (found.status, app.states[0]["tenant"].name) == (200, "acme")


PROBES = ["/health", "/ready", "/version"]


def test_all_but_the_probes_and_the_page_need_a_key():
    assert {route.path for route in ROUTES if not route.needs_key} == {"/", "/page/{name}", *PROBES}


@pytest.mark.parametrize("path_asked", PROBES)
def test_probes_need_no_key(path: Path, key: str, path_asked: str):
    app = AuthMiddleware(Echo(), Tenants.from_file(path))
    assert send(app, method="GET", path=path_asked).status == 200
    for other in (f"{path_asked}/", f"{path_asked}x", f"/v1{path_asked}", path_asked.upper(), "/metrics", "/nowhere"):
        assert send(app, method="GET", path=other).status == 401


def test_keys_can_be_added_and_removed_at_run_time(path: Path, key: str):
    clock = ManualClock(100.0)
    tenants = Tenants.from_file(path, clock=clock)
    second = add(path, "late")
    revoke(path, key)
    assert (known(tenants, key), known(tenants, second)) == (True, False)  # looked at a moment ago
    clock.now += 1.0
    assert (known(tenants, key), known(tenants, second)) == (False, True)
    assert tenants.names == {"acme", "late"}


def test_key_file_is_checked_once_a_second_and_read_on_change(path: Path, key: str, monkeypatch):
    looks, opens, real_stat, real_open = [], [], os.stat, os.open
    clock = ManualClock(100.0)
    tenants = Tenants.from_file(path, clock=clock)

    def stat(name, *rest, **more):
        if name == path:
            looks.append(name)
        return real_stat(name, *rest, **more)

    def opening(name, *rest, **more):
        opens.append(name)
        return real_open(name, *rest, **more)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "open", opening)
    for _ in range(50):
        clock.now += 0.1
        assert known(tenants, key)
    assert len(looks) in (4, 5)
    assert not opens


@pytest.mark.parametrize("how", ["damaged", "unsafe", "gone"])
def test_broken_file_keeps_the_old_keys_and_is_logged_once(path: Path, key: str, how: str, caplog):
    clock = ManualClock(100.0)
    tenants = Tenants.from_file(path, clock=clock)
    good = path.read_bytes()
    breaks = {"damaged": lambda: path.write_text("{"), "unsafe": lambda: path.chmod(0o644), "gone": path.unlink}
    breaks[how]()
    with caplog.at_level(logging.INFO, logger="inlay"):
        for _ in range(5):
            clock.now += 1.0
            assert known(tenants, key)
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        assert errors[0].startswith(f"the keys file has changed and cannot be used; the old keys stay valid: {path}: ")
        path.write_bytes(good)
        path.chmod(0o600)
        revoke(path, key)
        clock.now += 1.0
        assert not known(tenants, key)
    assert key not in caplog.text


def test_a_server_does_not_start_without_its_file(path: Path):
    with pytest.raises(ParameterError, match="no such file; make it with inlay keys add"):
        Tenants.from_file(path)


def test_the_refusal_is_openais(path: Path, key: str):
    with pytest.raises(BodyError) as caught:
        Tenants.from_file(path).of(None)
    assert failure_of(caught.value).status == 401
