"""The limits of tenants, which ``inlay keys`` stores, and the meter that admits requests within them.

The limits per minute are token buckets. A bucket holds a minute's worth, is full at the start, and fills evenly. So at
most ``limit × (1 + t / 60)`` requests are admitted in any span of t seconds.

Tokens are paid when they are used: prompt tokens with the first update of the prompt, answer tokens as they arrive. The
tokens that a running request may still use are reserved. A request is admitted while its tenant's bucket holds more
tokens than its other requests have reserved. So a tenant that sends one request at a time is admitted until its bucket
is empty, whatever the size of the request. Parallel requests together use at most the content of the bucket and one
request more. A reservation shrinks as tokens are paid, and ends with its request. So a short answer does not keep other
requests waiting for the tokens that it never used.

Every answer takes a slot: a request of 64 prompts with 8 answers each takes 512 (``max_concurrent``). In addition, a
tenant may have at most as many running answers as slots remain free for others. That is half of all slots for a single
tenant, and a third for each of two. So a tenant without running requests always finds a free slot in the engine's
queue.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields

from inlay.api.call import Level
from inlay.api.failures import BodyError
from inlay.api.openai.respond import duration
from inlay.errors import ParameterError
from inlay.policy import CEILINGS as CEILINGS

_MINUTE_NS = 60 * 10**9
_BUSY_RETRY_S = 1.0  # a slot is free as soon as one of the tenant's requests ends

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one tenant, for all its keys together. None means no limit. Raises ParameterError.

    Args:
        requests_per_minute: requests.
        tokens_per_minute: tokens of prompts and answers together.
        max_concurrent: answers at the same time. A request without answers of its own counts as one.
        max_reuse: the most approximation that a request may ask for, one of CEILINGS.
        max_tokens: the most tokens of one answer.
        max_pinned_bytes: bytes of the KV pool that its pins may take; None for the server's limit for all pins.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_reuse: str | None = None
    max_tokens: int | None = None
    max_pinned_bytes: int | None = None

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

#: The tenant name of all callers on a server without keys. No keys file can have a tenant of this name.
PUBLIC = "public"


@dataclass(frozen=True, slots=True)
class Tenant:
    """The caller of a request.

    Args:
        name: the tenant's name.
        salt: the ``cache_salt`` that keeps its KV apart; None on a server without keys.
        limits: see Limits.
        admin: the tenant may change public schemas.
    """

    name: str
    salt: str | None = field(default=None, repr=False)
    limits: Limits = NO_LIMITS
    admin: bool = False

    @property
    def owner(self) -> str:
        """The owner of its stored answers: another tenant of the same name has another salt."""
        return self.name if self.salt is None else f"{self.name}/{self.salt}"


#: The tenant of every request on a server without keys.
EVERYBODY = Tenant(PUBLIC, admin=True)


class Bucket:
    """A token bucket that holds a minute's worth and fills evenly. It may be in debt.

    It counts in integers, so nothing is lost to rounding: one piece is as many units as a minute has nanoseconds.
    """

    def __init__(self, per_minute: int, now: int) -> None:
        self.per_minute = per_minute
        self._units = per_minute * _MINUTE_NS
        self._at = now

    def holds(self, now: int) -> int:
        """Return the whole pieces that it holds at a time in nanoseconds. A negative number is a debt."""
        return self._filled(now) // _MINUTE_NS

    def take(self, pieces: int, now: int) -> None:
        self._filled(now)
        self._units -= pieces * _MINUTE_NS

    def seconds_until(self, pieces: int, now: int) -> float:
        """Return the seconds until it holds this many pieces."""
        return max(0, pieces * _MINUTE_NS - self._filled(now)) / self.per_minute / 1e9

    def resize(self, per_minute: int, now: int) -> None:
        """Fill it at another rate from now on. Its content or debt stays, up to the new size."""
        self._filled(now)
        self.per_minute = per_minute

    def _filled(self, now: int) -> int:
        self._units = min(self.per_minute * _MINUTE_NS, self._units + (now - self._at) * self.per_minute)
        self._at = now
        return self._units


class Account:
    """The usage of one tenant: its running ``answers``, and the tokens ``reserved`` for them."""

    def __init__(self) -> None:
        self.answers = 0
        self.reserved = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def adopt(self, limits: Limits, now: int) -> None:
        """Apply these limits from now on. They differ from the old ones if the keys file has changed."""
        self.requests = _fitted(self.requests, limits.requests_per_minute, now)
        self.tokens = _fitted(self.tokens, limits.tokens_per_minute, now)


class AdmittedRequest:
    """An admitted request. It has one slot until ``hold`` takes the slots of its other answers."""

    def __init__(self, meter: Meter, account: Account, tenant: Tenant) -> None:
        self._meter = meter
        self._account = account
        self._tenant = tenant
        self._answers = 1
        self._reserved = 0
        self._paid = 0

    def hold(self, *, answers: int = 1, tokens: int = 0) -> None:
        """Take slots for all answers of the request, and reserve the tokens that it may use.

        Raises:
            BodyError: status 429 with retry_after_s if there is no room now; 403 or 400 if there never is.
        """
        self._meter.check_room(self._tenant, self._account, answers, answers - self._answers)
        if tokens:
            self._meter.check_tokens(self._account)
        self._meter.answers += answers - self._answers
        self._account.answers += answers - self._answers
        self._account.reserved += tokens
        self._answers, self._reserved = answers, self._reserved + tokens

    def tokens(self, count: int) -> None:
        """Pay for used tokens."""
        self._paid += count
        if self._account.tokens is not None:
            self._account.tokens.take(count, self._meter.clock())
        self._release(min(count, self._reserved))

    def used(self, total: int) -> None:
        """Pay for the tokens since the last call. ``total`` counts all tokens of the request so far."""
        if total > self._paid:
            self.tokens(total - self._paid)

    def end(self) -> None:
        """Release the slots and the unused reservation."""
        self._meter.answers -= self._answers
        self._account.answers -= self._answers
        self._release(self._reserved)

    def _release(self, tokens: int) -> None:
        self._account.reserved -= tokens
        self._reserved -= tokens


class Meter:
    """Admits requests and counts their usage. Use it from one event loop. It never awaits, so each call is atomic.

    Args:
        clock: monotonic nanoseconds.
        places: the number of answers that may run or wait, shared among the tenants; None for no limit.
    """

    def __init__(self, clock: Clock = time.monotonic_ns, *, places: int | None = None) -> None:
        self.clock = clock
        self.answers = 0  # running answers of all tenants
        self._places = places
        self._accounts: dict[str, Account] = {}

    @asynccontextmanager
    async def request(self, tenant: Tenant, *, tokens: bool = True) -> AsyncIterator[AdmittedRequest]:
        """Hold a slot for one request of a tenant, until the block ends.

        Args:
            tenant: the caller.
            tokens: the request may use tokens. A request that uses none is admitted even if the tokens are used up.

        Raises:
            BodyError: status 429 with retry_after_s, the tenant's limit is reached.
        """
        account = self.account(tenant)
        self.check_room(tenant, account, 1, 1)
        self._check_bucket("requests", account.requests)
        if tokens:
            self.check_tokens(account)
        if account.requests is not None:
            account.requests.take(1, self.clock())
        self.answers += 1
        account.answers += 1
        admitted = AdmittedRequest(self, account, tenant)
        try:
            yield admitted
        finally:
            admitted.end()

    def count(self, tenant: Tenant) -> None:
        """Count a request that only shows the server's state. It needs no slot, so it is answered under full load.

        Raises:
            BodyError: status 429 with retry_after_s, the tenant's requests per minute are used up.
        """
        requests = self.account(tenant).requests
        self._check_bucket("requests", requests)
        if requests is not None:
            requests.take(1, self.clock())

    def levels(self, tenant: Tenant) -> list[Level]:
        """Return the state of each limit per minute."""
        account, now = self.account(tenant), self.clock()
        buckets = {"requests": (account.requests, 0), "tokens": (account.tokens, account.reserved)}
        return [
            Level(
                name,
                bucket.per_minute,
                max(0, bucket.holds(now) - reserved),
                bucket.seconds_until(bucket.per_minute, now),
            )
            for name, (bucket, reserved) in buckets.items()
            if bucket is not None
        ]

    def check(self, tenant: Tenant, *, tokens: bool = True) -> None:
        """Raise BodyError if any request of the tenant would be refused now. It uses nothing.

        For ``tokens`` see ``request``.
        """
        account = self.account(tenant)
        self.check_room(tenant, account, 1, 1)
        self._check_bucket("requests", account.requests)
        if tokens:
            self._check_bucket("tokens", account.tokens)

    def check_room(self, tenant: Tenant, account: Account, answers: int, more: int) -> None:
        """Raise BodyError if there are not enough slots for a request.

        Args:
            tenant: the caller.
            account: the caller's usage.
            answers: all answers of the request.
            more: its answers that have no slot yet.
        """
        most = tenant.limits.max_concurrent
        if most is not None and answers > most:
            message = f"the request asks for {answers:,} answers, but your key allows {most:,} at the same time"
            raise BodyError(f"{message}; ask for fewer", param="n", code="max_concurrent_not_allowed", status=403)
        if most is not None and account.answers + more > most:
            raise _too_many(
                f"your key allows {most:,} answers at the same time, and all are running; wait for one to end",
                _BUSY_RETRY_S,
            )
        if self._places is None:
            return
        share = max(1, self._places // 2)
        if answers > share:
            message = f"the request asks for {answers:,} answers, but one tenant may have {share:,} at the same time"
            raise BodyError(f"{message}; split it into several requests", param="n")
        if account.answers + more > max(1, self._places - self.answers - more):
            raise BodyError(
                f"{account.answers:,} of your answers run or wait, and the free slots are for other tenants; "
                "wait for one to end",
                code="queue_full",
                status=429,
                retry_after_s=_BUSY_RETRY_S,
            )

    def check_tokens(self, account: Account) -> None:
        """Raise BodyError if the tenant has no tokens left to start a request."""
        self._check_bucket("tokens", account.tokens)
        bucket = account.tokens
        if bucket is not None and bucket.holds(self.clock()) - account.reserved < 1:
            raise _too_many(
                f"your running requests have reserved the rest of your {bucket.per_minute:,} tokens a minute; "
                "wait for one to end, or give them smaller max_tokens",
                _BUSY_RETRY_S,
            )

    def _check_bucket(self, name: str, bucket: Bucket | None) -> None:
        now = self.clock()
        if bucket is not None and bucket.holds(now) < 1:
            wait = bucket.seconds_until(1, now)
            raise _too_many(f"your {bucket.per_minute:,} {name} a minute are used up; wait {duration(wait)}", wait)

    def account(self, tenant: Tenant) -> Account:
        account = self._accounts.setdefault(tenant.name, Account())
        account.adopt(tenant.limits, self.clock())
        return account


def _fitted(bucket: Bucket | None, per_minute: int | None, now: int) -> Bucket | None:
    """Return the bucket for a limit: the existing one at the new rate, or a new full one. None without a limit."""
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    return bucket


def _too_many(message: str, wait_s: float) -> BodyError:
    return BodyError(message, code="rate_limit_exceeded", status=429, retry_after_s=wait_s)
