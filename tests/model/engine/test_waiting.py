"""Requests that wait: they take no slot, are looked up again only after a change, and none that fits is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from inlay import LLM, SamplingParams, Schema
from inlay.kv.index import PrefixIndex
from inlay.kv.offload.disk import DiskTier
from inlay.types import Scope
from tests.conftest import tiny
from tests.model.engine.driving import step

SCHEMAS = [
    Schema.from_string(
        f'<schema name="s{number}">'
        + "".join(f'<module name="m{at}">{number}.{at} is the number of this module here</module>' for at in range(6))
        + "</schema>"
    )
    for number in range(4)
]
_TOKENS = 384  # bytes of a token of the tiny model's keys and values


class Hanging:
    """Reads of the store that hang until ``go_on`` is set. looked: look-ups in the index of the pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.looked = threading.Event(), 0
        get, longest = DiskTier.get, PrefixIndex.longest

        def hang(tier: DiskTier, *args: Any) -> Any:
            assert self.go_on.wait(60)
            return get(tier, *args)

        def count(index: PrefixIndex, *args: Any, **kwargs: Any) -> Any:
            self.looked += 1
            return longest(index, *args, **kwargs)

        monkeypatch.setattr(DiskTier, "get", hang)
        monkeypatch.setattr(PrefixIndex, "longest", count)


@pytest.fixture
def hanging(tmp_path, monkeypatch) -> Iterator[Hanging]:
    llm = make(tmp_path, 20_000)
    for schema in SCHEMAS:
        llm.add_schema(schema)
    llm.shutdown()
    found = Hanging(monkeypatch)
    yield found
    found.go_on.set()


def make(folder: Any, tokens: int, **settings: Any) -> LLM:
    settings = {
        "reuse": "anchored",
        "promotion_memory": 0,
        "profile": "off",
        "max_pass_s": None,
        "store_timeout_s": 60.0,
    } | settings
    return LLM(tiny("llama"), kv_memory=tokens * _TOKENS, chunk_size=16, seed=0, store=folder, **settings)


def known(folder: Any, tokens: int, **settings: Any) -> LLM:
    llm = make(folder, tokens, **settings)
    for schema in SCHEMAS:
        llm.add_schema(schema, encode=False)
    return llm


def request(llm: LLM, prompt: Any, tokens: int = 2, tenant: str = "") -> Any:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return llm.local.prepare(llm.processor.process(prompt, params, llm.policy(), Scope(tenant=tenant)))


def of_schema(number: int, text: str = "What?") -> Any:
    prompt = SCHEMAS[number].prompt()
    for at in range(6):
        prompt = prompt.use(f"m{at}")
    return prompt.text(text)


def test_request_loading_from_disk_takes_no_slot_and_is_looked_up_once(tmp_path, hanging):
    llm = known(tmp_path, 20_000, max_num_seqs=4)
    engine = llm.local.engine
    waiting = [request(llm, of_schema(number), tenant="one") for number in range(4)]
    for each in waiting:
        engine.add(each)
    for _ in range(4):
        step(llm)
    other = request(llm, {"prompt_token_ids": [1, 2, 3]}, 40, tenant="two")
    engine.add(other)
    step(llm)
    assert other.token_ids
    hanging.looked = 0
    for _ in range(30):
        step(llm)
    assert not other.finished
    assert hanging.looked == 0
    hanging.go_on.set()
    until(lambda: all(each.finished for each in waiting), llm)
    assert [each.error for each in waiting] == [None] * 4
    assert all(each.usage.disk_tokens > 0 for each in waiting)
    llm.shutdown()


def test_segment_too_large_to_prefetch_is_looked_up_once(tmp_path, hanging):
    llm = known(tmp_path, 700, max_num_seqs=1)
    engine = llm.local.engine
    running = request(llm, {"prompt_token_ids": [1, 2, 3]}, 60)
    engine.add(running)
    step(llm)
    engine.add(request(llm, of_schema(0)))
    step(llm)
    hanging.looked = 0
    for _ in range(30):
        step(llm)
    assert not running.finished
    assert hanging.looked == 0
    llm.shutdown()


@pytest.mark.parametrize("prompt", [of_schema(1), {"prompt_token_ids": [at % 250 for at in range(300)]}])
def test_requests_wait_while_a_late_read_holds_memory(tmp_path, hanging, prompt):
    """Both requests whose modules hang and requests that need none of them."""
    llm = known(tmp_path, 480, store_timeout_s=0.1)
    engine = llm.local.engine
    first = request(llm, of_schema(0))
    engine.add(first)
    step(llm)
    time.sleep(0.2)
    second = request(llm, prompt)
    engine.add(second)
    for _ in range(20):
        step(llm)
    assert (first.error, second.error) == (None, None)
    assert engine.stalled or engine.scheduler.running or first.finished
    hanging.go_on.set()
    until(lambda: first.finished and second.finished, llm)
    assert (first.error, second.error) == (None, None)
    llm.shutdown()


def until(done: Any, llm: LLM) -> None:
    began = time.monotonic()
    while not done():
        assert time.monotonic() < began + 60
        step(llm)
        llm.local.engine.residency.wait(0.01)


def test_request_waiting_for_a_prefix_takes_no_slot():
    llm = make("off", 8000, max_num_batched_tokens=32, prefill_chunk=32, max_num_seqs=4)
    engine, head = llm.local.engine, [at % 250 for at in range(400)]
    policy = llm.policy("exact")
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    first, *waiting = (
        llm.local.prepare(llm.processor.process({"prompt_token_ids": [*head, at]}, params, policy)) for at in range(6)
    )
    engine.add(first)
    step(llm)
    for each in waiting:
        engine.add(each)
    step(llm)
    short = request(llm, {"prompt_token_ids": [7] * 8})
    engine.add(short)
    for _ in range(4):
        step(llm)
    assert short.token_ids
    assert first.prompt_left
    while engine.busy:
        step(llm)
    assert all(each.usage.cached_tokens >= 400 - 16 for each in waiting)
    llm.shutdown()
