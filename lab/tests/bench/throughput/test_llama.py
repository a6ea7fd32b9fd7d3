"""llama.cpp as a column, with a stand-in for llama.cpp: the column's questions, and the worker's calls."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import sys
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inlay.cli.main import main
from inlay.errors import DeadlineError, ModelError
from inlay_lab.bench.throughput import llama
from inlay_lab.bench.throughput.llama import LlamaCpp
from inlay_lab.bench.throughput.workload import shared_prefix
from tests.conftest import tiny

pytestmark = pytest.mark.long

VOCABULARY, COMPLETION = 64, 4
CONFIG = tiny("llama").model.config


def successor(ids: list[int]) -> int:
    return sum(at * token for at, token in enumerate(ids, 1)) % VOCABULARY


def answered(ids: list[int], tokens: int) -> list[int]:
    said: list[int] = []
    for _ in range(tokens):
        said.append(successor([*ids, *said]))
    return said


class Memory:
    """Tokens with their sequences, as in a unified KV cache."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, int, set[int]]] = []  # position, token, sequences
        self.computed = 0
        self.most_cells = 0

    def clear(self, memory: Any, data: bool) -> None:
        self.cells = []

    def copy(self, memory: Any, source: int, target: int, first: int, end: int) -> None:
        assert (first, end) == (-1, -1)
        for _, _, sequences in self.cells:
            if source in sequences:
                sequences.add(target)

    def remove(self, memory: Any, sequence: int, first: int, end: int) -> bool:
        for _, _, sequences in self.cells:
            sequences.discard(sequence)
        self.cells = [cell for cell in self.cells if cell[2]]
        return True

    def ids(self, sequence: int) -> list[int]:
        held = sorted((position, token) for position, token, sequences in self.cells if sequence in sequences)
        assert [position for position, _ in held] == list(range(len(held))), "a position is missing or there twice"
        return [token for _, token in held]

    def decode(self, state: Any, batch: Any) -> int:
        self.logits = {}
        for at in range(batch.n_tokens):
            assert batch.n_seq_id[at] == 1
            self.cells.append((batch.pos[at], batch.token[at], {batch.seq_id[at][0]}))
            self.computed += 1
            self.most_cells = max(self.most_cells, len(self.cells))
            if batch.logits[at]:
                self.logits[at] = successor(self.ids(batch.seq_id[at][0]))
        return 0

    def row(self, state: Any, at: int) -> Any:
        numbers = (ctypes.c_float * VOCABULARY)()
        numbers[self.logits[at]] = 1.0
        return ctypes.cast(numbers, ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def played(monkeypatch) -> Any:
    """The worker's module, the memory behind its llama_cpp, and the parameters of its context."""
    memory, params = Memory(), SimpleNamespace()
    fake: Any = ModuleType("llama_cpp")
    fake.llama_log_callback = lambda call: call
    for name in ("log_set", "backend_init", "synchronize", "get_memory", "model_get_vocab"):
        setattr(fake, f"llama_{name}", lambda *_: None)
    fake.llama_model_default_params = fake.llama_model_load_from_file = lambda *_: object()
    fake.llama_context_default_params = lambda: params
    fake.llama_init_from_model = lambda model, params: object()
    fake.llama_vocab_n_tokens = lambda vocabulary: VOCABULARY
    fake.llama_batch_init = lambda cells, embedding, most: SimpleNamespace(
        n_tokens=0, token=[0] * cells, pos=[0] * cells, n_seq_id=[0] * cells, seq_id=[[0] for _ in range(cells)],
        logits=[False] * cells,
    )  # fmt: skip
    fake.llama_memory_clear, fake.llama_memory_seq_cp = memory.clear, memory.copy
    fake.llama_memory_seq_rm = memory.remove
    fake.llama_decode, fake.llama_get_logits_ith = memory.decode, memory.row
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    name = "inlay_lab.bench.throughput.llama_worker"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name), memory, params
    sys.modules.pop(name)


