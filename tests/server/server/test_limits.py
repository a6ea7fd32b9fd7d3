"""Limits of tenants: no interleaving of requests exceeds them, and refusals name the time until a retry."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import ParameterError
from inlay.api.dialect import OPENAI
from inlay.api.failures import BodyError, failure_of
from inlay.api.openai.respond import duration
from inlay.server.limits import CEILINGS, EVERYBODY, AdmittedRequest, Limits, Meter, Tenant
from inlay.server.settings import CEILINGS as SETTINGS_CEILINGS
from inlay.server.tenants import RateLimitMiddleware
from tests.clock import ManualClock
from tests.server.server.asgi import Echo, send

T = TypeVar("T")
SECOND, MINUTE = 10**9, 60 * 10**9


def tenant(name: str = "a", **limits: Any) -> Tenant:
    return Tenant(name, "salt", Limits(**limits))


def begin(meter: Meter, who: Tenant) -> tuple[AsyncExitStack, AdmittedRequest] | BodyError:
    """A request that is admitted and stays open, or its refusal."""

    async def enter() -> tuple[AsyncExitStack, AdmittedRequest] | BodyError:
        stack = AsyncExitStack()
        try:
            return stack, await stack.enter_async_context(meter.request(who))
        except BodyError as error:
            return error

    return at_once(enter())


def end(stack: AsyncExitStack) -> None:
    at_once(stack.aclose())


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("nothing may happen between the steps of a meter")


def refusal(meter: Meter, who: Tenant) -> BodyError:
    error = begin(meter, who)
    assert isinstance(error, BodyError)
    failure = failure_of(error)
    assert (failure.status, failure.kind, failure.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert failure.retry_after_s is not None
    assert failure.retry_after_s > 0
    return error


def admitted(meter: Meter, who: Tenant) -> AdmittedRequest:
    begun = begin(meter, who)
    assert not isinstance(begun, BodyError), begun
    return begun[1]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from("ab")),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("tokens"), st.integers(0, 20), st.integers(0, 50)),
        st.tuples(st.just("wait"), st.integers(0, MINUTE) | st.integers(0, SECOND)),
        st.tuples(st.just("retry")),
    ),
    max_size=60,
)
some = st.none() | st.integers(1, 12)


@given(steps, some, some, some)
def test_no_interleaving_admits_more_than_the_limits(steps, per_minute, tokens, most):
    """Held against the definition, over every pair of moments, for each of two tenants alone."""
    clock, who = ManualClock(12_345), {}
    for name in "ab":
        who[name] = tenant(name, requests_per_minute=per_minute, tokens_per_minute=tokens, max_concurrent=most)
    meter, running, log, refused = Meter(clock), [], [], None
    for step, *more in steps:
        if step == "wait":
            clock.now += more[0]
        # immediately after the time that a refusal names, without other requests
        elif step == "retry" and refused is not None:
            name, wait = refused
            clock.now += math.ceil(wait * SECOND)
            step, more = "begin", [name]
        elif step == "end" and running:
            end(running.pop(more[0] % len(running))[1])
        elif step == "tokens" and running:
            name, _, one = running[more[0] % len(running)]
            one.tokens(more[1])
            log.append((clock.now, name, "tokens", more[1]))
        if step == "begin":
            name = more[0]
            begun = begin(meter, who[name])
            if isinstance(begun, BodyError):
                assert begun.retry_after_s is not None
                refused = (name, begun.retry_after_s)
                continue
            running.append((name, *begun))
            log.append((clock.now, name, "request", 1))
            assert most is None or sum(one[0] == name for one in running) <= most
            assert owed(log, name, tokens, clock.now) <= 0
    for name in "ab":
        requests = [time for time, whose, kind, _ in log if (whose, kind) == (name, "request")]
        for first, start in enumerate(requests):
            for last in range(first, len(requests)):
                assert within(last - first + 1, requests[last] - start, per_minute)


def within(count: int, span_ns: int, per_minute: int | None) -> bool:
    """Whether so many may be admitted in a span of time, both its ends counted."""
    return per_minute is None or count * MINUTE <= per_minute * (MINUTE + span_ns)


def owed(log, name: str, per_minute: int | None, now: int) -> int:
    """The debt of a tenant in tokens at a time, from all that it used: the largest over all moments to count from."""
    if per_minute is None:
        return 0
    used = [(time, count) for time, whose, kind, count in log if (whose, kind) == (name, "tokens")]
    debts = [0]
    for number, (start, _) in enumerate(used):
        spent = sum(count for _, count in used[number:])
        debts.append(spent * MINUTE - per_minute * (MINUTE + now - start))
    return max(debts)


@given(st.integers(1, 10_000), st.integers(0, 10**12))
def test_rejected_request_is_admitted_at_the_named_time(per_minute, later):
    clock = ManualClock(12_345)
    meter, who = Meter(clock), tenant(requests_per_minute=per_minute)
    for _ in range(per_minute):
        admitted(meter, who)
        if per_minute > 100:  # enough to be seen, without ten thousand event loops
            meter.account(who).requests.take(per_minute - 1, clock.now)
            break
    wait = refusal(meter, who).retry_after_s
    assert wait is not None
    clock.now += math.ceil(wait * SECOND) - 2
    refusal(meter, who)
    clock.now += 3
    admitted(meter, who)


def test_a_steady_tenant_gets_its_limit():
    clock = ManualClock(12_345)
    meter, who = Meter(clock), tenant(requests_per_minute=7)
    count = 0
    for _ in range(10 * 60):
        clock.now += SECOND
        count += not isinstance(begin(meter, who), BodyError)
    assert count == 7 + 7 * 10 - 1  # the bucket was full, and the last one is not whole yet


def test_tokens_are_charged_when_used():
    clock = ManualClock(12_345)
    meter, who = Meter(clock), tenant(tokens_per_minute=600)
    one, other = admitted(meter, who), admitted(meter, who)
    one.tokens(500)
    other.tokens(400)  # more than there is left: a debt of 300
    assert str(refusal(meter, who)) == "your 600 tokens a minute are used up; wait 30.1s"
    assert OPENAI.limit_headers(meter.levels(who))["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 30 * SECOND
    refusal(meter, who)
    clock.now += SECOND // 10
    admitted(meter, who)


def holding(meter: Meter, who: Tenant, **size: int) -> tuple[AsyncExitStack, AdmittedRequest] | BodyError:
    """A request whose size is known, or its refusal."""
    begun = begin(meter, who)
    if isinstance(begun, BodyError):
        return begun
    try:
        begun[1].hold(**size)
    except BodyError as error:
        end(begun[0])
        return error
    return begun


def test_concurrent_requests_use_the_remainder_plus_one_request():
    meter, who = Meter(ManualClock(12_345)), tenant(tokens_per_minute=500)
    found = [holding(meter, who, tokens=400) for _ in range(40)]
    running = [one for one in found if not isinstance(one, BodyError)]
    assert len(running) == 2, "the first leaves 100 tokens, and the second has begun on them"
    refused = failure_of(next(one for one in found if isinstance(one, BodyError)))
    assert (refused.status, refused.code, refused.retry_after_s) == (429, "rate_limit_exceeded", 1.0)
    assert "your running requests have reserved the rest of your 500 tokens a minute" in refused.message
    assert OPENAI.limit_headers(meter.levels(who))["x-ratelimit-remaining-tokens"] == "0"


def test_unused_reservation_is_returned():
    meter, who = Meter(ManualClock(12_345)), tenant(tokens_per_minute=500)
    begun = holding(meter, who, tokens=10_000)
    assert not isinstance(begun, BodyError), "one request alone is admitted however long it may become"
    begun[1].used(30)
    begun[1].used(30)
    assert isinstance(holding(meter, who, tokens=1), BodyError)
    end(begun[0])
    assert OPENAI.limit_headers(meter.levels(who))["x-ratelimit-remaining-tokens"] == "470"
    assert not isinstance(holding(meter, who, tokens=470), BodyError)


def test_request_without_tokens_is_admitted_despite_token_debt():
    meter, who = Meter(ManualClock(12_345)), tenant(tokens_per_minute=10, requests_per_minute=2)
    admitted(meter, who).tokens(50)
    refusal(meter, who)

    async def look() -> None:
        async with meter.request(who, tokens=False):
            pass

    at_once(look())
    with pytest.raises(BodyError, match="your 2 requests a minute are used up"):
        at_once(look())


uses = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 300)),
        st.tuples(st.just("use"), st.integers(0, 20), st.integers(0, 300)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.integers(0, 2 * MINUTE)),
    ),
    max_size=60,
)


@given(uses, st.integers(1, 200))
def test_debt_is_at_most_one_request(uses, per_minute):
    """This holds for all concurrent requests that use no more than they declared."""
    clock, running, largest = ManualClock(12_345), [], 0
    meter, who = Meter(clock), tenant(tokens_per_minute=per_minute)
    for step, *more in uses:
        if step == "wait":
            clock.now += more[0]
        elif step == "begin":
            begun = holding(meter, who, tokens=more[0])
            if not isinstance(begun, BodyError):
                running.append([begun, more[0]])
                largest = max(largest, more[0])
        elif step == "use" and running:
            one = running[more[0] % len(running)]
            count = min(more[1], one[1])
            one[0][1].tokens(count)
            one[1] -= count
        elif step == "end" and running:
            end(running.pop(more[0] % len(running))[0][0])
        assert -meter.account(who).tokens.holds(clock.now) <= largest
    for (stack, _), _ in running:
        end(stack)
    assert meter.account(who).reserved == meter.account(who).answers == meter.answers == 0


def test_every_answer_takes_a_slot():
    meter, who = Meter(ManualClock(12_345)), tenant(max_concurrent=4)
    never = holding(meter, who, answers=5)
    assert isinstance(never, BodyError)
    failure = failure_of(never)
    assert (failure.status, failure.code, failure.retry_after_s) == (403, "max_concurrent_not_allowed", None)
    begun = holding(meter, who, answers=3)
    assert not isinstance(begun, BodyError)
    assert isinstance(holding(meter, who, answers=2), BodyError)
    last = holding(meter, who, answers=1)
    assert not isinstance(last, BodyError)
    refusal(meter, who)
    end(begun[0])
    assert not isinstance(holding(meter, who, answers=3), BodyError)


def test_tenant_leaves_queue_slots_for_others():
    meter, greedy, other, third = Meter(ManualClock(12_345), places=12), tenant("a"), tenant("b"), tenant("c")
    never = holding(meter, greedy, answers=7)
    assert isinstance(never, BodyError)
    assert failure_of(never).status == 400
    first = [holding(meter, greedy) for _ in range(12)]
    refused = [failure_of(one) for one in first if isinstance(one, BodyError)]
    assert len(refused) == 6
    assert {(one.status, one.code, one.retry_after_s) for one in refused} == {(429, "queue_full", 1.0)}
    second = [holding(meter, other, answers=3), holding(meter, third)]
    assert not any(isinstance(one, BodyError) for one in second), "there are places for whoever has few"
    assert meter.answers == 10
    assert isinstance(holding(meter, other), BodyError)


def test_the_servers_state_is_shown_under_full_load():
    meter, full = Meter(ManualClock(12_345)), tenant("a", requests_per_minute=2, max_concurrent=1)
    running = holding(meter, full)
    assert not isinstance(running, BodyError)
    refusal(meter, full)
    meter.count(full)
    with pytest.raises(BodyError) as refused:
        meter.count(full)
    assert refused.value.code == "rate_limit_exceeded"
    assert meter.answers == 1


def test_rejected_request_uses_no_quota():
    clock = ManualClock(12_345)
    meter, who = Meter(clock), tenant(requests_per_minute=2, max_concurrent=1)
    begun = begin(meter, who)
    assert not isinstance(begun, BodyError)
    assert "your key allows 1 answers at the same time, and all are running;" in str(refusal(meter, who))
    end(begun[0])
    admitted(meter, who)
    assert OPENAI.limit_headers(meter.levels(who))["x-ratelimit-remaining-requests"] == "0"


def test_failed_request_releases_its_slot():
    meter, who = Meter(ManualClock(12_345)), tenant(max_concurrent=1)

    async def fail() -> None:
        async with meter.request(who):
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            at_once(fail())


def test_changed_limits_apply_from_the_next_request():
    clock = ManualClock(12_345)
    meter, who = Meter(clock), tenant(requests_per_minute=100)
    admitted(meter, who)
    less = replace(who, limits=Limits(requests_per_minute=2))
    admitted(meter, less)
    admitted(meter, less)
    refusal(meter, less)
    more = replace(who, limits=Limits(requests_per_minute=60))
    refusal(meter, more)
    clock.now += SECOND
    admitted(meter, more)
    admitted(meter, replace(who, limits=Limits()))
    assert OPENAI.limit_headers(meter.levels(replace(who, limits=Limits()))) == {}


def test_tenants_are_charged_separately():
    meter, limits = Meter(ManualClock(12_345)), {"requests_per_minute": 1, "max_concurrent": 1}
    admitted(meter, tenant("a", **limits))
    admitted(meter, tenant("b", **limits))
    refusal(meter, tenant("a", **limits))


def test_headers_are_openais():
    clock = ManualClock(12_345)
    meter, who = Meter(clock), tenant(requests_per_minute=60, tokens_per_minute=60_000)
    one = admitted(meter, who)
    one.tokens(59_500)
    app = RateLimitMiddleware(Echo(), meter)
    assert send(app, state={"tenant": who}).headers == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "60000",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "59.5s",
    }
    assert set(send(app, state={"tenant": tenant("b", max_tokens=5)}).headers) == set()
    assert send(app, state={"tenant": EVERYBODY}).headers == send(app).headers == {}


def test_body_is_not_read_if_the_limit_is_used_up():
    meter, who, app = Meter(ManualClock(12_345)), tenant(requests_per_minute=1), Echo()
    chunked = {"transfer-encoding": "chunked"}
    assert send(RateLimitMiddleware(app, meter), [b"x"], headers=chunked, state={"tenant": who}).status == 200
    admitted(meter, who)
    found = send(
        RateLimitMiddleware(app, meter), (b"x" * 2**16 for _ in range(999)), headers=chunked, state={"tenant": who}
    )
    assert (found.status, found.error["code"]) == (429, "rate_limit_exceeded")
    assert (found.headers["retry-after"], found.headers["x-ratelimit-remaining-requests"]) == ("60", "0")
    assert found.taken == 2**25 // 2**16 + 1  # thrown away, so that the client reads its answer
    assert send(RateLimitMiddleware(app, meter), method="GET", state={"tenant": who}).status == 200
    assert len(app.states) == 2


def test_body_without_token_cost_is_read_despite_token_debt():
    meter, who, length = Meter(ManualClock(12_345)), tenant(tokens_per_minute=10), {"content-length": "1"}
    admitted(meter, who).tokens(50)
    for path, status in (("/tokenize", 200), ("/detokenize", 200), ("/v1/completions", 429)):
        found = send(RateLimitMiddleware(Echo(), meter), [b"x"], path=path, headers=length, state={"tenant": who})
        assert found.status == status


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0001, "1ms"), (0.017, "17ms"), (1, "1s"), (1.5, "1.5s"), (59.9991, "1m0s"), (3661, "61m1s")],
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"max_reuse": "all"}, "max_reuse is 'all'; use one of off, exact, auto, modular"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"requests_per_minute": True}, "requests_per_minute is True; it must be"),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute is 1.5; it must be"),
    ],
)
def test_limits_are_checked(limits, sentence: str):
    with pytest.raises(ParameterError) as caught:
        Limits(**limits)
    assert str(caught.value).startswith(sentence)


def test_ceilings_equal_the_servers():
    assert CEILINGS == SETTINGS_CEILINGS
