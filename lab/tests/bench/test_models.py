"""The benchmarks of whole models on the smallest shape: the work of each column, and the JSON."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import AutoConfig

from inlay.attention.registry import get_backend
from inlay.client.llm import LLM
from inlay.engine import core as engine
from inlay.engine import forward
from inlay.errors import CapacityError, ContextError, ParameterError
from inlay.models.load import load_model
from inlay.models.shapes import SHAPES
from inlay_lab.bench import stock, ttft
from inlay_lab.bench.decode import SHARES, DecodeSetting, measure_decode, step_shares, stock_loop, stream
from inlay_lab.bench.encode import EncodeSetting, compute, encode, measure_encode, module_ids
from inlay_lab.bench.engines.gguf_file import ARCHITECTURES, bytes_read, why_not, write_gguf
from inlay_lab.bench.ttft import Setting, TTFTSetting, draw_ttft, measure_ttft
from tests.conftest import CONFIGS, tiny

pytestmark = pytest.mark.long

TINY = "random:tiny"
HAS_LLAMA = all(importlib.util.find_spec(package) for package in ("llama_cpp", "gguf"))
PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def fp32() -> LLM:
    return LLM(TINY, dtype="float32", seed=0, reuse="isolated", kv_memory="64MiB")


def test_the_baseline_is_the_stock_model_with_our_weights(fp32):
    model = stock.load_stock(TINY, "float32")
    assert {type(m).__name__ for m in model.modules()} >= {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "Linear"}
    seconds, answer = stream(fp32, PROMPT, 6)
    assert stock_loop(model, PROMPT, 6)[1] == answer
    assert len(answer) == 7
    assert seconds > 0


def test_the_stock_loop_is_greedy_search(fp32):
    model = stock.load_stock(TINY, "float32")
    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, do_sample=False, min_new_tokens=7, max_new_tokens=7, pad_token_id=0)
    assert stock_loop(model, PROMPT, 6)[1] == tuple(expected[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("shape", ["tiny", "qwen2.5-0.5b", "llama-2-7b"])
def test_weights_are_counted_without_loading_them(shape):
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    hidden, inner, layers, vocabulary = (
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    )  # fmt: skip
    head = hidden // config.num_attention_heads
    kv = config.num_key_value_heads * head
    per_layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    per_layer += hidden + 2 * kv if config.model_type == "qwen2" else 0
    decoder, table = layers * per_layer + hidden, vocabulary * hidden
    both = 1 if config.tie_word_embeddings else 2
    assert stock.weight_bytes(config, torch.bfloat16) == 2 * (decoder + both * table)
    assert stock.bytes_read_per_token(config, torch.float32) == 4 * (decoder + table)
    for quantization, of_llama, of_ours in (("int8", 34 / 32, 1.0), ("int4", 18 / 32, 20 / 32)):
        # Biases and norms are in neither's blocks; the head has 8 bits.
        read = stock.bytes_read_per_token(config, torch.bfloat16, quantization)
        assert read == pytest.approx(decoder * of_ours + table, rel=0.02)
        if shape != "tiny":
            expected = decoder * of_llama + table * 34 / 32
            assert bytes_read(config, quantization) == pytest.approx(expected, rel=0.01)


def test_too_little_memory_for_the_stock_model_is_one_sentence(monkeypatch):
    config = AutoConfig.for_model("llama", vocab_size=100, hidden_size=32, num_hidden_layers=1)
    stock.check_another_fits(config, torch.float32)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(
        CapacityError, match=r"the stock model takes .* GB beside ours and 0.0 GB are free; use a smaller"
    ):
        stock.check_another_fits(config, torch.float32)


@pytest.mark.usefixtures("quick_model")
def test_decode_json():
    setting = DecodeSetting(model=TINY, context=8, tokens=4, baselines=("transformers",), runs=1, quick=True)
    told: list[tuple[int, int]] = []
    result = measure_decode(setting, lambda done, total: told.append((done, total)))
    assert set(result["columns"]) == {"inlay", "transformers"}
    read = result["weight_bytes_per_token"]["inlay"]
    assert result["weight_bytes_per_token"] == {"inlay": read, "transformers": read}
    for cell in result["columns"].values():
        assert cell["tokens_s"] == pytest.approx(1000 / cell["ms_per_token"], rel=0.02)
        gb_s = read / cell["ms_per_token"] / 1e6
        assert cell["gb_s"] == pytest.approx(gb_s, rel=0.02, abs=0.01)
        assert cell["of_copy"] == pytest.approx(gb_s / result["ceilings"]["copy_gb_s"], rel=0.05, abs=0.001)
        assert cell["of_floor"] == pytest.approx(result["floor"]["ms"] / cell["ms_per_token"], rel=0.02, abs=0.001)
    floor = result["floor"]
    assert floor["weights_ms"] == pytest.approx(read / floor["read_gb_s"] / 1e6, rel=0.02, abs=0.001)
    assert floor["ms"] == pytest.approx(max(floor["weights_ms"], floor["products_ms"]) + floor["kv_ms"], abs=0.002)
    assert result["in_turns"] is True
    assert told
    assert tuple(result["step"]["ms"]) == SHARES
    assert sum(result["step"]["share"].values()) == pytest.approx(1, abs=0.001)


@pytest.mark.usefixtures("quick_model")
def test_models_too_large_together_run_one_after_another(monkeypatch):
    monkeypatch.setattr("inlay_lab.bench.decode.another_fits", lambda *arguments: False)
    setting = DecodeSetting(model=TINY, context=8, tokens=2, baselines=("transformers",), runs=1, quick=True)
    result = measure_decode(setting)
    assert result["in_turns"] is False
    assert set(result["columns"]) == {"inlay", "transformers"}


def test_step_shares_add_up_and_the_engine_is_restored(fp32):
    before = (engine.begin, forward.build_plan, vars(type(get_backend()))["attend"])
    forwards = [vars(module).get("forward") for module in fp32.loaded.model.modules()]
    shares = step_shares(fp32, PROMPT, 3)
    assert (engine.begin, forward.build_plan, vars(type(get_backend()))["attend"]) == before
    assert [vars(module).get("forward") for module in fp32.loaded.model.modules()] == forwards
    assert all(shares["ms"][name] > 0 for name in SHARES)
    assert sum(shares["ms"].values()) == pytest.approx(shares["ms_per_token"], abs=0.01)


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"context": 0}, ParameterError, "context is 0; it must be at least 1"),
        ({"tokens": 0}, ParameterError, "tokens is 0; it must be at least 1"),
        ({"runs": 0}, ParameterError, "runs is 0; it must be at least 1"),
        ({"baselines": ("vllm",)}, ParameterError, "baseline is 'vllm'; use one of transformers, llama.cpp"),
        ({"context": 9000}, ContextError, r"9000 \+ 32 tokens do not fit the model's context of 2048; use fewer"),
    ],
)
@pytest.mark.usefixtures("quick_model")
def test_wrong_decode_settings(wrong, error, sentence):
    with pytest.raises(error, match=sentence):
        measure_decode(DecodeSetting(**{"model": TINY, **wrong}))


def test_reason_for_skipping_llama_cpp(monkeypatch):
    config = tiny("llama").model.config
    gpt2 = tiny("gpt2").model.config
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_not(config, "bfloat16") == "not installed; run: pip install llama-cpp-python gguf"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert why_not(config, "bfloat16") is None
    assert why_not(config, "float32") == "its file is bf16, and the model is float32"
    assert why_not(gpt2, "bfloat16") == "this benchmark writes no GGUF of type 'gpt2'"
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10))
    assert "and " in str(why_not(config, "bfloat16"))
    assert "GB free" in str(why_not(config, "bfloat16"))


@pytest.mark.usefixtures("quick_model")
def test_skipped_column_has_a_reason(monkeypatch):
    setting = DecodeSetting(
        model=TINY, dtype="float32", context=8, tokens=2, baselines=("llama.cpp",), runs=1, quick=True
    )
    reason = "its file is bf16, and the model is float32" if HAS_LLAMA else "not installed"
    cell = measure_decode(setting)["columns"]["llama.cpp"]
    assert cell["ms_per_token"] is None
    assert cell["skipped"].startswith(reason)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_random_file_for_llama_cpp_has_the_models_shape(name, tmp_path):
    gguf = pytest.importorskip("gguf")
    settings = dict(CONFIGS[name][1]) | {"hidden_size": 128, "intermediate_size": 96}  # heads of 32
    config = AutoConfig.for_model(CONFIGS[name][0], **settings)
    assert config.model_type in ARCHITECTURES
    file = tmp_path / "random.gguf"
    write_gguf(config, file)
    counted = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(file).tensors)
    assert 2 * counted == stock.weight_bytes(config, torch.bfloat16)
    write_gguf(config, file, "int4")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["token_embd.weight" if config.tie_word_embeddings else "output.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_up.weight"] == "Q4_0"


def test_llama_cpp_is_a_column_of_decode(stand_ins):
    pytest.importorskip("gguf")
    setting = DecodeSetting(model=TINY, dtype="bfloat16", context=8, tokens=4, baselines=("llama.cpp",), quick=True)
    result = measure_decode(setting)
    assert set(result["columns"]) == {"inlay", "llama.cpp"}
    assert result["columns"]["llama.cpp"]["ms_per_token"] > 0


def test_llama_cpp_gives_first_tokens_of_whole_and_held_prompts(stand_ins):
    pytest.importorskip("gguf")
    rows = (Setting(16, 8), Setting(32, 8))
    setting = TTFTSetting(model=TINY, dtype="bfloat16", rows=rows, runs=1, baselines=("llama.cpp",), quick=True)
    result = measure_ttft(setting)
    assert result["left_out"] == {}
    assert all(row[name] > 0 for row in result["rows"] for name in ("llama_ms", "llama_held_ms"))


def test_ttft_gives_the_reason_for_skipping_llama_cpp(monkeypatch):
    monkeypatch.setattr("inlay_lab.bench.ttft.why_not", lambda *arguments: "not here")
    setting = TTFTSetting(model=TINY, rows=(Setting(16, 8),), runs=1, baselines=("llama.cpp",), quick=True)
    result = measure_ttft(setting)
    assert result["left_out"] == {"llama.cpp": "not here"}
    assert "llama_ms" not in result["rows"][0]


def test_encoding_stores_the_stock_models_values(fp32):
    text = '<schema name="e"><module name="a">first of them</module><module name="b">and a second one</module></schema>'
    encode(fp32, text)
    ids = module_ids(fp32, text)
    assert [len(each) for each in ids] == [len("first of them"), len("and a second one")]
    cache = compute(load_model(TINY, dtype="float32", weights="stock").model, ids, 2)
    pool, stored = fp32.storage, sorted(fp32.store, key=lambda segment: segment.tokens)
    assert [segment.tokens for segment in stored[-2:]] == [len(each) for each in ids]
    for row, segment in enumerate(stored[-2:]):
        values = torch.cat([pool.values[-1][:, run.first : run.end] for run in segment.slots], 1)
        expected = cache.layers[-1].values[row, :, : segment.tokens]  # the rest is padding
        torch.testing.assert_close(values[:, : segment.tokens], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("quick_model")
def test_encode_json():
    setting = EncodeSetting(model=TINY, modules=3, tokens=16, batches=(1, 2, 8), runs=1, quick=True)
    result = measure_encode(setting)
    assert (result["modules"], result["tokens"]) == (3, 48)
    # larger batches than the number of modules are left out
    assert list(result["stock_tokens_s_by_batch"]) == ["1", "2"]
    assert result["stock_batch"] in (1, 2)
    assert result["ratio"] == pytest.approx(result["tokens_s"] / result["stock_tokens_s"], rel=0.01)


@pytest.mark.usefixtures("quick_model")
@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"modules": 0}, ParameterError, "modules is 0; it must be at least 1"),
        ({"batches": (0,)}, ParameterError, "batch is 0; it must be at least 1"),
        ({"tokens": 9000}, ContextError, "modules of 9000 tokens do not fit the model's context of 2048"),
        (
            {"modules": 2, "batches": (4, 8), "tokens": 8},
            ParameterError,
            "batch is 4 at least, and there are 2 modules",
        ),
    ],
)
def test_wrong_encode_settings(wrong, error, sentence):
    with pytest.raises(error, match=sentence):
        measure_encode(EncodeSetting(**{"model": TINY, "quick": True, **wrong}))


@pytest.mark.usefixtures("quick_model")
def test_sweep_fits_curves_and_lists_skipped_rows(tmp_path):
    rows = tuple(Setting(count, 8) for count in (16, 32, 48, 64, 80, 9000))
    setting = TTFTSetting(model=TINY, rows=rows, runs=1, sweep=True, longest_baseline=64, quick=True)
    result = measure_ttft(setting)
    assert [row["cached"] for row in result["rows"]] == [16, 32, 48, 64, 80]
    (left_out,) = result["skipped"]
    assert left_out["reason"] == "9000 + 8 tokens do not fit the model's context of 2048"
    assert [row["full_prefill_ms"] is None for row in result["rows"]] == [False] * 4 + [True]
    ours, full = result["fits"]["ttft_ms"], result["fits"]["full_prefill_ms"]
    assert (ours["degree"], len(ours["coefficients"])) == (1, 2)
    assert (full["degree"], len(full["coefficients"])) == (2, 3)
    assert max(ours["r2"], full["r2"]) <= 1
    file = tmp_path / "ttft.svg"
    draw_ttft(result, file)
    assert "full prefill, stock transformers" in file.read_text()


@pytest.mark.usefixtures("quick_model")
def test_too_long_row_without_a_sweep_is_an_error():
    with pytest.raises(ContextError, match="do not fit the model's context of 2048"):
        measure_ttft(TTFTSetting(model=TINY, rows=(Setting(16, 8), Setting(9000, 8)), quick=True))


@pytest.mark.usefixtures("quick_model")
@pytest.mark.parametrize("reuse", ["isolated", "modular", "anchored+linked:4", "modular+profiled:0.25"])
def test_every_timed_request_computes_its_new_and_recomputed_tokens(monkeypatch, reuse):
    """No request finds text that an earlier one computed."""
    usages, first_token = [], ttft.first_token

    def noted(*asked, **more):
        output = first_token(*asked, **more)
        usages.append(output.usage)
        return output

    monkeypatch.setattr(ttft, "first_token", noted)
    (row,) = measure_ttft(TTFTSetting(model=TINY, rows=(Setting(64, 8),), runs=3, baselines=(), reuse=reuse))["rows"]
    recomputed = row.get("repaired", 0)
    assert (recomputed > 0) == ("+" in reuse)
    assert (row["cached"], row["new"], "over_behind" in row) == (64, 8, recomputed > 0)
    assert len(usages) > 8
    assert {usage.computed_tokens for usage in usages} == {8 + recomputed}
    assert {usage.cached_tokens for usage in usages} == {0, 64 - recomputed, *([64] if recomputed else [])}


@pytest.mark.parametrize("name", ["kernels", "ttft"])
def test_importing_the_command_line_imports_no_torch(name):
    code = f"import sys, inlay_lab.cli.bench_{name}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.usefixtures("quick_model")
def test_json_can_be_read_back():
    setting = TTFTSetting(model=TINY, rows=(Setting(16, 8),), runs=1, baselines=(), quick=True)
    result = measure_ttft(setting)
    assert json.loads(json.dumps(result)) == result
    assert result["rows"][0]["full_prefill_ms"] is None
