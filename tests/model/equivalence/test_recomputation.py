"""Composed prompts with recomputed tokens against the stock model: selected tokens attend to the prompt's real
prefix.
"""

from __future__ import annotations

import numpy as np
import pytest

from inlay import SamplingParams, Schema
from inlay.prompt.composed import choose_tokens, compose
from tests.conftest import CONFIGS, tiny
from tests.generated import in_pairs
from tests.model.equivalence.oracle import prefill
from tests.model.equivalence.recorder import Recorder, close
from tests.model.equivalence.test_modules import PROMPTS, SCHEMA, oracle_logits

KINDS = ["query", "profiled*query", "blend"]  # a selection pass chooses the tokens
SETTINGS = [(r, p) for r in ("isolated", "anchored") for p in ("schema", "packed")]


def recorder_for(loaded, schema, **settings):
    recorder = Recorder(loaded, **settings)
    recorder.llm.add_schema(schema)
    return recorder


def set_profiles(llm, prompts, policy, seed=0):
    """Set random deviation profiles, so that random tokens are recomputed."""
    draw = np.random.default_rng(seed)
    for prompt in prompts:
        for part in llm.processor.process(prompt, SamplingParams(), policy).parts:
            for spec in part.candidates:
                llm.local.engine.kv_manager.profiles.add(spec.key, draw.random(len(spec.ids)).astype(np.float16))


def chosen(llm, prompt, policy):
    """The recomputed tokens of a prompt, by the start of each part."""
    request = llm.processor.process(prompt, SamplingParams(), policy)
    return choose_tokens(policy.recompute, compose(request), llm.local.engine.kv_manager.profiles).offsets


