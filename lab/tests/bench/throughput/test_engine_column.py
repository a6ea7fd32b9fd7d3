"""llama.cpp and vLLM as columns, each in a separate process, with stand-ins for their packages."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from inlay.cli.main import main
from inlay.errors import DeadlineError, ModelError
from inlay_lab.bench.throughput.engine_column import EngineColumn, llama_column, vllm_column
from inlay_lab.bench.throughput.runs import Run
from inlay_lab.bench.throughput.workload import Workload, shared_prefix
from tests.conftest import tiny
from tests.model.equivalence.oracle import prefill

pytestmark = pytest.mark.long

COMPLETION = 4
CONFIG = tiny("llama").model.config


@pytest.fixture
def vllm(stand_ins, tmp_path, monkeypatch) -> Iterator[EngineColumn]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with vllm_column(tiny("llama").model, most=2, longest=50) as column:
        yield column
    assert not [*tmp_path.glob("inlay-bench-*")]


@pytest.fixture
def llama(stand_ins) -> Iterator[EngineColumn]:
    pytest.importorskip("gguf")
    column = llama_column(CONFIG, "bfloat16", most=4, longest=70 + 6 + COMPLETION, shared=70, token_bytes=10)
    yield column
    column.close()


def greedy(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The stock model's answer, with a whole pass for every token."""
    said: list[int] = []
    for _ in range(COMPLETION):
        said.append(int(prefill(tiny("llama"), [*ids, *said])[-1].argmax()))
    return tuple(said)


def check_times(run: Run, workload: Workload) -> None:
    assert [answer.prompt_ids for answer in run.answers] == [ask.ids for ask in workload.asks]
    for ask, answer in zip(workload.asks, run.answers, strict=True):
        assert answer.arrived == run.started + ask.at
        assert len(answer.times) == COMPLETION
        assert answer.times == sorted(answer.times)
        assert answer.times[0] > answer.arrived


def test_vllm_answers_with_the_given_weights(vllm):
    workload = shared_prefix(262, requests=3, prefix=40, question=6, completion=COMPLETION)
    expected = [greedy(ask.ids) for ask in workload.asks]
    assert len(set(expected)) > 1
    for each in (workload, workload.arriving(50.0, 0)):
        run = vllm.run(each, 30)
        assert [answer.ids for answer in run.answers] == expected
        assert (run.peak_batch, run.kv_peak) == (None, None)
        check_times(run, each)
    with pytest.raises(DeadlineError, match="not done within 0 s"):
        vllm.run(workload, 0)
    assert [answer.ids for answer in vllm.run(workload).answers] == expected, "it has dropped what was late"
    assert vllm.prompt_tokens(workload) == 40 + 3 * 6


@pytest.mark.parametrize("prefix", [0, 70])
@pytest.mark.parametrize("rate", [None, 200.0])
def test_llama_cpp_answers_with_a_shared_prefix(llama, llama_package: ModuleType, prefix, rate):
    workload = shared_prefix(CONFIG.vocab_size, requests=6, prefix=prefix, question=6, completion=COMPLETION)
    workload = workload if rate is None else workload.arriving(rate, 0)
    run = llama.run(workload)
    expected = [llama_package.answer([*ask.ids], COMPLETION) for ask in workload.asks]
    assert [[*answer.ids] for answer in run.answers] == expected
    check_times(run, workload)
    assert run.kv_peak == 10 * (prefix + run.peak_batch * (6 + COMPLETION))
    assert run.peak_batch == 4 or rate is not None
    with pytest.raises(DeadlineError, match=r"not done within 1e-06 s; give a larger --budget-s or fewer --requests"):
        llama.run(workload, 1e-6)
    assert llama.prompt_tokens(workload) == prefix + 6 * 6


def test_unavailable_llama_cpp_is_skipped_with_a_reason(monkeypatch, capsys, quick_model):
    why = "not installed; run: pip install llama-cpp-python gguf"
    monkeypatch.setattr("inlay_lab.bench.throughput.engine_column.why_not", lambda config, dtype: why)
    words = "bench throughput --model random:tiny --quick --against llama.cpp --part prefix,modules --prefixes 0"
    assert main([*words.split(), "--json"]) == 0
    behind_prefix, modules = json.loads(capsys.readouterr().out)["rows"]
    assert behind_prefix["columns"]["llama.cpp"] == {"skipped": why}
    assert set(modules["columns"]) == {"inlay"}
    assert main(words.split()) == 0
    assert why in " ".join(capsys.readouterr().out.split())


def test_failed_llama_cpp_is_reported(stand_ins, llama, monkeypatch):
    monkeypatch.setattr(
        "inlay_lab.bench.engines.gguf_file.write_gguf", lambda config, path, quantization: path.write_bytes(b"no model")
    )
    with pytest.raises(ModelError, match=r"llama.cpp: .*cannot load the model; leave it out with --against off,stock"):
        llama.run(shared_prefix(262, requests=1, prefix=0, question=2, completion=2))


def test_vllm_loading_error_is_reported(vllm, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(ModelError) as raised:
        vllm.run(shared_prefix(262, requests=1, prefix=0, question=6, completion=COMPLETION))
    assert str(raised.value) == "vllm: RuntimeError: no room; its standard error tells more"


def test_missing_vllm_is_reported(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as raised, vllm_column(tiny("llama").model, most=1, longest=10):
        pass
    assert str(raised.value) == "not installed; run: pip install vllm"


def test_too_little_disk_space_is_reported(stand_ins, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=1000))
    message = f"^its file takes 0.0 GB, and {tmp_path} has 0.0 GB free$"
    with pytest.raises(ModelError, match=message), vllm_column(tiny("llama").model, most=1, longest=10):
        pass
    assert not [*Path(tmp_path).glob("inlay-bench-*")]


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "gguf")), reason="llama.cpp is not installed"
)
def test_real_llama_cpp_answers_the_same_with_and_without_sharing():
    column = llama_column(CONFIG, "bfloat16", most=3, longest=30 + 6 + COMPLETION, shared=0, token_bytes=10)
    workload = shared_prefix(CONFIG.vocab_size, requests=3, prefix=30, question=6, completion=COMPLETION)
    try:
        shared = column.run(workload)
        alone = [column.run(replace(workload, asks=(ask,))).answers[0].ids for ask in workload.asks]
    finally:
        column.close()
    assert [answer.ids for answer in shared.answers] == alone
