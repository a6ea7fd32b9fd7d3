"""Every column computes the same on a tiny model and reports its figures."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from inlay.client.async_llm import AsyncLLM
from inlay.errors import DeadlineError, ModelError
from inlay.sampling.params import SamplingParams
from inlay_lab.bench.throughput.columns import padded
from inlay_lab.bench.throughput.runs import Run
from inlay_lab.bench.throughput.steps import recording
from inlay_lab.bench.throughput.workload import (
    KINDS,
    Ask,
    Sizes,
    Workload,
    permuted_modules,
    shared_prefix,
    user_workload,
)
from tests.conftest import tiny
from tests.model.equivalence.oracle import PromptCacheOracle, prefill
from tests.model.hooks import failing

pytestmark = pytest.mark.long

COMPLETION = 4
SIZES = Sizes(document=70, system=40, text=12, passage=16, passages=3, question=6, answer=3, summary=3)


def greedy(ids: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """The stock model's answer, with a whole pass for every token."""
    said: list[int] = []
    for _ in range(tokens):
        said.append(int(prefill(tiny("llama"), [*ids, *said])[-1].argmax()))
    return tuple(said)


def check(run: Run, workload: Workload, expected: list[tuple[int, ...]]) -> None:
    assert [answer.prompt_ids for answer in run.answers] == [ask.ids for ask in workload.asks]
    assert [answer.ids for answer in run.answers] == expected
    for answer in run.answers:
        assert len(answer.times) == workload.completion
        assert answer.times == sorted(answer.times)
        assert answer.times[0] > answer.arrived >= run.started


@pytest.mark.parametrize("prefix", [0, 70])
@pytest.mark.parametrize("rate", [None, 200.0])
def test_every_column_equals_the_stock_model(columns, prefix, rate):
    workload = shared_prefix(262, requests=5, prefix=prefix, question=6, completion=COMPLETION)
    assert len({ask.ids[:prefix] for ask in workload.asks}) == 1
    assert len({ask.ids[prefix:] for ask in workload.asks}) == 5
    expected = [greedy(ask.ids, COMPLETION) for ask in workload.asks]
    assert len(set(expected)) > 1
    if rate is not None:
        workload = workload.arriving(rate, 0)
    for name, column in columns.items():
        run = column.run(workload)
        check(run, workload, expected)
        assert (run.peak_batch or 1) <= 4, name


@pytest.mark.parametrize("name", ["inlay", "off", "stock", "transformers"])
def test_run_over_its_time_limit_ends_and_leaves_no_request(llm, columns, name):
    workload = shared_prefix(262, requests=3, prefix=20, question=6, completion=COMPLETION)
    with pytest.raises(DeadlineError, match=r"not done within 1e-05 s; give a larger --budget-s or fewer --requests"):
        columns[name].run(workload, 1e-5)
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)
    check(columns[name].run(workload), workload, [greedy(ask.ids, COMPLETION) for ask in workload.asks])


@pytest.mark.parametrize("name", ["inlay", "off"])
def test_running_requests_are_dropped_before_the_next_run(llm, columns, name):
    with pytest.raises(DeadlineError):
        columns[name].run(shared_prefix(262, requests=3, prefix=20, question=6, completion=1000), 0.2)
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


def test_clients_alternate(columns):
    workload = replace(shared_prefix(262, requests=5, prefix=9, question=6, completion=COMPLETION), clients=2)
    run = columns["inlay"].run(workload)
    check(run, workload, [greedy(ask.ids, COMPLETION) for ask in workload.asks])
    assert run.peak_batch == 2
    for number, answer in enumerate(run.answers[2:], start=2):
        ended = sum(other.times[-1] <= answer.arrived for other in run.answers[:number])
        assert ended >= number - 1, "two were under way already"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_hits_equal_the_workloads_hit_rate(llm, columns, kind, rate):
    workload = asyncio.run(user_workload(kind, llm, SIZES, requests=6, hit_rate=rate, clients=2))
    run = columns["inlay"].run(workload)
    for ask, answer in zip(workload.asks, run.answers, strict=True):
        # Random texts may share a first token or two by chance, and a schema's first token is stored too.
        assert 0 <= answer.usage.cached_tokens - ask.shared <= 3, (kind, ask.shared)
    computed = sum(answer.usage.computed_tokens for answer in run.answers)
    steps = sum(part.rows for step in run.steps for part in step.parts)
    assert steps == computed + 6 * (workload.completion - 1)
    promised = columns["inlay"].prompt_tokens(workload)
    assert computed <= promised <= computed + 6 * 3
    off = columns["off"].run(workload)
    assert all(answer.usage.cached_tokens == 0 for answer in off.answers)
    assert len(llm.store) == 0
    assert columns["off"].prompt_tokens(workload) == sum(answer.usage.computed_tokens for answer in off.answers)


