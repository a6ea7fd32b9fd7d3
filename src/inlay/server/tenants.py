"""Finds the tenant of a request by its key, and checks keys, rate limits and the Host header in middlewares.

A key is ``inlay-ID-SECRET``. ID is public and finds the key's entry in one step. SECRET is 256 random bits. Only the
owner has the key: the file holds a salted SHA-256 of it. Slow hashes (bcrypt, argon2) protect passwords that people
choose. 256 random bits cannot be guessed, and every request computes the hash.

Other users cannot read the file, one process at a time changes it, and a crash never leaves a partial file.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_serializer
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inlay.api.failures import BodyError
from inlay.errors import ParameterError
from inlay.server.errors import has_body, refuse
from inlay.server.limits import EVERYBODY, NO_LIMITS, PUBLIC, Limits, Meter, Tenant
from inlay.server.routes import route_of
from inlay.whole_file import replace_file

_PREFIX = "inlay"
_ID_BYTES, _SECRET_BYTES, _SALT_BYTES = 4, 32, 16
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_NOBODYS_SALT, _NOBODYS_HASH = "00" * _SALT_BYTES, "00" * 32

_Salt = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * _SALT_BYTES}}}$")]
_KeyId = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * _ID_BYTES}}}$")]


def _as_limits(value: object) -> Limits:
    if not isinstance(value, Mapping):
        raise ValueError("limits are an object")
    known = [field.name for field in fields(Limits)]
    for name in value:
        if name not in known:
            raise ValueError(f"there is no limit {name!r:.60}; there are {', '.join(known)}")
    return Limits(**value)


class _StrictEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TenantEntry(_StrictEntry):
    """A tenant. ``salt`` is its hexadecimal cache_salt, chosen once, so that all its keys share one cache."""

    salt: _Salt
    limits: Annotated[Limits, BeforeValidator(_as_limits)] = NO_LIMITS

    @field_serializer("limits")
    def _named(self, limits: Limits) -> dict[str, Any]:
        return {name: value for name, value in asdict(limits).items() if value is not None}


class KeyEntry(_StrictEntry):
    """A key of a tenant.

    Args:
        tenant: the tenant's name.
        admin: the key may change public schemas and segments.
        salt: of the hash, in hexadecimal.
        sha256: the hash, in hexadecimal.
        created: the time in UTC.
    """

    tenant: str
    admin: bool
    salt: _Salt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: str


class KeyFile(_StrictEntry):
    """The content of a keys file: tenants by name, and keys by id. ``version`` is the version of the format."""

    version: Literal[1]
    tenants: dict[Annotated[str, Field(pattern=_NAME)], TenantEntry] = Field(default_factory=dict)
    keys: dict[_KeyId, KeyEntry] = Field(default_factory=dict)

    def entry_of(self, key: str) -> KeyEntry | None:
        """Return the entry of a key; None if there is none. A wrong id takes as long as a wrong secret."""
        entry = self.keys.get(key.removeprefix(f"{_PREFIX}-").partition("-")[0])
        salt, expected = (_NOBODYS_SALT, _NOBODYS_HASH) if entry is None else (entry.salt, entry.sha256)
        return entry if hmac.compare_digest(_hashed(key, salt), expected) else None

    def add(self, tenant: str, *, admin: bool = False) -> tuple[str, str]:
        """Create a key for a tenant, and the tenant if it is new. Returns the key and its id."""
        if tenant not in self.tenants:
            self.tenants[tenant] = TenantEntry(salt=secrets.token_hex(_SALT_BYTES))
        key_id = secrets.token_hex(_ID_BYTES)
        while key_id in self.keys:
            key_id = secrets.token_hex(_ID_BYTES)
        key, salt = f"{_PREFIX}-{key_id}-{secrets.token_urlsafe(_SECRET_BYTES)}", secrets.token_hex(_SALT_BYTES)
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.keys[key_id] = KeyEntry(tenant=tenant, admin=admin, salt=salt, sha256=_hashed(key, salt), created=created)
        return key, key_id


def check_tenant(name: str) -> str:
    """Return a valid tenant name. Metrics and logs show it. Raises ParameterError."""
    if name == PUBLIC:
        raise ParameterError(f"the tenant is {PUBLIC!r}, which is reserved for servers without keys; give another name")
    if not re.fullmatch(_NAME, name):
        raise ParameterError(
            f"the tenant is {name!r:.80}; write 1 to 64 letters, digits, dots, dashes and underscores, the first a "
            "letter or a digit"
        )
    return name


def _hashed(key: str, salt: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + key.encode()).hexdigest()


_MAX_BYTES = 64 * 2**20
_RESTORE = "correct it, or put a copy in its place"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies one state of a file without reading it."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # its mode may change alone

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_keys(path: Path) -> tuple[KeyFile, Stamp]:
    """Return the content of a keys file, and the state of the file.

    Raises ParameterError if it cannot be read, other users may read it, or it is damaged.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            _check_mode(path, found)
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise ParameterError(
                f"{path}: no such file; make it with inlay keys add --file {path} --tenant …"
            ) from None
        raise ParameterError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if len(data) > _MAX_BYTES:
        raise ParameterError(f"{path}: has more than {_MAX_BYTES:,} bytes, which no file of keys has; check the path")
    return _parsed(path, data), Stamp.of(found)


