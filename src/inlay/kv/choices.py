"""Values that settings of the cache may have. Every command reads them, so this file imports no NumPy."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from urllib.parse import urlsplit, urlunsplit

from inlay.errors import ParameterError
from inlay.wording import show

ROUNDED = ("int8", "fp8")  # KV dtypes that count as another model
CODEC_NAMES = ("none", "int8", "fp8")

#: URL schemes and their names in redis-py. Valkey speaks the same protocol.
SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}


class Kept(Enum):
    """Which segments the tiers below the pool may hold. Host memory may hold all: it ends with the process."""

    SCHEMAS = "schemas"  # those of public schemas
    UNSALTED = "unsalted"  # parts of messages, too, of requests without a cache_salt
    ALL = "all"  # private schemas, and parts of messages of requests with a cache_salt, too


def check_address(name: str, address: object) -> None:
    """Check the form of a server address. Raises ParameterError."""
    try:
        parts = urlsplit(address) if isinstance(address, str) else None
        right = (
            parts is not None
            and parts.scheme in SCHEMES
            and bool(parts.path if parts.scheme == "unix" else parts.hostname)
        )
        right = right and parts is not None and (parts.port is None or parts.port > 0)
    except ValueError:
        right = False
    if not right:
        said = without_password(address) if isinstance(address, str) else address
        raise ParameterError(
            f"{name} is {show(said)}; give an address like 'redis://host:6379/0', or None for none",
            code="cache.invalid_address",
        )


def without_password(address: str) -> str:
    """An address without its password, for messages."""
    with suppress(ValueError):
        parts = urlsplit(address)
        if "@" in parts.netloc:
            address = urlunsplit(parts._replace(netloc="…@" + parts.netloc.rpartition("@")[2]))
        return address.partition("?")[0]
    return "…"
