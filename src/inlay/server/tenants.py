"""Finds the tenant of a request by its key, and checks keys, rate limits and the Host header in middlewares."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inlay.api.failures import BodyError
from inlay.errors import ParameterError
from inlay.server.errors import has_body, refuse
from inlay.server.keys import KeyFile, Stamp, read_keys
from inlay.server.limits import EVERYBODY, NO_LIMITS, PUBLIC, Meter, Tenant
from inlay.server.routes import route_of

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_SEND = "send the header 'Authorization: Bearer KEY'"


class Tenants:
    """The tenants of a server. Use it from one event loop.

    Args:
        path: the keys file, which is read again when it changes; None for none.
        api_keys: the operator's keys. Requests with them belong to EVERYBODY. Without file and keys, all requests do.
        clock: monotonic seconds.

    Raises:
        ParameterError: the file cannot be read.
    """

    def __init__(
        self, path: Path | None, api_keys: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._operator = [_digest(key) for key in api_keys]
        self._clock = clock
        self._keys = KeyFile(version=1)
        self._stamp: Stamp | None = None
        if path is not None:
            self._keys, self._stamp = read_keys(path)
        self._looked_at = clock()

    @classmethod
    def open(cls) -> Tenants:
        """Return tenants without keys: every request belongs to EVERYBODY."""
        return cls(None)

    @classmethod
    def from_file(cls, path: Path, *, clock: Callable[[], float] = time.monotonic) -> Tenants:
        """Return the tenants of a keys file. Raises ParameterError."""
        return cls(path, clock=clock)

    @property
    def names(self) -> frozenset[str]:
        """The names of all current tenants."""
        own = {PUBLIC} if self._operator or self._path is None else set()
        return frozenset(own | set(self._keys.tenants))

    def of(self, authorization: str | None) -> Tenant:
        """Return the tenant for an Authorization header, or for None without one. Raises BodyError with status 401."""
        if self._path is None and not self._operator:
            return EVERYBODY
        if self._path is not None:
            self._look_again(self._path)
        if authorization is None:
            raise _stranger(f"there is no API key; {_SEND}")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _stranger(f"the Authorization header is not of the form 'Bearer KEY'; {_SEND}")
        if self._is_operators(key.strip()):
            return EVERYBODY
        entry = self._keys.entry_of(key.strip())
        if entry is None:
            raise _stranger("the API key is wrong or was revoked; ask the operator of this server for another")
        tenant = self._keys.tenants[entry.tenant]
        return Tenant(entry.tenant, tenant.salt, tenant.limits, entry.admin)

    def _is_operators(self, key: str) -> bool:
        """Compares with all keys in constant time, so that timing reveals nothing about them."""
        given = _digest(key)
        return sum(hmac.compare_digest(given, one) for one in self._operator) > 0

    def _look_again(self, path: Path) -> None:
        """Read the file again if it has changed. A file that cannot be read changes nothing and is logged once."""
        now = self._clock()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = _stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys, self._stamp = read_keys(path)
        except ParameterError as error:
            logger.error("the keys file has changed and cannot be used; the old keys stay valid: %s", error)
        else:
            logger.info("%s has changed and was read again; it has %d keys", path, len(self._keys.keys))


class AuthMiddleware:
    """ASGI middleware: sets ``scope["state"]["tenant"]``. It answers 401 to a request without a valid key."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_of(scope["path"]).needs_key:
            try:
                scope.setdefault("state", {})["tenant"] = self._tenants.of(_authorization(scope))
            except BodyError as error:
                await refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


class RateLimitMiddleware:
    """ASGI middleware: adds rate limit headers to responses for tenants with limits. Place it inside AuthMiddleware.

    If a limit is used up, it refuses a request with a body before the body is read. Only metered requests have a body.
    """

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope.get("state", {}).get("tenant") if scope["type"] == "http" else None
        if tenant is None or tenant.limits == NO_LIMITS:
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                dialect = route_of(scope["path"]).dialect
                MutableHeaders(scope=message).update(dialect.limit_headers(self._meter.levels(tenant)))
            await send(message)

        try:
            if has_body(scope):
                self._meter.check(tenant, tokens=route_of(scope["path"]).uses_tokens)
        except BodyError as error:
            await refuse(error, scope, receive, sending)
        else:
            await self._app(scope, receive, sending)


class LocalHostMiddleware:
    """ASGI middleware: answers 421 to requests for any host but localhost and loopback addresses.

    It is for a server without keys that listens on this machine only. A web page can make its own host name resolve to
    127.0.0.1 ("DNS rebinding"). Its scripts can then call a local server as their own origin. They cannot change the
    Host header, which still holds the page's host name. Probes need no Host header.

    Starlette's TrustedHostMiddleware does not fit. It knows names and "*.name", but not all of 127.0.0.0/8. It reads
    "[" as the host of "[::1]:8000", requires a Host from probes, and its answer 400 does not say what to do.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("host")
            host = given or ""
            probed = given is None and route_of(scope["path"]).probe
            if not probed and not is_local(host):
                message = (
                    f"the Host is {host!r:.80}, but a server without keys answers only to localhost; write localhost, "
                    "or start the server with --keys or --open-to-network"
                )
                await refuse(BodyError(message, code="misdirected_request", status=421), scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_local(host: str) -> bool:
    """True if a Host header names localhost or a loopback address."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_api_key(key: str) -> str:
    """Return the key if clients can send it as ``Authorization: Bearer KEY``.

    Raises ParameterError without the key in it.
    """
    if not re.fullmatch(r"[!-~]+", key):
        raise ParameterError(
            "an API key is empty, or has a space or a character that headers cannot hold; write letters, digits and "
            "signs of ASCII"
        )
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _authorization(scope: Scope) -> str | None:
    """Return the Authorization header, or one made of Anthropic's ``x-api-key``.

    Raises BodyError for several keys, because a proxy may have checked another one.
    """
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) > 1:
        raise _stranger("there are several Authorization headers; send one")
    values += [b"Bearer " + value.strip() for name, value in scope["headers"] if name == b"x-api-key"]
    if len(set(values)) > 1:
        raise _stranger("there are several keys, in Authorization and x-api-key headers; send one")
    return values[0].decode("latin-1") if values else None


def _stamp(path: Path) -> Stamp | None:
    try:
        return Stamp.of(os.stat(path))
    except OSError:
        return None


def _stranger(message: str) -> BodyError:
    return BodyError(message, code="invalid_api_key", status=401)
