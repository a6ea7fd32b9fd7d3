"""Layers whose few rows the kernel takes in one call or two, against the same layers' own modules, bit by bit."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inlay import LLM, SamplingParams
from inlay.attention.cpu import CpuBackend
from inlay.attention.kernel import kernel
from inlay.models import linear
from inlay.models.compiled_weight import can_compile
from inlay.models.few_rows import MOST_ROWS, FewRows, FewRowsPass
from inlay.models.interface import PassContext, attention_implementation
from inlay.models.linear import DirectLinear, can_multiply
from inlay.models.lora import Adapters, load_adapter
from inlay.models.weights import WeightForm
from tests.adapters import write_adapter
from tests.conftest import tiny
from tests.model.models.prepared import prepared

pytestmark = pytest.mark.skipif(
    not can_compile(torch.bfloat16) or not can_multiply(torch.zeros(1, 1, dtype=torch.bfloat16)),
    reason="no kernel for few rows on this processor",
)
NAMES = ("llama", "llama3-scaled", "mistral", "qwen2", "qwen2-mixed", "qwen3")
FORMS = [(None, torch.bfloat16), ("int8", torch.bfloat16), ("int4", torch.bfloat16), (None, torch.float32)]
IDS = [int(i) for i in torch.randint(0, 256, (MOST_ROWS + 1,), generator=torch.Generator().manual_seed(5))]


def made(name, quantization=None, dtype=torch.bfloat16):
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float32:  # the kernel multiplies it everywhere, and is chosen where it is the fastest
            patch.setattr(linear, "can_multiply", lambda weight: True)
        return prepared(name, WeightForm(quantization=quantization), dtype)


def logits_of(model, ids):
    with torch.inference_mode(), attention_implementation(model, "sdpa"):
        return model(torch.tensor([ids]), use_cache=False).logits


@pytest.fixture
def calls(monkeypatch):
    """The names of the ways that passes and layers went, in order."""
    went = []

    def note(owner, name):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args: (went.append(name), method(self, *args))[1])

    note(FewRowsPass, "logits")
    note(FewRows, "before")
    note(FewRows, "behind")
    return went


@pytest.mark.parametrize(("quantization", "dtype"), FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_two_calls_equal_the_layers_modules_bit_for_bit(name, quantization, dtype, calls, monkeypatch):
    """With transformers' own attention between them."""
    model = made(name, quantization, dtype).model
    for rows in (1, 7, MOST_ROWS):
        found = logits_of(model, IDS[:rows])
        assert calls == ["before", "behind"] * 3
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(FewRows, "fits", lambda *_, **__: False)
            assert torch.equal(found, logits_of(model, IDS[:rows]))
        assert calls == []


