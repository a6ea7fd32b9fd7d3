"""The engines that run in a process of their own, with stand-ins for their packages."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inlay.errors import ModelError
from inlay.models.shapes import MODEL_DIRECTORY
from inlay_lab.bench.engines.engine_process import LlamaCpp, MistralRs, OpenVino, Settings
from inlay_lab.bench.engines.gguf_file import random_gguf
from inlay_lab.bench.engines.peer import Peer, llama_cpp
from inlay_lab.bench.throughput.workload import shared_prefix
from tests.conftest import tiny

CONFIG = tiny("llama").model.config
SHARED = list(range(20))


class Llama:
    """llama.cpp's engine over its stand-in, with the state of its context."""

    def __init__(self, package: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch, **state: Any) -> None:
        self.answer_of = package.answer
        make = package.llama_init_from_model

        def kept(model: Any, params: Any) -> Any:
            self.state = make(model, params)
            vars(self.state).update(state)
            return self.state

        monkeypatch.setattr(package, "llama_init_from_model", kept)
        self.engine = LlamaCpp(settings)

    def ask(self, prompts: list[list[int]], tokens: int, computed: int) -> None:
        """Check the answers, and the number of prompt tokens that were computed."""
        before = self.state.computed
        assert self.engine.answer(prompts, [], tokens) == self.answer_of(prompts[0], tokens)
        assert self.state.computed - before == computed + len(prompts) * (tokens - 1)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.fixture
def llama(llama_package: ModuleType, monkeypatch: pytest.MonkeyPatch, file: str) -> Llama:
    return Llama(llama_package, Settings(threads=1, longest=64, own=30, most=4, gguf=file), monkeypatch)


def test_llama_cpp_answers_behind_the_prefix_that_it_has(llama: Llama) -> None:
    llama.ask([[*SHARED, 50, 51]], 1, 22)
    llama.ask([[*SHARED, 60, 61]], 3, 2)
    llama.ask([[*SHARED, 60, 61]], 1, 1)  # a prompt wholly known computes its last token
    llama.ask([[*SHARED, 70, 71], [*SHARED, 72, 73], [*SHARED, 74]], 4, 5)
    llama.ask([[*SHARED, 80]], 2, 1)
    llama.ask([[90, 91, 92]], 1, 3)
    llama.engine.forget()
    llama.ask([[90, 91, 92]], 1, 3)