@pytest.fixture
def column(played, monkeypatch) -> Any:
    """The column, with the worker in this process."""
    module = played[0]

    class Here:
        def __init__(self, config: Any, name: str, words: Any, remedy: str) -> None:
            assert name == module.__name__
            self.sequences = module.Sequences("file", *words)

        def ask(self, line: str) -> Any:
            return json.loads(json.dumps(module.answered(self.sequences, json.loads(line))))

        def close(self) -> None:
            pass

    monkeypatch.setattr(llama, "Worker", Here)
    monkeypatch.setattr(llama, "why_not", lambda config, dtype: None)
    made = LlamaCpp(CONFIG, "bfloat16", most=4, longest=70 + 6 + COMPLETION, shared=70, token_bytes=10)
    yield made
    made.close()


@pytest.mark.parametrize("prefix", [0, 70])
@pytest.mark.parametrize("rate", [None, 200.0])
def test_sequences_share_computed_tokens(column, played, prefix, rate):
    _, memory, params = played
    workload = shared_prefix(VOCABULARY, requests=6, prefix=prefix, question=6, completion=COMPLETION)
    workload = workload if rate is None else workload.arriving(rate, 0)
    for _ in range(2):  # nothing of the first run is left in the second
        memory.computed = memory.most_cells = 0
        run = column.run(workload)
        assert [list(answer.ids) for answer in run.answers] == [
            answered(list(ask.ids), COMPLETION) for ask in workload.asks
        ]
        assert memory.computed == prefix + 6 * (6 + COMPLETION - 1)  # an answer's last token is not computed
        assert memory.most_cells <= params.n_ctx
        for answer, ask in zip(run.answers, workload.asks, strict=True):
            assert answer.prompt_ids == ask.ids
            assert len(answer.times) == COMPLETION
            assert answer.times == sorted(answer.times)
            assert answer.times[0] > answer.arrived >= run.started
    assert params.kv_unified is True
    assert params.n_seq_max == 5
    if rate is None:
        assert (run.peak_batch, run.kv_peak) == (4, 10 * (prefix + 4 * (6 + COMPLETION)))


def test_run_over_its_time_limit_ends(column, played):
    workload = shared_prefix(VOCABULARY, requests=3, prefix=70, question=6, completion=COMPLETION)
    with pytest.raises(DeadlineError, match=r"not done within 1e-06 s; give a larger --budget-s or fewer --requests"):
        column.run(workload, 1e-6)
    module = played[0]
    sequences = module.Sequences("file", 100, 2, 1)
    sequences.begin([1, 2])
    with pytest.raises(module.LateError):
        sequences.answer([[3]], 2, time.perf_counter() - 1)


def test_unavailable_llama_cpp_is_skipped_with_a_reason(monkeypatch, capsys, quick_model):
    why = "not installed; run: pip install llama-cpp-python gguf"
    monkeypatch.setattr(llama, "why_not", lambda config, dtype: why)
    words = "bench throughput --model random:tiny --quick --against llama.cpp --part prefix,modules --prefixes 0"
    assert main([*words.split(), "--json"]) == 0
    behind_prefix, modules = json.loads(capsys.readouterr().out)["rows"]
    assert behind_prefix["columns"]["llama.cpp"] == {"skipped": why}
    assert set(modules["columns"]) == {"inlay"}
    assert main(words.split()) == 0
    assert why in " ".join(capsys.readouterr().out.split())


def test_failed_worker_process_is_reported(monkeypatch):
    monkeypatch.setattr("inlay_lab.bench.decode.llama.write_gguf", lambda config, path, quantization: None)
    monkeypatch.setattr(llama, "WORKER", "inlay_lab.bench.no_such_module")
    monkeypatch.setattr(llama, "why_not", lambda config, dtype: None)
    column = LlamaCpp(CONFIG, "bfloat16", most=1, longest=9, shared=0, token_bytes=10)
    with pytest.raises(ModelError, match=r"llama.cpp ended with status 1; leave it out with --against off,stock"):
        column.run(shared_prefix(VOCABULARY, requests=1, prefix=0, question=2, completion=2))


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "gguf")), reason="llama.cpp is not installed"
)
def test_llama_cpp_answers_the_same_with_and_without_sharing():
    column = LlamaCpp(CONFIG, "bfloat16", most=3, longest=30 + 6 + COMPLETION, shared=0, token_bytes=10)
    workload = shared_prefix(CONFIG.vocab_size, requests=3, prefix=30, question=6, completion=COMPLETION)
    try:
        shared = column.run(workload)
        alone = column.run(replace(workload, prefix=0))
    finally:
        column.close()
    assert [answer.ids for answer in shared.answers] == [answer.ids for answer in alone.answers]
