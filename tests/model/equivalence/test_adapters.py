"""Answers under adapters equal those of the stock model with the adapter merged, with any other requests in the
batch.
"""

from __future__ import annotations

import pytest
import torch

from inlay import LLM, SamplingParams, Schema
from inlay.errors import ParameterError
from inlay.models.load import load_model
from inlay.models.weights import WeightForm
from tests.adapters import ALL, merged, write_adapter
from tests.conftest import CONFIGS, tiny
from tests.model.equivalence.oracle import PromptCacheOracle, prefill
from tests.model.equivalence.recorder import Recorder, close
from tests.model.equivalence.test_exact import check_whole_answer, ids
from tests.model.equivalence.test_modules import PROMPTS, SCHEMA, oracle_logits
from tests.model.models.prepared import prepared
from tests.raising import raises

DOCUMENT = "A document of some length that is put in front of every question that is asked here."


@pytest.fixture
def folders(tmp_path):
    """Makes two adapters of a model: one of some layers of attention, one of all layers with ranks of their own."""

    def make(loaded):
        return {
            "some": write_adapter(tmp_path / "some", loaded, seed=1),
            "all": write_adapter(
                tmp_path / "all",
                loaded,
                ALL,
                seed=2,
                rank=3,
                use_rslora=True,
                ranks={"o_proj": 5, "mlp.c_proj": 6},
                alpha_pattern={"k_proj": 1, "up_proj": 2, "c_fc": 2},
                lora_alpha=2,
            ),
        }

    return make


