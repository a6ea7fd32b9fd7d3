"""Rejected tokens leave no trace in the store, the pool or a later answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from inlay.engine.request import Request
from inlay.kv.store import SegmentStore
from tests.model.engine.driving import Driver, check_stock, ids
from tests.model.engine.speculation.planted import FREE, Name, Planted
from tests.model.engine.speculation.test_equality import parameters

PROMPTS = [ids(9 + 5 * number, number) for number in range(6)]
Stored = dict[tuple[int, tuple[int, ...]], list[torch.Tensor]]


def planted(known: dict[Name, Sequence[int]], seed: int = 0, **settings: Any) -> Driver:
    """A driver whose drafts are right up to a random token."""
    driver = Driver(speculation="lookup", **settings)
    driver.engine.speculator = Planted(known, driver.loaded.spec.vocab_size, seed)
    return driver


def names(requests: Sequence[Request]) -> list[Name]:
    return [(member.ids, member.params.seed, member.index) for each in requests for member in each.family]


def stored(driver: Driver) -> Stored:
    """All keys and values in the store: by position and tokens, those of each run of tokens from its first one on."""
    found: Stored = {}
    store: SegmentStore = driver.store
    for segment in store:
        slots = torch.cat([torch.arange(run.first, run.end) for run in segment.slots])
        storage = driver.llm.storage
        layers = [each[:, slots] for layer in zip(storage.keys, storage.values, strict=True) for each in layer]
        found[segment.run.start, tuple(segment.run.ids)] = layers
    return found


def requests(driver: Driver) -> list[Request]:
    return [
        driver.request(prompt, 20, seed=number, temperature=0.8 * (number % 2)) for number, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_store_is_the_same_as_without_drafts(chunk_size):
    plain = Driver(speculation="off", chunk_size=chunk_size)
    asked = requests(plain)
    answers = plain.run(*asked)
    driver = planted(dict(zip(names(asked), answers, strict=True)), chunk_size=chunk_size)
    assert driver.run(*requests(driver)) == answers
    accepted, drafted = (sum(counts.values()) for counts in _counts(driver))
    assert 0 < accepted < drafted
    expected, found = stored(plain), stored(driver)
    assert found.keys() == expected.keys()
    for key, layers in expected.items():
        for one, other in zip(layers, found[key], strict=True):
            torch.testing.assert_close(other, one, atol=1e-4, rtol=0)
    assert driver.all_free()


def test_a_later_turn_reads_the_tokens_of_a_draft():
    plain = Driver(speculation="off")
    (first,) = [plain.request(PROMPTS[2], 24)]
    (answer,) = plain.run(first)
    driver = planted({(first.ids, None, 0): answer})
    driver.run(driver.request(PROMPTS[2], 24))
    again = driver.request([*PROMPTS[2], *answer, 7], 6)
    driver.run(again)
    assert again.usage is not None
    assert again.usage.cached_tokens == len(PROMPTS[2]) + len(answer) - 1, "the last token was never computed"
    check_stock(driver, again)


def test_every_logit_equals_the_stock_model():
    plain = Driver(speculation="off", name="mistral")
    asked = requests(plain)
    answers = plain.run(*asked)
    driver = planted(dict(zip(names(asked), answers, strict=True)), name="mistral")
    again = requests(driver)
    assert driver.run(*again) == answers
    for request in again:
        driver.logits[request] = driver.logits[request][: len(request.token_ids)]
        check_stock(driver, request)


def test_the_tokens_of_a_pass_bound_drafts_too():
    plain = Driver(speculation="off")
    asked = requests(plain)
    answers = plain.run(*asked)
    driver = planted(dict(zip(names(asked), answers, strict=True)), max_num_batched_tokens=9)
    assert driver.run(*requests(driver)) == answers
    assert max(driver.passes) <= 9


def fuzz(seed: int, count: int) -> int:
    """Random requests in a small pool, of which some are cancelled. Returns the number of preemptions."""
    draw = random.Random(seed)
    plain = Driver(speculation="off", record=False, chunk_size=draw.choice([1, 4, 8]))
    prompts = [ids(draw.randrange(1, 40), number) for number in range(count)]
    params = [parameters(draw, 100 * seed + number) for number in range(count)]
    params = [each for each in params if each.prompt_logprobs is None]
    made = list(zip(prompts, params, strict=False))

    def all_of(driver: Driver) -> list[Request]:
        fields = (
            "temperature",
            "n",
            "seed",
            "max_tokens",
            "top_k",
            "top_p",
            "repetition_penalty",
            "structured_outputs",
        )
        return [
            driver.request(prompt, each.max_tokens or 1, **{name: getattr(each, name) for name in fields})
            for prompt, each in made
        ]

    asked = all_of(plain)
    plain.add(*asked)
    plain.finish()
    expected = {name: tuple(one.token_ids) for name, one in zip(names(asked), _members(asked), strict=True)}
    driver = planted(expected, seed, kv_tokens=draw.choice([160, 240]), record=False, chunk_size=draw.choice([1, 4, 8]))
    waiting, alive, preempted = all_of(driver), [], 0
    while waiting or alive:
        if waiting and draw.random() < 0.4:
            alive.append(waiting.pop())
            driver.add(alive[-1])
        driver.step()
        if alive and draw.random() < 0.05:
            gone = alive.pop(draw.randrange(len(alive)))
            for member in gone.family:
                driver.engine.release(member)
        for request in [each for each in alive if each.answered]:
            alive.remove(request)
            for name, member in zip(names([request]), request.family, strict=True):
                assert member.error is None, member.error
                assert tuple(member.token_ids) == expected[name]
                preempted += member.preemptions
    driver.audit()
    assert not any(segment.holds for segment in driver.store)
    assert driver.all_free(), "slots have leaked"
    return preempted


def test_preempted_and_cancelled_answers_leave_no_slot():
    assert sum(fuzz(seed, 14) for seed in range(4)) > 0


@pytest.mark.long
def test_many_preempted_and_cancelled_answers_leave_no_slot():
    assert sum(fuzz(seed, 30) for seed in range(100, 130)) > 10


def test_full_pool_leaves_no_memory_for_drafts():
    """Drafts use free chunks alone. They preempt no request."""
    plain = Driver(speculation="off", kv_tokens=48)
    (asked,) = [plain.request(PROMPTS[1], 30)]
    (answer,) = plain.run(asked)
    driver = planted({(asked.ids, None, 0): answer}, kv_tokens=48)
    assert driver.run(driver.request(PROMPTS[1], 30)) == [answer]
    assert driver.engine.stats().preemptions == 0
    assert FREE.seconds(1) == 1.0


def _members(requests: Sequence[Request]) -> list[Request]:
    return [member for each in requests for member in each.family]


def _counts(driver: Driver) -> tuple[dict[str, int], dict[str, int]]:
    speculator = driver.engine.speculator
    assert speculator is not None
    return speculator.accepted, speculator.drafted