def check(recorder, loaded, prompt, reuse, positions, told=None):
    policy = recorder.llm.policy(reuse, positions)
    recomputed = chosen(recorder.llm, prompt, policy)
    ((output, logits),) = told or recorder.greedy([prompt], reuse=reuse, positions=positions)
    answer = list(output.outputs[0].token_ids)
    expected = oracle_logits(loaded, recorder.llm, prompt, answer, str(policy.context), positions, recomputed)
    for step, row in enumerate(expected):
        close(logits[step], row)
    assert output.usage.recomputed_tokens == sum(map(len, recomputed.values()))
    return output


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("which", "name", "recompute"), in_pairs(PROMPTS, CONFIGS, ["linked:3", "profiled:0.4"]))
def test_composed_prompt_with_recomputation_equals_the_stock_model(which, name, recompute):
    loaded, schema = tiny(name), Schema.from_string(SCHEMA)
    recorder = recorder_for(loaded, schema)
    prompt = PROMPTS[which](schema.prompt())
    for context, positions in SETTINGS:
        if (name == "gpt2" and positions == "packed") or (which.startswith("new text") and positions == "schema"):
            continue
        policy = recorder.llm.policy(f"{context}+{recompute}", positions)
        set_profiles(recorder.llm, [prompt], policy)
        first = check(recorder, loaded, prompt, str(policy), positions)
        again = check(recorder, loaded, prompt, str(policy), positions)  # all of it is stored now
        assert again.usage.computed_tokens == 1
        assert again.usage.recomputed_tokens == first.usage.recomputed_tokens
        assert first.usage.recomputed_tokens > 0 or which in ("one module", "a scaffold")  # which may be exact
        assert first.usage.linked_tokens == (first.usage.recomputed_tokens if recompute.startswith("linked") else 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("recompute", ["profiled:1", "linked:1000"])
def test_ratio_of_one_equals_full_prefill(name, recompute):
    loaded, schema = tiny(name), Schema.from_string(SCHEMA)
    positions = "schema" if name == "gpt2" else "packed"
    recorder = recorder_for(loaded, schema, positions=positions)
    prompt = PROMPTS["nested, short and full arguments"](schema.prompt())
    set_profiles(recorder.llm, [prompt], recorder.llm.policy(f"anchored+{recompute}", positions))
    ((output, logits),) = recorder.greedy([prompt], reuse=f"anchored+{recompute}")
    answer = output.outputs[0].token_ids
    end = output.prompt_positions[-1] + 1
    ids = [*output.prompt_token_ids, *answer[:-1]]
    close(logits, prefill(loaded, ids, [*output.prompt_positions, *range(end, end + len(answer) - 1)])[-len(answer) :])


@pytest.mark.parametrize("kind", ["linked", "profiled", *KINDS])
def test_ratio_of_zero_recomputes_nothing(kind):
    schema = Schema.from_string(SCHEMA)
    recorder = recorder_for(tiny("llama"), schema)
    prompt = PROMPTS["order and gaps"](schema.prompt())
    ((plain, expected),) = recorder.greedy([prompt], reuse="anchored")
    ((output, logits),) = recorder.greedy([prompt], reuse=f"anchored+{kind}:0")
    close(logits, expected)
    assert (output.usage.recomputed_tokens, output.usage.selecting_tokens, output.usage.computed_tokens) == (0, 0, 1)
    assert plain.usage.prompt_tokens == output.usage.prompt_tokens


@pytest.mark.parametrize("chunk_size", [1, 16])
@pytest.mark.parametrize("budget", [3, 4096])
@pytest.mark.parametrize("recompute", ["linked:7", "profiled:0.5"])
def test_in_chunks(chunk_size, budget, recompute):
    loaded, schema = tiny("qwen3"), Schema.from_string(SCHEMA)
    recorder = recorder_for(loaded, schema, chunk_size=chunk_size, max_num_batched_tokens=budget)
    prompt = PROMPTS["nested, short and full arguments"](schema.prompt())
    policy = recorder.llm.policy(f"anchored+{recompute}")
    set_profiles(recorder.llm, [prompt], policy)
    check(recorder, loaded, prompt, str(policy), "packed")


def test_sliding_window_counts_positions_with_recomputed_tokens():
    """Mistral's window is shorter than these prompts, and there are gaps between the recomputed tokens."""
    loaded = tiny("mistral")
    assert loaded.model.config.sliding_window < 100
    schema = Schema.from_string(SCHEMA)
    recorder = recorder_for(loaded, schema)
    prompt = PROMPTS["a scaffold"](schema.prompt().use("trip", likes="tea"))
    set_profiles(recorder.llm, [prompt], recorder.llm.policy("anchored+profiled:0.5"))
    check(recorder, loaded, prompt, "anchored+profiled:0.5", "packed")


def test_batched_with_requests_under_other_policies():
    """Invariant 2: recomputation for one request changes nothing for the others."""
    loaded, schema = tiny("llama"), Schema.from_string(SCHEMA)
    policies = ["off", "exact", "anchored", "isolated+linked:2", "anchored+linked:5", "anchored+profiled:0.3"]
    prompt = PROMPTS["nested, short and full arguments"](schema.prompt())
    alone = {}
    for reuse in policies:
        recorder = recorder_for(loaded, schema)
        set_profiles(recorder.llm, [prompt], recorder.llm.policy(reuse))
        ((_, alone[reuse]),) = recorder.greedy([prompt], reuse=reuse)
    recorder = recorder_for(loaded, schema)
    set_profiles(recorder.llm, [prompt], recorder.llm.policy("anchored"))
    llm, params = recorder.llm, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    processed = [llm.processor.process(prompt, params, llm.policy(reuse)) for reuse in [*policies, *policies]]
    requests = [llm.local.prepare(each) for each in processed]
    for request in requests:
        llm.client.submit(request, lambda _: None)
    while llm.stats().busy:
        llm.client.pump()
    for request, reuse in zip(requests, [*policies, *policies], strict=True):
        for step, row in enumerate(alone[reuse]):
            close(recorder.logits[request.id][step], row)
