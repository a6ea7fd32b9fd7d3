"""What tenants may use of a server, which ``inlay keys`` writes down; and the meter, which admits requests within that.

The limits by the minute are token buckets: a bucket holds a minute's worth, is filled evenly, and is full at the start.
So in any span of t seconds at most ``limit × (1 + t / 60)`` requests are admitted.

Tokens are paid when they are used: a prompt's with the first news of it, an answer's as they come. What requests under
way may still use is reserved: a request is admitted while its tenant's bucket holds more than the others have reserved.
So a tenant that asks for one thing at a time is admitted until its bucket is empty, however much it asks for, and
requests that run side by side use at most what the bucket held and one request more. Reservations go down as tokens are
paid and end with their request, so an answer that stays short keeps nobody waiting behind what it could have said.

Every answer takes a place, so that a request of 64 prompts and 8 answers each takes 512 (``max_concurrent``). Beside
that limit, one tenant may have as many answers under way as it leaves places free for others: half of all places where
it is alone, a third where two do so. So there is room in the engine's line for whoever has nothing in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields

from inlay.api.failures import BodyError
from inlay.errors import ParameterError
from inlay.policy import CEILINGS as CEILINGS

_MINUTE_NS = 60 * 10**9
_BUSY_RETRY_S = 1.0  # a place is free again as soon as any of the tenant's requests ends

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one tenant may use, all its keys together; None for no limit. Raises ParameterError.

    requests_per_minute, tokens_per_minute: of prompts and of answers together.
    max_concurrent: answers at the same time; a request without answers of its own counts as one.
    max_reuse: the most approximation that a request may ask for, a word of CEILINGS.
    max_tokens: the most that one answer may have.
    max_pinned_bytes: of the KV pool, that its pins may take; None for what the server lets all pins take.
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


class Bucket:
    """Holds a minute's worth of something, and is filled evenly; may be in debt.

    Whole numbers throughout, in units of which a minute's nanoseconds make one piece: nothing is lost to rounding.
    """

    def __init__(self, per_minute: int, now: int) -> None:
        self.per_minute = per_minute
        self._units = per_minute * _MINUTE_NS
        self._at = now

    def holds(self, now: int) -> int:
        """How many whole pieces it holds at a time in nanoseconds, or is short of if that is negative."""
        return self._filled(now) // _MINUTE_NS

    def take(self, pieces: int, now: int) -> None:
        self._filled(now)
        self._units -= pieces * _MINUTE_NS

    def seconds_until(self, pieces: int, now: int) -> float:
        """How long until it holds so many."""
        return max(0, pieces * _MINUTE_NS - self._filled(now)) / self.per_minute / 1e9

    def resize(self, per_minute: int, now: int) -> None:
        """Fill it at another rate from now on. What it holds, or owes, stays, as far as there is room for it."""
        self._filled(now)
        self.per_minute = per_minute

    def _filled(self, now: int) -> int:
        self._units = min(self.per_minute * _MINUTE_NS, self._units + (now - self._at) * self.per_minute)
        self._at = now
        return self._units


class Account:
    """What one tenant has used. answers: under way. reserved: tokens that they may still use."""

    def __init__(self) -> None:
        self.answers = 0
        self.reserved = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def adopt(self, limits: Limits, now: int) -> None:
        """Go by these limits from now on; they are other ones when the file of keys has changed."""
        self.requests = _fitted(self.requests, limits.requests_per_minute, now)
        self.tokens = _fitted(self.tokens, limits.tokens_per_minute, now)


class Admission:
    """A request that was admitted: one answer's place, until ``hold`` says how many it asks for."""

    def __init__(self, meter: Meter, account: Account, tenant: Tenant) -> None:
        self._meter = meter
        self._account = account
        self._tenant = tenant
        self._answers = 1
        self._reserved = 0
        self._paid = 0

    def hold(self, *, answers: int = 1, tokens: int = 0) -> None:
        """Take places for all answers of the request, and reserve the tokens that it may use.

        Raises BodyError: status 429 and retry_after_s where there is no room now, 403 or 400 where there never is.
        """
        self._meter.check_room(self._tenant, self._account, answers, answers - self._answers)
        if tokens:
            self._meter.check_tokens(self._account)
        self._meter.answers += answers - self._answers
        self._account.answers += answers - self._answers
        self._account.reserved += tokens
        self._answers, self._reserved = answers, self._reserved + tokens

    def tokens(self, count: int) -> None:
        """Pay for tokens that were used."""
        self._paid += count
        if self._account.tokens is not None:
            self._account.tokens.take(count, self._meter.clock())
        self._release(min(count, self._reserved))

    def used(self, total: int) -> None:
        """Pay for what was used since the last time, now that it is so many tokens in all."""
        if total > self._paid:
            self.tokens(total - self._paid)

    def end(self) -> None:
        """Give back its places, and what it has reserved and did not use."""
        self._meter.answers -= self._answers
        self._account.answers -= self._answers
        self._release(self._reserved)

    def _release(self, tokens: int) -> None:
        self._account.reserved -= tokens
        self._reserved -= tokens


