"""Modules of a model with short convolutions against Prompt Cache done with the stock model.

Attention reads a module's keys at a shift. The convolutions read their columns after the module's last token, as they
were encoded. The module's first tokens are recomputed at their new place.
"""

from __future__ import annotations

import pytest
import torch

from inlay import Schema
from tests.generated import in_pairs
from tests.model.equivalence.recorder import Recorder, close
from tests.model.equivalence.test_modules import POLICIES, PROMPTS, SCHEMA
from tests.model.equivalence.test_recomputation import check, recorder_for
from tests.model.families.configs import tiny
from tests.model.families.suite import _steps as steps_of

ASKING = {
    **{name: PROMPTS[name] for name in ("one module", "order and gaps", "nested, short and full arguments")},
    **{name: PROMPTS[name] for name in ("defaults", "a scaffold")},
    "new text in the middle": lambda p: PROMPTS["new text in the middle"](p).text("Where to?"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "which", "policy", "recompute"),
    in_pairs(["lfm2", "lfm3"], ASKING, POLICIES, ["linked:3", "linked:0", "linked:7"]),
)
def test_a_prompt_of_modules(name, which, policy, recompute):
    context, positions = policy
    if which == "new text in the middle" and positions == "schema":
        return  # there is no gap behind the trip's last words
    loaded, schema = tiny(name), Schema.from_string(SCHEMA)
    recorder = recorder_for(loaded, schema)
    prompt = ASKING[which](schema.prompt())
    for _ in range(2):  # a second time everything comes from the store
        output = check(recorder, loaded, prompt, f"{context}+{recompute}", positions)
    assert output.usage.computed_tokens == 1


@pytest.mark.parametrize("budget", [3, 17])
def test_in_chunks(budget):
    """A pass ends in front of work that reads a state of the same pass."""
    loaded, schema = tiny("lfm2"), Schema.from_string(SCHEMA)
    recorder = recorder_for(loaded, schema, chunk_size=4, max_num_batched_tokens=budget, prefill_chunk=budget)
    prompt = ASKING["nested, short and full arguments"](schema.prompt())
    for _ in range(2):
        check(recorder, loaded, prompt, "anchored+linked:3", "packed")


def test_a_batch_of_prompts_shares_the_states_of_its_modules():
    loaded, schema = tiny("lfm2"), Schema.from_string(SCHEMA)
    recorder = recorder_for(loaded, schema, max_num_batched_tokens=40, prefill_chunk=32)
    names = ("order and gaps", "one module", "nested, short and full arguments", "order and gaps")
    prompts = [ASKING[name](schema.prompt()) for name in names]
    told = recorder.greedy(prompts, reuse="anchored+linked:3", positions="packed")
    for prompt, one in zip(prompts, told, strict=True):
        check(recorder, loaded, prompt, "anchored+linked:3", "packed", [one])


def test_whole_modules_of_linked_tokens_equal_full_prefill():
    loaded, schema = tiny("lfm2"), Schema.from_string(SCHEMA)
    recorder = recorder_for(loaded, schema)
    ((output, logits),) = recorder.greedy([ASKING["defaults"](schema.prompt())], reuse="anchored+linked:1000")
    close(logits, steps_of("lfm2", list(output.prompt_token_ids), output))


def test_a_module_at_the_end_of_a_prompt_is_computed():
    """The state in front of its last token is not stored."""
    recorder = recorder_for(tiny("lfm2"), Schema.from_string(SCHEMA), reuse="isolated")
    schema = Schema.from_string(SCHEMA)
    for _ in range(2):
        ((output, _),) = recorder.greedy([schema.prompt().use("money")])
    # The text before it is stored, with the state in front of the last token.
    assert output.usage.computed_tokens == 1
    ((other, _),) = recorder.greedy([schema.prompt().use("food").use("money")])
    assert other.usage.computed_tokens >= len("We can spend a little.")


@pytest.mark.parametrize(("name", "first"), [("lfm2", 3), ("lfm3", 7)])
def test_linked_tokens_reduce_divergence_from_full_prefill(name, first):
    """Without them, the convolutions at a module's first tokens see no text before it."""
    schema = Schema.from_string(SCHEMA)
    recorder = recorder_for(tiny(name), schema)
    prompts = [make(schema.prompt()) for make in ASKING.values()]
    full = [logits for _, logits in recorder.greedy(prompts, 1, reuse="off")]

    def divergence(reuse: str) -> float:
        found = [logits for _, logits in recorder.greedy(prompts, 1, reuse=reuse, positions="packed")]
        pairs = [(a.log_softmax(-1), b.log_softmax(-1)) for a, b in zip(full, found, strict=True)]
        return float(torch.stack([(a.exp() * (a - b)).sum() for a, b in pairs]).mean())

    assert divergence("modular") < divergence("modular+linked:0")
    assert divergence("modular") == divergence(f"modular+linked:{first}")  # the default


def test_exact_requests_read_no_module_encoded_elsewhere():
    schema = Schema.from_string(SCHEMA)
    recorder = Recorder(tiny("lfm2"))
    recorder.llm.add_schema(schema)
    prompt = ASKING["order and gaps"](schema.prompt())
    for reuse in ("modular", "exact", "modular", "exact"):
        ((output, logits),) = recorder.greedy([prompt], reuse=reuse)
        if reuse == "exact":
            close(logits, steps_of("lfm2", list(output.prompt_token_ids), output))