def models(loaded, folders):
    """Each name → its model."""
    return {None: loaded} | {name: merged(loaded, folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_batch_of_several_adapters_and_none(name, folders):
    loaded = tiny(name)
    made = folders(loaded)
    expected, recorder = models(loaded, made), Recorder(loaded, adapters=made)
    asked = ["some", None, "all", "some", None, "all"]
    prompts = [ids(length, seed) for seed, length in enumerate((1, 17, 40, 15, 3, 61))]
    for adapter, prompt, (output, logits) in zip(
        asked, prompts, recorder.greedy(prompts, tokens=12, adapter=asked), strict=True
    ):
        check_whole_answer(expected[adapter], prompt, output, logits)
    plain = Recorder(loaded).greedy(prompts[1:2], tokens=12)[0][1]
    close(recorder.greedy(prompts[1:2], tokens=12)[0][1], plain)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_adapters_work_on_joined_and_packed_layers(name, folders):
    loaded = tiny(name)
    made = folders(loaded)
    expected, recorder = models(loaded, made), Recorder(prepared(name), adapters=made)
    asked, prompts = ["all", "some", None], [ids(21, seed) for seed in range(3)]
    for adapter, prompt, (output, logits) in zip(asked, prompts, recorder.greedy(prompts, adapter=asked), strict=True):
        check_whole_answer(expected[adapter], prompt, output, logits)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_layers(quantization, folders):
    """An adapter over quantized layers moves the logits as it does in a model with the rounded weights."""
    loaded = tiny("llama")
    made = folders(loaded)
    form, prompt = WeightForm(quantization=quantization), ids(33)
    rounded, recorder = prepared("llama", form), Recorder(prepared("llama", form), adapters=made)
    ((_, logits),) = recorder.greedy([prompt], tokens=1, adapter="all")
    layers = linear_layers_of(rounded, loaded)
    expected = merged(layers, made["all"])
    close(logits, prefill(expected, prompt)[-1:])


@pytest.mark.parametrize("kind", ["Q4_0", {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}])
def test_adapters_work_on_quantized_checkpoints(kind, folders, tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed")
    from tests.model.models.formats.gguf_files import random_model, write_gguf

    model = random_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    path = write_gguf(tmp_path / "model.gguf", model, "llama", kind)
    loaded = load_model(path, dtype="float32", weights="stock")
    made, prompt = folders(loaded), ids(33)
    rounded, kept = (load_model(path, dtype="float32") for _ in range(2))
    ((_, logits),) = Recorder(kept, adapters=made).greedy([prompt], tokens=1, adapter="all")
    expected = prefill(merged(linear_layers_of(rounded, loaded), made["all"]), prompt)[-1:]
    # the inputs of a layer are rounded, and a difference of the last bit may change a rounding
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=0)


def linear_layers_of(rounded, loaded):
    """The stock model with the weights that a quantized one computes with: its answers to one input at a time."""
    import copy
    from dataclasses import replace

    model = copy.deepcopy(loaded.model)
    for module in rounded.model.modules():
        first = 0
        for path, outputs in getattr(module, "stands_for", ()):
            eye = torch.eye(module.in_features)
            weight = module(eye).t()[first : first + outputs]
            model.get_submodule(path).weight.data = weight.clone()
            first += outputs
    return replace(loaded, model=model)


@pytest.mark.parametrize("budget", [7, 50])
def test_in_chunks(budget, folders):
    loaded = tiny("llama")
    made = folders(loaded)
    expected, recorder = models(loaded, made), Recorder(loaded, adapters=made, max_num_batched_tokens=budget)
    asked, prompts = ["all", None, "some"], [ids(length, seed) for seed, length in enumerate((40, 3, 61))]
    for adapter, prompt, (output, logits) in zip(asked, prompts, recorder.greedy(prompts, adapter=asked), strict=True):
        check_whole_answer(expected[adapter], prompt, output, logits)


def test_the_output_layer(tmp_path):
    loaded = tiny("llama")
    folder = write_adapter(tmp_path / "head", loaded, ("lm_head", "down_proj"))
    recorder = Recorder(loaded, adapters={"head": folder})
    asked, prompts = ["head", None, "head"], [ids(9, seed) for seed in range(3)]
    expected = {"head": merged(loaded, folder), None: loaded}
    for adapter, prompt, (output, logits) in zip(asked, prompts, recorder.greedy(prompts, adapter=asked), strict=True):
        check_whole_answer(expected[adapter], prompt, output, logits)


def test_segments_of_one_adapter_are_not_found_by_another(folders):
    """All send the same prompt in turn: each finds only its own segments."""
    loaded = tiny("llama")
    made = folders(loaded)
    expected, recorder = models(loaded, made), Recorder(loaded, adapters=made, reuse="exact")
    prompt = ids(80)
    for again in (False, True):
        for adapter in ("some", None, "all"):
            ((output, logits),) = recorder.greedy([prompt], adapter=adapter)
            assert output.usage.cached_tokens == (len(prompt) - 1 if again else 0)
            check_whole_answer(expected[adapter], prompt, output, logits)


def test_adapter_is_identified_by_its_weights(folders):
    loaded = tiny("llama")
    made = folders(loaded)
    recorder = Recorder(loaded, adapters={"one": made["some"], "two": made["some"]})
    recorder.greedy([ids(40)], adapter="one")
    ((output, _),) = recorder.greedy([ids(40)], adapter="two")
    assert output.usage.cached_tokens == 39


def pml(llm) -> Schema:
    schema = Schema.from_string(SCHEMA)
    llm.add_schema(schema, encode=False)
    return schema


@pytest.mark.parametrize(("reuse", "positions"), [("isolated", "schema"), ("anchored", "packed")])
@pytest.mark.parametrize("case", ["order and gaps", "ends in a module"])
def test_modules_are_encoded_under_the_adapter(reuse, positions, case, folders):
    loaded = tiny("qwen3")
    made = folders(loaded)
    expected, recorder = models(loaded, made), Recorder(loaded, adapters=made)
    prompt = PROMPTS[case](pml(recorder.llm).prompt()).build()
    for adapter in ("all", None, "some", "all"):
        ((output, logits),) = recorder.greedy([prompt], reuse=reuse, positions=positions, adapter=adapter)
        answer = list(output.outputs[0].token_ids)
        close(logits, torch.stack(oracle_logits(expected[adapter], recorder.llm, prompt, answer, reuse, positions)))
        assert output.usage.across_tokens == 0
    assert output.usage.module_tokens > 0


class Across(PromptCacheOracle):
    """Modules by the model alone, the request's own tokens by the model with the adapter."""

    def __init__(self, alone, adapted) -> None:
        super().__init__(alone)
        self._alone, self._adapted = alone, adapted

    def add_module(self, *args) -> None:
        self.loaded = self._alone
        super().add_module(*args)

    def add_fresh(self, *args) -> None:
        self.loaded = self._adapted
        super().add_fresh(*args)


@pytest.mark.parametrize("reuse", ["isolated", "anchored"])
def test_across_reads_modules_encoded_without_the_adapter(reuse, folders):
    loaded = tiny("llama")
    made = folders(loaded)
    expected, recorder = models(loaded, made), Recorder(loaded, adapters=made)
    schema = pml(recorder.llm)
    prompt = PROMPTS["order and gaps"](schema.prompt()).build()
    recorder.greedy([prompt], reuse=reuse)  # by the model alone: its modules are there now
    encoded = recorder.llm.stats().encoded_tokens
    ((output, logits),) = recorder.greedy([prompt], reuse=f"{reuse}+across", adapter="all")
    usage = output.usage
    assert recorder.llm.stats().encoded_tokens == encoded
    assert 0 < usage.module_tokens == usage.across_tokens
    assert usage.exact_tokens == 0, "nothing behind them is exact"

    def oracle(_):
        return Across(loaded, expected["all"])

    answer = list(output.outputs[0].token_ids)
    positions = recorder.llm.positions_for(reuse)
    close(
        logits,
        torch.stack(oracle_logits(loaded, recorder.llm, prompt, answer, reuse, positions, make_oracle=oracle)),
    )
    # Without the word nothing of it is read, and exact reuse finds nothing that stands after it.
    ((own, _),) = recorder.greedy([prompt], reuse=reuse, adapter="all")
    assert (own.usage.cached_tokens, own.usage.across_tokens) == (0, 0)
    ((exact, logits),) = recorder.greedy([prompt], reuse="exact", adapter="all")
    check_whole_answer(expected["all"], list(exact.prompt_token_ids), exact, logits)
    assert exact.usage.module_tokens == 0


def test_across_prefers_stored_modules_of_the_adapter(folders):
    loaded = tiny("llama")
    made = folders(loaded)
    expected, recorder = models(loaded, made), Recorder(loaded, adapters=made)
    prompt = PROMPTS["one module"](pml(recorder.llm).prompt()).build()
    recorder.greedy([prompt], reuse="anchored")
    recorder.greedy([prompt], reuse="anchored", adapter="all")
    ((output, logits),) = recorder.greedy([prompt], reuse="anchored+across", adapter="all")
    assert output.usage.across_tokens == 0 < output.usage.cached_tokens
    answer = list(output.outputs[0].token_ids)
    close(logits, torch.stack(oracle_logits(expected["all"], recorder.llm, prompt, answer, "anchored", "packed")))


def test_across_encodes_missing_modules_without_the_adapter(folders):
    made = folders(tiny("llama"))
    recorder = Recorder(tiny("llama"), adapters=made)
    prompt = PROMPTS["one module"](pml(recorder.llm).prompt()).build()
    ((first, _),) = recorder.greedy([prompt], reuse="anchored+across", adapter="all")
    assert first.usage.cached_tokens == 0
    encoded = recorder.llm.stats().encoded_tokens
    ((second, _),) = recorder.greedy([prompt], reuse="anchored+across", adapter="some")
    ((third, _),) = recorder.greedy([prompt], reuse="anchored")
    assert recorder.llm.stats().encoded_tokens == encoded > 0
    assert second.usage.across_tokens == third.usage.cached_tokens == second.usage.module_tokens + encoded * 0


def test_parts_of_messages_are_encoded_per_adapter(folders):
    """A part that is marked is encoded under the adapter, and across adapters without it."""
    loaded = tiny("llama")
    made = folders(loaded)
    recorder = Recorder(loaded, adapters=made)
    parts = [
        _text(DOCUMENT) | {"cache_control": {"type": "ephemeral"}},
        _text("And another document, as long as that."),
    ]
    parts[1]["cache_control"] = parts[0]["cache_control"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [*parts, _text("Why?")]}]

    def ask(reuse, adapter):
        ((output, _),) = recorder.greedy([messages], reuse=reuse, adapter=adapter)
        return output.usage

    assert ask("anchored", None).cached_tokens == 0
    assert ask("anchored", "some").cached_tokens == 0
    assert ask("anchored", "some").across_tokens == 0 < ask("anchored", "some").module_tokens
    assert ask("anchored+across", "all").across_tokens >= len(DOCUMENT)
    assert ask("anchored", "all").across_tokens == 0


def _text(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize("recompute", ["linked:4", "profiled:0.3"])
def test_recomputed_tokens_use_the_adapter(recompute, folders):
    """With all tokens of modules recomputed, an answer is that of a full prefill, also across adapters."""
    loaded = tiny("llama")
    made = folders(loaded)
    expected, recorder = models(loaded, made), Recorder(loaded, adapters=made)
    prompt = PROMPTS["order and gaps"](pml(recorder.llm).prompt()).build()
    kind = recompute.partition(":")[0]
    whole = f"anchored+across+{kind}:{'1' if kind == 'profiled' else '999'}"
    for policy in (f"anchored+{recompute}", f"anchored+across+{recompute}", whole):
        ((output, logits),) = recorder.greedy([prompt], reuse=policy, adapter="all", positions="packed")
        assert output.usage.recomputed_tokens > 0
    check_whole_answer(expected["all"], list(output.prompt_token_ids), output, logits)


def test_store_on_disk_separates_adapters(tmp_path, folders):
    loaded = tiny("llama")
    made = folders(loaded)
    expected, params = models(loaded, made), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def restarted(adapters, adapter):
        llm = LLM(loaded, kv_memory="16MiB", chunk_size=16, store=tmp_path / "store", adapters=adapters, seed=0)
        prompt = PROMPTS["one module"](pml(llm).prompt()).build()
        (output,) = llm.generate(prompt, params, adapter=adapter, reuse="anchored")
        answer = list(output.outputs[0].token_ids)
        logits = oracle_logits(expected[adapter], llm, prompt, answer, "anchored", "packed")
        assert answer == torch.stack(logits).argmax(-1).tolist()
        llm.shutdown()
        return output.usage.disk_tokens, llm.stats().encoded_tokens

    for again in (False, True):
        for adapter in ("some", None, "all"):
            disk, encoded = restarted(made, adapter)
            assert (disk > 0, encoded > 0) == (again, not again)
    # An adapter under a new name is still the same adapter.
    assert restarted({"some": made["some"], "all": made["all"]} | {"x": made["some"]}, "some")[1] == 0


def test_lossy_forms_in_a_store_are_separated_by_adapter(tmp_path, folders):
    """Each reads the forms of its own modules; those of the model alone only across adapters, after which nothing is
    exact."""
    loaded = tiny("llama")
    made = folders(loaded)
    expected = models(loaded, made)

    def restarted(adapter, reuse):
        settings = {"store": tmp_path / "store", "store_codec": "int8", "seed": 0}
        recorder = Recorder(loaded, adapters=made, **settings)
        prompt = PROMPTS["one module"](pml(recorder.llm).prompt()).build()
        ((output, _),) = recorder.greedy([prompt], reuse=reuse, adapter=adapter)
        ((exact, logits),) = recorder.greedy([prompt], reuse="exact", adapter=adapter)
        check_whole_answer(expected[adapter], list(exact.prompt_token_ids), exact, logits)
        recorder.llm.shutdown()
        return output.usage, recorder.llm.stats().encoded_tokens

    usage, encoded = restarted(None, "anchored")
    assert (usage.disk_tokens, encoded > 0) == (0, True)
    usage, again = restarted("all", "anchored+across")
    assert (again, usage.exact_tokens) == (0, 0)
    assert usage.disk_tokens == usage.across_tokens == usage.module_tokens > 0
    usage, own = restarted("all", "anchored")
    assert (usage.disk_tokens, own) == (0, encoded)
    for reuse in ("anchored", "anchored+across"):
        usage, again = restarted("all", reuse)
        assert (again, usage.exact_tokens, usage.across_tokens) == (0, 0, 0), "its own, where both are there"
        assert usage.disk_tokens == usage.module_tokens > 0
    assert restarted("some", "anchored")[0].disk_tokens == 0


def test_schemas_are_encoded_ahead_for_an_adapter(folders):
    made = folders(tiny("llama"))
    recorder = Recorder(tiny("llama"), adapters=made)
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema, adapter="some")
    encoded = recorder.llm.stats().encoded_tokens
    prompt = PROMPTS["one module"](schema.prompt())
    ((output, _),) = recorder.greedy([prompt], adapter="some")
    assert recorder.llm.stats().encoded_tokens == encoded > 0
    assert output.usage.cached_tokens > len("We can spend a little.")
    recorder.llm.warm(prompt, adapter="all")
    assert recorder.llm.stats().encoded_tokens > encoded
    assert recorder.llm.deviations(schema.name, adapter="some").keys() >= {"money", "food"}


def test_shared_model_is_left_unchanged(folders):
    loaded = tiny("llama")
    made, prompt = folders(loaded), ids(20)
    before = prefill(loaded, prompt)
    hooks = sum(len(module._forward_hooks) for module in loaded.model.modules())  # of others who use this model
    recorder, other = Recorder(loaded, adapters=made), Recorder(loaded)
    recorder.greedy([prompt], adapter="all")
    assert torch.equal(prefill(loaded, prompt), before)
    ((output, logits),) = other.greedy([prompt])
    check_whole_answer(loaded, prompt, output, logits)
    recorder.llm.shutdown()
    assert sum(len(module._forward_hooks) for module in loaded.model.modules()) <= hooks


def test_unknown_adapter_is_rejected(folders):
    made = folders(tiny("llama"))
    llm, bare = LLM(tiny("llama"), kv_memory="8MiB", adapters=made), LLM(tiny("llama"), kv_memory="8MiB")
    with raises("adapter.unknown", ParameterError, names="'some', 'all'"):
        llm.generate("x", adapter="other")
    with raises("adapter.unknown", ParameterError, names="'other'"):
        bare.generate("x", adapter="other")
    with raises("parameter.wrong_count", ParameterError):
        llm.generate(["x", "y"], adapter=["some", None, "all"])
    with raises("adapter.unknown", ParameterError, names="3"):
        llm.add_schema(Schema.from_string(SCHEMA), adapter=3)
    assert llm.schema("s") is None


def test_combination_is_promoted_for_its_adapter(folders):
    loaded = tiny("llama")
    llm = LLM(loaded, adapters=folders(loaded), promotion_memory=0.1)
    schema = Schema.from_string(
        '<schema name="s"><module name="a">The first module of them.</module><module name="b">The second one.</module>'
        "</schema>"
    )
    llm.add_schema(schema, encode=False)
    prompt, params = schema.prompt().use("a").use("b").text("Well?"), SamplingParams(temperature=0, max_tokens=8)

    def answer(adapter, reuse="modular"):
        (output,) = llm.generate(prompt, params, adapter=adapter, reuse=reuse)
        return output

    for _ in range(2):
        assert answer("all").usage.promoted_tokens == 0
    llm.promote()
    found, alone = answer("all"), answer(None)
    assert found.usage.promoted_tokens > 0
    assert found.usage.module_tokens == found.usage.across_tokens == alone.usage.promoted_tokens == 0
    assert found.outputs[0].token_ids == answer("all", "off").outputs[0].token_ids
    assert answer("some").usage.promoted_tokens == 0
    llm.shutdown()