class Meter:
    """Admits requests and counts what they use. One event loop's; never awaits, so nothing happens in between.

    clock: nanoseconds that never go back.
    places: how many answers may run and wait, of which every tenant has a share; None where nothing is to be shared.
    """

    def __init__(self, clock: Clock = time.monotonic_ns, *, places: int | None = None) -> None:
        self.clock = clock
        self.answers = 0  # under way, of all tenants
        self._places = places
        self._accounts: dict[str, Account] = {}

    @asynccontextmanager
    async def request(self, tenant: Tenant, *, tokens: bool = True) -> AsyncIterator[Admission]:
        """A place for one request of a tenant, given back at the end. Raises BodyError: status 429, retry_after_s.

        tokens: whether it may use some; one that uses none is admitted while they are used up.
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
        admitted = Admission(self, account, tenant)
        try:
            yield admitted
        finally:
            admitted.end()

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """OpenAI's ``x-ratelimit-…`` headers for what is limited: the limit, what is left of it, when that is all."""
        account, now = self.account(tenant), self.clock()
        buckets = {"requests": (account.requests, 0), "tokens": (account.tokens, account.reserved)}
        headers = {}
        for name, (bucket, reserved) in buckets.items():
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, bucket.holds(now) - reserved))
                headers[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.per_minute, now))
        return headers

    def check(self, tenant: Tenant, *, tokens: bool = True) -> None:
        """Refuse what any request would be refused for now; uses nothing. tokens: see ``request``. Raises BodyError."""
        account = self.account(tenant)
        self.check_room(tenant, account, 1, 1)
        self._check_bucket("requests", account.requests)
        if tokens:
            self._check_bucket("tokens", account.tokens)

    def check_room(self, tenant: Tenant, account: Account, answers: int, more: int) -> None:
        """Raises BodyError where a request has no room. answers: all that it asks for. more: those without a place."""
        most = tenant.limits.max_concurrent
        if most is not None and answers > most:
            message = f"the request asks for {answers:,} answers, and your key allows {most:,} at the same time"
            raise BodyError(f"{message}; ask for fewer", param="n", code="max_concurrent_not_allowed", status=403)
        if most is not None and account.answers + more > most:
            raise _too_many(
                f"as many of your requests are running as may, {most:,}; every answer counts, wait for one to end",
                _BUSY_RETRY_S,
            )
        if self._places is None:
            return
        share = max(1, self._places // 2)
        if answers > share:
            message = f"the request asks for {answers:,} answers, and one tenant may have {share:,} at the same time"
            raise BodyError(f"{message}; make several requests of it", param="n")
        if account.answers + more > max(1, self._places - self.answers - more):
            raise BodyError(
                f"{account.answers:,} of your answers run or wait, and the rest of the line is for others; "
                "wait for one to end",
                code="queue_full",
                status=429,
                retry_after_s=_BUSY_RETRY_S,
            )

    def check_tokens(self, account: Account) -> None:
        """Raises BodyError where a request that uses tokens may not begin."""
        self._check_bucket("tokens", account.tokens)
        bucket = account.tokens
        if bucket is not None and bucket.holds(self.clock()) - account.reserved < 1:
            raise _too_many(
                f"what is left of your {bucket.per_minute:,} tokens a minute is reserved for your requests that are "
                "running; wait for one to end, or give them smaller max_tokens",
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


def duration(seconds: float) -> str:
    """A time as OpenAI writes it in headers: "17ms", "1.5s", "2m30s"; rounded up, so that nobody comes early."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    rest = f"{milliseconds / 1000:g}s"
    return f"{minutes}m{rest}" if minutes else rest


def _fitted(bucket: Bucket | None, per_minute: int | None, now: int) -> Bucket | None:
    """The bucket that a limit asks for: this one wherever there is one."""
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    return bucket


def _too_many(message: str, wait_s: float) -> BodyError:
    return BodyError(message, code="rate_limit_exceeded", status=429, retry_after_s=wait_s)
