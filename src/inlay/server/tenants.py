"""Who asks: from the key of a request to its tenant, and a middleware that lets nobody else further."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from inlay.api.failures import BodyError
from inlay.errors import ParameterError
from inlay.server.errors import refuse
from inlay.server.keys import PUBLIC, KeyFile, Stamp, read_keys
from inlay.server.limits import NO_LIMITS, Limits

logger = logging.getLogger(__name__)

#: Answered without a key: probes have none.
OPEN_PATHS = frozenset({"/health", "/ready", "/version"})

_LOOK_EVERY_S = 1.0
_SEND = "send the header 'Authorization: Bearer KEY'"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks.

    salt: keeps the KV of its requests apart (``cache_salt``); None on a server without keys.
    admin: whether it may change what is public.
    """

    name: str
    salt: str | None = field(default=None, repr=False)
    limits: Limits = NO_LIMITS
    admin: bool = False


#: Everybody, on a server without keys.
EVERYBODY = Tenant(PUBLIC, admin=True)


class Tenants:
    """The tenants of a server. One event loop's.

    clock: seconds that never go back.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._keys = KeyFile(version=1)
        self._stamp: Stamp | None = None
        if path is not None:
            self._keys, self._stamp = read_keys(path)
        self._looked_at = clock()

    @classmethod
    def open(cls) -> Tenants:
        """No keys: every request is EVERYBODY's."""
        return cls(None)

    @classmethod
    def from_file(cls, path: Path, *, clock: Callable[[], float] = time.monotonic) -> Tenants:
        """The tenants of a file of keys, which is read again when it changes. Raises ParameterError."""
        return cls(path, clock)

    @property
    def names(self) -> frozenset[str]:
        """Of all tenants that there are now."""
        return frozenset({PUBLIC} if self._path is None else self._keys.tenants)

    def of(self, authorization: str | None) -> Tenant:
        """Whose request has this Authorization header, or none. Raises BodyError with status 401."""
        if self._path is None:
            return EVERYBODY
        self._look_again(self._path)
        if authorization is None:
            raise _stranger(f"there is no API key; {_SEND}")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _stranger(f"the Authorization header is not of the form 'Bearer KEY'; {_SEND}")
        entry = self._keys.entry_of(key.strip())
        if entry is None:
            raise _stranger("the API key is wrong or was revoked; ask the operator of this server for another")
        tenant = self._keys.tenants[entry.tenant]
        return Tenant(entry.tenant, tenant.salt, tenant.limits, entry.admin)

    def _look_again(self, path: Path) -> None:
        """Take up what ``inlay keys`` has changed. What cannot be read changes nothing, and is said once."""
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
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("%s has changed and was read again: %d keys", path, len(self._keys.keys))


class Authenticate:
    """ASGI middleware: sets ``scope["state"]["tenant"]``, and answers 401 where a request has no key that is known."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope.setdefault("state", {})["tenant"] = self._tenants.of(_authorization(scope))
            except BodyError as error:
                await refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    """The Authorization header. Raises BodyError where there are several, of which a proxy may have seen another."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) > 1:
        raise _stranger("there are several Authorization headers; send one")
    return values[0].decode("latin-1") if values else None


def _stamp(path: Path) -> Stamp | None:
    try:
        return Stamp.of(os.stat(path))
    except OSError:
        return None


def _stranger(message: str) -> BodyError:
    return BodyError(message, code="invalid_api_key", status=401)
