"""vLLM as a column, in a separate process, with a stand-in for the package ``vllm``."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from inlay.errors import DeadlineError, ModelError
from inlay_lab.bench.throughput.vllm import Vllm
from inlay_lab.bench.throughput.workload import shared_prefix
from tests.conftest import tiny
from tests.model.equivalence.oracle import prefill

pytestmark = pytest.mark.long

COMPLETION = 4
STAND_IN = '''
"""The part of vLLM's interface that the worker uses, over the checkpoint that it is given."""

import os
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

print("a line of its log")


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0, True, False)
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, *, model, max_num_seqs, max_model_len, **more):
        if "STAND_IN_FAILS" in os.environ:
            raise RuntimeError("no room\\nfor it")
        assert more == {
            "skip_tokenizer_init": True, "enable_prefix_caching": True, "gpu_memory_utilization": 0.85, "seed": 0
        }
        self.model, self.most, self.longest = AutoModelForCausalLM.from_pretrained(model), max_num_seqs, max_model_len
        self.llm_engine, self.running, self.resets = self, {}, 0

    def reset_prefix_cache(self):
        self.resets += 1
        return True

    def add_request(self, name, prompt, params):
        assert int(name) // 3 + 1 == self.resets, "each run has three requests, and forgets first"
        assert name not in self.running
        assert len(prompt["prompt_token_ids"]) + params.max_tokens <= self.longest
        self.running[name] = [list(prompt["prompt_token_ids"]), [], params.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.running)

    def abort_request(self, names):
        for name in names:
            self.running.pop(name, None)

    def step(self):
        print("another line")
        outputs = []
        for name, (ids, said, most) in list(self.running.items())[: self.most]:
            with torch.inference_mode():
                said.append(int(self.model(torch.tensor([ids + said])).logits[0, -1].argmax()))
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tuple(said))]))
            if len(said) == most:
                del self.running[name]
        return outputs
'''


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> None:
    """A package ``vllm`` for this process and its children."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def greedy(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The stock model's answer, with a whole pass for every token."""
    said: list[int] = []
    for _ in range(COMPLETION):
        said.append(int(prefill(tiny("llama"), [*ids, *said])[-1].argmax()))
    return tuple(said)


def test_vllm_answers_with_the_given_weights(stand_in, tmp_path):
    workload = shared_prefix(262, requests=3, prefix=40, question=6, completion=COMPLETION)
    expected = [greedy(ask.ids) for ask in workload.asks]
    assert len(set(expected)) > 1
    column = Vllm(tiny("llama").model, most=2, longest=workload.longest)
    for each in (workload, workload.arriving(50.0, 0)):
        run = column.run(each, 30)
        assert [answer.ids for answer in run.answers] == expected
        assert [answer.prompt_ids for answer in run.answers] == [ask.ids for ask in each.asks]
        for ask, answer in zip(each.asks, run.answers, strict=True):
            assert answer.arrived == run.started + ask.at
            assert len(answer.times) == COMPLETION
            assert answer.times == sorted(answer.times)
            assert answer.times[0] > answer.arrived
    with pytest.raises(DeadlineError, match="not done within 0 s"):
        column.run(workload, 0)
    assert [answer.ids for answer in column.run(workload).answers] == expected, "it has dropped what was late"
    assert column.prompt_tokens(workload) == 40 + 3 * 6
    column.close()
    assert not [*tmp_path.glob("inlay-bench-*")]


def test_vllm_loading_error_is_reported(stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    workload = shared_prefix(262, requests=1, prefix=0, question=6, completion=COMPLETION)
    column = Vllm(tiny("llama").model, most=1, longest=workload.longest)
    with pytest.raises(ModelError) as raised:
        column.run(workload)
    assert str(raised.value) == "vLLM: RuntimeError: no room; its standard error tells more"
    column.close()


def test_missing_vllm_is_reported(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as raised:
        Vllm(tiny("llama").model, most=1, longest=10)
    assert str(raised.value) == "not installed; run: pip install vllm"


def test_too_little_disk_space_is_reported(stand_in, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=1000))
    with pytest.raises(ModelError, match=f"^its file takes 0.0 GB, and {tmp_path} has 0.0 GB free$"):
        Vllm(tiny("llama").model, most=1, longest=10)
    assert not [*Path(tmp_path).glob("inlay-bench-*")]
