"""Keys and values in 8 bits: their scope, cost and equivalent computation, and the models that refuse them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inlay import LLM, ParameterError, SamplingParams
from inlay.attention.storage import NARROW, LayerShape, bytes_per_token
from inlay.cli.main import main
from inlay.config import EngineConfig
from inlay.kv.choices import ROUNDED
from inlay.kv.offload.codecs import SCALED
from inlay.kv.offload.disk import DiskTier
from inlay.kv.offload.record import SegmentRecord, is_finite
from tests.conftest import tiny
from tests.model.attention.devices import pretend
from tests.model.test_store import BOTH, SCHEMA, files
from tests.raising import raises

STEPS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)


def make(kv_cache_dtype: str = "int8", model: str = "llama", **settings) -> LLM:
    settings = {"kv_memory": "8MiB", "chunk_size": 16, "seed": 0, "store": "off"} | settings
    llm = LLM(tiny(model), kv_cache_dtype=kv_cache_dtype, **settings)
    llm.add_schema(SCHEMA, encode=False)
    return llm


def steps(llm: LLM, reuse: str | None = None) -> list[dict[int, float]]:
    """The log-probabilities of the likeliest tokens at every step."""
    (output,) = llm.generate(BOTH, STEPS, reuse=reuse)
    said = output.outputs[0].logprobs
    assert said is not None
    return [{token: each.logprob for token, each in step.items()} for step in said]


def apart(one: list[dict[int, float]], other: list[dict[int, float]]) -> float:
    pairs = zip(one, other, strict=True)
    return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("model", ["gemma4_text", "gpt2", "llama", "qwen2"])
def test_exact_equals_computation_without_reuse(model, backend):
    llm = make(model=model, attention_backend=backend)
    alone = steps(llm, "off")
    assert apart(alone, steps(llm, "exact")) < 1e-4
    (again,) = llm.generate(BOTH, STEPS, reuse="exact")
    assert again.usage.exact_tokens > 0
    assert apart(alone, steps(llm, "exact")) < 1e-4, "from what is stored"
    assert 0 < apart(alone, steps(make("auto", model), "off")) < 0.1, "near to what is computed without rounding"


def test_exact_equals_computation_without_reuse_in_fp8(monkeypatch):
    pretend(monkeypatch)
    llm = make("fp8")
    alone = steps(llm, "off")
    assert apart(alone, steps(llm, "exact")) < 1e-4
    assert apart(alone, steps(llm, "exact")) < 1e-4, "from what is stored"
    assert 0 < apart(alone, steps(make("auto"), "off")) < 1, "near to what is computed without rounding"


def test_device_and_cpu_round_to_int8_equally(monkeypatch):
    expected = {
        reuse: steps(make(), reuse) for reuse in ("exact", "modular", "anchored+blend:0.3", "anchored+query:0.3")
    }
    pretend(monkeypatch)
    for reuse, steps_there in expected.items():
        assert apart(steps(make(), reuse), steps_there) < 1e-4, reuse


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "mistral"])
def test_int8_segments_may_be_shifted(model):
    llm = make(model=model)
    assert llm.client.model.why_not_shift is None
    assert apart(steps(llm, "modular"), steps(make("auto", model), "modular")) < 0.1


def test_fp8_segments_may_be_shifted(monkeypatch):
    pretend(monkeypatch)
    llm = make("fp8")
    assert llm.client.model.why_not_shift is None
    assert apart(steps(llm, "modular"), steps(make("auto"), "modular")) < 1


@pytest.mark.parametrize(("kept", "tensor"), [("int8", "I8"), ("fp8", "F8_E4M3")])
def test_stored_bytes_equal_the_pool_and_other_dtypes_do_not_read_them(tmp_path, monkeypatch, kept, tensor):
    pretend(monkeypatch)
    llm = make(kept, store=tmp_path)
    llm.add_schema(SCHEMA)
    expected = steps(llm)
    llm.shutdown()
    again = make(kept, store=tmp_path)
    assert steps(again) == expected, "bit for bit"
    assert again.stats().disk_tokens > 0
    assert again.stats().encoded_tokens == 0
    again.shutdown()
    header = json.loads(files(tmp_path)[0].read_bytes()[8:4096].rstrip())
    (layer,) = {(each["dtype"], each["shape"][-1]) for name, each in header.items() if name.endswith(".kv")}
    assert layer == (tensor, tiny("llama").spec.layers[0].head_dim + 4)
    for different in {"auto", "int8", "fp8"} - {kept}:
        other = make(different, store=tmp_path / different)
        for name in files(tmp_path):
            (tmp_path / different / "v1" / name.name).write_bytes(name.read_bytes())
        other.shutdown()
        other = make(different, store=tmp_path / different)
        (output,) = other.generate(BOTH, STEPS)
        assert dict(output.usage.misses).keys() == {"other codec"}
        other.shutdown()


def test_twice_rounded_record_is_rejected(tmp_path):
    llm = make(store=tmp_path)
    llm.add_schema(SCHEMA)
    llm.shutdown()
    tier = DiskTier(tmp_path, 1 << 30)
    said = tier.record(next(tier.iterate()).key).to_json()
    assert SegmentRecord.from_json(said).kv_dtype == "int8"
    with pytest.raises(ValueError, match="it was rounded twice"):
        SegmentRecord.from_json(said | {"codec": "int8"})


def test_invalid_numbers_are_not_written(tmp_path):
    llm = make(store=tmp_path)
    storage, slabs = llm.storage, []
    read = storage.read_slab

    def broken(layer, slots):
        slab = read(layer, slots)
        slab[0, 0, 0, -4:] = np.array([np.nan], np.float32).view(np.uint8)
        slabs.append(slab)
        return slab

    storage.read_slab = broken
    llm.add_schema(SCHEMA)
    llm.shutdown()
    assert slabs
    assert files(tmp_path) == []


def test_fp8_nan_is_not_finite():
    slab = np.zeros((2, 1, 3, 8), np.uint8)
    slab[1, 0, 2, 1] = 0x7E  # the largest one
    assert is_finite(slab, "fp8")
    for code in (0x7F, 0xFF):
        slab[1, 0, 2, 1] = code
        assert not is_finite(slab, "fp8")
        assert is_finite(slab, "int8")
    slab[1, 0, 2, 1], slab[0, 0, 0, -4:] = 0, np.array([np.inf], np.float32).view(np.uint8)
    assert not is_finite(slab, "fp8")


@pytest.mark.parametrize(("kept", "on_device"), [("int8", False), ("int8", True), ("fp8", True)])
def test_memory_command_equals_the_pools_bytes_per_token(capsys, monkeypatch, kept, on_device):
    main(["memory", "--model", "demo", "--codec", kept, "--json"])
    predicted = json.loads(capsys.readouterr().out)["models"][0]["bytes_per_token"]
    if on_device:
        pretend(monkeypatch)
    llm = LLM("demo", kv_cache_dtype=kept, kv_memory="1MiB", store="off")
    assert predicted == llm.client.model.bytes_per_token == llm.store.pool.bytes_per_token
    memory = llm.storage.keys + llm.storage.values
    if on_device:
        memory += [scale for pair in llm.storage.scales for scale in pair]
    assert sum(tensor.nbytes for tensor in memory) / llm.store.pool.slots == predicted
    llm.shutdown()
    layers = [LayerShape(2, 64)] * 3 + [LayerShape(1, 96, shared=True)]
    assert bytes_per_token(layers, NARROW[kept]) == 3 * 2 * 2 * (64 + 4) + 96 + 4


def test_all_modules_list_the_same_dtypes():
    assert tuple(NARROW) == tuple(SCALED) == ROUNDED


def test_measurements_are_kept_per_dtype(monkeypatch):
    pretend(monkeypatch)
    assert len({make(kept).client.model.measured_as(None) for kept in ("auto", "int8", "fp8")}) == 3


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ({"kv_cache_dtype": "int4"}, "parameter.unknown_choice", "auto, int8, fp8"),
        ({"store_codec": "fp8"}, "parameter.conflict", "store_codec is 'fp8'"),
    ],
)
def test_wrong_settings(settings, code, names):
    with raises(code, ParameterError, names=names):
        LLM(tiny("llama"), **{"kv_cache_dtype": "int8"} | settings)


def test_store_does_not_round_fp8_again():
    with raises("parameter.conflict", ParameterError, names="store_codec"):
        EngineConfig(kv_cache_dtype="fp8", store_codec="int8")


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_cpu_does_not_support_fp8(backend):
    with raises("parameter.unavailable_dtype", ParameterError, names="'int8'"):
        make("fp8", attention_backend=backend)


def test_every_model_command_has_the_kv_cache_dtype_option(capsys):
    for command in ("run", "serve", "batch", "check", "cache warm", "eval modular-qa", "eval longbench"):
        main([*command.split(), "--help"])
        assert "--kv-cache-dtype" in capsys.readouterr().out, command
    for bench in ("decode", "encode", "ttft", "throughput"):
        main(["bench", bench, "--help"])
        assert "--kv-cache-dtype" in capsys.readouterr().out, bench


def test_fp8_on_a_cpu_is_rejected_with_an_alternative():
    with raises("parameter.unavailable_dtype", ParameterError, names="'int8'"):
        LLM(tiny("llama"), kv_cache_dtype="fp8")
