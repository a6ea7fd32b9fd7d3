"""Admits requests within their tenants' limits, and counts what they use.

The limits by the minute are token buckets: a bucket holds a minute's worth, is filled evenly, and is full at the start.
So in any span of t seconds at most ``limit × (1 + t / 60)`` requests are admitted.
What a request will use is not known when it is admitted, and a reservation of the most that it may use would turn away
many that fit. So tokens are paid when they are used: a request is admitted while its tenant's bucket is not empty, what
it uses may put the bucket into debt, and the next is admitted when the debt is paid.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders

from inlay.openai.failures import BodyError
from inlay.server.allowance import NO_LIMITS, Limits
from inlay.server.refusal import has_body, refuse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from inlay.server.tenants import Tenant

__all__ = ["Bucket", "Limits", "Meter", "Pass", "RateHeaders", "duration"]

_MINUTE_NS = 60 * 10**9
_BUSY_RETRY_S = 1.0  # a place is free again as soon as any of the tenant's requests ends

Clock = Callable[[], int]


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
    """What one tenant has used."""

    def __init__(self) -> None:
        self.running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def adopt(self, limits: Limits, now: int) -> None:
        """Go by these limits from now on; they are other ones when the file of keys has changed."""
        self.requests = _fitted(self.requests, limits.requests_per_minute, now)
        self.tokens = _fitted(self.tokens, limits.tokens_per_minute, now)


class Pass:
    """A request that was admitted."""

    def __init__(self, account: Account, clock: Clock) -> None:
        self._account = account
        self._clock = clock

    def tokens(self, count: int) -> None:
        """Pay for tokens that were used: the prompt's when it is laid out, an answer's as they come."""
        if self._account.tokens is not None:
            self._account.tokens.take(count, self._clock())


class Meter:
    """Admits requests and counts what they use. One event loop's; never awaits, so nothing happens in between.

    clock: nanoseconds that never go back.
    """

    def __init__(self, clock: Clock = time.monotonic_ns) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    @asynccontextmanager
    async def request(self, tenant: Tenant) -> AsyncIterator[Pass]:
        """A place for one request of a tenant, given back at the end. Raises BodyError: status 429, retry_after_s."""
        account = self.check(tenant)
        if account.requests is not None:
            account.requests.take(1, self._clock())
        account.running += 1
        try:
            yield Pass(account, self._clock)
        finally:
            account.running -= 1

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """OpenAI's ``x-ratelimit-…`` headers for what is limited: the limit, what is left of it, when that is all."""
        account, now = self._account(tenant), self._clock()
        buckets = {"requests": account.requests, "tokens": account.tokens}
        headers = {}
        for name, bucket in buckets.items():
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, bucket.holds(now)))
                headers[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.per_minute, now))
        return headers

    def check(self, tenant: Tenant) -> Account:
        """Refuse what ``request`` would refuse now; uses nothing. Raises BodyError."""
        account, now, most = self._account(tenant), self._clock(), tenant.limits.max_concurrent
        if most is not None and account.running >= most:
            raise _too_many(
                f"as many of your requests are running as may, {most:,}; wait for one to end", _BUSY_RETRY_S
            )
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket is not None and bucket.holds(now) < 1:
                wait = bucket.seconds_until(1, now)
                raise _too_many(f"your {bucket.per_minute:,} {name} a minute are used up; wait {duration(wait)}", wait)
        return account

    def _account(self, tenant: Tenant) -> Account:
        account = self._accounts.setdefault(tenant.name, Account())
        account.adopt(tenant.limits, self._clock())
        return account


class RateHeaders:
    """ASGI middleware between Authenticate and Guard: answers to tenants with limits say what is left of them.

    Where nothing is left, a request with a body is refused before the body is read: only what is metered has one.
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
                MutableHeaders(scope=message).update(self._meter.headers(tenant))
            await send(message)

        try:
            if has_body(scope):
                self._meter.check(tenant)
        except BodyError as error:
            await refuse(error, scope, receive, sending)
        else:
            await self._app(scope, receive, sending)


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
