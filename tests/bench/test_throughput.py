"""Many requests at once: every column computes the same, and the figures are what they say; on tiny models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from inlay.async_llm import AsyncLLM
from inlay.attention.plan import Piece, Span
from inlay.bench.machine import Ceilings
from inlay.bench.throughput import measure
from inlay.bench.throughput.continuous import Continuous
from inlay.bench.throughput.measure import ThroughputSetting, measure_throughput
from inlay.bench.throughput.ours import Ours
from inlay.bench.throughput.record import Answer, Run, figures
from inlay.bench.throughput.steps import Cost, Step, covered, held_chunks, recording, summary
from inlay.bench.throughput.stock import Stock, padded
from inlay.bench.throughput.workload import Ask, Workload, permuted_modules, shared_prefix
from inlay.cache.pool import Run as Slots
from inlay.cli.main import main
from inlay.errors import CapacityError, ContextError, ModelError, ParameterError
from inlay.models.interface import attention_implementation
from tests.conftest import tiny
from tests.equivalence.oracle import PromptCacheOracle, prefill

COMPLETION = 4


@pytest.fixture(scope="module")
def llm():
    made = AsyncLLM(tiny("llama"), seed=0, kv_memory="16MiB", max_num_seqs=4)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def columns(llm):
    model = tiny("llama").model
    return {
        "inlay": Ours(llm, reuse=True),
        "off": Ours(llm, reuse=False),
        "stock": Stock(model, 4),
        "transformers": Continuous(model, 4),
    }


@pytest.fixture
def quick_model(monkeypatch) -> None:
    """Whatever model is named, a tiny one that is in memory already."""
    for module in ("inlay.bench.throughput.measure", "inlay.bench.stock"):
        monkeypatch.setattr(f"{module}.load_model", lambda *arguments, **keywords: tiny("llama"))


def greedy(ids: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """The stock model's answer, every token from a whole pass of its own."""
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
def test_every_column_answers_as_the_stock_model(columns, prefix, rate):
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
    check(run, workload, [_spliced(llm, ask) for ask in workload.asks])
    assert run.prepare_s > 0
    assert sum(span.length for step in run.steps for span in step.spans) == 3 * (5 + COMPLETION - 1)


def _spliced(llm: AsyncLLM, ask: Ask) -> tuple[int, ...]:
    """The answer from modules that the stock model has encoded one at a time and that were moved to their places."""
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
    assert ours.kv_peak == (4 + 3) * chunk  # one prompt, and a chunk for each other one's own tokens
    assert ours.kv_peak <= ours.pool_peak
    assert (ours.peak_batch, off.peak_batch, stock.peak_batch) == (4, 4, 4)
    stored = 200 + 4 * (200 + 8 + COMPLETION - 1)  # the prefix, and a copy of it in front of each
    assert stock.kv_peak == stored * llm.store.pool.bytes_per_token
    assert sum(span.length for step in ours.steps for span in step.spans) == 200 + 4 * (8 + COMPLETION - 1)
    assert sum(span.length for step in off.steps for span in step.spans) == 4 * (208 + COMPLETION - 1)


def test_the_engine_is_left_as_it_was(llm):
    engine = llm._engine
    with recording(llm):
        assert "step" in vars(engine)
        assert "run" in vars(engine._runner)
    assert "step" not in vars(engine)
    assert "run" not in vars(engine._runner)