@contextmanager
def editing(path: Path) -> Iterator[KeyFile]:
    """Give the content of a keys file to change, and write it if the block succeeds. A missing file is empty.

    The folder is locked meanwhile instead of the file, because the file is replaced. Raises ParameterError.
    """
    with _locked(path):
        content = read_keys(path)[0] if path.exists() else KeyFile(version=1)
        yield content
        _write(path, content)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        folder = os.open(os.path.dirname(os.path.realpath(path)), os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        raise ParameterError(f"{path}: there is no folder {path.parent}; make it first") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would wait for a writer


def _check_mode(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ParameterError(f"{path}: is no regular file; check the path")
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(found.st_mode)
        raise ParameterError(f"{path}: others may read or change it (mode {mode:04o}); run chmod 600 {path}")


def _parsed(path: Path, data: bytes) -> KeyFile:
    try:
        content = KeyFile.model_validate_json(data)
    except ValidationError as error:
        raise ParameterError(f"{path}: {_sentence(error)}; {_RESTORE}") from None
    for key_id, key in content.keys.items():
        if key.tenant not in content.tenants:
            raise ParameterError(
                f"{path}: keys.{key_id} is of the tenant {key.tenant!r:.80}, which does not exist; {_RESTORE}"
            )
    return content


def _sentence(error: ValidationError) -> str:
    """Return the first problem, its place, and the number of further problems."""
    first, *more = error.errors(include_url=False, include_input=False)
    place = ".".join(str(part) for part in first["loc"] if part != "[key]")
    what = first["msg"].removeprefix("Value error, ")
    return f"{f'{place}: ' if place else ''}{what}{f' (and {len(more)} more)' if more else ''}"


def _write(path: Path, content: KeyFile) -> None:
    """Replace the file in one step. A symbolic link still points at it, and its owner stays the same."""
    try:  # root may edit a file that the server's user reads
        replace_file(Path(os.path.realpath(path)), f"{content.model_dump_json(indent=2)}\n".encode(), keep_owner=True)
    except OSError as error:
        raise ParameterError(f"{path}: cannot be written ({error.strerror}); nothing has changed") from None


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

    def of(self, authorization: str | None, *, from_api_key: bool = False) -> Tenant:
        """Return the tenant for an Authorization header, or for None without one. Raises BodyError with status 401.

        Args:
            from_api_key: True if the header was made of an ``x-api-key`` header, which errors then name.
        """
        if self._path is None and not self._operator:
            return EVERYBODY
        if self._path is not None:
            self._look_again(self._path)
        if authorization is None:
            raise _stranger(f"there is no API key; {_SEND}")
        scheme, _, key = authorization.strip().partition(" ")
        if from_api_key and not key.strip():
            raise _stranger("the x-api-key header is empty; send the header 'x-api-key: KEY'")
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
        """Return True if this is one of the operator's keys. Takes the same time for every key."""
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
                authorization, from_api_key = _authorization(scope)
                tenant = self._tenants.of(authorization, from_api_key=from_api_key)
                scope.setdefault("state", {})["tenant"] = tenant
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


def _authorization(scope: Scope) -> tuple[str | None, bool]:
    """Return the Authorization header, or one made of Anthropic's ``x-api-key``, and True in the second case.

    Raises BodyError for several keys, because a proxy may have checked another one.
    """
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) > 1:
        raise _stranger("there are several Authorization headers; send one")
    from_api_key = not values
    values += [b"Bearer " + value.strip() for name, value in scope["headers"] if name == b"x-api-key"]
    if len(set(values)) > 1:
        raise _stranger("there are several keys, in Authorization and x-api-key headers; send one")
    return (values[0].decode("latin-1"), from_api_key) if values else (None, False)


def _stamp(path: Path) -> Stamp | None:
    try:
        return Stamp.of(os.stat(path))
    except OSError:
        return None


def _stranger(message: str) -> BodyError:
    return BodyError(message, code="invalid_api_key", status=401)
