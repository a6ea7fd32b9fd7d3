"""Who may use how much of a server: tenants and their limits, which ``inlay keys`` writes down."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from inlay.errors import ParameterError
from inlay.policy import LEVELS

#: How much approximation requests may ask for, from none to all; the words of ``--max-reuse``.
CEILINGS = LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one tenant may use, all its keys together; None for no limit. Raises ParameterError.

    requests_per_minute, tokens_per_minute: of prompts and of answers together.
    max_concurrent: answers at the same time; a request without answers of its own counts as one.
    max_reuse: the most approximation that a request may ask for, a word of CEILINGS.
    max_tokens: the most that one answer may have.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_reuse: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is None:
                continue
            if limit.name == "max_reuse":
                if value not in CEILINGS:
                    raise ParameterError(f"max_reuse is {value!r}; use one of {', '.join(CEILINGS)}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"{limit.name} is {value!r}; it must be a whole number of at least 1")


NO_LIMITS = Limits()

#: The name of everybody on a server without keys, which no tenant of keys can have.
PUBLIC = "public"


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