def test_steps_hold_their_forward_pass(columns):
    run = columns["inlay"].run(shared_prefix(262, requests=2, prefix=8, question=4, completion=2))
    assert all(0 < step.forward_s < step.seconds for step in run.steps)
    assert sum(step.rows for step in run.steps) == 4


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8))
def test_slots_in_several_runs_count_once(runs):
    slots = [Slots(first, length) for first, length in runs]
    assert covered(slots) == len({slot for run in slots for slot in range(run.first, run.end)})
    step = Step((), 0, (tuple(slots),), 1, 0.0)
    assert held_chunks(step, 8) == len({slot // 8 for run in slots for slot in range(run.first, run.end)})


def test_operations_are_those_that_torch_counts(llm):
    cost, model = Cost.of(llm), tiny("llama").model
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), attention_implementation(model, "eager"):
        model(torch.arange(9)[None], past_key_values=cache, use_cache=True)
        with FlopCounterMode(display=False) as counter:
            model(torch.tensor([[3]]), past_key_values=cache, use_cache=True)
    step = Step((Span(9, 1, (Piece(Slots(0, 9), 0),), (Slots(9, 1),)),), 1, (), 1, 0.0)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert cost.flops(step) - 2 * norms == counter.get_total_flops()


def test_a_floor_is_the_larger_of_two_times_and_reads_what_is_shared_once():
    cost = Cost(body=1000, head=100, itemsize=2, pair_flops=8, kv_bytes=16, dtype="float32")
    shared = Piece(Slots(0, 10), 0)
    spans = (Span(10, 1, (shared,), (Slots(64, 1),)), Span(10, 3, (shared,), (Slots(128, 3),)))
    step = Step(spans, rows=1, held=(), running=2, forward_s=0.5, seconds=1.0)
    assert cost.bytes(step) == (1000 + 100) * 2 + (10 + 1 + 3) * 16
    assert cost.flops(step) == 2 * 4 * 1000 + 2 * 1 * 100 + 8 * (11 + 3 * 10 + 6)
    slow_memory = Ceilings({"float32": 1e9}, copy_gb_s=cost.bytes(step) / 1e9 / 0.25)
    told = summary([step, step], cost, slow_memory)
    assert told == {
        "count": 2, "seconds": 2.0, "forward_s": 1.0, "floor_s": 0.5, "floor_memory_s": 0.5, "of_floor": 0.25
    }  # fmt: skip
    slow_compute = Ceilings({"float32": cost.flops(step) / 1e9 / 0.75}, copy_gb_s=1e9)
    assert summary([step], cost, slow_compute)["floor_memory_s"] == 0
    assert summary([step], cost, slow_compute)["of_floor"] == 0.75


def test_figures_of_a_run():
    run = Run(10.0, [Answer(10.0, [11.0, 11.5, 13.0]), Answer(12.0, [12.5, 13.5, 14.0])], kv_peak=7)
    told = figures(run)
    assert (told["wall_s"], told["tokens_s"], told["requests_s"]) == (4.0, 1.5, 0.5)
    assert told["latency_ms_per_token"] == pytest.approx((3 / 3 + 2 / 3) / 2 * 1000, abs=0.001)
    assert told["ttft_ms"] == {"p50": 750.0, "p90": 950.0, "p99": 995.0}
    assert told["inter_token_ms"]["p50"] == 750.0  # of 500, 1500, 1000, 500
    assert told["kv_peak_bytes"] == 7
    assert figures(Run(0.0, [Answer(0.0, [1.0])]))["inter_token_ms"] is None


def test_tokens_that_come_together_have_one_time():
    answer = Answer(0.0)
    answer.say((5,), 1.0)
    answer.say((5, 6, 7), 2.0)
    assert (answer.ids, answer.times) == ((5, 6, 7), [1.0, 2.0, 2.0])


def test_arrivals_are_a_seeded_poisson_process():
    workload = shared_prefix(262, requests=4000, prefix=0, question=1, completion=1)
    times = [ask.at for ask in workload.arriving(5.0, 0).asks]
    assert times[0] == 0
    gaps = torch.tensor(times).double().diff()
    assert float(gaps.mean()) == pytest.approx(1 / 5, rel=0.05)
    assert float(gaps.std()) == pytest.approx(1 / 5, rel=0.08)
    assert [ask.at for ask in workload.arriving(5.0, 0).asks] == times
    assert [ask.at for ask in workload.arriving(5.0, 1).asks] != times
    assert [ask.ids for ask in workload.arriving(5.0, 0).asks] == [ask.ids for ask in workload.asks]


def test_the_run_of_median_time_is_told_and_the_first_one_is_small():
    class Fake:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def run(self, workload: Workload) -> Run:
            self.seen.append(len(workload.asks))
            took = {2: 100.0, 5: (9.0, 3.0, 5.0)[len(self.seen) - 2]}[len(workload.asks)]
            return Run(0.0, [Answer(0.0, [took])])

    fake, workload = Fake(), shared_prefix(262, requests=5, prefix=0, question=1, completion=1)
    runs, left_out = measure._in_turns({"inlay": fake}, workload, 3)
    assert fake.seen == [2, 5, 5, 5]
    assert runs["inlay"].wall_s == 5.0
    assert left_out == {}


@pytest.mark.usefixtures("quick_model")
def test_json_and_tables(capsys):
    words = "bench throughput --model random:tiny --quick --arrivals batch,poisson --prefixes 70 --against off,stock"
    status = main(words.split())
    out, err = capsys.readouterr()
    assert status == 0, err
    *table, last = out.splitlines()
    result = json.loads(last)
    assert [(row["part"], row["arrivals"], row["prefix"]) for row in result["rows"]] == [
        ("prefix", "batch", 70), ("prefix", "poisson", 70), ("modules", "batch", None), ("modules", "poisson", None)
    ]  # fmt: skip
    for row in result["rows"]:
        assert list(row["columns"]) == ["inlay", "off", "stock"]
        ours, off = row["columns"]["inlay"], row["columns"]["off"]
        assert ours["tokens_s"] == pytest.approx(4 * row["completion"] / ours["wall_s"], rel=0.05)
        assert row["kv_saved"] == pytest.approx(1 - ours["kv_peak_bytes"] / off["kv_peak_bytes"], abs=0.001)
        assert (row["ratio"] is None) == (row["arrivals"] == "poisson")
    first = result["rows"][0]
    assert first["ratio"]["stock"] == pytest.approx(
        first["columns"]["stock"]["wall_s"] / first["columns"]["inlay"]["wall_s"], rel=0.05, abs=0.01
    )
    assert any("70 shared tokens; 4 requests, all at once" in line for line in table)
    assert any("6 of 12 modules in any order; 4 requests, 50 a second" in line for line in table)


@pytest.mark.usefixtures("quick_model")
def test_a_column_that_cannot_run_says_why(monkeypatch, capsys):
    def refuse(self, *arguments, **keywords):
        raise RuntimeError("no such device\nand more")

    monkeypatch.setattr(type(tiny("llama").model), "continuous_batching_context_manager", refuse)
    words = "bench throughput --model random:tiny --quick --against transformers --part prefix --prefixes 0"
    assert main(words.split()) == 0
    *table, last = capsys.readouterr().out.splitlines()
    (row,) = json.loads(last)["rows"]
    reason = "transformers' continuous batching: RuntimeError: no such device"
    assert row["columns"]["transformers"] == {"skipped": reason}
    assert row["ratio"] == {}
    assert row["kv_saved"] is None
    assert "no such device" in " ".join(table)


def test_an_error_of_one_request_is_the_columns(columns, monkeypatch):
    column = columns["transformers"]
    monkeypatch.setattr(type(column._model), "forward", lambda *arguments, **keywords: 1 / 0)
    with pytest.raises(ModelError, match=r"transformers' continuous batching: .*division by zero"):
        column.run(shared_prefix(262, requests=1, prefix=0, question=2, completion=1))


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"requests": 0}, ParameterError, "requests is 0; it must be at least 1"),
        ({"prefixes": (-1,)}, ParameterError, "prefix is -1; it must be at least 0"),
        ({"rates": (1.0, 0.0)}, ParameterError, "rate is 0.0; it must be a number of requests a second above 0"),
        ({"rates": (float("nan"),)}, ParameterError, "rate is nan; it must be a number of requests a second above 0"),
        ({"columns": ("vllm",)}, ParameterError, "column is 'vllm'; use one of inlay, off, stock, transformers"),
        ({"parts": ("x",)}, ParameterError, "part is 'x'; use one of prefix, modules"),
        ({"arrivals": ("x",)}, ParameterError, "arrivals is 'x'; use one of batch, poisson"),
        ({"prefixes": (9000,)}, ContextError, r"requests of \d+ tokens do not fit the model's context of 2048"),
        ({"batch": 10**9}, CapacityError, "take .* GB of KV where nothing is shared, and .* GB are free; give a"),
    ],
)
@pytest.mark.usefixtures("quick_model")
def test_wrong_settings(wrong, error, sentence):
    with pytest.raises(error, match=sentence):
        measure_throughput(ThroughputSetting(**{"models": ("m",), "quick": True, "prefixes": (0,), **wrong}))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--rates 1", "--rates are those of Poisson arrivals; add --arrivals poisson, or drop --rates"),
        ("--arrivals poisson --rates x", "--rates is 'x'; write a number, or several with commas: 0.5,1,2"),
        ("--prefixes x", "--prefixes is 'x'; write a number, or several with commas: 1024,2048"),
    ],
)
def test_wrong_words_are_one_sentence(words, sentence, capsys):
    assert main(["bench", "throughput", "--model", "random:tiny", *words.split()]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_importing_the_command_line_imports_no_torch():
    code = "import sys, inlay.cli.bench_throughput; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
