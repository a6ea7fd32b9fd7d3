"""API keys: how they are made and known again, and what a file of them says.

A key is ``inlay-ID-SECRET``. ID is public and finds the key's entry in one step; SECRET is 256 random bits. Nothing
keeps a key but its owner: there is a salted SHA-256 of it. A slow hash (bcrypt, argon2) makes guessing dear where
secrets come out of people's heads; 256 random bits are beyond guessing at any price, and every request is hashed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_serializer

from inlay.errors import ParameterError
from inlay.server.allowance import NO_LIMITS, Limits

#: The tenant of a server without keys; no other is called so.
PUBLIC = "public"

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


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TenantEntry(_Entry):
    """A tenant. salt: of its cache, in hexadecimal; chosen once, so that all its keys find what any of them left."""

    salt: _Salt
    limits: Annotated[Limits, BeforeValidator(_as_limits)] = NO_LIMITS

    @field_serializer("limits")
    def _named(self, limits: Limits) -> dict[str, Any]:
        return {name: value for name, value in asdict(limits).items() if value is not None}


class KeyEntry(_Entry):
    """A key. salt, sha256: of its hash, in hexadecimal. created: when, in UTC. admin: may change what is public."""

    tenant: str
    admin: bool
    salt: _Salt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: str


class KeyFile(_Entry):
    """What a file of keys says: tenants by name, keys by id. ``version`` is that of the file's form."""

    version: Literal[1]
    tenants: dict[Annotated[str, Field(pattern=_NAME)], TenantEntry] = Field(default_factory=dict)
    keys: dict[_KeyId, KeyEntry] = Field(default_factory=dict)

    def entry_of(self, key: str) -> KeyEntry | None:
        """The entry of a key, None if there is none. A wrong id takes as long as a wrong secret."""
        entry = self.keys.get(key.removeprefix(f"{_PREFIX}-").partition("-")[0])
        salt, expected = (_NOBODYS_SALT, _NOBODYS_HASH) if entry is None else (entry.salt, entry.sha256)
        return entry if hmac.compare_digest(_hashed(key, salt), expected) else None

    def add(self, tenant: str, *, admin: bool = False) -> tuple[str, str]:
        """Make a key for a tenant, and the tenant if there is none of that name. Returns the key and its id."""
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
    """Return a name that a tenant may have; metrics and logs show it. Raises ParameterError."""
    if name == PUBLIC:
        raise ParameterError(
            f"the tenant is {PUBLIC!r}, as everybody is called on a server without keys; give another name"
        )
    if not re.fullmatch(_NAME, name):
        raise ParameterError(
            f"the tenant is {name!r:.80}; write 1 to 64 letters, digits, dots, dashes and underscores, the first a "
            "letter or a digit"
        )
    return name


def _hashed(key: str, salt: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + key.encode()).hexdigest()
