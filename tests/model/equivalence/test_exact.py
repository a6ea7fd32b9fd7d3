"""Without reuse, and with exact reuse, logits are those of the stock model: alone, in batches, in chunks, in decode."""

from __future__ import annotations

import pytest
import torch

from inlay import Schema, use
from inlay.models.load import LoadedModel
from tests.conftest import CONFIGS, tiny
from tests.model.equivalence.oracle import prefill
from tests.model.equivalence.recorder import Recorder, close

LENGTHS = (1, 2, 15, 16, 17, 40, 75)


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_whole_answer(loaded: LoadedModel, prompt: list[int], output, logits) -> None:
    """Every step's logits against one stock pass over prompt and answer."""
    answer = list(output.outputs[0].token_ids)
    expected = prefill(loaded, prompt + answer[:-1])[len(prompt) - 1 :]
    close(logits, expected)
    assert answer == expected.argmax(-1).tolist()


@pytest.mark.parametrize("length", LENGTHS)
def test_alone(any_model, length):
    prompt = ids(length)
    ((output, logits),) = Recorder(any_model).greedy([prompt], tokens=40, reuse="off")
    check_whole_answer(any_model, prompt, output, logits)


def test_a_batch_of_unequal_lengths(any_model):
    prompts = [ids(length, seed) for seed, length in enumerate(LENGTHS)]
    for prompt, (output, logits) in zip(prompts, Recorder(any_model).greedy(prompts, tokens=20), strict=True):
        check_whole_answer(any_model, prompt, output, logits)


@pytest.mark.parametrize("budget", [1, 7, 50])
def test_in_chunks(any_model, budget):
    prompts = [ids(length, seed) for seed, length in enumerate((40, 3, 61))]
    recorder = Recorder(any_model, max_num_batched_tokens=budget)
    for prompt, (output, logits) in zip(prompts, recorder.greedy(prompts), strict=True):
        check_whole_answer(any_model, prompt, output, logits)


def test_more_requests_than_places(any_model):
    prompts = [ids(9 + seed, seed) for seed in range(5)]
    recorder = Recorder(any_model, max_num_seqs=2)
    for prompt, (output, logits) in zip(prompts, recorder.greedy(prompts), strict=True):
        check_whole_answer(any_model, prompt, output, logits)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_both_backends(backend):
    loaded = tiny("qwen3")
    prompt = ids(33)
    ((output, logits),) = Recorder(loaded, attention_backend=backend).greedy([prompt])
    check_whole_answer(loaded, prompt, output, logits)


SCHEMA = """
<schema name="s">Some words that are always there, in front.
<module name="a">The first module speaks of apples and of pears.</module>
<module name="b">The second module speaks of brooks.</module>
and some words between them,
<module name="c">and the third one of clouds and cranes, at length.</module>
</schema>
"""


@pytest.mark.parametrize("name", list(CONFIGS))
def test_exact_reuse_equals_the_stock_model_cold_and_warm(name):
    loaded = tiny(name)
    recorder = Recorder(loaded, reuse="exact")
    recorder.llm.add_schema(Schema.from_string(SCHEMA))
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema)
    for modules in (("a", "c"), ("a", "b", "c"), ("a", "c"), ("b",)):
        prompt = schema.prompt()
        for module in modules:
            prompt = prompt.use(module)
        ((output, logits),) = recorder.greedy([prompt.text("What of it?")])
        assert output.prompt_positions == tuple(range(len(output.prompt_token_ids)))
        check_whole_answer(loaded, list(output.prompt_token_ids), output, logits)
    assert output.usage.module_tokens == 0
    ((again, _),) = recorder.greedy([schema.prompt().use("a").use("c").text("What of it?")])
    assert again.usage.cached_tokens == len(again.prompt_token_ids) - 1  # the last logits have to be computed
    assert again.usage.exact_tokens == again.usage.cached_tokens


