"""Background work leaves most of the time to the engine, and rests only while the engine is busy."""

from __future__ import annotations

import threading
import time

import pytest

from inlay.workpool import LONGEST_S, SHARE, Pacer, WorkPool

WAIT_S = 20.0


def burn(seconds: float = 0.03) -> None:
    """Take so much processor time."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_rest_after_work_keeps_the_time_share():
    busy = Pacer(lambda: True)
    assert busy.rest_s(0.3) == pytest.approx(0.3 * (1 / SHARE - 1))
    assert busy.rest_s(0.1, owners=2) == pytest.approx(0.1 * (2 / SHARE - 1)), "both together take that share"
    assert busy.rest_s(100.0) == LONGEST_S
    assert busy.rest_s(0.0001) == 0
    assert Pacer(lambda: False).rest_s(10.0) == 0
    assert Pacer().rest_s(10.0) == 0, "without an engine there is nobody to wait for"


def test_work_that_took_long_is_followed_by_a_rest():
    """Which is its owner's alone."""
    now = [0.0]
    pool = WorkPool("work", 4, pacer=Pacer(lambda: True), clock=lambda: now[0])
    pool.submit(burn, owner="ann").result(WAIT_S)
    _wait_for(lambda: pool.resting == {"ann"})
    later = pool.submit(int, owner="ann")
    pool.submit(int, owner="bob").result(WAIT_S)
    assert not later.done()
    now[0] = LONGEST_S
    later.result(WAIT_S)
    assert not pool.resting


def test_idle_engine_ends_rests():
    busy = threading.Event()
    busy.set()
    pool = WorkPool("work", 4, pacer=Pacer(busy.is_set), clock=lambda: 0.0)  # no rest ends by itself
    pool.submit(burn, owner="ann").result(WAIT_S)
    _wait_for(lambda: pool.resting == {"ann"})
    later = pool.submit(int, owner="ann")
    time.sleep(0.1)
    assert not later.done()
    busy.clear()
    later.result(WAIT_S)


def test_rests_do_not_add_up_beyond_the_longest():
    class Counting(Pacer):
        rests = 0

        def rest_s(self, worked_s, owners=1):
            self.rests += 1
            return super().rest_s(worked_s, owners)

    now, pacer = [0.0], Counting(lambda: True)
    pool = WorkPool("work", 8, pacer=pacer, clock=lambda: now[0])
    for future in [pool.submit(burn, 0.3, owner="ann") for _ in range(4)]:
        future.result(WAIT_S)
    _wait_for(lambda: pool.resting == {"ann"} and pacer.rests == 4)
    later = pool.submit(int, owner="ann")
    now[0] = LONGEST_S
    later.result(WAIT_S)


def test_unowned_work_does_not_wait():
    pool = WorkPool("work", 4, pacer=Pacer(lambda: True), clock=lambda: 0.0)
    pool.submit(burn).result(WAIT_S)
    pool.submit(int).result(WAIT_S)
    assert not pool.resting


def test_short_work_is_not_followed_by_a_rest():
    pool = WorkPool("work", 4, pacer=Pacer(lambda: True), clock=lambda: 0.0)
    for _ in range(20):
        pool.submit(int, owner="ann").result(WAIT_S)


def _wait_for(condition) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)
