"""The requirements on families with recurrent layers, as functions that a test or the survey calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inlay import LLM, SamplingParams, Schema
from inlay.errors import PolicyError
from tests.model.equivalence.recorder import Recorder, close
from tests.model.equivalence.test_modules import PROMPTS
from tests.model.equivalence.test_modules import SCHEMA as WORDS
from tests.model.equivalence.test_recomputation import check, recorder_for
from tests.model.families.configs import tiny, tiny_bfloat16
from tests.model.families.suite import _ids as ids_of
from tests.model.families.suite import _steps as steps_of
from tests.model.families.suite import (
    adapters,
    chat_tools,
    chunks,
    errors_in_bfloat16,
    packed_weights,
    prefill_and_decode,
    quantized_weights,
    stock_calls,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SCHEMA = (
    '<schema name="trip"><system>Plan a trip.</system><user><module name="sea">The sea is warm in May.</module>'
    '<module name="hills">The hills are dry in May.</module></user></schema>'
)


def prefixes(name: str) -> None:
    """Prompts that begin alike continue stored states, in chunks that cut through them, and equal the stock model."""
    recorder = Recorder(tiny(name), max_num_batched_tokens=16, prefill_chunk=16)
    begin, cached = ids_of(40), []
    for end in (ids_of(9, 1), ids_of(9, 1), ids_of(5, 2), ids_of(7, 3)):
        ((output, logits),) = recorder.greedy([begin + end], 3)
        close(logits, steps_of(name, begin + end, output))
        cached.append(output.usage.cached_tokens)
    # The whole prompt but its last token; the third prompt marks where it leaves the others, and the fourth hits.
    assert cached == [0, 48, 0, 40]


def turns(name: str) -> None:
    """A conversation continues the state after its last answer."""
    recorder, prompt = Recorder(tiny(name)), ids_of(30)
    for turn in range(3):
        ((output, logits),) = recorder.greedy([prompt], 5)
        close(logits, steps_of(name, prompt, output))
        assert output.usage.cached_tokens == (len(prompt) - 7 if turn else 0)
        prompt = [*prompt, *output.outputs[0].token_ids, *ids_of(6, turn + 1)]


def batches(name: str) -> None:
    """Requests of all kinds in one batch: new, continued, with one token, and several answers of one prompt."""
    recorder = Recorder(tiny(name), max_num_batched_tokens=24, prefill_chunk=16)
    begin = ids_of(20)
    prompts = [begin + ids_of(13, 1), [7], ids_of(33, 2), begin + ids_of(13, 1) + ids_of(4, 3)]
    for _ in range(2):
        for prompt, (output, logits) in zip(prompts, recorder.greedy(prompts, 6), strict=True):
            close(logits, steps_of(name, prompt, output))
    alone = recorder.llm.generate([prompts[2]], GREEDY)[0].outputs[0].token_ids
    (output,) = recorder.llm.generate([prompts[2]], SamplingParams(top_k=1, max_tokens=8, ignore_eos=True, n=3))
    assert [one.token_ids for one in output.outputs] == [alone] * 3


def preemption(name: str) -> None:
    """Requests that lose their room in the middle of their answers give the stock model's answers."""
    loaded = tiny(name)
    states = LLM(loaded, kv_memory="16MiB").store.states
    assert states is not None
    per_token = LLM(loaded, kv_memory="16MiB").store.pool.bytes_per_token
    room = 8 * states.slot_bytes + 8 * 16 * per_token
    recorder = Recorder(loaded, kv_memory=room, state_memory=8 * states.slot_bytes, max_num_seqs=4)
    prompts = [ids_of(30, seed) for seed in range(4)]
    for prompt, (output, logits) in zip(prompts, recorder.greedy(prompts, 20), strict=True):
        close(logits, steps_of(name, prompt, output))
    assert recorder.llm.stats().preemptions
    accounted(recorder.llm)


def bfloat16(name: str) -> None:
    """In chunks and behind a stored state, most rows are as near to fp32 as the stock model's in bfloat16.

    In the other rows of models with experts, rounding chooses other experts.
    """
    recorder = Recorder(tiny_bfloat16(name), max_num_batched_tokens=16, prefill_chunk=16)
    found: list[tuple[Tensor, ...]] = []
    for seed in range(3):
        for cached in (0, 39):
            output, *errors = errors_in_bfloat16(name, recorder, ids_of(40, seed))
            assert output.usage.cached_tokens == cached
            found.append(tuple(errors))
    ours, theirs, truth = (torch.cat(each).median() for each in zip(*found, strict=True))
    assert ours < 1.5 * theirs + 0.01 * truth


def schemas(name: str) -> None:
    """A schema's prompt is text with a state after each module. A prompt that begins with the same modules hits it."""
    recorder = Recorder(tiny(name))
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema)
    both = schema.prompt().use("sea").use("hills")
    cached = []
    for prompt in (both.text("Where to?"), both.text("And when?"), schema.prompt().use("sea").text("Is it far?")):
        ((output, logits),) = recorder.greedy([prompt], 3, reuse="exact")
        close(logits, steps_of(name, list(output.prompt_token_ids), output))
        cached.append(output.usage.cached_tokens)
        assert output.usage.module_tokens == 0
    first, second, third = cached
    assert first < third < second
    # A schema is encoded at once for a model that reads modules, and the text in front of its modules is everyone's.
    assert (first == 0) == (recorder.llm.client.model.why_exact is not None)


def modules(name: str) -> None:
    """Modules are read after other text with short convolutions, and refused with every other recurrent layer."""
    recorder = Recorder(tiny(name))
    if recorder.llm.client.model.why_exact is None:
        for context in ("isolated", "anchored"):
            modules_equal_the_stock_model(name, f"{context}+linked:3")
        return
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema)
    asking = schema.prompt().use("sea").text("Where to?")
    ((output, _),) = recorder.greedy([asking], 1)
    assert (output.reuse, output.usage.module_tokens) == ("exact", 0)
    for asked in ({"reuse": "modular"}, {"positions": "schema"}):
        with pytest.raises(PolicyError) as refused:
            recorder.llm.generate([asking], GREEDY, **asked)
        assert refused.value.code == "policy.unsupported"


def modules_equal_the_stock_model(name: str, reuse: str) -> None:
    """Modules read after other text, from the store too, give the logits of Prompt Cache with the stock model."""
    loaded, schema = tiny(name), Schema.from_string(WORDS)
    recorder = recorder_for(loaded, schema)
    prompt = PROMPTS["nested, short and full arguments"](schema.prompt())
    for _ in range(2):
        output = check(recorder, loaded, prompt, reuse, "packed")
    assert output.usage.computed_tokens == 1


def accounted(llm: LLM) -> None:
    """Assert that every state slot is free, stored, or the scratch slot."""
    states = llm.store.states
    assert states is not None
    assert states.free_slots + states.stored + 1 == states.slots


CHECKS: dict[str, Callable[[str], None]] = {
    "prefill and decode": prefill_and_decode,
    "chunks": chunks,
    "prefixes": prefixes,
    "turns": turns,
    "batches": batches,
    "preemption": preemption,
    "schemas": schemas,
    "modules": modules,
    "packed weights": packed_weights,
    "bfloat16": bfloat16,
    "int8 weights": quantized_weights,
    "stock calls": stock_calls,
    "adapters": adapters,
    "chat tools": chat_tools,
}