@pytest.mark.parametrize(("quantization", "dtype"), FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_equal_with_whole_passes_two_calls_a_layer_or_none(name, quantization, dtype, calls, monkeypatch):
    """Prompts, and answers decoded side by side: tokens and their log-probabilities."""
    loaded = made(name, quantization, dtype)
    prompts, params = [IDS[:50], IDS[20:23]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    answers = []
    for expected, left_out in (("logits", ()), ("before", (FewRowsPass,)), (None, (FewRowsPass, FewRows))):
        with monkeypatch.context() as patch:
            for owner in left_out:
                patch.setattr(owner, "fits", lambda *_, **__: False)
            llm = LLM(loaded, kv_memory="16MiB", seed=0, reuse="off")
            calls.clear()
            answers.append([output.outputs[0] for output in llm.generate(prompts, params)])
            assert set(calls) == {None: set(), "logits": {"logits"}, "before": {"before", "behind"}}[expected]
    said = [[(each.token_ids, each.logprobs) for each in answer] for answer in answers]
    assert said[0] == said[1] == said[2]


def test_hooked_module_is_called_with_its_inputs(calls):
    model = made("qwen2", "int4").model
    seen = []
    handle = model.model.layers[1].mlp.down.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    before = logits_of(model, IDS[:5])
    assert seen == [(1, 5, 64)]
    assert calls == ["before", "behind"] * 2
    handle.remove()
    assert torch.equal(logits_of(model, IDS[:5]), before)
    assert len(seen) == 1


def test_pass_that_stops_or_waits_between_layers_is_no_whole_pass():
    """Keys may still be on their way into the pool when the pass begins."""
    loaded, backend = made("llama"), CpuBackend()
    pool = backend.make_pool(loaded.spec.shapes, torch.bfloat16, 64)
    passes = FewRowsPass.of(loaded.model, loaded.spec, backend, pool)
    assert passes is not None
    plan = SimpleNamespace(rows=MOST_ROWS)
    plain = PassContext(backend, pool, plan, loaded.spec)
    assert passes.fits(plain)
    for other in ({"await_layer": id}, {"last_layer": 1}, {"watched": [()]}, {"kept": object()}):
        assert not passes.fits(replace(plain, **other))
    plan.rows += 1
    assert not passes.fits(plain)


@pytest.mark.parametrize("place", ["model", "model.embed_tokens", "model.layers.2", "model.layers.1.mlp", "lm_head"])
def test_hook_anywhere_in_the_model_is_called_in_a_pass(place, calls):
    """Also one that was added after the engine."""
    loaded = made("llama")
    llm = LLM(loaded, kv_memory="16MiB", seed=0, reuse="off")
    seen = []
    handle = loaded.model.get_submodule(place).register_forward_pre_hook(lambda *_: seen.append(1))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    calls.clear()
    hooked = llm.generate([IDS[:9]], params)[0].outputs[0].token_ids
    assert len(seen) == 3
    assert "logits" not in calls
    handle.remove()
    assert llm.generate([IDS[:9]], params)[0].outputs[0].token_ids == hooked
    assert calls[-3:] == ["logits"] * 3


def test_adapters_leave_other_requests_on_whole_passes(calls, tmp_path):
    loaded = made("llama")
    folder = write_adapter(tmp_path / "a", tiny("llama"))
    llm = LLM(loaded, kv_memory="16MiB", seed=0, reuse="off", adapters={"a": folder})
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    calls.clear()
    llm.generate([IDS[:9]], params)
    assert calls == ["logits"] * 3
    calls.clear()
    llm.generate([IDS[:9]], params, adapter="a")
    assert "logits" not in calls


def test_unused_adapter_keeps_the_kernel_path(calls, tmp_path):
    loaded = made("llama")
    adapters = Adapters(loaded.model, [load_adapter(loaded.model, "a", write_adapter(tmp_path / "a", tiny("llama")))])
    for work, fast in (([(b"", 5)], True), ([(b"", 4), (next(iter(adapters.digests)), 1)], False)):
        calls.clear()
        with adapters.applied(work, [4]):
            logits_of(loaded.model, IDS[:5])
        assert (calls == ["before", "behind"] * 3) == fast
    adapters.remove()


def test_many_rows_and_batches_skip_the_kernel(calls):
    model = made("llama").model
    logits_of(model, IDS)
    with torch.inference_mode(), attention_implementation(model, "sdpa"):
        model(torch.tensor([IDS[:5], IDS[5:10]]), use_cache=False)
        model(torch.tensor([IDS[:5]]), use_cache=True)
    assert calls == []


def test_short_rotary_tables_are_rejected(calls):
    loaded = made("llama")
    llm = LLM(loaded, kv_memory="16MiB", seed=0, reuse="off", speculation="off")
    rotary = loaded.model.model.rotary_emb.stock
    rotary.inv_freq = rotary.inv_freq[: len(rotary.inv_freq) // 2]
    calls.clear()
    with pytest.raises(RuntimeError, match="shape"):
        logits_of(loaded.model, IDS[:5])
    assert calls == []
    with pytest.raises(RuntimeError, match="rotary table"):
        llm.generate([IDS[:5]], SamplingParams(max_tokens=1))


def test_unused_model_is_freed():
    model = made("llama").model
    layer = weakref.ref(model.model.layers[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_products_of_wrong_shapes_or_types_are_rejected():
    layer = made("llama").model.model.layers[0]
    qkv, out, gate_up, down = (
        each.product() for each in (layer.self_attn.qkv, layer.self_attn.out, layer.mlp.gate_up, layer.mlp.down)
    )
    norm = layer.input_layernorm.weight.data_ptr()
    assert qkv.bf16
    kernel.DecoderLayer(qkv, out, gate_up, down, norm, norm, 1e-5, 0, 0, 1e-5, 4, 2, 8)
    for wrong in ((qkv, out, down, gate_up, 4), (out, qkv, gate_up, down, 4), (qkv, out, gate_up, down, 8)):
        with pytest.raises(ValueError, match="do not fit"):
            kernel.DecoderLayer(*wrong[:4], norm, norm, 1e-5, 0, 0, 1e-5, wrong[4], 2, 8)
    mixed = DirectLinear(torch.zeros(layer.mlp.down.out_features, layer.mlp.down.in_features)).product()
    assert not mixed.bf16
    with pytest.raises(ValueError, match="different types"):
        kernel.DecoderLayer(qkv, out, gate_up, mixed, norm, norm, 1e-5, 0, 0, 1e-5, 4, 2, 8)