def test_prompts_of_unequal_lengths_are_padded(columns):
    prompts = [tuple(range(7, 7 + size)) for size in (20, 23, 30)]
    workload = Workload(tuple(Ask(ids, list(ids)) for ids in prompts), COMPLETION, prefix=9)
    check(columns["stock"].run(workload), workload, [greedy(ids, COMPLETION) for ids in prompts])
    assert padded([[1, 2], [3, 4]], 9)[1] is None


def test_modules_in_any_order(llm, columns):
    workload = asyncio.run(permuted_modules(llm, requests=3, tokens=10, question=5, completion=COMPLETION))
    full = [greedy(ask.ids, COMPLETION) for ask in workload.asks]
    for name in ("off", "stock", "transformers"):
        check(columns[name].run(workload), workload, full)
    run = columns["inlay"].run(workload)
    check(run, workload, [_composed_prompt(llm, ask) for ask in workload.asks])
    assert run.prepare_s > 0
    assert sum(part.rows for step in run.steps for part in step.parts) == 3 * (5 + COMPLETION - 1)


def _composed_prompt(llm: AsyncLLM, ask: Ask) -> tuple[int, ...]:
    """The answer from modules that the stock model encoded one at a time and moved to their positions."""
    oracle, at = PromptCacheOracle(tiny("llama")), len(llm.encoder.bos)
    if at:
        oracle.add_module([], list(zip(llm.encoder.bos, range(at), strict=True)), 0)
    for _ in range(6):
        oracle.add_module([], list(zip(ask.ids[at : at + 10], range(10), strict=True)), at)
        at += 10
    oracle.add_fresh(list(ask.ids[at:]), at)
    said = [int(oracle.logits[-1].argmax())]
    while len(said) < COMPLETION:
        oracle.add_fresh(said[-1:], len(ask.ids) + len(said) - 1)
        said.append(int(oracle.logits[-1].argmax()))
    return tuple(said)


def test_shared_memory_is_counted_once(llm, columns):
    workload = shared_prefix(262, requests=4, prefix=200, question=8, completion=COMPLETION)
    chunk = 64 * llm.store.pool.bytes_per_token
    ours, off, stock = (columns[name].run(workload) for name in ("inlay", "off", "stock"))
    assert off.kv_peak == off.pool_peak == 4 * 4 * chunk  # 212 tokens each
    assert ours.kv_peak == (4 + 3) * chunk  # one prompt, and a chunk for each other's own tokens
    assert ours.kv_peak <= ours.pool_peak
    assert (ours.peak_batch, off.peak_batch, stock.peak_batch) == (4, 4, 4)
    stored = 200 + 4 * (200 + 8 + COMPLETION - 1)  # the prefix, and a copy of it for each sequence
    assert stock.kv_peak == stored * llm.store.pool.bytes_per_token
    assert sum(part.rows for step in ours.steps for part in step.parts) == 200 + 4 * (8 + COMPLETION - 1)
    assert sum(part.rows for step in off.steps for part in step.parts) == 4 * (208 + COMPLETION - 1)


def test_engine_is_restored_after_recording(llm):
    async def ask() -> None:
        async for _ in llm.generate("Hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)):
            pass

    with recording(llm) as steps:
        asyncio.run(ask())
        assert len(steps) == 3
    asyncio.run(ask())
    assert len(steps) == 3


def test_steps_hold_their_forward_pass(columns):
    run = columns["inlay"].run(shared_prefix(262, requests=2, prefix=8, question=4, completion=2))
    assert all(0 < step.forward_s < step.seconds for step in run.steps)
    assert sum(step.rows for step in run.steps) == 4


def test_error_of_one_request_fails_the_column(columns):
    column = columns["transformers"]
    with (
        failing(tiny("llama"), ZeroDivisionError("division by zero")),
        pytest.raises(ModelError, match=r"transformers' continuous batching: .*division by zero"),
    ):
        column.run(shared_prefix(262, requests=1, prefix=0, question=2, completion=1))
