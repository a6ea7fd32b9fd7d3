"""Random requests over few state slots and a small pool: each answer is the stock model's, and no slot is leaked."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest

from inlay.engine.request import Request
from tests.model.engine.driving import ids
from tests.model.engine.test_states import StateDriver
from tests.model.families.configs import RECURRENT

TRUNKS = [ids(30, seed) for seed in range(3)]


class Fuzz:
    """A sequence of requests, cancellations and preemptions.

    Attributes:
        requests: the answers that it has checked, once it has run.
        disturbs: the name of ``disturb`` in ``seen``.
        found: the name in ``seen`` of requests that read what was stored.
    """

    disturbs, found = "forget", "hit"

    def __init__(self, seed: int, name: str) -> None:
        self.random, self.seen = random.Random(seed), Counter[str]()
        self.driver = self.made(name)
        self.requests: list[Request] = []

    def made(self, name: str) -> StateDriver:
        """A driver with few slots and a small pool."""
        pick = self.random.choice
        return StateDriver(
            name,
            slots=pick([5, 8, 20]),
            tokens=pick([200, 300, 600]),
            chunk_size=pick([1, 4, 8]),
            max_num_seqs=pick([2, 4]),
            max_num_batched_tokens=pick([8, 24, 64]),
            prefill_chunk=pick([5, 16]),
            state_interval=pick([0, 0, 13]),
        )

    def request(self) -> Request:
        draw = self.random
        several = {"n": 2, "temperature": 1, "top_k": 1} if draw.random() < 0.2 else {}
        return self.driver.request(
            self.prompt(),
            tokens=draw.randint(1, 9),
            salt=draw.choice(["", "", "one"]),
            reuse=draw.choice(["exact", "exact", "exact", "off"]),
            **several,
        )

    def disturb(self) -> None:
        """Forget texts."""
        self.driver.engine.evict_texts("one")

    def read(self, request: Request) -> bool:
        """True if the request read what was stored."""
        return bool(request.usage and request.usage.cached_tokens)

    def prompt(self) -> list[int]:
        """A trunk or a part of it with something after it, an earlier prompt, or an earlier prompt with its answer."""
        draw = self.random
        earlier = [request for request in self.requests if request.finished and request.error is None]
        kind = draw.choice(["trunk", "trunk", "again", "turn", "short"])
        if earlier and kind in ("again", "turn"):
            request = draw.choice(earlier)
            said = [*request.token_ids, *ids(4, draw.randrange(9))] if kind == "turn" else []
            return [*request.ids, *said][:110]
        if kind == "short":
            return ids(draw.randint(1, 4), draw.randrange(9))
        trunk = draw.choice(TRUNKS)
        return trunk[: draw.randint(1, len(trunk))] + ids(draw.randint(1, 25), draw.randrange(5))

    def act(self) -> None:
        """Add, cancel or preempt a request, or disturb them; then take a few steps."""
        draw, driver = self.random, self.driver
        kind = draw.choice(["add", "add", "add", "cancel", "preempt", self.disturbs, "step"])
        running = [task for task in driver.engine.scheduler.running if isinstance(task, Request)]
        if kind == "add":
            request = self.request()
            driver.add(request)
            self.requests += request.family
        elif kind == "cancel" and running:
            task = draw.choice(running)
            driver.engine.release(task)
            self.requests.remove(task)
        elif kind == "preempt" and running:
            driver.engine.scheduler.requeue(draw.choice(running))
        elif kind == self.disturbs:
            self.disturb()
        self.seen[kind] += 1
        driver.step(draw.randint(0, 4))

    def run(self, actions: int) -> None:
        """Act, finish, and check every answer and every slot."""
        driver = self.driver
        for _ in range(actions):
            self.act()
        driver.finish()
        for request in self.requests:
            driver.check(request)
            self.seen[self.found] += self.read(request)
        self.seen["evicted"] += driver.states.evicted
        assert driver.all_free()
        assert driver.states.free_slots == driver.states.slots - 1


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "mamba2"])
def test_random_requests(name):
    seen = Counter[str]()
    for seed in range(3):
        fuzz = Fuzz(seed, name)
        fuzz.run(40)
        seen += fuzz.seen
    assert min(seen[kind] for kind in ("add", "cancel", "preempt", "hit", "evicted")) > 0, seen


@pytest.mark.long
def test_a_thousand_answers_to_random_requests_equal_the_stock_model():
    """Every family with states in turn, over batches, chunks, marks, preemptions and cancellations."""
    names, seen, answers = sorted(RECURRENT), Counter[str](), 0
    for seed in count():
        if answers >= 1000 and seed >= len(names):
            break
        fuzz = Fuzz(seed, names[seed % len(names)])
        fuzz.run(80)
        seen, answers = seen + fuzz.seen, answers + len(fuzz.requests)
    assert min(seen[kind] for kind in ("add", "cancel", "preempt", "forget", "hit", "evicted")) > 10, seen