DIALECT = """
<schema name="d"><system>Rules that always stand in front.</system>
Some words between turns, without a role.
<module name="shot"><user>What do apples cost?</user><assistant>A coin each, or six for five.</assistant></module>
<module name="now" cache="false">It is noon <param name="day" len="9" default="on Monday"/>.
  <module name="more">And the sun shines.</module></module>
<module name="facts"><user>Pears cost <union scaffold="much"><module name="much">ten</module><module
  name="little">two</module></union> coins.</user></module></schema>
"""


@pytest.mark.parametrize("name", list(CONFIGS))
def test_turns_and_uncached_modules_equal_the_stock_model(name):
    loaded = tiny(name)
    recorder = Recorder(loaded, reuse="exact")
    schema = Schema.from_string(DIALECT)
    recorder.llm.add_schema(schema)
    plain = schema.prompt().use("shot").use("facts/much").text("And plums?")
    with_time = schema.prompt().use("shot").use("now/more").use("facts", use("little")).text("And plums?")
    for reuse in ("off", "exact", "exact"):
        for prompt in (plain, with_time):
            ((output, logits),) = recorder.greedy([prompt], reuse=reuse)
            assert output.prompt_positions == tuple(range(len(output.prompt_token_ids)))
            check_whole_answer(loaded, list(output.prompt_token_ids), output, logits)
            uncached = len("It is noon ") + len("on Monday") + len(".\n") + len("And the sun shines.")
            computed = len(output.prompt_token_ids) - output.usage.cached_tokens
            assert prompt is plain or computed >= uncached, "which every request computes"
    assert uncached <= computed < 2 * uncached


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_ending_in_uncached_text_is_exact_in_chunks(budget):
    loaded = tiny("llama")
    recorder = Recorder(loaded, reuse="exact", max_num_batched_tokens=budget)
    schema = Schema.from_string(
        '<schema name="d">Always in front.<module name="m" cache="false">Never kept.</module></schema>'
    )
    recorder.llm.add_schema(schema)
    for _ in range(2):
        prompts = [schema.prompt().use("m"), schema.prompt().use("m", "And new text.")]
        for output, logits in recorder.greedy(prompts):
            check_whole_answer(loaded, list(output.prompt_token_ids), output, logits)
            assert output.usage.prompt_tokens - output.usage.cached_tokens >= len("Never kept.")
    assert output.usage.cached_tokens >= len("Always in front.")


@pytest.mark.parametrize("name", list(CONFIGS))
def test_approximate_states_are_never_returned_to_an_exact_request(name):
    """Invariant 3: with any approximate states in the store, ``exact`` and ``off`` equal the stock model."""
    loaded = tiny(name)
    recorder = Recorder(loaded)
    schema = Schema.from_string(SCHEMA)
    positions = ["schema"] if name == "gpt2" else ["schema", "packed"]
    prompt = schema.prompt().use("a").use("c").text("What of it?")
    for reuse in ("isolated", "anchored"):
        for position in positions:
            recorder.llm.add_schema(schema, reuse=reuse, positions=position)
            ((output, logits),) = recorder.greedy([prompt], reuse=reuse, positions=position)
            assert output.usage.module_tokens > 0
            expected = prefill(loaded, list(output.prompt_token_ids))[-1]
            assert (logits[0] - expected).abs().max() > 1e-3  # there is an approximation to be confused with
    for reuse in ("exact", "off"):
        ((output, logits),) = recorder.greedy([prompt], reuse=reuse, positions="packed")
        assert output.usage.module_tokens == 0
        check_whole_answer(loaded, list(output.prompt_token_ids), output, logits)


def test_positions_with_gaps_and_no_reuse(any_model):
    """Under ``schema`` positions without reuse, the stock model with the same gaps is the oracle."""
    recorder = Recorder(any_model, reuse="off", positions="schema")
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema)
    ((output, logits),) = recorder.greedy([schema.prompt().use("c").text("What of it?")])
    positions = list(output.prompt_positions)
    assert positions != list(range(len(positions)))
    answer = list(output.outputs[0].token_ids)
    behind = [positions[-1] + 1 + step for step in range(len(answer) - 1)]
    expected = prefill(any_model, list(output.prompt_token_ids) + answer[:-1], positions + behind)
    close(logits, expected[len(positions) - 1 :])