def test_recurrent_model_in_llama_cpp_computes_again_where_it_cannot_go_back(
    llama_package: ModuleType, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    llama = Llama(
        llama_package, Settings(threads=1, longest=64, own=30, most=2, gguf=file), monkeypatch, recurrent=True
    )
    llama.ask([SHARED], 1, 20)
    llama.ask([[*SHARED, 50, 51]], 1, 2)
    llama.ask([[*SHARED, 60, 61]], 2, 22)


def test_llama_cpp_restores_a_saved_prompt(llama: Llama, tmp_path: Path) -> None:
    saved = tmp_path / "slot"
    llama.ask([SHARED], 1, 20)
    assert llama.engine.save(str(saved)) == saved.stat().st_size
    llama.ask([[90, 91]], 1, 2)
    llama.engine.forget()
    llama.engine.load(str(saved), 20)
    llama.ask([[*SHARED, 50, 51]], 1, 2)
    for text, tokens in ((b"no slot", 20), (saved.read_bytes(), 30)):
        saved.write_bytes(text)
        llama.engine.forget()
        with pytest.raises(RuntimeError):
            llama.engine.load(str(saved), tokens)


@pytest.mark.parametrize("prefix", [0, 70])
@pytest.mark.parametrize("rate", [None, 200.0])
def test_llama_cpp_serves_in_batches_with_one_copy_of_the_prefix(
    llama_package: ModuleType, monkeypatch: pytest.MonkeyPatch, file: str, prefix: int, rate: float | None
) -> None:
    settings = Settings(threads=1, longest=prefix + 10, own=10, most=4, gguf=file)
    llama = Llama(llama_package, settings, monkeypatch)
    workload = shared_prefix(256, requests=6, prefix=prefix, question=6, completion=4)
    asks = (workload if rate is None else workload.arriving(rate, 0)).asks
    prompts, at = [ask.ids for ask in asks], [ask.at for ask in asks]
    for _ in range(2):  # nothing of the first run is left in the second
        llama.state.computed = 0
        served = llama.engine.serve(prompts, at, 4, math.inf)
        assert served is not None
        assert served["ids"] == [llama.answer_of(list(ids), 4) for ids in prompts]
        assert llama.state.computed == prefix + 6 * (6 + 4 - 1)  # an answer's last token is not computed
        for arrived, seconds in zip(at, served["seconds"], strict=True):
            assert len(seconds) == 4
            assert seconds == sorted(seconds)
            assert seconds[0] > arrived
        assert served["peak_batch"] == 4 or rate is not None
    assert llama.engine.serve(prompts, at, 4, 0.0) is None, "it is late"


def test_llama_cpp_that_cannot_load_its_file_is_one_sentence(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "inlay_lab.bench.engines.gguf_file.write_gguf", lambda config, path, quantization: path.write_bytes(b"no model")
    )
    with pytest.raises(ModelError) as caught, llama_cpp(CONFIG, 8, "leave it out"):
        pass
    assert str(caught.value) == "llama.cpp: RuntimeError: it cannot load the model; leave it out"


def test_engine_whose_process_ends_is_reported(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(ModelError) as caught:
        Peer("llama.cpp", Settings(threads=1, longest=8), "leave it out", python)
    assert str(caught.value) == "llama.cpp ended with status 3; leave it out"


def test_llama_cpp_is_timed_in_a_process(stand_ins: None) -> None:
    pytest.importorskip("gguf")
    with llama_cpp(CONFIG, 40, "leave it out") as peer:
        assert peer.first_token(SHARED) > 0
        assert peer.first_token(SHARED, 16) > 0
        assert peer.peak_bytes() > 0
        assert peer.load_s > 0


def test_answer_with_too_few_tokens_is_an_error(stand_ins: None) -> None:
    settings = Settings(threads=1, longest=64, most=2, folder=str(MODEL_DIRECTORY), dtype="float32")
    peer = Peer("vllm-eager", settings, "leave it out")
    try:
        assert peer.answer([[5, 6]], 1) > 0
        with pytest.raises(ModelError) as caught:
            peer.answer([[5, 6]], 3)
    finally:
        peer.close()
    assert str(caught.value) == "an answer has 2 tokens in place of 3; leave it out"


def test_random_file_is_deleted_at_the_end() -> None:
    pytest.importorskip("gguf")
    with random_gguf(CONFIG) as file:
        assert file.read_bytes()[:4] == b"GGUF"
    assert not file.parent.exists()


def test_openvino_and_mistral_get_the_options_that_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(threads=1, longest=64, most=4, gguf="/a/b.gguf")
    scheduler = SimpleNamespace()

    class Pipeline:
        def __init__(self, file: str, given: Any, device: str, options: dict[str, int]) -> None:
            assert (file, given, device, options) == ("/a/b.gguf", scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1})

        def generate(self, inputs: list[Any], configs: list[Any]) -> list[Any]:
            assert [each.tolist() for each in inputs] == [[[1, 2]], [[3]]]
            assert all(each.ignore_eos and not each.do_sample for each in configs)
            return [SimpleNamespace(m_generation_ids=[[7] * configs[0].max_new_tokens])] * 2

    genai = {"GenerationConfig": SimpleNamespace, "ContinuousBatchingPipeline": Pipeline}
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=np.asarray))  # type: ignore[arg-type]
    monkeypatch.setitem(
        sys.modules,
        "openvino_genai",
        SimpleNamespace(SchedulerConfig=lambda: scheduler, **genai),  # type: ignore[arg-type]
    )
    assert OpenVino(settings).answer([[1, 2], [3]], [], 5) == [7] * 5
    assert scheduler.enable_prefix_caching is True

    def complete(request: Any) -> Any:
        assert (request.prompt, request.temperature) in ((" a b", 0.0), (" c", 0.0))
        return SimpleNamespace(usage=SimpleNamespace(completion_tokens=request.max_tokens))

    fake = SimpleNamespace(
        Which=SimpleNamespace(
            GGUF=lambda *, quantized_model_id, quantized_filename: (quantized_model_id, quantized_filename)
        ),
        Runner=lambda *, which, max_seqs, prefix_cache_n: SimpleNamespace(
            send_completion_request=complete, which=which
        ),
        CompletionRequest=SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "mistralrs", fake)  # type: ignore[arg-type]
    assert MistralRs(settings).answer([[1, 2], [3]], [" a b", " c"], 4) == [0] * 4
