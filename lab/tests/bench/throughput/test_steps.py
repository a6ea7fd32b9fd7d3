"""The least time of an engine's steps, and the figures of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from inlay.attention.plan import Item, Part
from inlay.client.async_llm import AsyncLLM
from inlay.engine.unshared_runner import with_cache
from inlay.errors import DeadlineError
from inlay.models.interface import attention_implementation
from inlay.models.weights import WeightForm
from inlay.slots import SlotRange as Slots
from inlay.types import Usage
from inlay_lab.bench.floor import Rates
from inlay_lab.bench.throughput.runs import Answer, Limit, Run, figures
from inlay_lab.bench.throughput.steps import Cost, Step, covered, held_chunks, summary
from tests.conftest import tiny


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8))
def test_slots_in_several_ranges_count_once(runs):
    slots = [Slots(first, length) for first, length in runs]
    assert covered(slots) == len({slot for run in slots for slot in range(run.first, run.end)})
    step = Step((), 0, (tuple(slots),), 1, 0.0)
    assert held_chunks(step, 8) == len({slot // 8 for run in slots for slot in range(run.first, run.end)})


def test_operations_equal_torchs_count(llm):
    cost, model = Cost.of(llm, 100), tiny("llama").model
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), attention_implementation(model, "eager"):
        model(torch.arange(9)[None], **with_cache(model, cache), use_cache=True)
        with FlopCounterMode(display=False) as counter:
            model(torch.tensor([[3]]), **with_cache(model, cache), use_cache=True)
    step = Step((Part.of(9, 1, (Item(Slots(0, 9), 0),), (Slots(9, 1),)),), 1, (), 1, 0.0)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert cost.flops(step) - 2 * norms == counter.get_total_flops()


def test_floor_is_the_larger_time_and_counts_shared_reads_once():
    cost = Cost(body=1000, head=100, itemsize=2, pair_flops=8, kv_bytes=16, dtype="float32")
    shared = Item(Slots(0, 10), 0)
    parts = (Part.of(10, 1, (shared,), (Slots(64, 1),)), Part.of(10, 3, (shared,), (Slots(128, 3),)))
    step = Step(parts, rows=1, held=(), running=2, forward_s=0.5, seconds=1.0)
    assert cost.bytes(step) == (1000 + 100) * 2 + (10 + 1 + 3) * 16
    assert cost.flops(step) == 2 * 4 * 1000 + 2 * 1 * 100 + 8 * (11 + 3 * 10 + 6)
    slow_memory = Rates("float32", cost.bytes(step) / 1e9 / 0.25, {4: 1e9})
    told = summary([step, step], cost, slow_memory)
    assert told == {
        "count": 2, "seconds": 2.0, "forward_s": 1.0, "floor_s": 0.5, "floor_memory_s": 0.5, "of_floor": 0.25,
        "decode": None,
    }  # fmt: skip
    slow_compute = Rates("float32", 1e9, {4: cost.flops(step) / 1e9 / 0.75})
    assert summary([step], cost, slow_compute)["floor_memory_s"] == 0
    assert summary([step], cost, slow_compute)["of_floor"] == 0.75


def test_floor_depends_on_reads_products_and_kv():
    rates = Rates("float32", 2.0, {16: 500.0, 32: 800.0})
    floor = rates.floor(flops=4e9, rows=16, weight_bytes=1e7, kv_bytes=1e6)
    assert (floor.weights_s, floor.products_s, floor.kv_s) == (0.005, 0.008, 0.0005)
    assert (floor.seconds, floor.bound) == (0.0085, "compute")
    more = rates.floor(flops=3.9e9, rows=17, weight_bytes=1e7, kv_bytes=1e6)  # 32 rows are no slower
    assert (more.seconds, more.bound) == (0.005 + 0.0005, "memory")


def test_rates_are_measured_on_demand():
    rates = Rates.measured("bfloat16", quick=True)
    assert rates.read_gb_s > 0.01
    assert rates.gemm_gflops == {}
    assert rates.gemm(3) == rates.gemm(4) > 0.01
    assert set(rates.gemm_gflops) == {4}


def test_full_decode_steps_have_the_most_requests_and_no_prompt():
    def step(lengths: list[int], seconds: float) -> Step:
        parts = tuple(Part.of(9, length, (), (Slots(64 * row, length),)) for row, length in enumerate(lengths))
        return Step(parts, len(lengths), (), len(lengths), 0.0, seconds)

    cost = Cost(body=1000, head=100, itemsize=2, pair_flops=8, kv_bytes=16, dtype="float32")
    rate = Rates("float32", (1100 * 2 + 3 * 16) / 1e9 / 0.010, {4: 1e9, 1: 1e9, 16: 1e9})  # 10 ms for three rows
    steps = [
        step([1, 1, 1], 0.02),
        step([1, 1, 1], 0.04),
        step([1, 1, 1], 0.1),
        step([1, 1, 1, 7], 9.0),
        step([1], 9.0),
    ]
    told = summary(steps, cost, rate)["decode"]
    more = ("fastest_ms", "weights_ms", "products_ms", "kv_ms", "read_gb_s", "gemm_gflops")
    parts = {name: told.pop(name) for name in more}
    assert told == {"rows": 3, "count": 3, "ms": 40.0, "floor_ms": 10.0, "of_floor": 0.25, "bound": "memory"}
    assert parts == {
        "fastest_ms": 20.0, "weights_ms": 9.786, "products_ms": 0.0, "kv_ms": 0.214,
        "read_gb_s": rate.read_gb_s, "gemm_gflops": 1e9,
    }  # fmt: skip


def test_floor_is_none_with_windowed_layers():
    for name, told in (("mistral", False), ("qwen2-mixed", False), ("qwen2", True)):
        llm = AsyncLLM(tiny(name), seed=0, kv_memory="1MiB")  # windows of 40
        assert Cost.of(llm, 40) is not None
        assert (Cost.of(llm, 41) is not None) == told
        llm.shutdown()


def test_floor_is_none_for_quantized_weights():
    quantized = replace(tiny("llama"), form=WeightForm(quantization="int8"))
    llm = AsyncLLM(quantized, seed=0, kv_memory="1MiB")
    assert Cost.of(llm, 40) is None
    llm.shutdown()


def test_figures_of_a_run():
    run = Run(10.0, [Answer(10.0, [11.0, 11.5, 13.0]), Answer(12.0, [12.5, 13.5, 14.0])], kv_peak=7)
    told = figures(run)
    assert (told["wall_s"], told["tokens_s"], told["requests_s"]) == (4.0, 1.5, 0.5)
    assert told["latency_ms_per_token"] == pytest.approx((3 / 3 + 2 / 3) / 2 * 1000, abs=0.001)
    assert told["ttft_ms"] == {"p50": 750.0, "p90": 950.0, "p99": 995.0}
    assert told["inter_token_ms"]["p50"] == 750.0  # of 500, 1500, 1000, 500
    assert told["kv_peak_bytes"] == 7
    assert (told["requests"], told["hit_rate"]) == (2, None)
    assert figures(Run(0.0, [Answer(0.0, [1.0])]))["inter_token_ms"] is None


def test_hit_rate_is_per_token():
    used = [Usage(100, 80, 20, 80, 0, 0), Usage(300, 0, 300, 0, 0, 0)]
    run = Run(0.0, [Answer(0.0, [1.0], usage=usage) for usage in used])
    assert figures(run)["hit_rate"] == 0.2


def test_time_limit_expires():
    Limit(60.0).check()
    with pytest.raises(DeadlineError, match="not done within -1 s"):
        Limit(-1.0).check()


def test_tokens_emitted_together_have_one_time():
    answer = Answer(0.0)
    answer.say((5,), 1.0)
    answer.say((5, 6, 7), 2.0)
    assert (answer.ids, answer.times) == ((5, 6, 7), [1.0, 2.0, 2.0])
