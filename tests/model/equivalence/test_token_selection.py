"""The token selection pass against the stock model: its attention, and the deviation of keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from inlay import SamplingParams, Schema
from inlay.engine.unshared_runner import with_cache
from inlay.models.interface import attention_implementation
from inlay.prompt.composed import choose_tokens, compose
from tests.conftest import CONFIGS, tiny
from tests.generated import in_pairs
from tests.model.equivalence.oracle import PromptCacheOracle, forward, keys_and_values, mask_for, prefill
from tests.model.equivalence.recorder import Recorder, close
from tests.model.equivalence.test_modules import PROMPTS, SCHEMA, oracle_logits
from tests.model.equivalence.test_recomputation import KINDS, recorder_for, set_profiles

NESTED = "nested, short and full arguments"


class Watching(PromptCacheOracle):
    """Records the attention of the last computed tokens: ``mass`` by position, summed over rows, heads and layers."""

    def compute(self, ids, positions):
        cache = DynamicCache()
        for layer in range(len(self.keys)):
            cache.update(torch.cat(self.keys[layer], 2), torch.cat(self.values[layer], 2), layer)
        query, everything = torch.tensor(positions), torch.tensor(self.positions + positions)
        mask = mask_for(self.loaded.model, query, everything, everything[None] <= query[:, None])
        with torch.inference_mode(), attention_implementation(self.loaded.model, "eager"):
            output = self.loaded.model(
                input_ids=torch.tensor([ids]), position_ids=query[None], attention_mask=mask,
                **with_cache(self.loaded.model, cache), use_cache=True, output_attentions=True,
            )  # fmt: skip
        self.mass = np.zeros(int(everything.max()) + 1)
        np.add.at(self.mass, everything.numpy(), sum(layer[0].sum((0, 1)) for layer in output.attentions).numpy())
        super().compute(ids, positions)


def expected_choice(recorder, loaded, prompt, policy, positions):
    """The choice that the stock model's own attention or keys lead to."""
    made = []

    def make_oracle(loaded):
        made.append(Watching(loaded))
        return made[0]

    llm = recorder.llm
    request = llm.processor.process(prompt, SamplingParams(), policy)
    composed = compose(request)
    oracle_logits(loaded, llm, prompt, [0], str(policy.context), positions, make_oracle=make_oracle)
    oracle = made[0]
    if policy.recompute.by_attention:
        by_position = oracle.mass
    else:
        layer = max(1, len(loaded.spec.layers) // 3)
        cache = DynamicCache()
        cache.inlay_positions = torch.tensor([], dtype=torch.long)
        ids, at = list(request.ids), list(request.positions)
        forward(loaded.model, ids, at, torch.ones(len(ids), len(ids)).tril().bool(), cache)
        here = keys_and_values(cache)[layer][0][0]
        there = torch.cat(oracle.keys[layer], 2)[0]
        order = np.argsort(oracle.positions[: len(ids)])
        by_position = np.zeros(at[-1] + 1)
        by_position[at] = (here - there[:, order]).pow(2).sum((0, 2)).sqrt().numpy()
    scores = {part.start: by_position[part.start : part.start + len(part.ids)] for part in request.parts}
    return choose_tokens(policy.recompute, composed, llm.local.engine.kv_manager.profiles, scores).offsets


def check(recorder, loaded, prompt, policy, positions, *, told=None):
    llm = recorder.llm
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    request = told or llm.local.prepare(llm.processor.process(prompt, params, policy))
    if told is None:
        llm.client.submit(request, lambda _: None)
        while llm.stats().busy:
            llm.client.pump()
    assert request.error is None
    recomputed = request.prompt.recomputed.offsets
    expected = oracle_logits(loaded, llm, prompt, request.token_ids, str(policy.context), positions, recomputed)
    for step, row in enumerate(expected):
        close(recorder.logits[request.id][step], row)
    return request, recomputed


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("which", "name", "kind"),
    in_pairs(["order and gaps", NESTED, "ends in a module", "new text in the middle"], CONFIGS, KINDS),
)
def test_selection_and_answer_equal_the_stock_model(which, name, kind):
    loaded, schema = tiny(name), Schema.from_string(SCHEMA)
    positions = "schema" if name == "gpt2" else "packed"
    if which.startswith("new text") and positions == "schema":
        return
    recorder = recorder_for(loaded, schema)
    prompt = PROMPTS[which](schema.prompt())
    policy = recorder.llm.policy(f"anchored+{kind}:0.3", positions)
    set_profiles(recorder.llm, [prompt], policy)
    request, recomputed = check(recorder, loaded, prompt, policy, positions)
    if name != "gpt2":  # whose oracle has no rotary embedding to move keys by
        assert recomputed == expected_choice(recorder, loaded, prompt, policy, positions)
    assert request.usage.recomputed_tokens == sum(map(len, recomputed.values())) > 0
    assert request.usage.linked_tokens == 0 < request.usage.selecting_tokens
    again, same = check(recorder, loaded, prompt, policy, positions)
    assert (same, again.usage.computed_tokens) == (recomputed, 1)  # the same choice is found again


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_ratio_of_one_equals_full_prefill(name, kind):
    loaded, schema = tiny(name), Schema.from_string(SCHEMA)
    positions = "schema" if name == "gpt2" else "packed"
    recorder = recorder_for(loaded, schema, positions=positions)
    prompt = PROMPTS[NESTED](schema.prompt())
    ((output, logits),) = recorder.greedy([prompt], reuse=f"anchored+{kind}:1")
    answer, end = output.outputs[0].token_ids, output.prompt_positions[-1] + 1
    ids = [*output.prompt_token_ids, *answer[:-1]]
    close(logits, prefill(loaded, ids, [*output.prompt_positions, *range(end, end + len(answer) - 1)])[-len(answer) :])
    assert output.usage.selecting_tokens == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("budget", [3, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_in_chunks_and_on_every_backend(kind, budget, backend):
    loaded, schema = tiny("mistral"), Schema.from_string(SCHEMA)  # its window is shorter than the prompt
    settings = {"attention_backend": backend, "max_num_batched_tokens": budget, "chunk_size": 1}
    recorder = recorder_for(loaded, schema, **settings)
    prompt = PROMPTS["a scaffold"](schema.prompt().use("trip", likes="tea"))
    policy = recorder.llm.policy(f"anchored+{kind}:0.4")
    _, recomputed = check(recorder, loaded, prompt, policy, "packed")
    assert recomputed == expected_choice(recorder, loaded, prompt, policy, "packed")


def test_batched_with_requests_under_other_policies():
    """Invariant 2: batching does not mix up the attention masks of requests."""
    loaded, schema = tiny("llama"), Schema.from_string(SCHEMA)
    reuses = ["off", "exact", "anchored", "anchored+linked:5", *(f"anchored+{kind}:0.3" for kind in KINDS)]
    prompts = [PROMPTS[which](schema.prompt()) for which in (NESTED, "order and gaps")]
    recorder = recorder_for(loaded, schema, max_num_batched_tokens=16, profile="off")
    llm, params = recorder.llm, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    asked = [(prompt, llm.policy(reuse)) for prompt in prompts for reuse in reuses]
    requests = [llm.local.prepare(llm.processor.process(prompt, params, policy)) for prompt, policy in asked]
    for request in requests:
        llm.client.submit(request, lambda _: None)
    while llm.stats().busy:
        llm.client.pump()
    for (prompt, policy), request in zip(asked, requests, strict=True):
        if policy.recompute is not None:
            _, recomputed = check(recorder, loaded, prompt, policy, "packed", told=request)
            if policy.recompute.selects:
                assert recomputed == expected_choice(recorder, loaded, prompt, policy, "packed")
            continue
        alone = Recorder(loaded)
        alone.llm.add_schema(schema)
        ((_, expected),) = alone.greedy([prompt], reuse=str(policy))
        for step, row in enumerate(expected):
            close(recorder.logits[request.id][step], row)
