"""Layers whose few rows the kernel takes in one call or two, against the same layers' own modules, bit by bit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from inlay import LLM, SamplingParams
from inlay.attention.kernel import kernel
from inlay.models.compiled_weight import can_compile
from inlay.models.few_rows import MOST_ROWS, FewRows
from inlay.models.interface import attention_implementation
from inlay.models.linear import can_multiply
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
FORMS = (None, "int8", "int4")
IDS = [int(i) for i in torch.randint(0, 256, (MOST_ROWS + 1,), generator=torch.Generator().manual_seed(5))]


def made(name, quantization=None):
    return prepared(name, WeightForm(quantization=quantization), torch.bfloat16)


def logits_of(model, ids):
    with torch.inference_mode(), attention_implementation(model, "sdpa"):
        return model(torch.tensor([ids]), use_cache=False).logits


@pytest.fixture
def calls(monkeypatch):
    """The names of the ways that layers went, in order."""
    went = []

    def note(name):
        method = getattr(FewRows, name)
        monkeypatch.setattr(FewRows, name, lambda self, *args: (went.append(name), method(self, *args))[1])

    note("at_once")
    note("before")
    note("behind")
    return went


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_two_calls_equal_the_layers_modules_bit_for_bit(name, quantization, calls, monkeypatch):
    """With transformers' own attention between them."""
    model = made(name, quantization).model
    for rows in (1, 7, MOST_ROWS):
        found = logits_of(model, IDS[:rows])
        assert calls == ["before", "behind"] * 3
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(FewRows, "fits", lambda *_, **__: False)
            assert torch.equal(found, logits_of(model, IDS[:rows]))
        assert calls == []


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_equal_with_one_two_or_no_kernel_calls(name, quantization, calls, monkeypatch):
    """Prompts, and answers decoded side by side: tokens and their log-probabilities."""
    loaded = made(name, quantization)
    prompts, params = [IDS[:50], IDS[20:23]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    answers = []
    for expected, attribute, value in (
        ("at_once", "whole", True),
        ("before", "whole", False),
        (None, "fits", lambda *_, **__: False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(FewRows, attribute, value)
            llm = LLM(loaded, kv_memory="16MiB", seed=0, reuse="off")
            calls.clear()
            answers.append([output.outputs[0] for output in llm.generate(prompts, params)])
            assert (expected in calls) == (expected is not None)
            assert ("at_once" in calls) == (expected == "at_once")
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


def test_unused_adapter_keeps_the_kernel_path(calls, tmp_path):
    loaded = made("llama")
    adapters = Adapters(loaded.model, [load_adapter(loaded.model, "a", write_adapter(tmp_path / "a", tiny("llama")))])
    for work, fast in (([(b"", 5)], True), ([(b"", 4), (next(iter(adapters.digests)), 1)], False)):
        calls.clear()
        with adapters.applied(work, [4]):
            logits_of(loaded.model, IDS[:5])
        assert (calls == ["before", "behind"] * 3) == fast
    adapters.remove()


def test_many_rows_batches_and_other_dtypes_skip_the_kernel(calls):
    model = made("llama").model
    logits_of(model, IDS)
    with torch.inference_mode(), attention_implementation(model, "sdpa"):
        model(torch.tensor([IDS[:5], IDS[5:10]]), use_cache=False)
        model(torch.tensor([IDS[:5]]), use_cache=True)
    logits_of(prepared("llama").model, IDS[:5])
    assert calls == []


def test_short_rotary_tables_are_rejected(calls):
    model = made("llama").model
    rotary = model.model.rotary_emb.stock
    rotary.inv_freq = rotary.inv_freq[: len(rotary.inv_freq) // 2]
    with pytest.raises(RuntimeError, match="shape"):
        logits_of(model, IDS[:5])
    assert calls == []


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


def test_products_of_wrong_shapes_are_rejected():
    layer = made("llama").model.model.layers[0]
    qkv, out, gate_up, down = (
        each.product() for each in (layer.self_attn.qkv, layer.self_attn.out, layer.mlp.gate_up, layer.mlp.down)
    )
    norm = layer.input_layernorm.weight.data_ptr()
    kernel.DecoderLayer(qkv, out, gate_up, down, norm, norm, 1e-5, 0, 0, 1e-5, 4, 2, 8)
    for wrong in ((qkv, out, down, gate_up, 4), (out, qkv, gate_up, down, 4), (qkv, out, gate_up, down, 8)):
        with pytest.raises(ValueError, match="do not fit"):
            kernel.DecoderLayer(*wrong[:4], norm, norm, 1e-5, 0, 0, 1e-5, wrong[4], 2, 8)
