"""The loop: packed encoding, plans that advance, chunks of prompts, and chunks of the pool."""

from __future__ import annotations

import copy

import pytest

from inlay import LLM, SamplingParams, Schema
from inlay.attention.plan import Part
from inlay.engine import forward
from inlay.engine.allocation import Work
from inlay.engine.pass_cost import FLOOR, LONE
from inlay.slots import SlotRange
from tests.conftest import tiny
from tests.counting import calls_of
from tests.model.engine.observing import observed
from tests.model.equivalence.oracle import prefill
from tests.model.equivalence.recorder import close

MODULES = Schema.from_string(
    '<schema name="s">Always here. '
    + "".join(f'<module name="m{n}">{n} is a module that holds a few words.</module>' for n in range(6))
    + "</schema>"
)


def work(length: int, slot: int = 0) -> Work:
    return Work(tuple(range(length)), Part.of(0, length, (), (SlotRange(slot, length),)))


@pytest.mark.parametrize("reuse", ["isolated", "anchored"])
def test_modules_are_encoded_in_one_pass(monkeypatch, reuse):
    llm = LLM(tiny("llama"), kv_memory="16MiB", max_pass_s=None, reuse=reuse)
    sizes = observed(llm).tokens
    llm.add_schema(MODULES)
    assert sizes == [llm.store.tokens]


def test_encoding_keeps_to_the_budget(monkeypatch):
    llm = LLM(tiny("llama"), kv_memory="16MiB", max_pass_s=None, max_num_batched_tokens=50)
    sizes = observed(llm).tokens
    llm.add_schema(MODULES)
    assert sizes[:-1] == [50] * (len(sizes) - 1)
    assert sum(sizes) == llm.store.tokens


def test_second_request_computes_only_new_text(monkeypatch):
    llm = LLM(tiny("llama"), kv_memory="16MiB", max_pass_s=None)
    llm.add_schema(MODULES)
    sizes = observed(llm).tokens
    prompt = MODULES.prompt().use("m1").use("m4").text("And?")
    llm.generate(prompt, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert sizes == [len("And?"), 1, 1]


def test_several_new_parts_take_one_pass(monkeypatch):
    schema = Schema.from_string(
        '<schema name="s"><module name="a">Go <param name="p" len="9"/> and <param name="q" len="9"/>.</module>'
        "</schema>"
    )
    llm = LLM(tiny("llama"), kv_memory="16MiB", max_pass_s=None)
    llm.add_schema(schema)
    sizes = observed(llm).tokens
    llm.generate(schema.prompt().use("a", p="here", q="there").text("OK?"), SamplingParams(max_tokens=1))
    assert sizes == [len("here") + len("there") + len("OK?")]


def test_plans_are_built_when_the_batch_changes_and_advanced_otherwise(monkeypatch):
    llm = LLM(tiny("llama"), kv_memory="16MiB", max_pass_s=None, speculation="off")
    built = calls_of(monkeypatch, forward, "build_plan")
    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (30, 10)]
    llm.generate(["Hello", "Good morning"], params)
    # the prompts; decoding of both; decoding of the one that is left
    assert [len(spans) for (spans,) in built] == [2, 2, 1]


def test_joining_request_leaves_the_tables_of_others_unchanged(monkeypatch):
    """A decoding request's table is made once, whatever other requests do, and across chunks of the pool."""
    llm = LLM(tiny("llama"), kv_memory="16MiB", chunk_size=4, max_num_seqs=2, max_num_batched_tokens=6)
    made = calls_of(monkeypatch, Part, "at")
    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (5, 30, 9, 9)]
    llm.generate(["Hello", "Good morning", "A third one", "Yet a fourth"], params)
    assert sorted(len(positions) for positions, *_ in made) == [1] * 4 + [5, 11, 12, 12]


def test_the_first_pass_of_a_lone_request_is_longer_than_that_of_two():
    sizes = {}
    for count in (1, 2):
        llm = LLM(tiny("llama"), kv_memory="16MiB", reuse="off", max_pass_s=60.0)
        seen = observed(llm).tokens
        llm.generate([list(range(200))] * count, SamplingParams(max_tokens=1))
        sizes[count] = seen[0]
    assert sizes == {1: LONE * FLOOR, 2: FLOOR}


def test_every_chunk_is_released():
    llm = LLM(tiny("llama"), kv_memory="16MiB", chunk_size=4)
    llm.add_schema(MODULES)
    prompts = [MODULES.prompt().use(f"m{n}").text("And?") for n in range(6)]
    llm.generate(prompts, [SamplingParams(max_tokens=1 + 3 * n, ignore_eos=True) for n in range(6)])
    assert not llm.stats().busy
    assert not any(segment.holds for segment in llm.store)
    llm.store.clear()
    assert llm.store.pool.free_chunks == llm.store.pool.chunks


def test_passes_without_logits_end_at_the_keys_of_the_last_layer():
    llm = LLM(tiny("llama"), kv_memory="16MiB", reuse="off", max_pass_s=None, max_num_batched_tokens=16)
    layers = llm.loaded.model.model.layers
    first: list[int] = []
    last: list[int] = []
    for layer, rows in ((layers[0], first), (layers[-1], last)):
        layer.mlp.register_forward_pre_hook(lambda _, given, own=rows: own.append(len(given[0][0])))
    llm.generate([list(range(40))], SamplingParams(max_tokens=1))
    assert first == [16, 16, 8]
    assert last == [8]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_layer_computes_the_rows_with_logits_alone(name, dtype, tmp_path):
    loaded = tiny(name)
    copy.deepcopy(loaded.model).save_pretrained(tmp_path)  # it changes the configuration
    loaded.tokenizer.save_pretrained(tmp_path)
    llm = LLM(tmp_path, kv_memory="16MiB", reuse="off", dtype=dtype, max_pass_s=None)
    layers = llm.loaded.model.model.layers
    first: list[int] = []
    last: list[int] = []
    for layer, rows in ((layers[0], first), (layers[-1], last)):
        layer.mlp.register_forward_pre_hook(lambda _, given, own=rows: own.append(len(given[0][0])))
    prompts = [list(range(start, start + length)) for start, length in ((0, 30), (7, 11), (90, 50))]
    taken = llm.distributions(prompts, [[5, 6], [7], [8, 9]])
    assert first[0] == 91
    assert last[0] == 3
    for prompt, continuation, found in zip(prompts, [[5], [], [8]], taken, strict=True):
        ids = [*prompt, *continuation]
        expected = prefill(loaded, ids, list(range(len(ids))))[len(prompt) - 1 :].log_softmax(-1)
        if dtype == "float32":
            close(found, expected)
        else:
            assert (found - expected).abs().max() < 0.3
